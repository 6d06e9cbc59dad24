"""Measures `penstock cat` of one object, beside its peers: `python -m benchmarks.cat --sizes 100kB,2GB`.

    nginx (`benchmarks.origin`, server `fast`) ── program ── pipe ── this process: splice(2) to /dev/null

Every program is a new process, from exec to its exit. Credentials are environment variables, and no AWS file
exists. All programs take turns; the printed figures are medians. The objects are sparse files on a disk, so
that those larger than memory can be measured too. The bytes that arrive are counted.

Peers are measured if they are on the PATH (`rclone`, `s5cmd`, `aws`), or installed for this interpreter or
for the first `python3` on the PATH (`obstore`). `--beside DIR` measures another checkout of Penstock too.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from benchmarks.dataset import DataSet, Shape, nginx_etag
from benchmarks.origin import running_origin
from benchmarks.startup import Program, environment, peers
from benchmarks.stats import in_turns, spread
from streamer.units import decimal_bytes

SIZES = "100kB,100MB,2GB"
_TIME = 1_750_000_000
"""Modification time of every object, in seconds."""
_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True, slots=True)
class Copy:
    """One object that a program has written to its standard output."""

    first: float
    """Seconds from exec to the first byte."""
    seconds: float
    """Seconds from exec to the exit."""
    cpu: float
    """User and system time of the process, in seconds."""


def parse_sizes(text: str) -> list[int]:
    """Return the sizes of a list such as `100kB,2GB`. Raises ValueError."""
    sizes = []
    for each in text.split(","):
        match = re.fullmatch(r"([0-9]+) ?(B|kB|MB|GB)", each.strip())
        if match is None:
            raise ValueError(f"{each!r} is no size; write 100kB, 2GB")
        sizes.append(int(match[1]) * _UNITS[match[2]])
    return sizes


def write_object(root: str, size: int) -> tuple[str, str]:
    """Write a sparse object of `size` bytes in a bucket of its own; return bucket and key."""
    shape = Shape(f"cat{size}", 1, 1, size)
    bucket, key = shape.bucket(0), shape.key(0)
    path = os.path.join(root, "objects", bucket, key)
    os.makedirs(os.path.dirname(path))
    with open(path, "wb") as file:
        file.truncate(size)
    os.utime(path, (_TIME, _TIME))
    os.makedirs(os.path.join(root, "lists"), exist_ok=True)
    DataSet(shape, root).write_listing(bucket, [(key, size, nginx_etag(_TIME, size))])
    return bucket, key


def programs(url: str, checkouts: Mapping[str, str], bucket: str, key: str) -> Iterator[Program]:
    """Yield every program that this machine has."""
    uri = f"s3://{bucket}/{key}"
    for name, checkout in checkouts.items():
        command = [sys.executable, "-m", "sidecar", "cat", "--quiet", "--path-style", uri]
        yield Program(name, command, checkout)
    yield from peers(url, os.getcwd(), bucket=bucket, key=key)


def copy(program: Program, variables: Mapping[str, str], size: int) -> Copy:
    """Run a program to its end and discard its output.

    Raises CalledProcessError if it fails, ValueError if it writes more or less than `size` bytes.
    """
    with open(os.devnull, "wb") as nothing:
        began = time.monotonic()
        with subprocess.Popen(
            program.command,
            cwd=program.cwd,
            env={**variables, **program.variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as process:
            assert process.stdout is not None  # noqa: S101 - a pipe
            count = len(os.read(process.stdout.fileno(), 1))
            first = time.monotonic() - began
            while moved := os.splice(process.stdout.fileno(), nothing.fileno(), 1 << 20):
                count += moved
            _, status, used = os.wait4(process.pid, 0)
            seconds = time.monotonic() - began
            process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, program.command)
    if count != size:
        raise ValueError(f"{program.name} has written {count} of {size} bytes")
    return Copy(first, seconds, used.ru_utime + used.ru_stime)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cat", description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=parse_sizes, default=SIZES, help=f"sizes of the objects ({SIZES})")
    parser.add_argument("--rounds", type=int, default=5, help="copies by each program, in turns (5)")
    parser.add_argument("--beside", metavar="DIR", help="another checkout of Penstock")
    options = parser.parse_args()
    checkouts = {"penstock": os.getcwd()} | ({"other": options.beside} if options.beside else {})
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
        os.chmod(directory, 0o755)  # noqa: S103 - nginx's workers may be another user; nothing here is secret
        root = os.path.join(directory, "data")
        objects = {size: write_object(root, size) for size in options.sizes}
        data = DataSet(Shape("cat", 1, 1, 1), root)
        with running_origin(data, os.path.join(directory, "origin")) as origin:
            url = origin.urls["fast"]
            variables = environment(url, directory)
            for size, (bucket, key) in objects.items():
                copies: dict[str, list[Copy]] = {}
                for _, program in in_turns(options.rounds, [*programs(url, checkouts, bucket, key)]):
                    copies.setdefault(program.name, []).append(copy(program, variables, size))
                for name, made in copies.items():
                    report(name, size, made)


def report(name: str, size: int, copies: list[Copy]) -> None:
    """Print the medians of one program's copies."""
    seconds, cpu, first = (
        spread([each.seconds for each in copies]),
        spread([each.cpu for each in copies]),
        spread([each.first for each in copies]),
    )
    print(
        f"{decimal_bytes(size):>8} {name:10} {seconds.text():20} s, {cpu.text():20} CPU-s, "
        f"{first.text():20} s to the first byte",
        flush=True,
    )


if __name__ == "__main__":
    main()
