"""Plans a manifest with and without listings: `python -m benchmarks.manifests [--entries N] [--folders N]`.

A server in a process of its own answers LISTs, HEADs and the GET of a manifest; its objects have no content.
Each way plans the same manifest in a fresh process, in turns. A row has the requests of the plan, its
CPU time, the most memory of its process, and the times to the first entries and to the whole plan.

Penstock's control connections have no proxy and no TLS here. `--latency` is the server's time for a request.
`--among N` puts N keys into the bucket for each that the manifest names: from 51 on, HEADs find nearly all.

`--stream` reads one epoch by `penstock run` instead: of the manifest, and of a bucket that has its objects
alone, by prefix. The second needs no HEAD. So the difference is the most that a manifest could gain if sizes
came from the first GET of each object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from statistics import median
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, unquote, urlsplit
from urllib.request import urlopen

from benchmarks.process import cpu_seconds
from benchmarks.startup import environment, write_job
from benchmarks.stats import in_turns
from streamer.plan import Arrangement, S3Uri
from streamer.s3.catalog.manifests import Manifest
from streamer.s3.catalog.object_finder import ObjectClients
from streamer.s3.catalog.object_info import open_inspector
from streamer.s3.catalog.pages import open_pages
from streamer.s3.client.endpoint import Endpoint
from streamer.s3.client.session import open_clients

if TYPE_CHECKING:
    from collections.abc import Sequence

COUNTS = "counts"
"""Path at which the server returns the numbers of requests since the last time, by kind."""
ETAG = "0123456789abcdef0123456789abcdef"
SIZE = 110_000
ORDERS = ("sorted", "shuffled")
WAYS = ("heads", "listings")
HEADINGS = ("order", "way", "entries", "LISTs", "HEADs", "CPU, s", "peak RSS, MiB", "first, s", "whole, s")


STREAMED = ("by the manifest", "by prefix")
STREAM_HEADINGS = ("epoch", "objects", "LISTs", "HEADs", "GETs", "CPU, s", "first byte, s", "whole, s")
DENSE = "dense"
"""Bucket with the objects of the manifest alone."""


def keys_of(entries: int, folders: int) -> list[str]:
    """Return the keys of the bucket, in order."""
    each = -(-entries // folders)
    return [f"train/n{n // each:08}/n{n // each:08}_{n % each:06}.JPEG" for n in range(entries)]


class Server(asyncio.Protocol):
    """One connection to the S3 server."""

    def __init__(
        self,
        buckets: dict[str, Sequence[str]],
        manifests: dict[str, bytes],
        counts: Counter[str],
        *,
        latency: float,
        size: int,
    ) -> None:
        """`buckets`: their keys, in order. `size`: bytes of every object."""
        self._buckets = buckets
        self._counts = counts
        self._size = size
        self._manifests = manifests
        self._latency = latency
        self._received = b""
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection."""
        if isinstance(transport, asyncio.WriteTransport):
            self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer the request after the latency; the client sends one at a time."""
        self._received += data
        if self._received.endswith(b"\r\n\r\n"):
            method, target, fields = self._received.decode().split(" ", 2)
            self._received = b""
            asyncio.get_running_loop().call_later(self._latency, self._answer, method, target, fields)

    def _answer(self, method: str, target: str, fields: str) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        url = urlsplit(target)
        bucket, _, key = url.path.lstrip("/").partition("/")
        header = "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n"
        self._counts[method if key else "LIST"] += 1
        if method == "HEAD":
            header = f'HTTP/1.1 200 OK\r\nContent-Length: {self._size}\r\nETag: "{ETAG}"\r\n\r\n'
            self._transport.write(header.encode())
            return
        if (found := re.search(r"\r\nRange: bytes=(\d+)-(\d+)\r\n", fields)) is not None:
            self._part(int(found[1]), int(found[2]))
            return
        if bucket == COUNTS:
            body = json.dumps(self._counts).encode()
            self._counts.clear()
        elif key:
            body = self._manifests[unquote(key)]
            header = header.replace("\r\n\r\n", f'\r\nETag: "{ETAG}"\r\n\r\n')
        else:
            query = {name: value[0] for name, value in parse_qs(url.query).items()}
            body = self._page(self._buckets[bucket], query)
        self._transport.write(header.format(len(body)).encode() + body)

    def _part(self, first: int, last: int) -> None:
        end = min(last + 1, self._size)
        header = (
            f"HTTP/1.1 206 Partial Content\r\nContent-Length: {end - first}\r\n"
            f'Content-Range: bytes {first}-{end - 1}/{self._size}\r\nETag: "{ETAG}"\r\n\r\n'
        )
        if self._transport is not None:
            self._transport.writelines([header.encode(), memoryview(bytes(end - first))])

    def _page(self, keys: Sequence[str], query: dict[str, str]) -> bytes:
        prefix = query.get("prefix", "")
        after = query.get("start-after", "")
        first = max(bisect_left(keys, prefix), bisect_right(keys, after))
        names = keys[first : first + 1001]
        names = names[: next((at for at, name in enumerate(names) if not name.startswith(prefix)), 1001)]
        more = len(names) > 1000
        contents = "".join(
            f"<Contents><Key>{name}</Key><LastModified>2024-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>&quot;{ETAG}&quot;</ETag><Size>{self._size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
            for name in names[:1000]
        )
        token = f"<NextContinuationToken>{names[999]}</NextContinuationToken>" if more else ""
        return (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult>'
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}"
            f"<EncodingType>url</EncodingType>{contents}</ListBucketResult>"
        ).encode()


async def serve(arguments: argparse.Namespace) -> None:
    """Serve until standard input ends; print the port."""
    keys = keys_of(arguments.entries * arguments.among, arguments.folders)
    wanted = keys[:: arguments.among]
    names = [key.removeprefix("train/") for key in wanted]
    buckets: dict[str, Sequence[str]] = {"bucket": keys, DENSE: wanted}
    counts = Counter[str]()
    manifests = {}
    for order in ORDERS:
        if order == "shuffled":
            random.Random(1).shuffle(names)  # noqa: S311 - an order, not a secret
        manifests[order] = json.dumps([{"prefix": "s3://bucket/train/"}, *names]).encode()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Server(buckets, manifests, counts, latency=arguments.latency, size=arguments.size),
        "127.0.0.1",
        0,
    )
    async with server:
        print(server.sockets[0].getsockname()[1], flush=True)
        await loop.run_in_executor(None, sys.stdin.read)


async def plan(port: int, order: str, way: str) -> dict[str, float]:
    """Plan the manifest in this process; return the figures of a row."""
    began, cpu = time.monotonic(), time.process_time()
    first = 0.0
    async with (
        open_clients(Endpoint(url=f"http://127.0.0.1:{port}", path_style=True), connections=1) as clients,
        open_inspector(clients, give_up_after=60) as inspector,
    ):
        with open_pages(clients) as pages:
            object_clients = ObjectClients(inspector, pages if way == "listings" else None)
            arrangement = Arrangement()
            uri, entries = S3Uri("bucket", order), arrangement.entries()
            manifest = Manifest(clients, uri, arrangement, object_clients=object_clients)
            async with contextlib.aclosing(manifest.runs()) as runs:
                async for run in runs:
                    first = first or time.monotonic() - began
                    entries.extend(run)
            counts = clients.request_counts
    return {
        "entries": len(entries),
        "lists": counts["ListObjectsV2"],
        "heads": counts["HeadObject"],
        "cpu": round(time.process_time() - cpu, 2),
        "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "first": round(first, 2),
        "whole": round(time.monotonic() - began, 2),
    }


def stream(port: int, epoch: str, objects: int, size: int) -> dict[str, float]:
    """Read one epoch by `penstock run` in a process of its own; return the figures of a row."""
    url = f"http://127.0.0.1:{port}"
    uri = f"s3://{DENSE}/train/" if epoch == "by prefix" else "s3://bucket/sorted"
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
        job, base = os.path.join(directory, "job.json"), os.path.join(directory, "ml")
        write_job(job, base, uri, kind="S3Prefix" if epoch == "by prefix" else "ManifestFile")
        began = time.monotonic()
        with subprocess.Popen(
            [sys.executable, "-m", "sidecar", "run", "-c", job],
            env=environment(url, directory), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            try:
                if not any(b'"ready"' in line for line in process.stderr or ()):
                    raise SystemExit("`penstock run` ended before it was ready")
                with open(os.path.join(base, "input", "data", "train_0"), "rb", buffering=0) as fifo:
                    count = len(fifo.read(1))
                    first = time.monotonic() - began
                    while data := fifo.read(1 << 20):
                        count += len(data)
                whole = time.monotonic() - began
                cpu = cpu_seconds(process.pid)
            finally:
                process.kill()
    if count != objects * size:
        raise SystemExit(f"{count} of {objects * size} bytes have come")
    with urlopen(f"{url}/{COUNTS}/") as response:  # noqa: S310 - our own server
        counts = json.load(response)
    figures = {"lists": counts.get("LIST", 0), "heads": counts.get("HEAD", 0), "gets": counts.get("GET", 0)}
    return {"objects": objects, **figures, "cpu": cpu, "first": first, "whole": whole}


def measure(arguments: argparse.Namespace) -> None:
    """Plan, or stream, in turns; print the medians."""
    environment = {
        **os.environ,
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_REGION": "eu-west-1",
    }
    module = [sys.executable, "-m", "benchmarks.manifests"]
    settings = ("entries", "folders", "among", "size", "latency")
    sizes = [f"--{name}={getattr(arguments, name)}" for name in settings]
    rows: dict[tuple[str, str], list[dict[str, float]]] = {}
    with subprocess.Popen(
        [*module, "--serve", *sizes],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as server:  # fmt: skip
        port = server.stdout.readline().strip() if server.stdout else ""
        for _, epoch in in_turns(arguments.rounds if arguments.stream else 0, STREAMED):
            row = stream(int(port), epoch, arguments.entries, arguments.size)
            rows.setdefault((epoch, ""), []).append(row)
        for _ in range(0 if arguments.stream else arguments.rounds):
            for order in ORDERS:
                for way in arguments.ways:
                    done = subprocess.run(
                        [*module, f"--port={port}", f"--order={order}", f"--way={way}"],
                        env=environment, check=True, stdout=subprocess.PIPE, text=True,
                    )  # fmt: skip
                    rows.setdefault((order, way), []).append(json.loads(done.stdout))
        if server.stdin:
            server.stdin.close()
    headings = STREAM_HEADINGS if arguments.stream else HEADINGS
    print("| " + " | ".join(headings) + " |")
    print("|" + "---|" * len(headings))
    for names, found in rows.items():
        figures = [median(each[name] for each in found) for name in found[0]]
        print(
            f"| {' | '.join(filter(None, names))} | " + " | ".join(f"{each:.4g}" for each in figures) + " |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--folders", type=int, default=80)
    parser.add_argument("--latency", type=float, default=0.02, help="seconds that the server takes")
    parser.add_argument("--among", type=int, default=1, help="keys in the bucket for each in the manifest")
    parser.add_argument("--size", type=int, default=SIZE, help="bytes of each object")
    parser.add_argument("--stream", action="store_true", help="read an epoch by `penstock run`")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--order", help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve(arguments))
    elif arguments.port:
        print(json.dumps(asyncio.run(plan(arguments.port, arguments.order, arguments.way))))
    else:
        measure(arguments)


if __name__ == "__main__":
    main()
