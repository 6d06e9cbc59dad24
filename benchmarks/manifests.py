"""Plans a manifest with and without listings: `python -m benchmarks.manifests [--entries N] [--folders N]`.

A server in a process of its own answers LISTs, HEADs and the GET of a manifest; its objects have no content.
Each way plans the same manifest in a fresh process, in turns. A row has the requests of the plan, its
CPU time, the most memory of its process, and the times to the first entries and to the whole plan.

Penstock's control connections have no proxy and no TLS here. `--latency` is the server's time for a request.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import subprocess
import sys
import time
from bisect import bisect_left, bisect_right
from statistics import median
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, unquote, urlsplit

from streamer.plan import Arrangement, S3Uri
from streamer.s3.catalog.manifests import Manifest
from streamer.s3.catalog.object_finder import ObjectClients
from streamer.s3.catalog.object_info import open_inspector
from streamer.s3.catalog.pages import open_pages
from streamer.s3.client.endpoint import Endpoint
from streamer.s3.client.session import open_clients

if TYPE_CHECKING:
    from collections.abc import Sequence

ETAG = "0123456789abcdef0123456789abcdef"
SIZE = 110_000
ORDERS = ("sorted", "shuffled")
WAYS = ("heads", "listings")
HEADINGS = ("order", "way", "entries", "LISTs", "HEADs", "CPU, s", "peak RSS, MiB", "first, s", "whole, s")


def keys_of(entries: int, folders: int) -> list[str]:
    """Return the keys of the bucket, in order."""
    each = -(-entries // folders)
    return [f"train/n{n // each:08}/n{n // each:08}_{n % each:06}.JPEG" for n in range(entries)]


class Server(asyncio.Protocol):
    """One connection to the S3 server."""

    def __init__(self, keys: Sequence[str], manifests: dict[str, bytes], latency: float) -> None:
        self._keys = keys
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
            method, target, _ = self._received.decode().split(" ", 2)
            self._received = b""
            asyncio.get_running_loop().call_later(self._latency, self._answer, method, target)

    def _answer(self, method: str, target: str) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        url = urlsplit(target)
        _, _, key = url.path.lstrip("/").partition("/")
        header = "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n"
        if method == "HEAD":
            header = f'HTTP/1.1 200 OK\r\nContent-Length: {SIZE}\r\nETag: "{ETAG}"\r\n\r\n'
            self._transport.write(header.encode())
            return
        if key:
            body = self._manifests[unquote(key)]
            header = header.replace("\r\n\r\n", f'\r\nETag: "{ETAG}"\r\n\r\n')
        else:
            body = self._page({name: value[0] for name, value in parse_qs(url.query).items()})
        self._transport.write(header.format(len(body)).encode() + body)

    def _page(self, query: dict[str, str]) -> bytes:
        keys, prefix = self._keys, query.get("prefix", "")
        after = query.get("start-after", "")
        first = max(bisect_left(keys, prefix), bisect_right(keys, after))
        names = keys[first : first + 1001]
        names = names[: next((at for at, name in enumerate(names) if not name.startswith(prefix)), 1001)]
        more = len(names) > 1000
        contents = "".join(
            f"<Contents><Key>{name}</Key><LastModified>2024-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>&quot;{ETAG}&quot;</ETag><Size>{SIZE}</Size><StorageClass>STANDARD</StorageClass></Contents>"
            for name in names[:1000]
        )
        token = f"<NextContinuationToken>{names[999]}</NextContinuationToken>" if more else ""
        return (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult>'
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}"
            f"<EncodingType>url</EncodingType>{contents}</ListBucketResult>"
        ).encode()


async def serve(entries: int, folders: int, latency: float) -> None:
    """Serve until standard input ends; print the port."""
    keys = keys_of(entries, folders)
    names = [key.removeprefix("train/") for key in keys]
    manifests = {}
    for order in ORDERS:
        if order == "shuffled":
            random.Random(1).shuffle(names)  # noqa: S311 - an order, not a secret
        manifests[order] = json.dumps([{"prefix": "s3://bucket/train/"}, *names]).encode()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Server(keys, manifests, latency), "127.0.0.1", 0)
    async with server:
        print(server.sockets[0].getsockname()[1], flush=True)
        await loop.run_in_executor(None, sys.stdin.read)


async def plan(port: int, order: str, way: str) -> dict[str, float]:
    """Plan the manifest in this process; return the figures of a row."""
    began, cpu = time.monotonic(), time.process_time()
    first = 0.0
    async with (
        open_clients(Endpoint(url=f"http://127.0.0.1:{port}", path_style=True), connections=1) as clients,
        open_inspector(clients, give_up_after=60, by_aiobotocore=False) as inspector,
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


def measure(arguments: argparse.Namespace) -> None:
    """Plan in turns; print the medians."""
    environment = {
        **os.environ,
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_REGION": "eu-west-1",
    }
    module = [sys.executable, "-m", "benchmarks.manifests"]
    sizes = [f"--entries={arguments.entries}", f"--folders={arguments.folders}"]
    rows: dict[tuple[str, str], list[dict[str, float]]] = {}
    with subprocess.Popen(
        [*module, "--serve", *sizes, f"--latency={arguments.latency}"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as server:  # fmt: skip
        port = server.stdout.readline().strip() if server.stdout else ""
        for _ in range(arguments.rounds):
            for order in ORDERS:
                for way in arguments.ways:
                    done = subprocess.run(
                        [*module, f"--port={port}", f"--order={order}", f"--way={way}"],
                        env=environment, check=True, stdout=subprocess.PIPE, text=True,
                    )  # fmt: skip
                    rows.setdefault((order, way), []).append(json.loads(done.stdout))
        if server.stdin:
            server.stdin.close()
    print("| " + " | ".join(HEADINGS) + " |")
    print("|" + "---|" * len(HEADINGS))
    for (order, way), found in rows.items():
        figures = [median(each[name] for each in found) for name in found[0]]
        print(f"| {order} | {way} | " + " | ".join(f"{figure:g}" for figure in figures) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--folders", type=int, default=80)
    parser.add_argument("--latency", type=float, default=0.02, help="seconds that the server takes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--order", help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve(arguments.entries, arguments.folders, arguments.latency))
    elif arguments.port:
        print(json.dumps(asyncio.run(plan(arguments.port, arguments.order, arguments.way))))
    else:
        measure(arguments)


if __name__ == "__main__":
    main()
