"""Measures record indexes: `python -m benchmarks.index`.

    scan     every format and record size: bytes per second of the scanner alone, and bytes of the index
    build    `penstock index build` and `penstock cat > /dev/null` of the same objects over HTTP, in turns
    large    the index of very many records (`benchmarks.large_index`)

The figures of `build` are the commands' own: CPU seconds (user and system) of the stream for each GB, without
the start of the program, and bytes of the objects per second.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from typing import Any

from benchmarks.index_server import running_server
from benchmarks.large_index import KEYS, measure_large
from benchmarks.stats import in_turns, spread
from streamer.formats import recordio, tfrecord
from streamer.formats.borders import BorderScanner
from streamer.formats.record_format import RecordFormat
from streamer.formats.record_index import IndexedObject, block

FORMATS = ("TFRecord", "RecordIO", "lines", "tar")
BLOCK = 128 * 1024
"""Bytes of a block: a buffer of the relay."""


def records(kind: str, size: int, count: int) -> bytes:
    """Return an object of `count` records of `size` bytes; in a tar each has a label, too."""
    payload = os.urandom(size).replace(b"\n", b" ")
    match kind:
        case "TFRecord":
            return tfrecord.encode(payload) * count
        case "RecordIO":
            return recordio.encode(payload) * count
        case "lines":
            return (payload[:-1] + b"\n") * count
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for number in range(count):
            for suffix, data in (("jpg", payload), ("cls", b"7")):
                member = tarfile.TarInfo(f"{number:08}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return made.getvalue()


def scan(kind: str, data: memoryview) -> tuple[BorderScanner, float]:
    """Scan an object; return the scanner and the CPU seconds."""
    scanner, began = RecordFormat.parse(kind).scanner(), time.process_time()
    for at in range(0, len(data), BLOCK):
        scanner.feed(data[at : at + BLOCK])
    scanner.finish()
    return scanner, time.process_time() - began


def measure_scans(sizes: list[int], rounds: int) -> None:
    """Print the speed of every scanner, and what a row of the index takes."""
    for kind in FORMATS:
        for size in sizes:
            data = memoryview(bytearray(records(kind, size, max(256, min(50_000, 64_000_000 // size)))))
            rates = []
            for _ in range(rounds):
                scanner, seconds = scan(kind, data)
                rates.append(len(data) / 1e9 / seconds)
            row = IndexedObject(0, 0, len(data), scanner.records, len(data), scanner.offsets)
            print(
                f"scan   {kind:9} {size:9,} bytes: {spread(rates).text()} GB/s of one core, "
                f"{len(block([row])) / scanner.records:.3f} bytes of index a record",
                flush=True,
            )


def figures(command: list[str], folder: str) -> dict[str, float]:
    """Run a command with `--json`; return the figures of its stream. Raises CalledProcessError."""
    variables = {**os.environ, **KEYS, "AWS_DEFAULT_REGION": "us-east-1"}
    with tempfile.TemporaryFile("w+", dir=folder) as closing, open(os.devnull, "wb") as nowhere:
        output = {"stdout": closing} if command[0] == "index" else {"stdout": nowhere, "stderr": closing}
        subprocess.run(
            [sys.executable, "-m", "sidecar", *command, "--json"], check=True, env=variables, **output
        )
        closing.seek(0)
        found: dict[str, Any] = json.load(closing)
    return found["channels"]["train"] if command[0] == "index" else found


def measure_builds(sizes: list[int], rounds: int, *, objects: int, megabytes: int) -> None:
    """Print what a build takes beside `penstock cat > /dev/null`, for TFRecord objects."""
    for size in sizes:
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
            data = records("TFRecord", size, max(1, megabytes * 1_000_000 // size))
            served = os.path.join(folder, "data")
            os.mkdir(served)
            for number in range(objects):
                with open(os.path.join(served, f"{number:04}"), "wb") as file:
                    file.write(data)
            total = len(data) * objects / 1e9
            del data
            with running_server(served) as url:
                commands = {
                    "cat": ["cat", "s3://bucket/data/", "--endpoint-url", url, "--path-style"],
                    "build": ["index", "build", "-c", _job(folder, url), "--format", "TFRecord"],
                }
                found: dict[str, list[dict[str, float]]] = {}
                for round_number, name in in_turns(rounds, list(commands)):
                    to = os.path.join(folder, f"{name} {round_number}")
                    more = [] if name == "cat" else ["--to", to]
                    found.setdefault(name, []).append(figures([*commands[name], *more], folder))
            for name, lists in found.items():
                cpu = spread([each["cpu_seconds_per_gb"] for each in lists]).text()
                rate = spread([total / each["seconds"] for each in lists]).text()
                print(
                    f"build  {name:5} {size:9,} bytes a record, {total:.1f} GB: {cpu} CPU-s/GB, {rate} GB/s",
                    flush=True,
                )


def _job(folder: str, url: str) -> str:
    path = os.path.join(folder, "job.json")
    source = {"S3DataType": "S3Prefix", "S3Uri": "s3://bucket/data/"}
    document = {
        "InputDataConfig": [{"ChannelName": "train", "DataSource": {"S3DataSource": source}}],
        "Penstock": {"Endpoint": {"Url": url, "PathStyle": True}},
    }
    with open(path, "w", encoding="utf-8") as file:
        json.dump(document, file)
    return path


def main() -> None:
    """Run the server, or the measurements."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.index", description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="1000,8192,100000,1000000", help="bytes of a record (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each (%(default)s)")
    parser.add_argument("--objects", type=int, default=20, help="objects of a build (%(default)s)")
    parser.add_argument("--megabytes", type=int, default=100, help="size of each (%(default)s)")
    parser.add_argument("--records", type=int, default=100_000_000, help="of the large index (%(default)s)")
    parser.add_argument("--only", choices=["scan", "build", "large"], help="one of the three")
    arguments = parser.parse_args()
    sizes = [int(each) for each in arguments.sizes.split(",")]
    if arguments.only in {None, "scan"}:
        measure_scans(sizes, arguments.rounds)
    if arguments.only in {None, "build"}:
        measure_builds(sizes, arguments.rounds, objects=arguments.objects, megabytes=arguments.megabytes)
    if arguments.only in {None, "large"}:
        measure_large(arguments.records, arguments.rounds)


if __name__ == "__main__":
    main()
