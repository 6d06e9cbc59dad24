"""The body of a span: small parts, each fetched by a request of its own, as one body.

    part ─ GET ─▶ response in its socket ─┐
    part ─ GET ─▶ response in its socket ─┼─ in order ─▶ the stage's pipe, the FIFO or a buffer
    part ─ GET ─▶ response in its socket ─┘

An object of 100 kB costs more in tasks, futures and stages than in system calls. So a span has one stage and
one task, and its requests are callbacks of their sockets: a response header is checked when it arrives, and
its body stays in the socket until every byte before it is taken. Then the connection is free for another
part, of this span or of another.

The task that owns the span does what must be waited for: it opens connections where none is idle, and reads
the bodies of error responses. A part that fails ends the span after the bytes before it. The request for the
rest of the span begins with one part at a time, so that it does not flood a server that refuses.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from streamer.errors import ErrorContext, SourceError, Throttled, Transient
from streamer.s3.client.faults import broken, not_understood
from streamer.s3.fallback import LeftToAiobotocore
from streamer.s3.http.client import Response, write_request
from streamer.s3.http.response import ResponseReader
from streamer.s3.ranges import OneCall, RequestReport

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from streamer.plan import Part
    from streamer.s3.http.body import HttpBody
    from streamer.s3.http.connection import Connection
    from streamer.s3.http.pool import ConnectionPool
    from streamer.s3.ranges import RangeRequest

CLOCK_RESOLUTION = 0.001
"""Resolution of uvloop's clock, in seconds."""


class SpanRequests(NamedTuple):
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


class _Wait(NamedTuple):
    """What the owner must do for a part."""

    part: int
    call: Callable[[], Coroutine[Any, Any, None]]
    connects: bool
    """Whether it only opens a connection."""


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


