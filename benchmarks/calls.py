"""Counts the Python calls that one object of 100 kB costs, in `penstock run` and `penstock cat`.

    python -m benchmarks.calls [run] [cat]

A count has little of the noise of a machine: two runs differ by less than 3 %. Every call of a function, a
method or a builtin in the main thread counts. (By `sys.setprofile`: cProfile's `getstats` in mid-run lacks
entries at times.) The figure is what an object adds in the middle of an epoch, so neither start-up nor the
prefetching of the next epoch is in it. The objects have ETags that are MD5s, as S3's are, and come from
`benchmarks.index_server`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile

from benchmarks.index_server import Periodic, running_server
from benchmarks.jobs import environment, write_job
from benchmarks.process import await_ready

OBJECTS = 10_000
PAYLOAD = 100_000 - 16
"""Bytes of the one record of an object; TFRecord's header and checksums are the other 16."""
COMMANDS = ("run", "cat")
_AHEAD = "64MiB"
"""Bytes that may be requested before they are read. With more, a reader that is late finds all of a short
epoch requested, and the calls of its requests made."""
_READ = 1 << 20
_COUNTED = """
import collections, os, signal, sys
from sidecar.__main__ import main

counts, events = int(sys.argv.pop(1)), collections.Counter()

def note(frame, event, _):
    events[event] += 1

signal.signal(
    signal.SIGUSR1, lambda *_: os.write(counts, b"%d\\n" % (events["call"] + events["c_call"]))
)
sys.setprofile(note)
main()
"""
"""Writes the calls so far to the descriptor of the first argument at each SIGUSR1."""


def calls_an_object(command: str, objects: int = OBJECTS) -> float:
    """Return the calls for each object of `penstock COMMAND`, between a fifth and four of an epoch.

    Raises RuntimeError if the epoch is shorter.
    """
    periodic = Periodic(objects=objects, records=1, payload=PAYLOAD)
    counts, child_counts = os.pipe()
    with (
        tempfile.TemporaryDirectory(prefix="calls-") as directory,
        running_server(_made(directory, "files"), periodic) as url,
        open(counts) as lines,
    ):
        arguments = (
            ["run", "-c", write_job(os.path.join(directory, "ml"), MemoryBudget=_AHEAD)]
            if command == "run"
            else ["cat", "--memory-budget", _AHEAD, "s3://bucket/data/"]
        )
        process = subprocess.Popen(
            [sys.executable, "-c", _COUNTED, str(child_counts), *arguments],
            env=environment(url, directory),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=[child_counts],
        )
        os.close(child_counts)
        with process, contextlib.ExitStack() as stack:
            stack.callback(process.kill)
            if process.stdout is None or process.stderr is None:
                raise RuntimeError("no pipe")
            stream = process.stdout.fileno()
            if command == "run":
                await_ready(process)
                stream = os.open(os.path.join(directory, "ml", "input", "data", "train_0"), os.O_RDONLY)
                stack.callback(os.close, stream)
            taken = []
            for due in (objects // 5, objects * 3 // 5):
                _read(stream, due * periodic.size)
                process.send_signal(signal.SIGUSR1)
                taken.append(int(lines.readline()))
        return (taken[1] - taken[0]) / (objects * 3 // 5)


def _made(directory: str, name: str) -> str:
    """Make a directory and return its path."""
    path = os.path.join(directory, name)
    os.mkdir(path)
    return path


def _read(fd: int, count: int) -> None:
    """Read `count` bytes of a pipe. Raises RuntimeError at its end."""
    buffer = memoryview(bytearray(_READ))
    while count:
        got = os.readv(fd, [buffer[: min(count, _READ)]])
        if not got:
            raise RuntimeError("the stream ended before it was measured")
        count -= got


def main() -> None:
    """Print the calls of each command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.calls", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("commands", nargs="*", metavar="COMMAND", help="run or cat (default: both)")
    parser.add_argument("--objects", type=int, default=OBJECTS, help="objects of the epoch")
    arguments = parser.parse_args()
    if unknown := set(arguments.commands) - set(COMMANDS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    for command in arguments.commands or COMMANDS:
        print(f"{command}  {calls_an_object(command, arguments.objects):.1f} calls an object", flush=True)


if __name__ == "__main__":
    main()
