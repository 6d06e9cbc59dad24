"""A machine that grants few threads: told before anything is offered, and worked with while it can be.

A thread needs address space for its stack, so large stacks in little space stand for pids.max and ulimit -u,
which root is free of.
"""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from tests.kit.processes import job, write_job

MIB = 1 << 20
STACK = 1024 * MIB


def with_threads(count: int, *command: str) -> subprocess.CompletedProcess[str]:
    """Run `penstock` where some `count` threads can be started besides the first."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_STACK, (STACK, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_AS, (count * STACK + STACK // 2, resource.RLIM_INFINITY))

    return subprocess.run(
        [sys.executable, "-m", "sidecar", *command],
        preexec_fn=limit,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_too_few_threads_end_with_a_line_that_says_what_to_raise(stub, tmp_path):
    stub.objects["b/train/x"] = b"x" * 1000
    path = write_job(tmp_path / "job.yaml", job(stub.url, tmp_path / "ml", "b/train/"))
    done = with_threads(0, "plan", "-c", path)
    assert done.returncode == 7, done.stderr
    assert done.stderr.startswith("penstock: this machine lets the process start 0 more threads")
    assert "pids.max" in done.stderr


@pytest.mark.parametrize("count", [3, 6])
def test_few_threads_are_enough(stub, tmp_path, count):
    """The executor is smaller; planning and name resolution have a thread each."""
    stub.objects["b/train/x"] = b"x" * 1000
    url = stub.url.replace("127.0.0.1", "localhost")
    path = write_job(tmp_path / "job.yaml", job(url, tmp_path / "ml", "b/train/"))
    done = with_threads(count, "plan", "-c", path)
    assert done.returncode == 0, done.stderr
    assert "objects  1" in done.stdout
