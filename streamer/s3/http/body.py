"""The body of one HTTP response, left in its socket until the stage takes it.

    connection readable ─→ _on_readable ─→ the stage's callback ─→ splice_into / read_into ─→ taken

Readiness is level-triggered, and SO_RCVLOWAT sets the number of bytes that make the socket ready: for
`notify` enough for a large move, for `park` more than are left, so that only a full or broken socket is
ready. A callback that calls neither `notify` nor `park` parks the socket too, because delivery is about to
take its bytes.

Every `PATIENCE` seconds a timer checks a body for which the stage waits. It hands over bytes that are too few
for a large move but have waited that long. A body that got no byte for `stall_timeout` seconds fails. Bytes
that wait for a slow stage are no stall, because the stage is then not waiting for the body.

Spliced bytes cannot be taken back, so the last `DOUBTED` bytes that have arrived stay in the socket until the
whole body is there. FIONREAD counts what has arrived, and so finds bytes after the body too.
"""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Callable
from dataclasses import replace

from streamer.errors import ErrorContext, InvalidResponse, SourceError, Transient, Truncated
from streamer.linux import SPLICE_FLAGS, is_ready
from streamer.s3.client.doubt import DOUBTED, NothingArrived
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
        self._stay = 0
        """Bytes that stay in the socket until the whole body is there; 0 unless the body is spliced."""
        self._here = 0
        """Bytes in the socket when they were last counted, less those that were spliced since then."""
        self._reported = False
        """Whether the socket was reported as readable since bytes were last spliced."""
        self._stayed = b""
        """Bytes that had stayed in the socket when the body failed."""
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

    def splice_into(self, pipe_fd: int, most: int, *, revocable: bool = False) -> int:
        if self._failure is not None:
            raise self._failure
        try:
            if revocable:
                may = self.left
            else:
                if self._here < self.left and self._here <= self._stay:
                    self._count_arrived()
                may = self._here if self._here == self.left else self._here - self._stay
            count = os.splice(self._connection.fd, pipe_fd, min(most, may), flags=SPLICE_FLAGS)
        except (BlockingIOError, BrokenPipeError):
            raise
        except OSError as error:
            raise self._fail(broken(error, self._context)) from error
        if revocable:
            self._here = 0
            if count == self.left:
                self._look_after()
        else:
            self._here -= count
            self._reported = False
        return self._moved(count)

    def _look_after(self) -> None:
        """Raise InvalidResponse if bytes follow the body."""
        if self._connection.has_surplus():
            raise self._fail(self._followed())
        self._connection.looked_at = self._loop.time()

    def _count_arrived(self) -> None:
        """Count the bytes in the socket. Raises NothingArrived if all of them stay, SourceError."""
        connection = self._connection
        self._here = connection.unread
        # A tiny receive window must not fill up with bytes that stay.
        self._stay = min(DOUBTED, connection.window // 4) if connection.window else DOUBTED
        if self._here > self.left:
            self._keep()  # the next response must agree with them
            raise self._fail(self._followed())
        if self._here == self.left:
            connection.looked_at = self._loop.time()
            return
        if self._here > self._stay:
            return
        # A socket that is readable with fewer bytes than its low-water mark has ended.
        if self._reported and is_ready(connection.fd, select.POLLRDHUP):
            if (error := self._keep()) is not None:
                raise self._fail(broken(error, self._context)) from error
            self._moved(0)
        self._reported = False
        raise NothingArrived

    def _keep(self) -> OSError | None:
        """Read the bytes that stayed in the socket; return the error that follows them, if there is one."""
        memory, count = memoryview(bytearray(min(self._stay, self.left - 1))), 0
        failure = None
        try:
            while got := self._connection.recv_into(memory[count:]):
                count += got
        except BlockingIOError:
            pass  # a body that stalls
        except OSError as error:
            failure = error
        self._stayed = bytes(memory[:count])
        return failure

    def _followed(self) -> SourceError:
        """Return the error of a body that does not end the response."""
        return InvalidResponse(
            f"more bytes follow the {counted(self._length, 'byte')} of the body, so a server or a proxy "
            "mixes up responses; see to what is between Penstock and S3",
            self._context,
        )

    def doubted(self) -> tuple[int, bytes]:
        return self._length - self.left, self._stayed

    def read_into(self, memory: memoryview) -> int:
        if self._failure is not None:
            raise self._failure
        self._here = 0
        try:
            count = self._connection.recv_into(memory[: self.left])
        except BlockingIOError:
            raise
        except OSError as error:
            raise self._fail(broken(error, self._context)) from error
        if count == self.left:
            self._look_after()
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
        worth = 1 << expected.bit_length()  # rounded, so that it seldom changes
        self._connection.expect(self.left, worth, self._stay)

    def _is_open(self) -> bool:
        return self.left > 0 and self._failure is None

    def _on_readable(self) -> None:
        if self._closed:
            return  # the connection may carry another request
        call = self._call
        if call is None or (self._parked and self._connection.unread >= self.left):
            self._connection.pause()  # the stage does not wait, or all bytes have arrived
            return
        self._call, self._reported = None, True
        call()
        self.stay()

    def stay(self) -> None:
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
            if self._stay:
                self._keep()
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
        """Call the stage for bytes that have arrived, or wait for the first one that does not stay."""
        stay = min(self._stay, self.left - 1)
        try:
            self._connection.expect(stay + 1)
        except OSError as error:
            self._fail(broken(error, self._context))
        if self._connection.unread > stay or self._failure is not None:
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
