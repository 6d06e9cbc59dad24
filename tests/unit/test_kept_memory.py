"""Freed memory that the C library keeps for the next blocks."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt(3) is glibc's")

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


def test_memory_that_was_freed_is_used_again_without_page_faults() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 1000  # five times 8 MiB have 10,240 pages


def python(script: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own, which must end well."""
    return subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | environment,
        capture_output=True, text=True, check=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "kept"),
    [({}, "True"), ({"PENSTOCK_MALLOPT": "0"}, "False"), ({"MALLOC_TRIM_THRESHOLD_": "1000"}, "False")],
)
def test_the_allocator_keeps_memory_unless_told_otherwise(environment: dict[str, str], kept: str) -> None:
    """400 blocks of 1 MiB, made and dropped: faulted in anew each time, or reused."""
    script = (
        "import resource\n"
        "from streamer.readers.core.memory import keep_memory\n"
        "print(keep_memory())\n"
        "faults = resource.getrusage(0).ru_minflt\n"
        "for _ in range(100):\n"
        "    held = [bytearray(1 << 20) + b'x' for _ in range(4)]\n"
        "    del held\n"
        "print(resource.getrusage(0).ru_minflt - faults < 20_000)\n"
    )
    done = python(script, environment)
    assert done.stdout.split() == [kept, kept]


@pytest.mark.parametrize(
    ("environment", "limited"),
    [({}, True), ({"PENSTOCK_MALLOPT": "0"}, False), ({"MALLOC_ARENA_MAX": "1000"}, False)],
)
def test_threads_share_as_many_heaps_as_there_are_cores(environment: dict[str, str], limited: bool) -> None:
    """glibc makes a heap for each thread that allocates, up to the limit; `malloc_stats` lists them."""
    heaps = max(2, len(os.sched_getaffinity(0)))
    script = (
        "import ctypes, threading\n"
        "from streamer.readers.core.memory import keep_memory_of_threads\n"
        "keep_memory_of_threads()\n"
        "libc = ctypes.CDLL(None)\n"
        f"all_have = threading.Barrier({heaps + 5})\n"
        "def allocate():\n"
        "    held = bytearray(100_000)\n"
        "    all_have.wait()\n"
        f"threads = [threading.Thread(target=allocate) for _ in range({heaps + 4})]\n"
        "[thread.start() for thread in threads]\n"
        "all_have.wait()\n"
        "[thread.join() for thread in threads]\n"
        "libc.malloc_stats()\n"
    )
    done = python(script, environment)
    found = sum(line.startswith("Arena ") for line in done.stderr.splitlines())
    assert (1 < found <= heaps) == limited


def test_a_reader_reuses_the_memory_of_its_records() -> None:
    """60 MB of records of 100 kB have 15,000 pages. By default glibc trims the heap after each block."""
    script = (
        "import io, resource\n"
        "from streamer.formats import tfrecord\n"
        "from streamer.readers.core.record_spec import record_reader\n"
        "reader = record_reader(io.BytesIO(tfrecord.encode(bytes(100_000)) * 600), 'TFRecord')\n"
        "faults = resource.getrusage(0).ru_minflt\n"
        "print(sum(map(len, reader)), resource.getrusage(0).ru_minflt - faults)\n"
    )
    size, faults = python(script, {}).stdout.split()
    assert int(size) == 60_000_000
    assert int(faults) < 3000


UPLOADER = """
import resource, socket, sys
from concurrent.futures import ThreadPoolExecutor
from sidecar.process import runner

def read_parts(serving):
    serving.close()
    for _ in range(2):
        for thread in threads:
            thread.submit(bytes, 30_000_000).result()
    with open("/proc/self/statm") as file:
        print(int(file.read().split()[1]) * resource.getpagesize() >> 20)

threads = [ThreadPoolExecutor(1) for _ in range(20)]
runner.run = read_parts
ours, its = socket.socketpair()
sys.argv = ["uploader", str(its.detach())]
from sidecar.upload.__main__ import main
main()
"""


def test_threads_of_the_uploader_keep_no_large_parts() -> None:
    """Each reads a part of a file of 300 GB, one after the other."""
    assert int(python(UPLOADER, {}).stdout) < 200  # MiB; 600 if each thread kept one
