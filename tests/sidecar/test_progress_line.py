"""The progress line of a terminal: what it shows, where it is shown, and that nothing of it stays."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from sidecar.process.progress import ERASE, transferred
from tests.kit.processes import job, penstock, write_job
from tests.kit.stub import S3Stub, stalls
from tests.kit.terminal import terminal
from tests.sidecar.test_progress import AT_ONCE


def cat(stub: S3Stub) -> str:
    """Put two objects of 3 and 2 MB; return the command that streams them."""
    stub.objects |= {f"b/x/{number}": bytes(size) for number, size in enumerate((3_000_000, 2_000_000))}
    endpoint = ["--endpoint-url", stub.url, "--path-style", "--part-size", "4MiB"]
    return "exec " + shlex.join([*AT_ONCE, "cat", "s3://b/x/", *endpoint])


def test_cat_into_a_file_shows_bytes_of_all_bytes(stub: S3Stub, tmp_path: Path) -> None:
    command, out = cat(stub), tmp_path / "out"
    stub.script(*[stalls(stub)] * 9, key="b/x/1")  # hedges too
    with terminal(["sh", "-c", f"{command} > {out}"], columns=79, rows=4) as window:
        screen = window.wait_for(lambda screen: "3 MB of 5 MB (60 %), " in screen.text)
        assert len(screen.text.strip().splitlines()) == 1
        stub.release()
        assert window.end() == 0
        assert out.stat().st_size == 5_000_000
        assert window.screen.lines[0].startswith("2 objects, 5000000 bytes in ")
        assert "MB of" not in window.screen.text


def test_the_build_of_an_index_shows_the_bytes_of_the_channel(stub: S3Stub, tmp_path: Path) -> None:
    cat(stub)
    path = write_job(tmp_path / "job.yaml", job(stub.url, None, "b/x/", PartSize="4MiB"))
    stub.script(*[stalls(stub)] * 9, key="b/x/1")  # hedges too
    stub.pages_allowed = 0
    command = ["index", "build", "-c", path, "--to", str(tmp_path / "index"), "--format", "lines"]
    with terminal([*AT_ONCE, *command], columns=79, rows=8) as window:
        window.wait_for(lambda screen: "x: listing the objects, 0 entries so far" in screen.text)
        stub.allow_pages()
        window.wait_for(lambda screen: "x: 3 MB of 5 MB (60 %), " in screen.text)
        stub.release()
        assert window.end() == 0
        assert window.screen.lines[0] == "x"
        assert "MB of" not in window.screen.text


def test_the_check_of_an_index_shows_the_listing_and_bytes(stub: S3Stub, tmp_path: Path) -> None:
    """A spot check reads a number of bytes that is not known beforehand."""
    stub.objects["b/x/0"] = b"line\n" * 1000
    path, place = write_job(tmp_path / "job.yaml", job(stub.url, None, "b/x/")), str(tmp_path / "index")
    assert penstock("index", "build", "-c", path, "--to", place, "--format", "lines").returncode == 0
    stub.script(*[stalls(stub)] * 9, key="b/x/0")
    stub.pages_allowed = len(stub.listings)
    with terminal([*AT_ONCE, "index", "verify", "-c", path, "--from", place], columns=79, rows=8) as window:
        window.wait_for(lambda screen: "x: listing the objects, 0 entries so far" in screen.text)
        stub.allow_pages()
        window.wait_for(lambda screen: "x: 0 B read" in screen.text)
        stub.release()
        assert window.end() == 0


def test_a_narrow_terminal_has_one_line_too(stub: S3Stub, tmp_path: Path) -> None:
    command = cat(stub)
    stub.script(*[stalls(stub)] * 9, key="b/x/1")  # hedges too
    with terminal(["sh", "-c", f"{command} > {tmp_path / 'out'}"], columns=12, rows=6) as window:
        window.wait_for(lambda screen: screen.lines[0] == "3 MB of 5 M" and not any(screen.lines[1:]))
        stub.release()
        assert window.end() == 0


@pytest.mark.parametrize(
    ("rest", "term", "shown"),
    [
        ("> {out}", "xterm", True),
        ("| cat > {out}", "xterm", False),
        ("--quiet > {out}", "xterm", False),
        ("> {out}", "dumb", False),
        ("> {out} 2> {out}.log", "xterm", False),
    ],
)
def test_the_line_is_for_files_and_terminals_alone(
    stub: S3Stub, tmp_path: Path, rest: str, term: str, *, shown: bool
) -> None:
    line = f"{cat(stub)} {rest.format(out=tmp_path / 'out')}"
    with terminal(["bash", "-c", line], columns=79, rows=4, TERM=term) as window:
        assert window.end() == 0
        assert (ERASE in window.screen.written) == shown
    assert (tmp_path / "out").stat().st_size == 5_000_000


def test_an_event_of_the_log_has_a_line_of_its_own(stub: S3Stub, tmp_path: Path) -> None:
    """Here the warning of an object that may not be data, which comes after the line of the listing."""
    command = cat(stub)
    stub.objects["b/x/2.crc"] = b"crc"
    with terminal(["sh", "-c", f"{command} > {tmp_path / 'out'}"], columns=300, rows=6) as window:
        assert window.end() == 0
        assert window.screen.lines[0].startswith("2")
        assert "objects that may not be data" in window.screen.lines[0]
        assert "listing" not in window.screen.lines[0]


def test_a_terminal_that_takes_no_output_stops_nothing(stub: S3Stub, tmp_path: Path) -> None:
    """After Ctrl-S the file is written to its end; the closing line waits for Ctrl-Q."""
    command, out = cat(stub), tmp_path / "out"
    stub.script(*[stalls(stub)] * 9, key="b/x/1")  # hedges too
    with terminal(["sh", "-c", f"{command} > {out}"], columns=79, rows=4) as window:
        window.wait_for(lambda screen: "3 MB of 5 MB" in screen.text)
        window.press("\x13")
        stub.release()
        window.wait_for(lambda _: out.stat().st_size == 5_000_000)
        window.press("\x11")
        assert window.end() == 0


def file_job(stub: S3Stub, tmp_path: Path) -> str:
    document = job(stub.url, tmp_path / "ml", "b/x/")
    document["InputDataConfig"][0]["InputMode"] = "File"
    return write_job(tmp_path / "job.yaml", document)


def test_a_file_channel_shows_its_download_between_the_events(stub: S3Stub, tmp_path: Path) -> None:
    cat(stub)
    stub.script(*[stalls(stub)] * 99, key="b/x/1")
    command = [*AT_ONCE, "run", "-c", file_job(stub, tmp_path)]
    with terminal(command, columns=300, rows=20) as window:
        # How much of the first object's end stays in a writer's pipe depends on how the kernel cut the pages.
        written = re.compile(r"^x: (2\.\d+|3) MB of 5 MB \((5\d|60) %\), ", re.MULTILINE)
        window.wait_for(lambda screen: written.search(screen.text) is not None)
        stub.release()
        window.wait_for(lambda screen: "ready" in screen.text)
        assert "MB of" not in window.screen.text
        window.press("\x03")
        assert window.end() == 0


def test_a_log_for_programs_and_a_short_log_have_no_line(stub: S3Stub, tmp_path: Path) -> None:
    cat(stub)
    document = job(stub.url, None, "b/x/")
    document["InputDataConfig"][0]["InputMode"] = "File"
    path = write_job(tmp_path / "job.yaml", document)
    for options in (["--json"], ["--log-level=warning"], []):
        with terminal([*AT_ONCE, "exec", "-c", path, *options, "true"], columns=99, rows=20) as window:
            assert window.end() == 0
            assert (ERASE in window.screen.written) == (not options)


def test_the_text_of_a_transfer() -> None:
    assert transferred(0, 5_000_000, 0) == "0 B of 5 MB"
    assert transferred(1_000_000, 5_000_000, 2) == "1 MB of 5 MB (20 %), 500 kB/s, 0:08 left"
    assert transferred(10**9, 4_000 * 10**9, 1) == "1 GB of 4 TB (0 %), 1 GB/s, 1:06:39 left"
    assert transferred(0, 0, 1) == "0 B of 0 B"
    assert transferred(1_000, 4_000, 1, before=1_000) == "2 kB of 4 kB (50 %), 1 kB/s, 0:02 left"


def test_nothing_is_imported_for_the_line() -> None:
    code = "import sys, sidecar.process.progress; sys.exit('rich' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
