"""The requests of a span: one GET for each part that has a body, several in flight at once.

    part ─ GET ─▶ response header, checked ─▶ body, left in its socket until the span takes it
                                           └▶ error response ─▶ its error, found by the owner

Each request is a callback of its socket and no task, because an object of 100 kB costs more in tasks, futures
and stages than in system calls. The task that owns the span does what must be waited for (`OwnerCalls`): it
opens connections where none is idle, and reads the bodies of error responses.

A request ends when its body is taken (`end`) or its part has failed (`fail`). No part after a failed one is
requested. The request for the rest of the span begins with one part at a time, so that it does not flood a
server that refuses.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from streamer.errors import ErrorContext, SourceError, Transient
from streamer.s3.client.doubt import NothingArrived
from streamer.s3.client.faults import broken, not_understood
from streamer.s3.client.final_answers import is_final
from streamer.s3.fallback import LeftToAiobotocore
from streamer.s3.http.body import CLOCK_RESOLUTION
from streamer.s3.http.client import Response, write_request
from streamer.s3.http.response import ResponseReader
from streamer.s3.owner_calls import OwnerCalls
from streamer.s3.ranges import RequestReport

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from streamer.plan import Part
    from streamer.s3.http.body import HttpBody
    from streamer.s3.http.connection import Connection
    from streamer.s3.http.pool import ConnectionPool
    from streamer.s3.ranges import RangeRequest


class RequestMethods(NamedTuple):
    """How the requests of a span are sent, and their responses judged."""

    pool: Callable[[Part], ConnectionPool]
    """Returns the connections to the part's host."""
    build: Callable[[Part], bytes]
    """Returns the bytes of the part's request."""
    body: Callable[[Response, Part, ErrorContext], HttpBody | None]
    """Returns the body of a response; None if `judge` must look at it. Raises SourceError."""
    judge: Callable[[Response, Part, ErrorContext], Coroutine[Any, Any, SourceError]]
    """Ends the response, and returns its error."""
    stall_timeout: float
    alone: bool = False
    """Whether the first request is sent alone, because the last span was left to aiobotocore."""


class _Get:
    """The request for one part, until the last byte of its body is taken."""

    __slots__ = ("began", "body", "context", "first_byte", "response", "waited")

    def __init__(self, response: Response, context: ErrorContext, began: float) -> None:
        self.response = response
        self.context = context
        self.began = began
        self.first_byte = 0.0
        """Seconds to the response header."""
        self.body: HttpBody | None = None
        """The body; None until the response header is checked."""
        self.waited = False
        """Whether the stage has waited for bytes of the body."""

    def close(self) -> None:
        if self.body is None:
            self.response.end(reuse=False)
        else:
            self.body.close()


