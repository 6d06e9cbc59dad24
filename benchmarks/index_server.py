"""The S3 server of benchmarks with records: listings, HEADs, ranged GETs, in a process of its own.

files of a folder     sent by sendfile(2), as `data/NAME`
periodic objects      as many as wanted, of any size, made of one record over and over: nothing is stored
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import md5
from urllib.parse import parse_qs, urlsplit

from benchmarks.dataset import listing
from streamer.formats import tfrecord

PAGE = 1000
_RANGE = re.compile(rb"\r\nrange: bytes=(\d+)-(\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class Periodic:
    """Objects of one TFRecord over and over."""

    objects: int
    records: int
    """Records of each object."""
    payload: int
    """Bytes of a record's data."""

    @property
    def record(self) -> bytes:
        return tfrecord.encode(bytes(self.payload))

    @property
    def size(self) -> int:
        return self.records * len(self.record)

    @property
    def keys(self) -> list[str]:
        return [f"data/{number:08}" for number in range(self.objects)]


@dataclass(frozen=True)
class Served:
    """An object of the server."""

    size: int
    etag: str
    fd: int | None
    """Its file; None if it is periodic."""


def etag(name: str) -> str:
    """Return the ETag of the object with this key."""
    return md5(name.encode(), usedforsecurity=False).hexdigest()


def objects_of(folder: str, periodic: Periodic | None) -> dict[str, Served]:
    """Return the objects of the server, by key, in order."""
    found = {}
    for name in os.listdir(folder):
        key, fd = f"data/{name}", os.open(f"{folder}/{name}", os.O_RDONLY)
        found[key] = Served(os.fstat(fd).st_size, etag(key), fd)
    if periodic is not None:
        size = periodic.size
        found |= {key: Served(size, etag(key), None) for key in periodic.keys}
    return dict(sorted(found.items()))


def page(objects: dict[str, Served], target: str) -> bytes:
    """Return a page of a listing."""
    query = {name: values[0] for name, values in parse_qs(urlsplit(target).query).items()}
    after = query.get("continuation-token", query.get("start-after", ""))
    keys = [key for key in objects if key.startswith(query.get("prefix", "")) and key > after]
    shown = [(key, objects[key].size, objects[key].etag) for key in keys[:PAGE]]
    return listing("bucket", shown, token=shown[-1][0] if len(keys) > PAGE else "").encode()


async def serve(folder: str, periodic: Periodic | None) -> None:
    """Answer until the process is ended; print the port."""
    objects = objects_of(folder, periodic)
    record = periodic.record if periodic else b""

    def between(first: int, end: int) -> bytes:
        start = first // len(record) * len(record)
        return (record * ((end - start) // len(record) + 1))[first - start : end - start]

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError), contextlib.closing(writer):
            while True:
                header = await reader.readuntil(b"\r\n\r\n")
                method, target, _ = header.split(b" ", 2)
                key = target.decode().partition("?")[0].removeprefix("/bucket").removeprefix("/")
                if not key:
                    body = page(objects, target.decode())
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                    continue
                if (found := objects.get(key)) is None:
                    writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                    continue
                asked, tag = _RANGE.search(header), found.etag.encode()
                if method == b"HEAD" or asked is None:
                    writer.write(
                        b'HTTP/1.1 200 OK\r\nETag: "%s"\r\nContent-Length: %d\r\n\r\n' % (tag, found.size)
                    )
                    continue
                first, end = int(asked[1]), min(int(asked[2]) + 1, found.size)
                writer.write(
                    b'HTTP/1.1 206 Partial Content\r\nContent-Range: bytes %d-%d/%d\r\nETag: "%s"\r\n'
                    b"Content-Length: %d\r\n\r\n" % (first, end - 1, found.size, tag, end - first)
                )
                if found.fd is None:
                    writer.write(between(first, end))
                    await writer.drain()
                    continue
                with os.fdopen(os.dup(found.fd), "rb") as file:
                    await loop.sendfile(writer.transport, file, first, end - first)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextlib.contextmanager
def running_server(folder: str, periodic: Periodic | None = None) -> Iterator[str]:
    """Run the server in another process; yield its URL."""
    numbers = [] if periodic is None else [periodic.objects, periodic.records, periodic.payload]
    command = [sys.executable, "-m", "benchmarks.index_server", folder, *map(str, numbers)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline() if process.stdout else 0)}"
        finally:
            process.terminate()


def main() -> None:
    """Serve a folder."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.index_server")
    parser.add_argument("folder")
    parser.add_argument("periodic", type=int, nargs="*", help="objects, records of each, bytes of a record")
    arguments = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(arguments.folder, Periodic(*arguments.periodic) if arguments.periodic else None))


if __name__ == "__main__":
    main()
