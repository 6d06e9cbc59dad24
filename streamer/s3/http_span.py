"""The body of a span: small parts, each fetched by a request of its own, as one body.

    response in its socket ─┐
    response in its socket ─┼─ in order, with literals between ─▶ the stage's pipe, the FIFO or a buffer
    response in its socket ─┘

A span has one stage and one task. Its requests (`SpanRequests`) leave each body in its socket until every
byte before it is taken. Then the connection is free for another part, of this span or of another.

The stage takes bytes and blocks nobody: it is called when the current part's body has bytes; if it parks the
span, when that body's socket is full. A part that fails ends the span after the bytes before it. The owner,
in `taken`, is woken by the last byte or that error.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from streamer.errors import SourceError
from streamer.s3.http.body import OneCall
from streamer.s3.span_requests import SpanRequests

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamer.s3.ranges import RangeRequest
    from streamer.s3.span_requests import RequestMethods


class HttpSpan(OneCall):
    """A `Body` of the bytes of a span from `request.first` on. The task that owns it calls `open` first."""

    def __init__(self, request: RangeRequest, methods: RequestMethods, *, spliceable: bool) -> None:
        self.left = request.part.end - request.first
        self.spliceable = spliceable
        self._request = request
        self._parts = request.part.rest(request.first)
        self._at = 0
        """Index of the part whose bytes are taken now."""
        self._literal = memoryview(b"")
        """Literals to take next."""
        self._body_left = 0
        """Bytes to take of the current part's body, after the literals."""
        self._enter(0)
        self._parked = False
        """Whether the stage waits for a full socket only."""
        self._stayed = b""
        """Bytes that had stayed in the socket of the part that failed."""
        self._failure: SourceError | None = None
        """The error, once every byte before it is taken."""
        self._requests = SpanRequests(
            request, self._parts, methods, takes=self._part_came, failed=self._part_failed
        )
        self._loop = asyncio.get_running_loop()

    def __repr__(self) -> str:
        return f"<HttpSpan {self._at}/{len(self._parts)} parts taken, {self.left} bytes left>"

    # The owner.

    async def open(self) -> None:
        """Send the first requests, and wait for the first response header. Raises SourceError.

        An error after literals is raised when these are taken.
        """
        self._request.reported = True
        self._request.on_phase("connect")
        await self._requests.open()
        if not self._literal and (error := self._requests.errors.get(self._at)) is not None:
            raise self._requests.left or error

    async def taken(self) -> None:
        await self._requests.owner.make_until(lambda: not self.left or self._failure is not None)
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        self._call = None
        self._requests.close()

    # The requests.

    def _part_came(self, index: int) -> bool:
        """Call the stage if it waits for this part; return whether it does."""
        if index != self._at or self._call is None:
            return False
        if self._parked:
            self._requests.park(index, self._fire)
        else:
            self._fire()
        return True

    def _part_failed(self, index: int) -> None:
        if index == self._at:
            self._loop.call_soon(self._fire)

    # The stage (`streamer.s3.ranges.Body`).

    def splice_into(self, pipe_fd: int, most: int, *, revocable: bool = False) -> int:
        count = 0
        try:
            while count < most and self.left:
                if self._literal:
                    step = os.write(pipe_fd, self._literal[: most - count])
                    self._took_literal(step)
                else:
                    body = self._requests.body(self._at)
                    step = body.splice_into(pipe_fd, most - count, revocable=revocable)
                    self._took_body(step)
                count += step
        except SourceError as error:
            self._note_error(error, taken=count)
        except OSError:
            if not count:
                raise
        return count

    def read_into(self, memory: memoryview) -> int:
        count = 0
        try:
            while count < len(memory) and self.left:
                if self._literal:
                    step = min(len(memory) - count, len(self._literal))
                    memory[count : count + step] = self._literal[:step]
                    self._took_literal(step)
                else:
                    step = self._requests.body(self._at).read_into(memory[count:])
                    self._took_body(step)
                count += step
        except SourceError as error:
            self._note_error(error, taken=count)
        except BlockingIOError:
            if not count:
                raise
        return count

    def probe(self) -> None:
        if not self._literal:
            try:
                self._requests.body(self._at).probe()
            except SourceError as error:
                self._note_error(error, taken=0)

    def doubted(self) -> tuple[int, bytes]:
        taken = self._parts[self._at].body - self._body_left if self._body_left else 0
        return taken, self._stayed

    def notify(self, call: Callable[[], None]) -> None:
        self._call, self._parked = call, False
        if self._literal or self._at in self._requests.errors:
            self._loop.call_soon(self._fire)
        else:
            self._requests.notify(self._at, self._fire)

    def park(self, call: Callable[[], None]) -> None:
        """As `Body.park`: all bodies stay in their sockets; only that of the current part may be full."""
        self._call, self._parked = call, True
        if not self._literal and self._at in self._requests.errors:
            self._loop.call_soon(self._fire)
        else:
            self._requests.park(self._at, self._fire)

    def _note_error(self, error: SourceError, *, taken: int) -> None:
        """Note an error of the current part. Raises it unless bytes before it have just been taken."""
        self._stayed = self._stayed or self._requests.stayed(self._at)
        self._requests.fail(self._at, error)
        if not taken:
            self._failure = error
            self._requests.owner.wake()
            raise error

    def _took_literal(self, count: int) -> None:
        self._literal = self._literal[count:]
        self._took(count)

    def _took_body(self, count: int) -> None:
        self._body_left -= count
        if self._body_left:
            self._took(count)
            return
        ended = self._at
        self._literal = memoryview(self._parts[ended].trailing)
        self._took(count)
        self._requests.end(ended)

    def _took(self, count: int) -> None:
        self.left -= count
        if not self.left:
            self._requests.owner.wake()
        elif not self._literal and not self._body_left:
            self._enter(self._at + 1)

    def _enter(self, index: int) -> None:
        part = self._parts[index]
        self._at, self._body_left = index, part.body
        self._literal = memoryview(part.leading if part.body else part.leading + part.trailing)
