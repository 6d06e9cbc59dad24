"""The body of a part: its ranges, each fetched by a request of its own, and its literals, as one body.

    response in its socket ─┐
    response in its socket ─┼─ in order, with literals between ─▶ the stage's pipe, the FIFO or a buffer
    response in its socket ─┘

A part has one stage and one task. Its requests (`PartRequests`) leave each body in its socket until every
byte before it is taken. Then the connection is free for another range, of this part or of another one. The
body of a large range is taken as it arrives.

The stage takes bytes and blocks nobody: it is called when the current range's body has bytes; if it parks the
part, when that body's socket is full. A range that fails ends the part after the bytes before it. The owner,
in `taken`, is woken by the last byte or that error.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from streamer.errors import SourceError
from streamer.s3.http.body import OneCall
from streamer.s3.part_requests import PartRequests

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamer.s3.http.body import HttpBody
    from streamer.s3.part_requests import Get
    from streamer.s3.range_gets import RangeGets
    from streamer.s3.ranges import RangeRequest

_NOTHING = memoryview(b"")


class PartBody(OneCall):
    """A `Body` of the bytes of a part from `request.first` on. The task that owns it calls `open` first."""

    def __init__(self, request: RangeRequest, gets: RangeGets, *, spliceable: bool, alone: bool) -> None:
        """`alone`: see `PartRequests`."""
        self.left = request.part.size - request.first
        self.spliceable = spliceable
        self._request = request
        self._items = request.part.rest(request.first)
        self._literal = _NOTHING
        """Bytes of a literal to take before those of the range `_at`."""
        self._at = 0
        """Index of the range whose bytes are taken now, or after the literal."""
        self._get: Get | None = None
        """Its request, once the body has come; kept if the body fails."""
        self._body: HttpBody | None = None
        """The body of `_get`."""
        self._parked = False
        """Whether the stage waits for a full socket only."""
        self._failure: SourceError | None = None
        """The error, once every byte before it is taken."""
        self._requests = PartRequests(
            request, self._items, gets, alone=alone, came=self._came, failed=self._failed
        )
        self._loop = asyncio.get_running_loop()
        self._enter(0)

    def __repr__(self) -> str:
        return f"<PartBody {self._at}/{len(self._items)} items taken, {self.left} bytes left>"

    # The owner.

    async def open(self) -> None:
        """Send the first requests, and wait for the first response header. Raises SourceError.

        An error after literals is raised when these are taken.
        """
        self._request.on_phase("connect")
        await self._requests.open()
        if not self._literal and (error := self._requests.errors.get(self._at)) is not None:
            raise self._requests.left or error

    async def taken(self) -> None:
        await self._requests.owner.make_until(lambda: not self.left or self._failure is not None)
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        self.hush()
        self._requests.close()

    # The requests.

    def _came(self, get: Get) -> Callable[[], None] | None:
        """Return what takes the body that has come, if the stage waits; else leave it in its socket."""
        if get.body is None:
            raise ValueError("no body has come")
        if get.index == self._at:
            self._get, self._body = get, get.body
            if (call := self._call) is not None:
                self._call = None
                if not self._parked:
                    return call
                get.body.park(call)
                return None
        get.body.stay()
        return None

    def _failed(self, index: int) -> None:
        if index == self._at:
            self._loop.call_soon(self._fire)

    # The stage (`streamer.s3.ranges.Body`).

    def splice_into(self, pipe_fd: int, most: int, *, revocable: bool = False) -> int:
        count = 0
        try:
            while count < most and self.left:
                if self._literal:
                    step = os.write(pipe_fd, self._literal[: most - count])
                    count += step
                    self._took_literal(step)
                    continue
                if (body := self._body) is None:
                    raise self._requests.missing(self._at)
                step = body.splice_into(pipe_fd, most - count, revocable=revocable)
                count += step
                self.left -= step
                if body.left:
                    break
                self._end()
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
                    count += step
                    self._took_literal(step)
                    continue
                if (body := self._body) is None:
                    raise self._requests.missing(self._at)
                step = body.read_into(memory[count:])
                count += step
                self.left -= step
                if body.left:
                    break
                self._end()
        except SourceError as error:
            self._note_error(error, taken=count)
        except BlockingIOError:
            if not count:
                raise
        return count

    def probe(self) -> None:
        if not self._literal:
            try:
                if self._body is None:
                    raise self._requests.missing(self._at)
                self._body.probe()
            except SourceError as error:
                self._note_error(error, taken=0)

    def doubted(self) -> tuple[int, bytes]:
        return (0, b"") if self._body is None else self._body.doubted()

    def notify(self, call: Callable[[], None]) -> None:
        self._wait(call, parked=False)

    def park(self, call: Callable[[], None]) -> None:
        """As `Body.park`: all bodies stay in their sockets; only that of the current range may be full."""
        self._wait(call, parked=True)

    def _wait(self, call: Callable[[], None], *, parked: bool) -> None:
        self._call, self._parked = call, parked
        if (self._literal and not parked) or self._at in self._requests.errors:
            self._loop.call_soon(self._fire)
        elif (get := self._get) is not None and self._body is not None:
            get.waited, self._call = True, None
            if parked:
                self._body.park(call)
            else:
                self._body.notify(call)

    def hush(self) -> None:
        self._call = None
        if self._body is not None:
            self._body.hush()

    def _note_error(self, error: SourceError, *, taken: int) -> None:
        """Note an error of the current range. Raises it unless bytes before it have just been taken."""
        self._requests.fail(self._at, error)
        if not taken:
            self._failure = error
            self._requests.owner.wake()
            raise error

    def _took_literal(self, count: int) -> None:
        self._literal = self._literal[count:]
        self.left -= count
        if not self.left:
            self._requests.owner.wake()

    def _end(self) -> None:
        """Go on with the items after the range whose body is taken."""
        ended = self._get
        self._enter(self._at + 1)
        if ended is not None:
            self._requests.end(ended)
        if not self.left:
            self._requests.owner.wake()

    def _enter(self, index: int) -> None:
        """Take the bytes of this item next, and those of the range after it if it is a literal."""
        if index < len(self._items) and isinstance(item := self._items[index], bytes):
            self._literal = memoryview(item)
            index += 1
        self._at = index
        self._get = get = self._requests.come(index)
        self._body = None if get is None else get.body