class SpanRequests:
    """Sends the requests of a span's parts in order. A part is named by its index in `parts`."""

    def __init__(
        self,
        request: RangeRequest,
        parts: list[Part],
        methods: RequestMethods,
        *,
        takes: Callable[[int], bool],
        failed: Callable[[int], None],
    ) -> None:
        """`takes`: called when the body of a part has come; returns False to leave it in its socket.

        `failed`: called when no further byte of a part will come.
        """
        self.owner = OwnerCalls()
        """What the owner must do. It opens connections and judges the first response early (`open`)."""
        self._request = request
        self._parts = parts
        self._methods = methods
        self._takes = takes
        self._failed = failed
        self._unsent = deque(index for index, part in enumerate(parts) if part.body)
        self._first = self._unsent[0] if self._unsent else None
        """The first part with a body."""
        alone = request.attempt > 1 or request.once or methods.alone
        self._most = 1 if alone else request.requests
        """Most requests at once; one more after each body."""
        self._begun = 0
        """Requests that are in flight or wait for a connection."""
        self._returned = 0
        """Requests that are over, and will not be followed by others of this span."""
        self._gets: dict[int, _Get] = {}
        """Requests in flight, by the index of their part."""
        self.errors: dict[int, SourceError] = {}
        """Why no further byte of a part will come, by its index."""
        self.left: LeftToAiobotocore | None = None
        """Why our own client does not support the first response."""
        self._report = RequestReport()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    async def open(self) -> None:
        """Send the first requests, and wait until the first response header is checked or its part failed."""
        self._begin_more()
        await self.owner.make_until(self._is_open, early=True)

    def _is_open(self) -> bool:
        if self._first is None or self._first in self.errors:
            return True
        get = self._gets.get(self._first)
        return get is not None and get.body is not None

    def close(self) -> None:
        """Cancel the requests in flight, and report what was sent."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._gets:
            self._count("cancelled", len(self._gets))
            for get in self._gets.values():
                get.close()
            self._gets.clear()
        if self._report.done:
            self._count("ok", len(self._report.done))
        self._request.on_report(self._report)

    def _count(self, outcome: str, count: int) -> None:
        """Count requests that have ended."""
        self._request.counts["requests"][outcome] += count
        self._report.ended += count

    def _note_error(self, error: SourceError) -> None:
        """Count and report a request that has failed."""
        self._count(error.kind, 1)
        self._report.errors.append((error.kind, str(error)))

    # Requests.

    def _begin_more(self) -> None:
        while self._unsent and self._begun < self._most:
            self._begun += 1
            self._begin(self._unsent.popleft())

    def _begin(self, index: int, *, fresh: bool = False) -> None:
        """Send a part's request, on an idle connection or when the owner has opened one. `fresh`: so."""
        pool = self._methods.pool(self._parts[index])
        connection = None if fresh else pool.idle(self._request.avoid)
        if connection is None:
            self.owner.add(partial(self._connect, index, pool, fresh=fresh), early=True)
        else:
            self._send(index, connection, pool)

    async def _connect(self, index: int, pool: ConnectionPool, *, fresh: bool) -> None:
        context, within = self._context(index), self._methods.stall_timeout
        try:
            connection = await pool.take(context, avoid=self._request.avoid, within=within, fresh=fresh)
        except SourceError as error:
            self._fail(index, error)
        except Exception as error:  # noqa: BLE001 - mapped where a foreign error is met
            self._fail(index, not_understood(error, context))
        else:
            self._send(index, connection, pool)

    def _context(self, index: int) -> ErrorContext:
        part = self._parts[index]
        return ErrorContext(part.object.bucket, part.object.key, part.start, self._request.attempt)

    def _send(self, index: int, connection: Connection, pool: ConnectionPool) -> None:
        context, stall_timeout = self._context(index), self._methods.stall_timeout
        reader = ResponseReader(connection, context, within=stall_timeout, stall_timeout=stall_timeout)
        response = Response(reader, connection, pool, stall_timeout=stall_timeout)
        self._gets[index] = _Get(response, context, self._loop.time())
        if self._timer is None:  # else it ends before the new response is due
            self._timer = self._loop.call_at(response.deadline, self._look)
        if index == self._first:
            self._request.peer = connection.peer
            self._request.on_phase("first_byte")
        connection.requests += 1
        try:
            write_request(connection, self._methods.build(self._parts[index]), context)
            connection.expect(1)
            connection.watch(partial(self._on_readable, index))
        except SourceError as error:
            self._lose(index, error)
        except OSError as error:  # the kernel cannot watch another socket
            self._lose(index, broken(error, context))

    def _on_readable(self, index: int) -> None:
        """Read what has come of a response header."""
        get = self._gets[index]
        if get.body is not None or get.first_byte:
            get.response.pause()  # `judge` has not begun
            return
        try:
            get.response.read_header()
            get.first_byte = max(self._loop.time() - get.began, 1e-6)
            get.body = self._methods.body(get.response, self._parts[index], get.context)
        except BlockingIOError:
            return
        except SourceError as error:
            self._lose(index, error)
            return
        except OSError as error:
            self._lose(index, broken(error, get.context))
            return
        except Exception as error:  # noqa: BLE001 - a header that the parser does not take
            self._lose(index, not_understood(error, get.context))
            return
        if get.body is None:
            get.response.pause()
            self.owner.add(partial(self._judge, index), early=index == self._first)
            return
        if index == self._first:
            self.owner.wake()
        if not self._takes(index):
            get.body.park(_ignore)

    async def _judge(self, index: int) -> None:
        """Find the error of a response without the part's body."""
        get = self._gets[index]
        try:
            error = await self._methods.judge(get.response, self._parts[index], get.context)
        except SourceError as failure:
            error = failure
        if self._closed:
            return
        del self._gets[index]
        if isinstance(error, LeftToAiobotocore):
            self.left = error if index == self._first else self.left
            error = Transient("aiobotocore must fetch this part", get.context)
        elif get.response.reused and is_final(error):
            self._begin(index, fresh=True)
            return
        else:
            self._note_error(error)
        self._fail(index, error)

    def _lose(self, index: int, error: SourceError) -> None:
        """Close a connection. Send its request again if the server had closed it while it was idle.

        Do so also after a final answer on a connection that was used before (`final_answers`).
        """
        get = self._gets.pop(index)
        get.close()
        if isinstance(error, Transient) and get.response.reused and not get.response.begun:
            self._begin(index)
        elif get.response.reused and is_final(error):
            self._begin(index, fresh=True)
        else:
            self._note_error(error)
            self._fail(index, error)

    def _fail(self, index: int, error: SourceError) -> None:
        """Note that no further byte of a part will come; request no part after it."""
        self.errors[index] = error
        self._begun -= 1
        while self._unsent and self._unsent[-1] > index:
            self._unsent.pop()
        if index == self._first:
            self.owner.wake()
        self._failed(index)

    def _look(self) -> None:
        """End the requests whose response header is overdue, and look again when the next one will be."""
        self._timer = None
        now = self._loop.time() + CLOCK_RESOLUTION
        for index, get in list(self._gets.items()):
            if not get.first_byte and get.response.deadline <= now:
                seconds = self._methods.stall_timeout
                get.response.late()
                self._lose(index, Transient(f"no response for {seconds:g} s", get.context))
        deadlines = [get.response.deadline for get in self._gets.values() if not get.first_byte]
        if deadlines and self._timer is None:
            self._timer = self._loop.call_at(min(deadlines), self._look)

    # Bodies.

    def body(self, index: int) -> HttpBody:
        """Return the body of a part. Raises NothingArrived until it comes, SourceError if it never will."""
        get = self._gets.get(index)
        if get is not None and get.body is not None:
            return get.body
        if (error := self.errors.get(index)) is not None:
            raise error
        raise NothingArrived

    def stayed(self, index: int) -> bytes:
        """Return the bytes that had stayed in the socket of a part whose body has failed."""
        get = self._gets.get(index)
        return b"" if get is None or get.body is None else get.body.doubted()[1]

    def notify(self, index: int, call: Callable[[], None]) -> None:
        """Have the body of a part call `call`, if it has come; else `takes` is called when it comes."""
        get = self._gets.get(index)
        if get is not None and get.body is not None:
            get.waited = True
            get.body.notify(call)

    def park(self, index: int, call: Callable[[], None]) -> None:
        """Have the body of a part call `call` when its socket is full, if it has come (`notify`)."""
        get = self._gets.get(index)
        if get is not None and get.body is not None:
            get.body.park(call)

    def fail(self, index: int, error: SourceError) -> None:
        """End a request whose body has failed. Does nothing if the part had failed before."""
        if (get := self._gets.pop(index, None)) is not None:
            get.close()
            self._note_error(error)
            self._fail(index, error)

    def end(self, index: int) -> None:
        """End a request whose body is taken, and send others."""
        get = self._gets.pop(index)
        get.close()
        seconds = self._loop.time() - get.began if get.waited else get.first_byte
        self._report.done.append((self._parts[index].body, get.first_byte, seconds))
        self._begun -= 1
        self._most = min(self._most + 1, self._request.requests)
        if self._unsent:
            self._begin_more()
        elif 1 < (ended := self._request.requests - self._returned - self._begun) >= self._begun > 0:
            self._returned += ended  # about half of the requests at a time, as each call costs some
            self._request.on_ended(ended)


def _ignore() -> None:
    """Ignore that a socket is full or broken: the error is found when its bytes are to be taken."""
