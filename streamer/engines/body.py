"""The body of a span that an engine process fetches: bytes that come through a pipe.

    asked ─ opened ─▶ open ─ all bytes taken ─▶ closed, pipe empty: used again
      │                 └─ failed after `written` bytes, or the engine is gone ─▶ closed with its pipe

The stage takes bytes as from a socket. A body gets a pipe when the stage waits for its bytes, or earlier
while pipes are free; until then the engine keeps the bytes. An error counts once every byte before it is
taken.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

from streamer.engines.wire import unpack_error, unpack_report
from streamer.errors import ErrorContext, SourceError, Transient
from streamer.linux import PIPE_SIZE, SPLICE_FLAGS, bytes_unread, set_pipe_size
from streamer.s3.fallback import LeftToAiobotocore
from streamer.s3.http.body import OneCall
from streamer.s3.ranges import RequestReport

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamer.engines.engine import Engine
    from streamer.s3.http.poller import FairPoller
    from streamer.s3.ranges import RangeRequest


class BodyPipes:
    """Pipes between engines and this process. At most `most` are in use for bodies that are not awaited."""

    def __init__(self, most: int, *, ahead: bool, size: int = PIPE_SIZE) -> None:
        """`ahead`: whether an engine with a pipe reads, and decrypts, further bytes than the pipe takes."""
        self.ahead = ahead
        self._most = most
        self._size = size
        self._used = 0
        self._free: list[tuple[int, int]] = []

    def take(self, *, needed: bool) -> tuple[int, int] | None:
        """Return the ends of an empty pipe; None if none is free and it is not `needed`.

        Raises OSError if it is needed, and this process has no descriptor left.
        """
        if not needed and self._used >= self._most:
            return None
        if self._free:
            ends = self._free.pop()
        else:
            ends = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            set_pipe_size(ends[1], self._size)
        self._used += 1
        return ends

    def give(self, ends: tuple[int, int], *, empty: bool) -> None:
        """Take back a pipe; close it unless it is empty and nobody writes into it."""
        self._used -= 1
        if empty and len(self._free) < self._most:
            self._free.append(ends)
        else:
            for fd in ends:
                os.close(fd)

    def close(self) -> None:
        """Close the free pipes."""
        while self._free:
            for fd in self._free.pop():
                os.close(fd)


class EngineBody(OneCall):
    """A `Body` of the bytes of one span from `request.first` on."""

    spliceable = True

    def __init__(
        self,
        number: int,
        request: RangeRequest,
        engine: Engine,
        *,
        pipes: BodyPipes,
        poller: FairPoller,
        on_expired: Callable[[SourceError], SourceError],
    ) -> None:
        """`on_expired`: notes an error of the credentials, and returns the error to raise."""
        self.left = self._length = request.part.end - request.first
        self._number = number
        self._request = request
        self._engine = engine
        self._pipes = pipes
        self._poller = poller
        self._on_expired = on_expired
        self._loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._pipe: tuple[int, int] | None = None
        self._watched = False
        self._parked: Callable[[], None] | None = None
        self._limit: int | None = None
        """Bytes of the body before its error; None while there is none."""
        self._failure: SourceError | None = None
        self._taken: asyncio.Future[None] | None = None
        self._closed = False
        self._report_due = request.report_due = self._loop.create_future()
        engine.spans[number] = self
        engine.load += self._length

    def __repr__(self) -> str:
        return f"<EngineBody {self._number} of {self._engine}, {self.left}/{self._length} bytes left>"

    async def wait_open(self) -> None:
        """Wait for the first response header. Raises SourceError."""
        await self._opened

    # Calls of the engine (`streamer.engines.engine.SpanCalls`).

    def opened(self, peer: str | None) -> None:
        self._request.peer = peer
        if not self._opened.done():
            self._opened.set_result(None)

    def phase(self, phase: Any, report: Any) -> None:
        if report is not None:
            self._request.on_report(unpack_report(report))
        if not self._closed:
            self._request.on_phase(phase)

    def ended(self, written: int, error: Any, report: Any) -> None:
        self._last_report(unpack_report(report))
        if error is not None:
            self._break(written, self._on_expired(unpack_error(error)))
        elif written < self._length:
            self._break(written, Transient("an engine process has ended a span early", self._context()))

    def lost(self, why: str) -> None:
        if not self.left:  # all of its requests have succeeded, and one process less reports them
            parts = self._request.part.rest(self._request.first)
            self._last_report(RequestReport({"ok": sum(part.body > 0 for part in parts)}))
            return
        if self._closed:
            self._last_report(RequestReport({"cancelled": 1}))
            return
        self._request.reported = False
        self._report_due.set_result(None)
        self._break(self._length - self.left, Transient(why, self._context()))

    def _last_report(self, report: RequestReport) -> None:
        self._request.on_report(report)
        self._report_due.set_result(None)

    def _context(self) -> ErrorContext:
        ref, offset = self._request.part.at(self._request.part.end - self.left)
        return ErrorContext(ref.bucket, ref.key, offset, self._request.attempt)

    def _break(self, written: int, error: SourceError) -> None:
        if self._closed or not self.left:
            return
        if not self._opened.done():
            self._fail(error)
            self._opened.set_exception(error)
            self._opened.exception()  # retrieved, in case the request is cancelled now
            return
        if isinstance(error, LeftToAiobotocore):  # in the middle of a span: the next request begins with it
            error = Transient("aiobotocore must fetch this part", error.context)
        self._limit, self._failure = written, error
        if self._length - self.left >= written:
            self._fail(error)
        self._call, self._parked = self._call or self._parked, None
        self._loop.call_soon(self._fire)

    def _fail(self, error: SourceError) -> SourceError:
        self._limit, self._failure = self._length - self.left, error
        self._unwatch()
        if self._taken is not None and not self._taken.done():
            self._taken.set_exception(error)
        return error

    # Calls of the stage (`streamer.s3.ranges.Body`).

    def _take(self, most: int) -> tuple[int, int]:
        """Return the pipe's read end and how many bytes may be taken. Raises SourceError, BlockingIOError."""
        count = min(most, self.left)
        if self._limit is not None and self._failure is not None:
            count = min(count, self._limit - (self._length - self.left))
            if count <= 0:
                raise self._fail(self._failure)
        pipe = self._pipe or self._grant(needed=True)
        if pipe is None:
            raise BlockingIOError
        return pipe[0], count

    def splice_into(self, pipe_fd: int, most: int) -> int:
        fd, count = self._take(most)
        return self._moved(os.splice(fd, pipe_fd, count, flags=SPLICE_FLAGS))

    def read_into(self, memory: memoryview) -> int:
        fd, count = self._take(len(memory))
        return self._moved(os.readv(fd, [memory[:count]]))

    def probe(self) -> None:
        fd, _ = self._take(1)
        if not bytes_unread(fd):
            raise BlockingIOError

    def _moved(self, count: int) -> int:
        self.left -= count
        if not self.left:
            self._unwatch()
            if self._taken is not None and not self._taken.done():
                self._taken.set_result(None)
        return count

    def _grant(self, *, needed: bool) -> tuple[int, int] | None:
        """Give the engine a pipe for this body, if there is one."""
        if self._pipe is None and not self._closed:
            try:
                pipe = self._pipes.take(needed=needed)
                if pipe is None:
                    return None
                self._pipe = pipe
                self._engine.send("pipe", self._number, self._pipes.ahead, descriptors=(pipe[1],))
            except OSError as error:
                if needed:
                    raise self._fail(
                        Transient(f"no pipe to an engine process: {error.strerror}", self._context())
                    ) from error
        return self._pipe

    def notify(self, call: Callable[[], None]) -> None:
        self._call, self._parked = call, None
        if self._failure is not None:
            self._loop.call_soon(self._fire)
            return
        try:
            pipe = self._grant(needed=True)
            if pipe is not None and not self._watched:
                self._poller.add(pipe[0], self._on_readable)
                self._watched = True
        except OSError as error:
            self._fail(Transient(f"cannot watch a pipe: {error.strerror}", self._context()))
        except SourceError:
            pass
        if self._failure is not None:
            self._loop.call_soon(self._fire)

    def _on_readable(self) -> None:
        if self._call is None:
            self._unwatch()  # the stage does not wait
        else:
            self._fire()

    def _unwatch(self) -> None:
        if self._watched and self._pipe is not None:
            self._watched = False
            self._poller.remove(self._pipe[0])

    def park(self, call: Callable[[], None]) -> None:
        if self._failure is not None:
            self.notify(call)
            return
        self._call, self._parked = None, call
        self._grant(needed=False)

    def hush(self) -> None:
        self._call = self._parked = None

    async def taken(self) -> None:
        if self._failure is not None and self._limit == self._length - self.left:
            raise self._failure
        if self.left:
            self._taken = self._loop.create_future()
            await self._taken

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.hush()
        self._unwatch()
        self._engine.load -= self._length
        if self.left:
            self._engine.send("close", self._number)
        if self._pipe is not None:
            self._pipes.give(self._pipe, empty=not self.left)
            self._pipe = None
