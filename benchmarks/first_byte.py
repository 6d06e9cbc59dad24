"""Measures the time to the first byte of a prefix of many objects: `python -m benchmarks.first_byte`.

    server of made-up keys (`benchmarks.listing`) ── `penstock run` ── FIFO ── this process: reads one byte
                                                  └─ `penstock cat` ── pipe ─┘

The programs take turns with a prefix of one object, so the difference is what the listing costs. `run` may be
compared with another checkout (`--beside DIR`). CPU seconds are those of the program up to its first byte.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time

from benchmarks.listing import SHAPES, running_server
from benchmarks.process import cpu_seconds
from benchmarks.startup import Start, environment, write_job
from benchmarks.stats import in_turns, spread

URI = "s3://bucket/train/"
PENSTOCK = [sys.executable, "-m", "sidecar"]


def first_of_run(checkout: str, url: str, directory: str) -> Start:
    """Start `penstock run` and open its FIFO when it is ready; return the start up to its first byte."""
    job, base = os.path.join(directory, "job.json"), os.path.join(directory, "ml")
    write_job(job, base, URI)
    began = time.monotonic()
    with subprocess.Popen(
        [*PENSTOCK, "run", "-c", job],
        cwd=checkout,
        env=environment(url, directory),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            for line in process.stderr or ():
                if b'"ready"' in line:
                    break
            else:
                raise SystemExit("`penstock run` ended before it was ready")
            with open(os.path.join(base, "input", "data", "train_0"), "rb", buffering=0) as fifo:
                return _first(fifo.read(1), process.pid, began)
        finally:
            process.send_signal(signal.SIGKILL)


def first_of_cat(checkout: str, url: str, directory: str) -> Start:
    """Start `penstock cat`; return the start up to its first byte."""
    began = time.monotonic()
    with subprocess.Popen(
        [*PENSTOCK, "cat", "--quiet", "--path-style", URI],
        cwd=checkout,
        env=environment(url, directory),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            return _first(process.stdout.read(1) if process.stdout else b"", process.pid, began)
        finally:
            process.send_signal(signal.SIGKILL)


def _first(byte: bytes, pid: int, began: float) -> Start:
    seconds = time.monotonic() - began
    if not byte:
        raise SystemExit("the program ended without a byte")
    return Start(seconds, cpu_seconds(pid))


def main() -> None:
    """Start all programs in turns, and print the medians."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.first_byte", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--keys", type=int, default=1_000_000, help="objects below the prefix (1000000)")
    parser.add_argument("--shape", choices=SHAPES, default="flat", help="form of the keys (flat)")
    parser.add_argument("--delay", type=float, default=0.1, help="seconds before each page is sent (0.1)")
    parser.add_argument("--rounds", type=int, default=7, help="starts of each program, in turns (7)")
    parser.add_argument("--beside", metavar="DIR", help="another checkout of Penstock")
    options = parser.parse_args()
    checkouts = {"": os.getcwd()} | ({f" of {options.beside}": options.beside} if options.beside else {})
    starts: dict[str, list[Start]] = {}
    with (
        running_server(options.shape, options.keys, options.delay) as many,
        running_server(options.shape, 1, options.delay) as one,
    ):
        programs = [
            (f"{name}{suffix}, {keys:,} objects", measure, checkout, url)
            for name, measure in (("run", first_of_run), ("cat", first_of_cat))
            for suffix, checkout in checkouts.items()
            for keys, url in ((options.keys, many), (1, one))
        ]
        for _, (name, measure, checkout, url) in in_turns(options.rounds, programs):
            with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
                starts.setdefault(name, []).append(measure(checkout, url, directory))
    for name, measured in starts.items():
        first, cpu = spread([each.first for each in measured]), spread([each.cpu for each in measured])
        print(f"{name:30} {first.text():18} s to the first byte {cpu.text():18} CPU-s")


if __name__ == "__main__":
    main()
