"""The body of one HTTP response, left in its socket until the stage takes it.

    connection readable ─→ _on_readable ─→ the stage's callback ─→ splice_into / read_into ─→ taken

Readiness is level-triggered, and SO_RCVLOWAT sets the number of bytes that make the socket ready: for
`notify` enough for a large move, for `park` more than are left, so that only a full or broken socket is
ready. A callback that calls neither `notify` nor `park` parks the socket too, because delivery is about to
take its bytes.

Every `PATIENCE` seconds a timer checks a body for which the stage waits. It hands over bytes that are too few
for a large move but have waited that long. A body that got no byte for `stall_timeout` seconds fails. Bytes
that wait for a slow stage are no stall, because the stage is then not waiting for the body.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace

from streamer.errors import ErrorContext, SourceError, Transient, Truncated
from streamer.linux import SPLICE_FLAGS
from streamer.s3.client.faults import broken, escaped_id
from streamer.s3.http.connection import Connection
from streamer.units import counted

PATIENCE = 0.25
"""Seconds for which a few bytes may wait in a socket for more bytes."""
GATHER_FOR = 0.02
"""Seconds for which bytes gather in the socket, at the rate so far, before the stage is called."""
CLOCK_RESOLUTION = 0.001
"""Resolution of uvloop's clock, in seconds."""


class OneCall:
    """Keeps the callback of a body (`Body.notify`), and calls it once."""

    _call: Callable[[], None] | None = None

    def _fire(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call()

    def hush(self) -> None:
        self._call = None


class HttpBody(OneCall):
    """A `Body` of the next `length` bytes of `connection`."""

    def __init__(
        self,
        connection: Connection,
        length: int,
        context: ErrorContext,
        *,
        stall_timeout: float,
        give_back: Callable[[Connection], None] | None,
        request_id: str | None = None,
    ) -> None:
        """`give_back`: takes the connection for another request; None to close it after this response.

        `request_id`: S3's name of the request, for errors.
        """
        self.left = length
        self.spliceable = connection.spliceable
        self._connection = connection
        self._length = length
        self._at = context
        self._request_id = request_id
        self._stall_timeout = stall_timeout
        self._give_back = give_back
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._parked = self._closed = False
        self._failure: SourceError | None = None
        self._taken: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        state = "failed" if self._failure else "parked" if self._parked else "open"
        return f"<HttpBody {state}, {self.left}/{self._length} bytes left>"

    @property
    def _context(self) -> ErrorContext:
        """Where an error is: made when there is one, since most bodies have none."""
        return replace(self._at, request_id=escaped_id(self._request_id))

    def splice_into(self, pipe_fd: int, most: int) -> int:
        if self._failure is not None:
            raise self._failure
        try:
            count = os.splice(self._connection.fd, pipe_fd, min(most, self.left), flags=SPLICE_FLAGS)
        except (BlockingIOError, BrokenPipeError):
            raise
        except OSError as error:
            raise self._fail(broken(error, self._context)) from error
        return self._moved(count)

    def read_into(self, memory: memoryview) -> int:
        if self._failure is not None:
            raise self._failure
        try:
            count = self._connection.recv_into(memory[: self.left])
        except BlockingIOError:
            raise
        except OSError as error:
            raise self._fail(broken(error, self._context)) from error
        return self._moved(count)

    def probe(self) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            count = self._connection.peek(memoryview(bytearray(1)))
        except BlockingIOError:
            raise
        except OSError as error:
            raise self._fail(broken(error, self._context)) from error
        if not count:
            self._moved(0)

    def _moved(self, count: int) -> int:
        if count == 0:
            raise self._fail(Truncated(f"the body ended {counted(self.left, 'byte')} early", self._context))
        self.left -= count
        if not self.left:
            self._end()
            if self._taken is not None and not self._taken.done():
                self._taken.set_result(None)
        return count

    def _fail(self, error: SourceError) -> SourceError:
        self._failure = error
        self._end()
        if self._taken is not None and not self._taken.done():
            self._taken.set_exception(error)
        return error

    def _end(self) -> None:
        """Stop waiting for bytes."""
        self._call = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def notify(self, call: Callable[[], None]) -> None:
        self._wait(call, parked=False)

    def park(self, call: Callable[[], None]) -> None:
        self._wait(call, parked=self._connection.window > 0)

    def _wait(self, call: Callable[[], None], *, parked: bool) -> None:
        self._call, self._parked = call, parked
        if self._failure is not None:
            self._loop.call_soon(self._fire)
            return
        connection = self._connection
        try:
            if parked:
                connection.hold(self.left)
            else:
                self._gather()
            connection.watch(self._on_readable)
        except OSError as error:  # the kernel has no memory for another watched socket
            self._fail(broken(error, self._context))
            self._call = call
            self._loop.call_soon(self._fire)
            return
        if connection.pending and not parked:
            self._loop.call_soon(self._on_readable)  # epoll does not report decrypted bytes
        if self._timer is None:
            self._timer = self._loop.call_later(PATIENCE, self._tick, self._length - self.left, 0.0)

    def _gather(self) -> None:
        """Set the low-water mark to the bytes of `GATHER_FOR` seconds at the rate so far."""
        elapsed = max(self._loop.time() - self._began, CLOCK_RESOLUTION)
        expected = int((self._length - self.left) * GATHER_FOR / elapsed)
        self._connection.expect(self.left, 1 << expected.bit_length())  # rounded, so that it seldom changes

    def _is_open(self) -> bool:
        return self.left > 0 and self._failure is None

    def _on_readable(self) -> None:
        if self._closed:
            return  # the connection may carry another request
        call = self._call
        if call is None or (self._parked and self._connection.unread >= self.left):
            self._connection.pause()  # the stage does not wait, or all bytes have arrived
            return
        self._call = None
        call()
        self._park_idle()

    def _park_idle(self) -> None:
        """Park the socket if the stage does not wait for bytes now."""
        if self._call is None and self._is_open():
            try:
                self._connection.hold(self.left)
            except OSError as error:
                self._fail(broken(error, self._context))

    def _tick(self, arrived: int, silent: float) -> None:
        """Check the body for a stall, and hand over bytes that have waited.

        `silent`: seconds without a byte so far. `arrived`: bytes of the body that had arrived before them.
        """
        unread = self._connection.unread
        now = self._length - self.left + unread // self._connection.grain
        if self._call is None or now > arrived or (self._parked and unread >= self.left):
            silent = 0.0
        elif silent + PATIENCE >= self._stall_timeout:
            call = self._call
            self._fail(Transient(f"no byte for {self._stall_timeout:g} s", self._context, silent=silent))
            call()
            return
        else:
            silent += PATIENCE
            if not self._parked or self._connection.grain > 1:  # TLS counts bytes only as they are read
                self._hand_over()
        if self._is_open():
            self._timer = self._loop.call_later(PATIENCE, self._tick, now, silent)

    def _hand_over(self) -> None:
        """Call the stage for the bytes that have arrived, or wait for the first byte if there are none."""
        try:
            self._connection.expect(1)
        except OSError as error:
            self._fail(broken(error, self._context))
        if self._connection.unread or self._failure is not None:
            self._on_readable()

    async def taken(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self.left:
            self._taken = self._loop.create_future()
            await self._taken

    def close(self) -> None:
        self._closed = True
        self._end()
        if self.left or self._give_back is None:
            self._connection.close()
        else:
            self._give_back(self._connection)
