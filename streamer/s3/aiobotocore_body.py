"""The body of a part that aiobotocore fetches: bytes in memory, and those of one response.

    response: readchunk ─▶ `AiobotocoreBody`, at most `QUEUED` bytes ─▶ read_into by the stage

A response is read with aiohttp's `readchunk()`, which returns each buffer as the socket filled it.
`readany()` joins all buffered bytes first (measured with 8 MiB parts: 1.8 CPU-s/GB in all, against 1.4), and
botocore's own iterator costs more than either. `readchunk()` bypasses botocore's length check, so this module
checks the length: each response is read to its own end, which a chunked one has, and its end must be the
range's. The last bytes are passed on after that.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from streamer.errors import ErrorContext, InvalidResponse, SourceError, Truncated
from streamer.s3.client.faults import map_errors
from streamer.s3.client.stall import Stall, within_stall
from streamer.s3.ranges import content_encoding, transformation
from streamer.units import KIB, counted

if TYPE_CHECKING:
    from streamer.plan import Segment
    from streamer.s3.ranges import Outcome, RangeRequest

QUEUED = 256 * KIB
"""Bytes to read ahead of the stage, exceeded by one chunk at most."""
SMALL_CHUNK = 4 * KIB
"""Size in bytes below which a chunk is joined with all other bytes that have arrived."""


class RangeResponse:
    """The response to the GET of a range, whose header is checked."""

    def __init__(
        self,
        response: Any,
        each: Segment,
        context: ErrorContext,
        request: RangeRequest,
        *,
        since: float,
        stall_timeout: float,
    ) -> None:
        """`response`: aiobotocore's. `since`: when the GET was sent (time.monotonic())."""
        from streamer.s3.client.redirects import surplus_after  # imports aiobotocore

        self._header = response["ResponseMetadata"]["HTTPHeaders"]
        self._doubt = ""
        """Text to add to an error of the body."""
        if content_encoding(self._header):
            self._doubt = transformation(self._header, response.get("ContentLength"))
        self._stream = response["Body"]
        self._length = len(each)
        self._context = context
        self._request = request
        self._since = since
        self._first_byte = time.monotonic() - since
        self._stall_timeout = stall_timeout
        self._followed = surplus_after(self._stream.raw_stream)
        self._closed = False

    async def read(self, take: Callable[[bytes, Stall], Awaitable[None]]) -> None:
        """Pass all bytes of the range to `take`, and end the response. Raises SourceError."""
        outcome: Outcome = "cancelled"
        try:
            with map_errors(self._context):
                await self._read(take)
            outcome = "ok"
        except SourceError as error:
            error.message += self._doubt
            outcome = error
            raise
        finally:
            self._end(outcome)

    async def _read(self, take: Callable[[bytes, Stall], Awaitable[None]]) -> None:
        content, left = self._stream.raw_stream.content, self._length
        async with within_stall(self._stall_timeout, self._context) as stall:
            while left:
                data, end_of_chunk = await content.readchunk()
                if not data and not end_of_chunk:
                    raise Truncated(f"the body ended {counted(left, 'byte')} early", self._context)
                if data:
                    if len(data) < SMALL_CHUNK:  # readchunk() does not yield to the loop between chunks
                        data += content.read_nowait()
                    left -= len(data)
                    if left <= 0:
                        await self._check_end(content, -left)
                    stall.moved()
                    await take(data, stall)

    async def _check_end(self, content: Any, surplus: int) -> None:
        """Wait for the end of the body. Raises InvalidResponse if other bytes come before or after it."""
        while not surplus and not content.at_eof():
            data, end_of_chunk = await content.readchunk()
            surplus += len(data)
            if not data and not end_of_chunk:
                break
        if surplus or await self._followed:
            raise InvalidResponse(
                f"more bytes follow the {counted(self._length, 'byte')} of the range, so a server or a proxy "
                "mixes up responses; see to what is between Penstock and S3",
                self._context,
            )

    def close(self) -> None:
        """Close the connection unless the response has been read."""
        self._end("cancelled")

    def _end(self, outcome: Outcome) -> None:
        if not self._closed:
            self._closed = True
            self._stream.close()
            seconds, received = time.monotonic() - self._since, self._length if outcome == "ok" else 0
            self._request.on_request_ended(outcome, received, self._first_byte, seconds, self._header)