class HttpSpan(OneCall):
    """A `Body` of the bytes of a span from `request.first` on. The task that owns it calls `open` first."""

    def __init__(self, request: RangeRequest, requests: SpanRequests, *, spliceable: bool) -> None:
        self.left = request.part.end - request.first
        self.spliceable = spliceable
        self._left: LeftToAiobotocore | None = None
        """Why our own client does not support the first response."""
        self._request = request
        self._requests = requests
        self._parts = request.part.rest(request.first)
        self._unsent = deque(index for index, part in enumerate(self._parts) if part.body)
        self._first = self._unsent[0] if self._unsent else -1
        """Index of the first part with a body."""
        self._at = 0
        """Index of the part whose bytes are taken now."""
        self._literal = memoryview(b"")
        """Literals to take next."""
        self._body_left = 0
        """Bytes to take of the current part's body, after the literals."""
        self._enter(0)
        alone = request.attempt > 1 or request.once or requests.alone
        self._most = 1 if alone else request.requests
        """Most requests at once; one more after each body."""
        self._begun = 0
        """Requests that are in flight or wait for a connection."""
        self._returned = 0
        """Requests that are over, and will not be followed by others of this span."""
        self._gets: dict[int, _Get] = {}
        """Requests in flight, by the index of their part."""
        self._errors: dict[int, SourceError] = {}
        """Why no further byte of a part will come, by its index."""
        self._failure: SourceError | None = None
        """The error, once every byte before it is taken."""
        self._waits: list[_Wait] = []
        """What the owner must do."""
        self._opened = not self._unsent
        """Whether the first response header is checked, or an error is known instead."""
        self._report = RequestReport()
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        """Set for the owner."""
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<HttpSpan {self._at}/{len(self._parts)} parts taken, {self.left} bytes left>"

    # The owner.

    async def open(self) -> None:
        """Send the first requests, and wait for the first response header. Raises SourceError.

        An error after literals is raised when these are taken.
        """
        self._request.reported = True
        self._request.on_phase("connect")
        self._begin_more()
        await self._attend(lambda: self._opened, first=True)
        if not self._literal and (error := self._errors.get(self._at)) is not None:
            raise self._left or error

    async def taken(self) -> None:
        """As `Body.taken`."""
        await self._attend(lambda: not self.left or self._failure is not None)
        if self._failure is not None:
            raise self._failure

    async def _attend(self, done: Callable[[], bool], *, first: bool = False) -> None:
        """Do what the parts need until `done`. `first`: of later parts than the first only open connections.

        What is not over then is done by the next call.
        """
        while not done():
            if not self._due(first=first):
                self._news.clear()
                await self._news.wait()
                continue
            running = {}
            async with asyncio.TaskGroup() as tasks:
                while not done():
                    for wait in self._due(first=first):
                        self._waits.remove(wait)
                        running[tasks.create_task(wait.call())] = wait
                    self._news.clear()
                    await self._news.wait()
                for each in running:
                    each.cancel()
            self._waits += [wait for each, wait in running.items() if each.cancelled()]

    def _due(self, *, first: bool) -> list[_Wait]:
        return [wait for wait in self._waits if not first or wait.connects or wait.part == self._first]

    def _wait_for(self, wait: _Wait) -> None:
        self._waits.append(wait)
        self._news.set()

    def close(self) -> None:
        """As `Body.close`."""
        if self._closed:
            return
        self._closed = True
        self._call = None
        if self._timer is not None:
            self._timer.cancel()
        if self._gets:
            self._report.requests["cancelled"] = len(self._gets)
            for get in self._gets.values():
                get.close()
            self._gets.clear()
        if self._report.done:
            self._report.requests["ok"] = len(self._report.done)
        self._request.on_report(self._report)

    # Requests.

    def _begin_more(self) -> None:
        while self._unsent and self._begun < self._most:
            self._begun += 1
            self._begin(self._unsent.popleft())

    def _begin(self, index: int) -> None:
        """Send a part's request, on an idle connection or when the owner has opened one."""
        pool = self._requests.pool(self._parts[index])
        connection = pool.idle(self._request.avoid)
        if connection is None:
            self._wait_for(_Wait(index, partial(self._connect, index, pool), connects=True))
        else:
            self._send(index, connection, pool)

    async def _connect(self, index: int, pool: ConnectionPool) -> None:
        context, within = self._context(index), self._requests.stall_timeout
        try:
            connection = await pool.take(context, avoid=self._request.avoid, within=within)
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
        context, stall_timeout = self._context(index), self._requests.stall_timeout
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
            write_request(connection, self._requests.build(self._parts[index]), context)
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
            get.body = self._requests.body(get.response, self._parts[index], get.context)
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
            self._wait_for(_Wait(index, partial(self._judge, index), connects=False))
            return
        if index == self._first:
            self._note_opened()
        if index != self._at or self._call is None:
            get.body.park(_ignore)
        else:
            self._fire()

    async def _judge(self, index: int) -> None:
        """Find the error of a response without the part's body."""
        get = self._gets[index]
        try:
            error = await self._requests.judge(get.response, self._parts[index], get.context)
        except SourceError as failure:
            error = failure
        if self._closed:
            return
        del self._gets[index]
        if isinstance(error, LeftToAiobotocore):
            self._left = error if index == self._first else self._left
            error = Transient("aiobotocore must fetch this part", get.context)
        else:
            self._count(error)
        self._fail(index, error)

    def _lose(self, index: int, error: SourceError) -> None:
        """Close a connection. Send its request again if the server had closed it while it was idle."""
        get = self._gets.pop(index)
        get.close()
        if isinstance(error, Transient) and get.response.reused and not get.response.begun:
            self._begin(index)
        else:
            self._count(error)
            self._fail(index, error)

    def _count(self, error: SourceError) -> None:
        report = self._report
        report.requests[error.kind] = report.requests.get(error.kind, 0) + 1
        report.errors.append((error.kind, str(error)))
        report.throttled += isinstance(error, Throttled)

    def _fail(self, index: int, error: SourceError) -> None:
        """Note that no further byte of a part will come; request no part after it."""
        self._errors[index] = error
        self._begun -= 1
        while self._unsent and self._unsent[-1] > index:
            self._unsent.pop()
        if index == self._first:
            self._note_opened()
        if index == self._at:
            self._loop.call_soon(self._fire)

    def _note_opened(self) -> None:
        if not self._opened:
            self._opened = True
            self._news.set()

    def _look(self) -> None:
        """End the requests whose response header is overdue, and look again when the next one will be."""
        self._timer = None
        now = self._loop.time() + CLOCK_RESOLUTION
        for index, get in list(self._gets.items()):
            if not get.first_byte and get.response.deadline <= now:
                seconds = self._requests.stall_timeout
                get.response.late()
                self._lose(index, Transient(f"no response for {seconds:g} s", get.context))
        deadlines = [get.response.deadline for get in self._gets.values() if not get.first_byte]
        if deadlines and self._timer is None:
            self._timer = self._loop.call_at(min(deadlines), self._look)

    # The stage (`streamer.s3.ranges.Body`).

    def splice_into(self, pipe_fd: int, most: int) -> int:
        """As `Body.splice_into`."""
        count = 0
        try:
            while count < most and self.left:
                if self._literal:
                    step = os.write(pipe_fd, self._literal[: most - count])
                    self._took_literal(step)
                else:
                    body = self._body()
                    step = body.splice_into(pipe_fd, most - count)
                    self._took(body, step)
                count += step
        except SourceError as error:
            self._note_error(error, taken=count)
        except OSError:
            if not count:
                raise
        return count

    def read_into(self, memory: memoryview) -> int:
        """As `Body.read_into`."""
        count = 0
        try:
            while count < len(memory) and self.left:
                if self._literal:
                    step = min(len(memory) - count, len(self._literal))
                    memory[count : count + step] = self._literal[:step]
                    self._took_literal(step)
                else:
                    body = self._body()
                    step = body.read_into(memory[count:])
                    self._took(body, step)
                count += step
        except SourceError as error:
            self._note_error(error, taken=count)
        except BlockingIOError:
            if not count:
                raise
        return count

    def probe(self) -> None:
        """As `Body.probe`."""
        if not self._literal:
            try:
                self._body().probe()
            except SourceError as error:
                self._note_error(error, taken=0)

    def _body(self) -> HttpBody:
        """Return the body whose bytes come next. Raises BlockingIOError, SourceError."""
        get = self._gets.get(self._at)
        if get is not None and get.body is not None:
            return get.body
        if (error := self._errors.get(self._at)) is not None:
            raise error
        raise BlockingIOError

    def _note_error(self, error: SourceError, *, taken: int) -> None:
        """Note an error of the current part. Raises it unless bytes before it have just been taken."""
        if (get := self._gets.pop(self._at, None)) is not None:
            get.close()
            self._count(error)
            self._fail(self._at, error)
        if not taken:
            self._failure = error
            self._news.set()
            raise error

    def _took_literal(self, count: int) -> None:
        self._literal = self._literal[count:]
        self._took_any(count)

    def _took(self, body: HttpBody, count: int) -> None:
        self._body_left -= count
        if body.left:
            self._took_any(count)
            return
        get = self._gets.pop(self._at)
        body.close()
        received = self._parts[self._at].body
        seconds = self._loop.time() - get.began if get.waited else get.first_byte
        self._report.done.append((received, get.first_byte, seconds))
        self._literal = memoryview(self._parts[self._at].trailing)
        self._took_any(count)
        self._begun -= 1
        self._most = min(self._most + 1, self._request.requests)
        if self._unsent:
            self._begin_more()
        elif 1 < (ended := self._request.requests - self._returned - self._begun) >= self._begun > 0:
            self._returned += ended  # about half of the requests at a time, as each call costs some
            self._request.on_ended(ended)

    def _took_any(self, count: int) -> None:
        self.left -= count
        if not self.left:
            self._news.set()
        elif not self._literal and not self._body_left:
            self._enter(self._at + 1)

    def _enter(self, index: int) -> None:
        part = self._parts[index]
        self._at, self._body_left = index, part.body
        self._literal = memoryview(part.leading if part.body else part.leading + part.trailing)

    def notify(self, call: Callable[[], None]) -> None:
        """As `Body.notify`."""
        self._call = call
        get = self._gets.get(self._at)
        if self._literal or self._at in self._errors:
            self._loop.call_soon(self._fire)
        elif get is not None and get.body is not None:
            get.waited = True
            get.body.notify(self._fire)

    park = notify


def _ignore() -> None:
    """Ignore that a socket is full or broken: the error is found when its bytes are to be taken."""
