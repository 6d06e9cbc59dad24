"""Measures the cost of `Join`: `python -m benchmarks.joined`, CPU-s/GB of `penstock cat` with and without.

Plain and joined runs alternate and stream the same objects from a server in memory, both by the buffered
transport: archives with members of several sizes, and Arrow streams.
"""

from __future__ import annotations

import argparse
import io
import re
import statistics
import subprocess
import sys
import tarfile
from collections.abc import Iterator

import pyarrow as pa

from streamer.units import KIB, MIB
from tests.kit.stub import StubThread

OBJECTS, OBJECT = 8, 64 * MIB
"""Number of objects of each kind, and bytes of each object."""
MEMBERS = (4 * KIB, 32 * KIB, 256 * KIB)


def archive(member: int) -> bytes:
    """Return a tar archive with members of this size in bytes."""
    made, data = io.BytesIO(), bytes(member)
    with tarfile.open(fileobj=made, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for number in range(OBJECT // (member + 512)):
            info = tarfile.TarInfo(f"{number:08d}.jpg")
            info.size = member
            tar.addfile(info, io.BytesIO(data))
    return made.getvalue()


def stream(batch: int) -> bytes:
    """Return an Arrow stream with batches of this size in bytes."""
    made = io.BytesIO()
    column = pa.array([bytes(1024)] * (batch // 1024), pa.binary(1024))
    table = pa.table({"data": column, "label": pa.array(range(len(column)))})
    with pa.ipc.new_stream(made, table.schema) as writer:
        for _ in range(OBJECT // batch):
            writer.write_table(table)
    return made.getvalue()


def cases() -> Iterator[tuple[str, str, bytes]]:
    """Yield name, value of `--join` and one object of each kind."""
    for member in MEMBERS:
        yield f"tar of {member // KIB} KiB members", "tar", archive(member)
    yield "Arrow, batches of 256 KiB", "arrow", stream(256 * KIB)


def cost(url: str, *options: str) -> float:
    """Return the CPU-seconds per GB of one run, as `penstock cat` reports them."""
    endpoint = ["--endpoint-url", url, "--path-style", "--anonymous", "--transport", "buffered"]
    command = [sys.executable, "-m", "sidecar", "cat", "s3://b/", *endpoint, *options]
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as reader:
        done = subprocess.run(command, stdout=reader.stdin, stderr=subprocess.PIPE, text=True, check=True)
        reader.communicate()
    found = re.search(r"([0-9.]+) CPU-s/GB", done.stderr)
    if found is None:
        raise RuntimeError(done.stderr)
    return float(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.joined", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="runs of either kind, in turns (5)")
    rounds = parser.parse_args().rounds
    thread = StubThread()
    stub = thread.start()
    try:
        for name, join, data in cases():
            stub.objects.clear()
            stub.objects.update({f"b/{number}": data for number in range(OBJECTS)})
            plain, joined = [], []
            for _ in range(rounds):
                plain.append(cost(stub.url))
                joined.append(cost(stub.url, "--join", join))
            print(
                f"{name:26} plain {statistics.median(plain):.2f} joined {statistics.median(joined):.2f} "
                f"CPU-s/GB ({' '.join(f'{a:.2f}:{b:.2f}' for a, b in zip(plain, joined, strict=True))})",
                flush=True,
            )
    finally:
        thread.stop()


if __name__ == "__main__":
    main()
