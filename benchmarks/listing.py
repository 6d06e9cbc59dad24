"""Measures listings: `python -m benchmarks.listing`, by our own client and by aiobotocore, in turns.

    this process ── starts ──▶ server: pages of made-up keys, each after a delay
                 └─ starts ──▶ lister: `Sources.plan` once, in a process of its own ──▶ figures, as JSON

The server knows ListObjectsV2 alone: `prefix` is ignored, `start-after` and tokens are positions in the keys.
Shapes: `flat`, image files of one folder; `folders`, a thousand files in each; `hashes`, hexadecimal names.
A lister's figures are its own: CPU seconds of the listing, peak memory above that before the listing, and the
CPU seconds that its event loop spent on the listing before another task had its turn, looked at every 2 ms.

`--keys COUNTS` lists several numbers of keys, `--into PAGE` writes the table into the page.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import resource
import subprocess
import sys
import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

from benchmarks.dataset import listing
from benchmarks.jobs import environment
from benchmarks.report import insert_into
from benchmarks.stats import in_turns, percentile, spread
from streamer.plan import S3Uri
from streamer.s3.client.endpoint import Endpoint
from streamer.s3.client.session import open_clients
from streamer.s3.pages.pages import open_pages
from streamer.s3.pages.sources import Sources

PAGE = 1000
SHAPES: dict[str, Callable[[int], str]] = {
    "flat": "train/img-{:08d}.jpg".format,
    "folders": lambda number: f"train/{number // 1000:05d}/{number % 1000:04d}.jpg",
    "hashes": lambda number: f"train/{number << 24:016x}",
}
"""By name, the key of an object by its number; keys ascend with the numbers."""
BEGIN, END = (
    "<!-- listing: begin; written by python -m benchmarks.listing -->",
    "<!-- listing: end -->",
)
COLUMNS = (
    "Keys",
    "CPU-µs a key",
    "keys for each CPU-s",
    "MB at the peak besides the names",
    "CPU-ms before another task: p50",
    "p99",
    "most",
)
TURNS = ("busy p50", "busy p99", "busy")
"""Figures of the last three columns."""
LOOK = 0.002
"""Seconds between two looks at the event loop's CPU time."""


class Keys(Sequence[str]):
    """All keys of a shape, in order; no key is stored."""

    def __init__(self, shape: str, count: int) -> None:
        self._key, self._count = SHAPES[shape], count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < self._count:
            raise IndexError(number)
        return self._key(number)


def page(keys: Keys, query: dict[str, list[str]]) -> bytes:
    """Return the page that the query asks for."""
    after = query.get("start-after", [""])[0]
    begin = (
        int(query["continuation-token"][0]) if "continuation-token" in query else bisect_right(keys, after)
    )
    end = min(begin + PAGE, len(keys))
    entries = [(keys[number], number + 1, f"{number:032x}") for number in range(begin, end)]
    return listing("bucket", entries, token=str(end) if end < len(keys) else "").encode()


async def serve(keys: Keys, delay: float) -> None:
    """Answer listings after `delay` until the process is ended; print the port."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError), contextlib.closing(writer):
            while True:
                header = await reader.readuntil(b"\r\n\r\n")
                until = asyncio.get_running_loop().time() + delay
                target = urlsplit(header.split(b" ", 2)[1].decode())
                body = page(keys, parse_qs(target.query))
                await asyncio.sleep(until - asyncio.get_running_loop().time())
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n\r\n"
                    % len(body)
                )
                writer.write(body)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def measure(url: str, *, by_aiobotocore: bool) -> dict[str, float]:
    """List the prefix once and return the figures."""
    turns, ended = array("d"), False

    async def look() -> None:
        while not ended:
            before = time.thread_time()
            await asyncio.sleep(0)
            turns.append(time.thread_time() - before)
            await asyncio.sleep(LOOK)

    async with open_clients(
        Endpoint(url=url, path_style=True), connections=64, by_aiobotocore=by_aiobotocore
    ) as clients:
        with open_pages(clients) as pages:
            looking = asyncio.create_task(look())
            memory, cpu = peak_memory(), time.process_time()
            entries = (await Sources(pages, [S3Uri("bucket", "train/")]).plan()).entries
            cpu = time.process_time() - cpu
            ended = True
            await looking
    return {
        "keys": len(entries),
        "cpu": cpu,
        "memory": peak_memory() - memory,
        "name": sum(len(key) for start in range(0, len(entries), PAGE) for key in _keys(entries, start)),
        "busy": max(turns),
        "busy p50": percentile(turns, 0.5),
        "busy p99": percentile(turns, 0.99),
    }


def _keys(entries: Any, start: int) -> list[bytes]:
    columns = entries.columns(start, min(start + PAGE, len(entries)))
    return [] if columns is None else columns.keys


def peak_memory() -> int:
    """Return the peak of the process's memory so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextlib.contextmanager
