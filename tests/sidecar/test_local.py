"""What this machine refuses: a full disk, a closed output, a port, a directory; and Ctrl-C.

Each is one line and its own exit code, and is found before storage is asked for anything.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.kit.harness import fill
from tests.kit.processes import PENSTOCK, job, penstock, write_job
from tests.kit.stub import S3Stub


class Noticed(list[str]):
    """A list that can be waited for until it has `count` items."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count
        self.full = threading.Event()

    def append(self, item: Any) -> None:
        super().append(item)
        if len(self) >= self._count:
            self.full.set()


def one_line(done: subprocess.CompletedProcess[Any] | subprocess.CompletedProcess[str]) -> Any:
    """The only line on standard error, which is no traceback."""
    reported = done.stderr if isinstance(done.stderr, str) else done.stderr.decode()
    assert len(reported.splitlines()) == 1, reported
    return reported


def cat_arguments(stub: S3Stub) -> list[Any]:
    return ["cat", "s3://b/train/", "--endpoint-url", stub.url, "--path-style"]


def arguments(stub: S3Stub, tmp_path: Path, command: str) -> Any:
    """A command line of each kind, for the prefix b/train/."""
    if command == "cat":
        return cat_arguments(stub)
    return [
        *command.split(),
        "-c",
        write_job(tmp_path / "j.yaml", job(stub.url, tmp_path / "ml", "b/train/")),
    ]


# --- Standard output ---------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["cat", "plan", "doctor --json", "--help"])
def test_a_full_disk_is_no_bug(stub: S3Stub, tmp_path: Path, command: str) -> None:
    fill(stub, [3_000_000], prefix="b/train/")
    words = ["--help"] if command == "--help" else arguments(stub, tmp_path, command)
    with open("/dev/full", "wb") as full:
        done = penstock(*words, capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 7, done.stderr
    assert one_line(done) == "penstock: cannot write standard output: No space left on device\n"


def test_a_disk_that_fills_up_in_mid_object(stub: S3Stub, tmp_path: Path) -> None:
    """What was written is the beginning of the stream, and the exit code says that it is no more."""
    data = fill(stub, [3_000_000], prefix="b/train/")
    script = 'ulimit -f 1000; trap "" XFSZ; exec "$@"'
    with open(tmp_path / "out", "wb") as out:
        done = subprocess.run(
            ["bash", "-c", script, "-", *PENSTOCK, *cat_arguments(stub)],
            stdout=out, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 7
    assert one_line(done) == "penstock: cannot write standard output: File too large\n"
    assert (tmp_path / "out").read_bytes() == data[: 1000 * 1024]


def test_a_trainer_starts_without_standard_input(stub: S3Stub, tmp_path: Path) -> None:
    """It gets an empty one, and no descriptor of the sidecar's."""
    fill(stub, [10], prefix="b/train/")
    path = write_job(tmp_path / "job.yaml", job(stub.url, tmp_path / "ml", "b/train/"))
    done = subprocess.run(
        ["bash", "-c", 'exec "$@" <&-', "-", *PENSTOCK, "exec", "-c", path, "readlink", "/proc/self/fd/0"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, f"{os.devnull}\n"), done.stderr


@pytest.mark.parametrize("command", ["cat", "plan"])
def test_a_closed_output_is_no_bug(stub: S3Stub, tmp_path: Path, command: str) -> None:
    fill(stub, [3_000_000], prefix="b/train/")
    done = subprocess.run(
        ["bash", "-c", 'exec "$@" >&-', "-", *PENSTOCK, *arguments(stub, tmp_path, command)],
        stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 7
    assert one_line(done) == "penstock: cannot write standard output: Bad file descriptor\n"


def test_a_reader_that_has_left_ends_every_command_alike(stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, [3_000_000], prefix="b/train/")
    for command in ("plan", "doctor --json"):
        words = arguments(stub, tmp_path, command)
        read_end, write_end = os.pipe()
        os.close(read_end)
        done = penstock(*words, capture_output=False, stdout=write_end, stderr=subprocess.PIPE)
        os.close(write_end)
        assert done.returncode == 141, (command, done.stderr)


def test_a_socket_that_does_not_block_is_waited_for(stub: S3Stub) -> None:
    """Another program may have set O_NONBLOCK on a terminal or socket that we share."""
    data = fill(stub, [3_000_000], prefix="b/train/")
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs, subprocess.Popen([*PENSTOCK, *cat_arguments(stub)], stdout=ours.fileno()) as process:
        ours.close()
        got = bytearray()
        while piece := theirs.recv(1 << 16):
            got += piece
    assert process.returncode == 0
    assert bytes(got) == data


def test_a_log_that_cannot_be_written_costs_no_epoch(stub: S3Stub, tmp_path: Path) -> None:
    """Standard error on a full disk: channels go on, and the exit code is still right."""
    data = fill(stub, [3_000_000], prefix="b/train/")
    path = write_job(tmp_path / "j.yaml", job(stub.url, None, "b/train/"))
    with open("/dev/full", "wb") as full:
        done = penstock(
            "exec", "-c", path, "--", "sh", "-c", "wc -c <$SM_CHANNEL_TRAIN''_0",
            capture_output=False, stdout=subprocess.PIPE, stderr=full,
        )  # fmt: skip
        assert (done.returncode, done.stdout.strip()) == (0, str(len(data)))
        done = penstock("cat", "b/data", capture_output=False, stdout=subprocess.PIPE, stderr=full)
        assert done.returncode == 2


# --- Ctrl-C ------------------------------------------------------------------------------------------


def test_ctrl_c_ends_with_130(stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, [3_000_000], prefix="b/train/")
    stub.listings, stub.together = Noticed(3), {"list train/", "never"}
    running = [
        subprocess.Popen(
            [*PENSTOCK, *arguments(stub, tmp_path, command)],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for command in ("cat", "plan", "doctor")
    ]  # fmt: skip
    assert stub.listings.full.wait()
    for process in running:
        process.send_signal(signal.SIGINT)
    for process in running:
        with process:
            assert process.stderr is not None
            assert process.stderr.read().strip() == ""
        assert process.returncode == 130
