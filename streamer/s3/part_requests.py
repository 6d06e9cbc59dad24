"""The requests of a part: one GET for each range, several in flight at once.

    range ─ GET ─▶ response header, checked ─▶ body, left in its socket until the part's body takes it
                                            └▶ error response ─▶ its error, found by the owner

Each request is a callback of its socket and no task, because an object of 100 kB costs more in tasks, futures
and stages than in system calls. The task that owns the part's body does what must be waited for
(`OwnerCalls`): it opens connections where none is idle, and reads the bodies of error responses.

A request ends when its body is taken (`end`) or its range has failed (`fail`). No range after a failed one is
requested. The request for the rest of the part begins with one range at a time, so that it does not flood a
server that refuses.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from streamer.errors import ErrorContext, SourceError, Transient
from streamer.s3.client.doubt import NothingArrived
from streamer.s3.client.faults import broken, not_understood
from streamer.s3.client.final_answers import is_final
from streamer.s3.http.body import CLOCK_RESOLUTION
from streamer.s3.http.client import Response
from streamer.s3.owner_calls import OwnerCalls
from streamer.s3.range_gets import LeftToAiobotocore
from streamer.s3.ranges import NO_HEADER, ignore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from streamer.plan import Segment
    from streamer.s3.http.body import HttpBody
    from streamer.s3.http.connection import Connection
    from streamer.s3.http.pool import ConnectionPool
    from streamer.s3.range_gets import RangeGets
    from streamer.s3.ranges import RangeRequest


class Get:
    """The request for one range, until the last byte of its body is taken."""

    __slots__ = ("began", "body", "context", "first_byte", "header", "index", "range", "response", "waited")

    def __init__(
        self,
        index: int,
        each: Segment,
        response: Response,
        context: ErrorContext,
        *,
        began: float,
        waited: bool,
    ) -> None:
        self.index = index
        """Index of the range in the items of the part."""
        self.range = each
        self.response = response
        self.context = context
        self.began = began
        self.first_byte = 0.0
        """Seconds to the response header."""
        self.header = NO_HEADER
        """Fields of the response header."""
        self.body: HttpBody | None = None
        """The body; None until the response header is checked."""
        self.waited = waited
        """Whether the stage has waited for bytes of the body, so that its time is that of the transfer."""

    def close(self) -> None:
        if self.body is None:
            self.response.end(reuse=False)
        else:
            self.body.close()


class PartRequests:
    """Sends the requests of a part's ranges in order. A range is named by its index in `items`."""

    def __init__(
        self,
        request: RangeRequest,
        items: Sequence[Segment | bytes],
        gets: RangeGets,
        *,
        alone: bool,
        came: Callable[[Get], Callable[[], None] | None],
        failed: Callable[[int], None],
    ) -> None:
        """`alone`: send the first request alone. `came`: called when the body of a range has come;
        returns what takes its bytes now.

        `failed`: called when no further byte of a range will come.
        """
        self.owner = OwnerCalls()
        """What the owner must do. It opens connections and judges the first response early (`open`)."""
        self.errors: dict[int, SourceError] = {}
        """Why no further byte of a range will come, by its index."""
        self.left: LeftToAiobotocore | None = None
        """Why our own client does not support the first response."""
        self._request = request
        self._gets = gets
        self._came: Callable[[Get], Callable[[], None] | None] = came
        self._failed: Callable[[int], None] = failed
        self._unsent = deque(
            [(index, item) for index, item in enumerate(items) if not isinstance(item, bytes)]
        )
        self._sole = len(self._unsent) == 1
        """Whether there is one range, whose body waits for nothing but the stage."""
        self._first = self._unsent[0][0] if self._unsent else None
        """The first range."""
        self._most = 1 if alone or request.attempt > 1 else request.requests
        """Most requests at once; one more after each body."""
        self._begun = 0
        """Requests that are in flight or wait for a connection."""
        self._returned = 0
        """Requests that are over, and will not be followed by others of this part."""
        self._sent: dict[int, Get] = {}
        """Requests in flight, by the index of their range."""
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        """Send the first requests; wait until the first response header is checked or its range failed."""
        self._begin_more()
        await self.owner.make_until(self._is_open, early=True)

    def _is_open(self) -> bool:
        if self._first is None or self._first in self.errors:
            return True
        get = self._sent.get(self._first)
        return get is not None and get.body is not None

    def close(self) -> None:
        """Cancel the requests in flight, and drop the references to the part's body."""
        self._unsent.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._sent:
            _, get = self._sent.popitem()
            get.close()
            self._request.on_request_ended("cancelled", 0, get.first_byte, 0.0, get.header)
        self._came = self._failed = ignore

    # Requests.

    def _begin_more(self) -> None:
        while self._unsent and self._begun < self._most:
            self._begun += 1
            self._begin(*self._unsent.popleft())

    def _begin(self, index: int, each: Segment, *, fresh: bool = False) -> None:
        """Send a request, on an idle connection or when the owner has opened one. `fresh`: so."""
        pool = self._gets.pool(each)
        connection = None if fresh else pool.idle(self._request.avoid)
        if connection is None:
            self.owner.add(partial(self._connect, index, each, pool, fresh=fresh), early=True)
        else:
            self._send(index, each, connection, pool, self._gets.stall_timeout)

    async def _connect(self, index: int, each: Segment, pool: ConnectionPool, *, fresh: bool) -> None:
        context, within, began = self._context(each), self._gets.stall_timeout, self._loop.time()
        try:
            connection = await pool.take(context, avoid=self._request.avoid, within=within, fresh=fresh)
        except Exception as error:  # noqa: BLE001 - mapped where a foreign error is met
            failure = error if isinstance(error, SourceError) else not_understood(error, context)
            self._note_error(failure)
            self._fail(index, failure)
        else:
            self._send(index, each, connection, pool, max(0.0, within - (self._loop.time() - began)))

    def _context(self, each: Segment) -> ErrorContext:
        ref = each.object
        return ErrorContext(ref.bucket, ref.key, each.start, self._request.attempt)

    def _send(
        self, index: int, each: Segment, connection: Connection, pool: ConnectionPool, within: float
    ) -> None:
        """Send a request. `within`: seconds in which the response header must come."""
        context, stall_timeout = self._context(each), self._gets.stall_timeout
        response = Response(connection, pool, context, within=within, stall_timeout=stall_timeout)
        get = self._sent[index] = Get(
            index, each, response, context, began=time.monotonic(), waited=self._sole
        )
        if self._timer is None:  # else it ends before the new response is due
            self._timer = self._loop.call_at(response.deadline, self._look)
        if index == self._first:
            self._request.peer = connection.peer
            self._request.on_phase("first_byte")
        try:
            response.send(self._gets.request(each))
            connection.expect(1)
            connection.watch(partial(self._on_readable, get))
        except SourceError as error:
            self._lose(get, error)
        except OSError as error:  # the kernel cannot watch another socket
            self._lose(get, broken(error, context))

    def _on_readable(self, get: Get) -> Callable[[], None] | None:
        """Read what has come of a response header; return what takes the body's bytes now."""
        if get.body is not None or get.first_byte:
            get.response.pause()  # the body is not to be taken yet, or `_judge` has not begun
            return None
        try:
            get.response.read_header()
            get.first_byte = time.monotonic() - get.began or 1e-6
            get.header = get.response.header.fields
            get.body = self._gets.body(get.response, get.range, get.context)
        except BlockingIOError:
            return None
        except SourceError as error:
            self._lose(get, error)
            return None
        except OSError as error:
            self._lose(get, broken(error, get.context))
            return None
        except Exception as error:  # noqa: BLE001 - a header that the parser does not take
            self._lose(get, not_understood(error, get.context))
            return None
        if get.body is None:
            get.response.pause()
            self.owner.add(partial(self._judge, get), early=get.index == self._first)
            return None
        if get.index == self._first:
            self.owner.wake()
        return self._came(get)

    async def _judge(self, get: Get) -> None:
        """Find the error of a response without the range's body."""
        try:
            error = await self._gets.error(get.response, get.range, get.context)
        except SourceError as failure:
            error = failure
        if self._sent.pop(get.index, None) is None:
            return  # closed meanwhile
        if isinstance(error, LeftToAiobotocore):
            self.left = error if get.index == self._first else self.left
            error = Transient("aiobotocore must fetch this part", get.context)
        elif get.response.reused and is_final(error):
            self._begin(get.index, get.range, fresh=True)
            return
        else:
            self._note_error(error, get)
        self._fail(get.index, error)

    def _lose(self, get: Get, error: SourceError) -> None:
        """Close a connection. Send its request again if the server had closed it while it was idle.

        Do so also after a final answer on a connection that was used before (`final_answers`).
        """
        del self._sent[get.index]
        get.close()
        if isinstance(error, Transient) and get.response.reused and not get.response.begun:
            self._begin(get.index, get.range)
        elif get.response.reused and is_final(error):
            self._begin(get.index, get.range, fresh=True)
        else:
            self._note_error(error, get)
            self._fail(get.index, error)

    def _note_error(self, error: SourceError, get: Get | None = None) -> None:
        """Report a request that has failed. `get`: None if it was not sent."""
        first_byte, header = (0.0, NO_HEADER) if get is None else (get.first_byte, get.header)
        self._request.on_request_ended(error, 0, first_byte, 0.0, header)

    def _fail(self, index: int, error: SourceError) -> None:
        """Note that no further byte of a range will come; request no range after it."""
        self.errors[index] = error
        self._begun -= 1
        while self._unsent and self._unsent[-1][0] > index:
            self._unsent.pop()
        if index == self._first:
            self.owner.wake()
        self._failed(index)

    def _look(self) -> None:
        """End the requests whose response header is overdue, and look again when the next one will be."""
        self._timer = None
        now = self._loop.time() + CLOCK_RESOLUTION
        for get in list(self._sent.values()):
            if not get.first_byte and get.response.deadline <= now:
                seconds = self._gets.stall_timeout
                get.response.late()
                self._lose(get, Transient(f"no response for {seconds:g} s", get.context))
        deadlines = [get.response.deadline for get in self._sent.values() if not get.first_byte]
        if deadlines and self._timer is None:
            self._timer = self._loop.call_at(min(deadlines), self._look)

    # Bodies.

    def come(self, index: int) -> Get | None:
        """Return the request of a range whose body has come; None until then, or if it never will."""
        get = self._sent.get(index)
        return get if get is not None and get.body is not None else None

    def missing(self, index: int) -> BaseException:
        """Return why a body has not come: NothingArrived, or SourceError if it never will."""
        return self.errors.get(index) or NothingArrived()

    def fail(self, index: int, error: SourceError) -> None:
        """End a request whose body has failed. Does nothing if the range had failed before."""
        if (get := self._sent.pop(index, None)) is not None:
            get.close()
            self._note_error(error, get)
            self._fail(index, error)

    def end(self, get: Get) -> None:
        """End a request whose body is taken, and send others."""
        del self._sent[get.index]
        get.close()
        seconds = time.monotonic() - get.began if get.waited else get.first_byte
        received = get.range.end - get.range.start
        self._request.on_request_ended("ok", received, get.first_byte, seconds, get.header)
        self._begun -= 1
        if self._most < self._request.requests:
            self._most += 1
        if self._unsent:
            self._begin_more()
        elif 1 < (ended := self._request.requests - self._returned - self._begun) >= self._begun > 0:
            self._returned += ended  # about half of the requests at a time, as each call costs some
            self._request.on_spare(ended)
