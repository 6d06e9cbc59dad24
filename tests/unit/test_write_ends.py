"""Opening FIFOs: what a cancelled open leaves behind, and the error without a thread."""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from streamer.errors import SinkError
from streamer.sink.write_ends import LocalWriteEnds
from streamer.units import GIB

PROGRAM = """
import asyncio, os, resource, sys, threading
from streamer.plan import Position
from streamer.sink.write_ends import LocalWriteEnds

def blocked(thread):
    with open(f"/proc/self/task/{thread.native_id}/syscall") as file:
        return file.read().split()[0] in ("257", "56")  # openat on x86-64 and arm64

async def main(path):
    os.mkfifo(path)
    path_fd = os.open(path, os.O_PATH)
    ends = LocalWriteEnds("train")
    opening = asyncio.ensure_future(ends.open(Position(0), path_fd, on_gone=lambda: None))
    (thread,) = (each for each in threading.enumerate() if each.name.startswith("open train"))
    while not blocked(thread):
        await asyncio.sleep(0)
    os.close(free := os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, free))
    opening.cancel()
    await asyncio.wait([opening])
    print("cancelled" if opening.cancelled() else opening.exception())
    ends.close()

asyncio.run(main(sys.argv[1]))
"""


def test_a_process_ends_that_has_no_descriptor_to_unblock_an_open(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "train_0")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("cancelled\n", "")


@pytest.mark.parametrize(
    ("limits", "remedy"),
    [
        ({}, "raise pids.max of the cgroup"),
        (
            {resource.RLIMIT_AS: GIB, resource.RLIMIT_DATA: GIB // 2},
            "raise the limit of address space (ulimit -v), which is 1 GiB and must hold a stack",
        ),
        (
            {resource.RLIMIT_DATA: GIB // 2},
            "raise the limit of data (ulimit -d), which is 512 MiB and must hold a stack",
        ),
    ],
)
def test_without_a_thread_the_error_names_the_limits_that_there_are(
    monkeypatch: pytest.MonkeyPatch, limits: dict[int, int], remedy: str
) -> None:
    """The kernel refuses a thread for its number and for its stack by the same error."""

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    unlimited = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits.get(kind, unlimited), unlimited))
    with pytest.raises(SinkError) as caught:
        LocalWriteEnds("train")
    assert f"channel train (can't start new thread): {remedy}" in str(caught.value)
