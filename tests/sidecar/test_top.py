"""`penstock top` in real pseudo-terminals: what a person sees, at three sizes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sidecar.admin.top import frame
from tests.kit.harness import MORE_THAN_A_FIFO, fill
from tests.kit.processes import PENSTOCK, Sidecar, job, penstock, sidecar, write_job
from tests.kit.stub import S3Stub
from tests.kit.terminal import Screen, terminal

SIZES = [(60, 20), (80, 24), (140, 40)]


@pytest.fixture
def running(stub: S3Stub, tmp_path: Path) -> Iterator[Sidecar]:
    """A sidecar in the middle of an epoch of 40 MB, of which its reader has taken one."""
    fill(stub, [MORE_THAN_A_FIFO], prefix="b/train/")
    document = job(stub.url, tmp_path / "ml", "b/train/", MemoryBudget="4MiB", DrainFor=0)
    path = write_job(tmp_path / "job.yaml", document)
    with sidecar(path) as serving:
        serving.wait_for("ready")
        with open(tmp_path / "ml/input/data/train_0", "rb") as fifo:
            assert len(fifo.read(1 << 20)) == 1 << 20
            yield serving


def shown(screen: Screen) -> bool:
    """The frame is there to its last word."""
    return "bandwidth limit" in screen.text.replace("\n", " ") and bool(
        re.search(r"\d+% of 40 MB", screen.text)
    )


@pytest.mark.parametrize(("columns", "rows", "colour"), [(60, 20, True), (140, 40, False)])
def test_a_terminal_shows_the_whole_frame(running: Sidecar, columns: int, rows: int, colour: bool) -> None:
    """With colours and without."""
    command = [*PENSTOCK, "top", "--url", running.url]
    variables = {} if colour else {"NO_COLOR": "1"}
    with terminal(command, columns=columns, rows=rows, **variables) as window:
        screen = window.wait_for(shown)
        assert screen.alternate
        for words in ("Penstock ready", "train", "s3://b/train/", "bottleneck", "epoch"):
            assert words in screen.text, screen.text
        assert bool(re.search("\x1b\\[[0-9;]*3[0-9]", screen.written)) == colour
        window.press("\x03")
        assert window.end() == 0
        assert not screen.alternate, "the shell's screen is not back"


def test_a_frame_follows_the_size(running: Sidecar) -> None:
    with terminal([*PENSTOCK, "top", "--url", running.url], columns=140, rows=40) as window:
        assert "last minute" in window.wait_for(shown).text
        window.resize(60, 20)
        screen = window.wait_for(lambda screen: shown(screen) and "last minute" not in screen.text)
        assert max(map(len, screen.lines)) <= 60
        assert "bottleneck" in screen.text


def test_the_end_of_the_sidecar_ends_it(running: Sidecar) -> None:
    with terminal([*PENSTOCK, "top", "--url", running.url], columns=80, rows=24) as window:
        window.wait_for(shown)
        running.process.send_signal(signal.SIGTERM)
        running.process.send_signal(signal.SIGTERM)
        assert window.end() == 0
        assert "The sidecar has ended." in window.screen.text


def test_once_prints_a_whole_frame_and_no_control_sequences(running: Sidecar) -> None:
    for columns, arguments in ((60, ["--once"]), (140, [])):  # standard output is no terminal
        environment = {**os.environ, "COLUMNS": str(columns)}
        done = penstock("top", "--url", running.url, *arguments, env=environment)
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout
        assert "…" not in done.stdout
        assert re.search(r"\d+% of 40 MB", done.stdout)
        assert "less than $0.01" in done.stdout
    document = json.loads(penstock("top", "--url", running.url, "--json").stdout)
    assert [channel["name"] for channel in document["channels"]] == ["train"]


def test_without_a_sidecar_there_is_an_error_and_the_screen_stays() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
    with terminal([*PENSTOCK, "top", "--url", url], columns=80, rows=24) as window:
        assert window.end() == 7
        assert url in window.screen.text
        assert "1049" not in window.screen.written, "the user's screen was cleared"


def event(count: int, **channel: object) -> dict[str, Any]:
    """A document of `/events` with `count` channels."""
    fields = {
        "source": "s3://b/" + "a/long/prefix/" * 8, "objects": 1200, "listing": False,
        "epoch": 3, "consumed": 45, "bytes": 100,
        "eta": 7500.0, "rates": [1e6 * n for n in range(60)], "shares": {"blocked": 0.5, "starved": 0.25,
        "limited": 0.15, "moving": 0.1}, "requests_in_flight": 3, "requests_in_flight_limit": 64,
        "reserved": 1 << 20, "quota": 1 << 29, "fifo": 1000, "errors": [],
        "bottleneck": {"kind": "trainer", "text": "The trainer is slower than storage", "remedy": "Good."},
    }  # fmt: skip
    limits = {
        "requests_in_flight_adapt": True,
        "requests_in_flight": 64,
        "bandwidth": None,
        "memory_budget": 1,
    }
    return {
        "ready": True, "why": "", "host": {"name": "algo-1"}, "transport": "splice", "limits": limits,
        "process": {"rss_bytes": 1 << 27, "cpu_seconds": 1.5},
        "requests": {"parts": 10, "planning": 1, "dollars": 0.1},
        "channels": [{**fields, "name": f"channel-{n}", **channel} for n in range(count)],
    }  # fmt: skip


def lines_of(document: dict[str, Any], columns: int, rows: int) -> list[str]:
    console = Console(width=columns, height=rows)
    with console.capture() as captured:
        console.print(frame(document, console))
    return captured.get().splitlines()


@pytest.mark.parametrize(("columns", "rows"), SIZES)
@pytest.mark.parametrize("count", [1, 2, 6, 100])
def test_channels_that_do_not_fit_become_shorter_and_are_counted(columns: int, rows: int, count: int) -> None:
    lines = lines_of(event(count), columns, rows)
    assert len(lines) <= rows
    assert max(map(len, lines)) <= columns
    text = "\n".join(lines)
    assert text.count("45% of 100 B") == text.count("57 MB/s") == text.count("channel-") > 0
    hidden = re.search(r"(\d+) more channels?: enlarge the terminal", text)
    assert text.count("channel-") + (int(hidden[1]) if hidden else 0) == count
    assert "memory budget" in text


def test_a_row_has_the_figures_of_status() -> None:
    text = "\n".join(lines_of(event(1), 140, 40))
    for words in ("1200 objects", "2:05:00 left", "50% waiting for the trainer", "10% moving bytes",
                  "memory 1 MiB of 512 MiB", "Good.", "slower"):  # fmt: skip
        assert words in text, text
    listing = "\n".join(lines_of(event(1, listing=True, bytes=None), 140, 40))
    assert "45 B of unknown" in listing
    failing = [{"text": f"[{n}] GET failed"} for n in range(3)]
    assert "[1] GET failed" in "\n".join(lines_of(event(1, errors=failing), 140, 40))


def test_a_failed_channel_comes_first_and_every_kind_of_bottleneck_has_a_frame() -> None:
    document = event(50)
    document["channels"][49]["bottleneck"] = {"kind": "failed", "text": "Access denied", "remedy": ""}
    assert "Access denied" in lines_of(document, 80, 24)[4]
    for kind in (
        "failed",
        "machine",
        "stuck",
        "idle",
        "trainer",
        "storage",
        "faults",
        "mixed",
        "limit",
        "even",
        "held_back",
    ):
        lines_of(event(1, bottleneck={"kind": kind, "text": "so", "remedy": ""}), 80, 24)


def test_a_rank_whose_requests_another_one_has_shows_none() -> None:
    own = "\n".join(lines_of(event(1), 140, 24))
    assert "requests 3/64" in own
    another = {"requests_in_flight": 0, "requests_in_flight_limit": 0, "reserved": 0, "quota": 0}
    shared = "\n".join(lines_of(event(1, **another), 140, 24))
    assert "requests 0/0" not in shared
    assert "FIFO 1000 B unread" in shared
