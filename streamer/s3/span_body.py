"""A span that is fetched in this process, for responses that our own client does not support.

These are redirects to another region, and bodies of unknown length. The span is read whole into memory
before it is delivered; its memory is reserved. As many of its parts are requested at once as the request
allows. After an error no later part is requested, and those in flight are cancelled.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from streamer.errors import SourceError
from streamer.s3.http.body import OneCall

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamer.plan import Part
    from streamer.s3.ranges import Body, RangeRequest, RangeSource


class SpanBody(OneCall):
    """A `Body` of bytes in memory, and perhaps of the error that follows them."""

    spliceable = False

    def __init__(
        self, data: bytearray, length: int, failure: SourceError | None, *, doubted: int = 0
    ) -> None:
        """`length`: bytes of the body; if they are more than those of `data`, `failure` follows them.

        `doubted`: bytes at the end of `data` that are of the response that failed.
        """
        self.left = length
        self._data = memoryview(data)
        self._failure = failure
        self._doubted = doubted
        self._loop = asyncio.get_running_loop()
        self._taken: asyncio.Future[None] = self._loop.create_future()

    @classmethod
    async def read(cls, request: RangeRequest, source: RangeSource) -> SpanBody:
        """Return the body of a span, read from `source`. Raises SourceError if its first part fails."""
        parts = request.part.rest(request.first)
        contents = [bytearray() for _ in parts]
        errors: dict[int, SourceError] = {}
        free = asyncio.Semaphore(max(1, request.requests))

        async def fetch(index: int, part: Part) -> None:
            try:
                async with free:
                    body = await source.open(replace(request, part=part, first=part.start, requests=1))
                    await _read(body, contents[index])
            except SourceError as error:
                errors[index] = error
                for later, task in tasks.items():
                    if later > index:
                        task.cancel()

        tasks: dict[int, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            for index, part in enumerate(parts):
                if part.body:
                    tasks[index] = group.create_task(fetch(index, part))
        failed = min(errors, default=None)
        data = bytearray()
        for index, part in enumerate(parts[: None if failed is None else failed + 1]):
            data += part.leading
            data += contents[index]
            if index != failed:
                data += part.trailing
        if failed is None:
            return cls(data, len(data), None)
        if not data:
            raise errors[failed]
        length = request.part.end - request.first
        return cls(data, length, errors[failed], doubted=len(contents[failed]))

    def __repr__(self) -> str:
        return f"<SpanBody {self.left} bytes left, {self._failure!r}>"

    def splice_into(self, pipe_fd: int, most: int, *, revocable: bool = False) -> int:
        """Not used: `spliceable` is False."""
        raise NotImplementedError

    def read_into(self, memory: memoryview) -> int:
        if self._failure is not None and not self._data:
            if not self._taken.done():
                self._taken.set_exception(self._failure)
            raise self._failure
        count = min(len(memory), len(self._data))
        memory[:count] = self._data[:count]
        self._data = self._data[count:]
        self.left -= count
        if not self.left:
            self._taken.set_result(None)
        return count

    def probe(self) -> None:
        if self._failure is not None and not self._data:
            raise self._failure

    def doubted(self) -> tuple[int, bytes]:
        return max(0, self._doubted - len(self._data)), b""

    def notify(self, call: Callable[[], None]) -> None:
        """As `Body.notify`: all bytes are there."""
        self._call = call
        self._loop.call_soon(self._fire)

    park = notify

    async def taken(self) -> None:
        await self._taken

    def close(self) -> None:
        self._call = None
        self._taken.cancel()


async def _read(body: Body, data: bytearray) -> None:
    """Append all bytes of `body` to `data`, and close it. Raises SourceError."""
    room = memoryview(bytearray(body.left))
    whole = body.left

    def pull() -> None:
        try:
            while body.left:
                body.read_into(room[whole - body.left :])
        except BlockingIOError:
            body.notify(pull)
        except SourceError:
            return  # `Body.taken` raises it too

    try:
        pull()
        await body.taken()
    finally:
        body.hush()
        body.close()
        data += room[: whole - body.left]
