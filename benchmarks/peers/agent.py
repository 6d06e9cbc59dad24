"""Code that the Python peers share: the protocol with the harness, ranges in order, and the FIFO.

    import everything, make the client      not measured
    print `ready`, wait for a line          the harness reads the clocks: wall, CPU of the peer
    stream                                  until every FIFO is closed
    wait for the end of standard input      the harness reads clocks and memory; then the peer exits

`in_order` keeps a number of ranged GETs in flight, across objects, and writes their bodies in stream order,
as a careful user of a client library would.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

from benchmarks.task import Stream, Task

MIB = 1 << 20
Get = Callable[[str, str, int, int], Awaitable[Iterable[Any]]]
"""Function (bucket, key, start, end) that returns the range's body, as one or more buffers."""


def wait_for_go() -> None:
    """Print `ready` and wait for the harness's line to begin."""
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()


def wait_for_end() -> None:
    """Wait until the harness has taken its measurements."""
    sys.stdin.read()


def ranges(stream: Stream, part_size: int) -> Iterator[tuple[str, int, int]]:
    """Yield a stream's parts: (key, start, end)."""
    for key in stream.keys:
        for start in range(0, stream.size, part_size):
            yield key, start, min(start + part_size, stream.size)


class Pipe:
    """The write end of a FIFO, which does not block the event loop."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY)  # blocks shortly at most: the reader opens the FIFO now
        os.set_blocking(self._fd, False)

    async def write(self, data: Any) -> None:
        """Write all of `data`. Raises BrokenPipeError if the reader has left."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._fd, view) :]
            except BlockingIOError:
                await self._writable()

    async def _writable(self) -> None:
        loop = asyncio.get_running_loop()
        ready = loop.create_future()
        loop.add_writer(self._fd, ready.set_result, None)
        try:
            await ready
        finally:
            loop.remove_writer(self._fd)

    def close(self) -> None:
        os.close(self._fd)


async def in_order(stream: Stream, get: Get, *, part_size: int, ahead: int) -> None:
    """Feed one FIFO, with `ahead` requests in flight."""
    pipe = Pipe(stream.fifo)
    parts = ranges(stream, part_size)
    flying: deque[asyncio.Task[Any]] = deque()

    async def one(key: str, start: int, end: int) -> Iterable[Any]:
        return await get(stream.bucket, key, start, end)

    def launch() -> None:
        if part := next(parts, None):
            flying.append(asyncio.create_task(one(*part)))

    for _ in range(ahead):
        launch()
    while flying:
        body = await flying.popleft()
        launch()
        for data in body:
            await pipe.write(data)
    pipe.close()


async def stream_all(task: Task, get: Get) -> None:
    """Feed all streams of a task, with `setting.requests` in flight in all, parts of `setting.part_mib`."""
    part_size = round(task.setting["part_mib"] * MIB)
    ahead = max(2, task.setting["requests"] // len(task.streams))
    wait_for_go()
    try:
        async with asyncio.TaskGroup() as group:
            for stream in task.streams:
                group.create_task(in_order(stream, get, part_size=part_size, ahead=ahead))
    except* BrokenPipeError:
        pass  # the reader has reached its time limit
    wait_for_end()