class AiobotocoreBody:
    """A `Body` of bytes in memory, and of those of a response, at most `QUEUED` of which are read ahead."""

    spliceable = False

    def __init__(self, length: int) -> None:
        self.left = length
        self._length = length
        self._response: RangeResponse | None = None
        self._after: list[bytes] = []
        """Literals after the bytes of the response."""
        self._sound = 0
        """Bytes of the body, from its begin on, that are of no unfinished response."""
        self._unfinished = False
        """Whether bytes after them are of one."""
        self._loop = asyncio.get_running_loop()
        self._chunks: deque[memoryview] = deque()
        self._queued = 0
        self._room = asyncio.Event()
        self._call: Callable[[], None] | None = None
        self._parked = False
        self._failure: SourceError | None = None

    def __repr__(self) -> str:
        return f"<AiobotocoreBody {self._queued} of {self.left} bytes left are here>"

    def begin(self, response: RangeResponse) -> None:
        """Have `taken` read the response; its bytes come next."""
        self._response, self._sound, self._unfinished = response, self._queued, True

    def add(self, data: bytes) -> None:
        """Append bytes that are in memory; after those of the response, if there is one."""
        if self._response is not None and self._unfinished:
            self._after.append(data)
        else:
            self._add(data)

    def fail(self, error: SourceError, *, doubted: int) -> None:
        """Note that no byte follows. The last `doubted` bytes are of the response that has failed."""
        if not self._queued:
            raise error
        self._failure, self._sound, self._unfinished = error, self._queued - doubted, True

    def splice_into(self, pipe_fd: int, most: int, *, revocable: bool = False) -> int:
        """Raise NotImplementedError: the bytes are in memory already."""
        raise NotImplementedError("not spliceable")

    def read_into(self, memory: memoryview) -> int:
        self.probe()
        count = 0
        while self._chunks and count < len(memory):
            chunk = self._chunks[0]
            step = min(len(chunk), len(memory) - count)
            memory[count : count + step] = chunk[:step]
            count += step
            if step == len(chunk):
                self._chunks.popleft()
            else:
                self._chunks[0] = chunk[step:]
        self._queued -= count
        self.left -= count
        self._room.set()
        return count

    def probe(self) -> None:
        if not self._chunks:
            if self._failure is not None:
                raise self._failure
            raise BlockingIOError

    def doubted(self) -> tuple[int, bytes]:
        return max(0, self._length - self.left - self._sound) if self._unfinished else 0, b""

    def notify(self, call: Callable[[], None]) -> None:
        self._wait(call, parked=False)

    def park(self, call: Callable[[], None]) -> None:
        self._wait(call, parked=True)

    def _wait(self, call: Callable[[], None], *, parked: bool) -> None:
        self._call, self._parked = call, parked
        if self._is_due():
            self._loop.call_soon(self._wake)

    def _is_due(self) -> bool:
        if self._failure is not None:
            return True
        full = self._queued >= min(QUEUED, self.left)
        return full if self._parked else self._queued > 0

    def _wake(self) -> None:
        if self._call is not None and self._is_due():
            call, self._call = self._call, None
            call()

    def hush(self) -> None:
        self._call = None

    async def taken(self) -> None:
        """As `Body.taken`; reads the response meanwhile."""
        try:
            if self._response is not None:
                await self._response.read(self._take)
                self._unfinished = False
                for data in self._after:
                    self._add(data)
        except SourceError as error:
            self._failure = error
            self._wake()
            raise
        while self.left:
            if self._failure is not None and not self._chunks:
                raise self._failure
            self._room.clear()
            await self._room.wait()

    async def _take(self, data: bytes, stall: Stall) -> None:
        """Queue bytes of the response, and wait while it is full."""
        self._add(data)
        while self._queued >= QUEUED:
            stall.pause()
            self._room.clear()
            await self._room.wait()
            stall.moved()

    def _add(self, data: bytes) -> None:
        self._chunks.append(memoryview(data))
        self._queued += len(data)
        self._wake()

    def close(self) -> None:
        self._call = None
        self._chunks.clear()
        if self._response is not None:
            self._response.close()
