"""A machine that grants few threads: told before anything is offered, and worked with while it can be.

A thread needs address space for its stack, so large stacks in little space stand for pids.max and ulimit -u,
which root is free of.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.processes import job, write_job
from tests.kit.stub import S3Stub

MIB = 1 << 20
STACK = 1024 * MIB


def with_threads(
    count: int, *arguments: str, command: tuple[str, ...] = (sys.executable, "-m", "sidecar")
) -> subprocess.CompletedProcess[str]:
    """Run `penstock`, or another command, where some `count` threads can be started besides the first."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_STACK, (STACK, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_AS, (count * STACK + STACK // 2, resource.RLIM_INFINITY))

    return subprocess.run(
        [*command, *arguments],
        preexec_fn=limit,
        capture_output=True,
        text=True,
        check=False,
    )


def test_too_few_threads_end_with_a_line_that_says_what_to_raise(stub: S3Stub, tmp_path: Path) -> None:
    stub.objects["b/train/x"] = b"x" * 1000
    path = write_job(tmp_path / "job.yaml", job(stub.url, tmp_path / "ml", "b/train/"))
    done = with_threads(0, "plan", "-c", path)
    assert done.returncode == 7, done.stderr
    assert done.stderr.startswith("penstock: this machine allows the sidecar 0 more threads")
    assert "raise the limit of address space (ulimit -v), which is 512 MiB and" in done.stderr
    assert "pids.max" in done.stderr


@pytest.mark.parametrize("count", [3, 6])
def test_few_threads_are_enough(stub: S3Stub, tmp_path: Path, count: int) -> None:
    """The executor is smaller; planning and name resolution have a thread each."""
    stub.objects["b/train/x"] = b"x" * 1000
    url = stub.url.replace("127.0.0.1", "localhost")
    path = write_job(tmp_path / "job.yaml", job(url, tmp_path / "ml", "b/train/"))
    done = with_threads(count, "plan", "-c", path)
    assert done.returncode == 0, done.stderr
    assert "objects  1" in done.stdout


def test_a_command_begins_without_looking_a_name_up(tmp_path: Path) -> None:
    """A name server that does not answer would hold every command up; libuv's threads start nevertheless."""
    program = (
        "from pathlib import Path; from sidecar.process.runner import LIBUV, run\n"
        "async def count(): return len(list(Path('/proc/self/task').iterdir()))\n"
        "print(run(count()) > LIBUV)"
    )
    options = ["-f", "-qq", "-e", "trace=openat,connect", "-o", str(tmp_path / "calls")]
    done = subprocess.run(
        ["strace", *options, sys.executable, "-c", program],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "True\n"
    calls = (tmp_path / "calls").read_text()
    assert "openat" in calls
    assert not any(name in calls for name in ("nsswitch.conf", "resolv.conf", "/etc/hosts", "connect("))


def test_an_executor_that_lacks_threads_says_how_many_there_are() -> None:
    """Not how many live: those of others, and those that have just been given up."""
    program = (
        "from concurrent.futures import ThreadPoolExecutor; from sidecar.process.runner import start_all\n"
        "from streamer.errors import SinkError\n"
        "try: start_all(ThreadPoolExecutor(9), 9)\n"
        "except SinkError as error: print(error)"
    )
    done = with_threads(4, command=(sys.executable, "-c", program))
    started = int(done.stdout.split("allows the sidecar ")[1].split()[0])
    assert 1 <= started <= 4
    assert "it needs 9 for its event loop" in done.stdout