def running_server(shape: str, keys: int, delay: float) -> Iterator[str]:
    """Run the server in another process; yield its URL."""
    command = [sys.executable, "-m", "benchmarks.listing", "--server"]
    command += ["--shape", shape, "--keys", str(keys), "--delay", str(delay)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline() if process.stdout else 0)}"
        finally:
            process.terminate()


def listed(client: str, url: str) -> dict[str, float]:
    """List in a new process. Raises CalledProcessError."""
    command = [sys.executable, "-m", "benchmarks.listing", "--lister", client, "--url", url]
    found = subprocess.check_output(command, env=environment(url, "/nonexistent"))
    return dict(json.loads(found))


def table(arguments: argparse.Namespace) -> str:
    """List each number of keys by each client, in turns, and return the medians as a table."""
    counts = [int(count) for count in arguments.keys.split(",")]
    found: dict[tuple[int, str], list[dict[str, float]]] = {}
    with contextlib.ExitStack() as stack:
        urls = {
            count: stack.enter_context(running_server(arguments.shape, count, arguments.delay))
            for count in counts
        }
        rows = [(count, client) for client in arguments.clients.split(",") for count in counts]
        for _, (count, client) in in_turns(arguments.rounds, rows):
            found.setdefault((count, client), []).append(listed(client, urls[count]))
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for (count, client), lists in found.items():
        if any(each["keys"] != count for each in lists):
            raise SystemExit(f"{client} has found {lists[0]['keys']} of {count} keys")
        cpu = spread([each["cpu"] for each in lists]).median
        memory = spread([each["memory"] - each["name"] for each in lists]).median
        turns = [spread([each[name] for each in lists]).median * 1000 for name in TURNS]
        first = f"{count:,}" if client == "ours" else f"{count:,}, {client}"
        cells = [first, f"{cpu / count * 1e6:.1f}", f"{count / cpu:,.0f}", f"{memory / 1e6:.1f}"]
        lines.append(f"| {' | '.join([*cells, *(f'{turn:.2f}' for turn in turns)])} |")
    return "\n".join(lines)


def main() -> None:
    """Run the server, a lister, or all of the measurement."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.listing", description=__doc__.splitlines()[0])
    parser.add_argument("--keys", default="1000000", metavar="COUNTS", help="comma-separated (1000000)")
    parser.add_argument("--shape", choices=SHAPES, default="flat", help="form of the keys (flat)")
    parser.add_argument("--delay", type=float, default=0.1, help="seconds before each page is sent (0.1)")
    parser.add_argument("--rounds", type=int, default=3, help="listings by each client (3)")
    parser.add_argument("--clients", default="ours,aiobotocore", help="comma-separated (ours,aiobotocore)")
    parser.add_argument("--into", metavar="PAGE", help="write the table into this page")
    parser.add_argument("--server", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--lister", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.server:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(serve(Keys(arguments.shape, int(arguments.keys)), arguments.delay))
    elif arguments.lister:
        print(json.dumps(asyncio.run(measure(arguments.url, by_aiobotocore=arguments.lister != "ours"))))
    else:
        lines = table(arguments)
        print(lines)
        if arguments.into:
            insert_into(arguments.into, lines, begin=BEGIN, end=END)


if __name__ == "__main__":
    main()
