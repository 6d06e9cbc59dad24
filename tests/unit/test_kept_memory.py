"""Freed memory that the C library keeps for the next blocks."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource
from streamer.linux import keep_free_memory

def turn():
    return [b"x" * (1 << 20) for _ in range(8)]

keep_free_memory(2 << 20, 32 << 20)
turn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    turn()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt(3) is glibc's")
def test_memory_that_was_freed_is_used_again_without_page_faults() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 1000  # five times 8 MiB have 10,240 pages
