"""Measures uploads: `python -m benchmarks.uploads`, throughput and CPU seconds beside other programs.

    files in memory ─ one program, a new process ─▶ sink: as many processes as cores, which drop every body

The sink answers as S3 does and stores nothing; the size that a HEAD has to name is the end of the key. All
programs take turns, so a busy machine slows all of them; the figures are medians. CPU seconds are those of
the program and its children. Peers are measured if they are on the PATH (`aws`, `s5cmd`, `rclone`) or
installed for this interpreter (`s3torchconnector`; plain HTTP alone, because it trusts the system's
certificates). The default takes some five minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import resource
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import httptools
import uvloop

from benchmarks.clients import rclone_path
from benchmarks.dataset import MIB, directory_in_memory
from benchmarks.jobs import environment
from benchmarks.origin import write_certificate
from benchmarks.stats import GB, in_turns, spread

SHAPES = {"1 × 4 GB": (1, 4_000_000_000), "1,000 × 4 MB": (1000, 4_000_000)}
CLIENTS = ("penstock", "aws", "s5cmd", "rclone", "s3torchconnector")
CONNECTOR = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
from s3torchconnector import S3Checkpoint
directory, uri = sys.argv[1:]
store = S3Checkpoint("us-east-1", endpoint=os.environ["AWS_ENDPOINT_URL"])
def put(name):
    with open(f"{directory}/{name}", "rb") as file, store.writer(uri + name) as writer:
        while data := file.read(1 << 20):
            writer.write(data)
with ThreadPoolExecutor(8) as pool:
    list(pool.map(put, os.listdir(directory)))
"""


class Sink(asyncio.Protocol):
    """One connection to the sink; httptools calls the methods `on_`."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._write = transport.write  # type: ignore[attr-defined] # of a socket
        self._parser, self._url = httptools.HttpRequestParser(self), b""

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, _: bytes) -> None:
        if name.lower() == b"expect":
            self._write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_message_complete(self) -> None:
        method, (path, _, query), self._url = self._parser.get_method(), self._url.partition(b"?"), b""
        name = b"Complete" if b"uploadId" in query else b"Initiate"
        root = {b"POST": b"%bMultipartUploadResult" % name, b"GET": b"ListBucketResult"}.get(method)
        inside = b"<UploadId>u</UploadId><ETag>e-1</ETag><IsTruncated>false</IsTruncated>"
        body = b"<%b>%b</%b>" % (root, inside, root) if root else b""
        length = int(path.rpartition(b"-")[2]) if method == b"HEAD" else len(body)
        self._write(
            b'HTTP/1.1 200 OK\r\nETag: "e-1"\r\nDate: Thu, 01 Jan 2026 09:00:00 GMT\r\n'
            b"Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n"
            b"Content-Type: application/xml\r\nContent-Length: %d\r\n\r\n%b" % (length, body)
        )


async def serve(listening: socket.socket, tls: ssl.SSLContext | None) -> None:
    server = await asyncio.get_running_loop().create_server(Sink, sock=listening, ssl=tls)
    await server.serve_forever()


@contextlib.contextmanager
def running_sink(tls: ssl.SSLContext | None) -> Iterator[str]:
    """Run the sink in other processes; yield its URL."""
    fork = multiprocessing.get_context("fork")
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        cores = os.sched_getaffinity(0)
        sinks = [fork.Process(target=lambda: uvloop.run(serve(listening, tls))) for _ in cores]
        for sink in sinks:
            sink.start()
        try:
            yield f"{'https' if tls else 'http'}://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            for sink in sinks:
                sink.kill()


def command_of(client: str, url: str, directory: str, uri: str) -> list[str] | None:
    """Return the command that uploads a directory; None if this machine has no such program."""
    tls = url.startswith("https:")
    if client == "penstock":
        return [sys.executable, "-m", "sidecar", "upload", "--replace", "--quiet", directory, uri]
    if client == "s3torchconnector":
        return None if tls or find_spec(client) is None else [sys.executable, "-c", CONNECTOR, directory, uri]
    commands: dict[str, list[str]] = {
        "aws": ["s3", "cp", "--quiet", "--recursive", directory, uri],
        "s5cmd": [*["--no-verify-ssl"] * tls, "cp", f"{directory}/", uri],  # it has no option for a CA
        "rclone": ["copy", "--s3-no-check-bucket", directory, rclone_path(url, uri.removeprefix("s3://"))],
    }
    return None if (path := shutil.which(client)) is None else [path, *commands[client]]


def measured(command: list[str], variables: dict[str, str]) -> tuple[float, float]:
    """Return wall and CPU seconds of a program. Raises CalledProcessError if it fails."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(command, env=variables, check=True, stdout=subprocess.DEVNULL)
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - began
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def rows(rounds: int, scale: float) -> Iterator[str]:
    """Upload each shape by each program, in turns; yield the rows of a table."""
    yield from ("| Files | Server | Program | GB/s | CPU-s/GB |", "|---|---|---|---|---|")
    with directory_in_memory("penstock-uploads-") as home:
        bundle, files = write_certificate(home, "127.0.0.1"), Path(home, "files")
        trust = {"AWS_CA_BUNDLE": bundle, "RCLONE_CA_CERT": bundle, "PYTHONPATH": os.pathsep.join(sys.path)}
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(f"{home}/cert.pem", f"{home}/key.pem")
        with running_sink(None) as plain, running_sink(tls) as encrypted:
            for shape, (count, largest) in SHAPES.items():
                size, found = int(largest * scale), dict[tuple[str, str], list[tuple[float, float]]]()
                files.mkdir()
                for number in range(count):
                    with (files / f"{number:04}-{size}").open("wb") as file:
                        for begin in range(0, size, 4 * MIB):
                            file.write(os.urandom(min(4 * MIB, size - begin)))
                asked = [(url, each) for url in (plain, encrypted) for each in CLIENTS]
                able = [row for row in asked if command_of(row[1], row[0], "", "")]
                for number, (url, client) in in_turns(rounds, able):
                    command = command_of(client, url, str(files), f"s3://bucket/{client}-{number}/") or []
                    run = measured(command, environment(url, home) | trust)
                    found.setdefault((url, client), []).append(run)
                shutil.rmtree(files)
                for (url, client), runs in found.items():
                    gb, server = count * size / GB, "TLS" if url == encrypted else "plain"
                    rate, cpu = spread([gb / wall for wall, _ in runs]), spread([cpu / gb for _, cpu in runs])
                    yield f"| {shape} | {server} | `{client}` | {rate.text()} | {cpu.text()} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.uploads", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2, help="uploads by each program, in turns (2)")
    parser.add_argument("--scale", type=float, default=1.0, help="part of each file's size (1)")
    options = parser.parse_args()
    for row in rows(options.rounds, options.scale):
        print(row, flush=True)


if __name__ == "__main__":
    main()
