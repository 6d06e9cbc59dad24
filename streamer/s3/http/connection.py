"""Persistent connections, one request at a time on each. `pool` makes them, and keeps the idle ones.

A connection's socket is watched from its first request until it is closed, except while nobody waits for its
bytes: registering a socket anew for every request is a tenth of the cost of a small object. Bytes that come
while a connection carries no request mean that the server has closed it, or is about to, so it is closed at
once. A request that was sent before that was noticed fails without a byte, and is sent again.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from streamer.linux import bytes_unread

if TYPE_CHECKING:
    from streamer.s3.http.poller import FairPoller
    from streamer.s3.http.tls import TlsContext

GATHERED = 256 * 1024
"""Receive low-water mark (SO_RCVLOWAT) in bytes. Waking less often means fewer, larger splices: 25 % less CPU
per byte, measured."""
MOST_GATHERED = 1024 * 1024
"""The same for fast connections: another tenth less. A pipe holds no more."""
LARGEST_WINDOW = 16 * 1024 * 1024
"""The most that a socket is asked to hold, in bytes; no part is larger by default."""
TLS_RECORD = 17 * 1024
"""A record and what surrounds it, rounded up."""


def largest_window() -> int:
    """Bytes that a TCP socket here can be made to hold while nobody reads it; see `Connection.widen`."""
    with socket.socket() as probe:
        return _widened(probe)


def _widened(sock: socket.socket) -> int:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, LARGEST_WINDOW)
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)


class Connection:
    """A non-blocking socket, closed once."""

    spliceable = True
    """Whether the bytes of a body can be spliced from the socket."""
    grain = 1
    """Bytes of `unread` that stand for at least one of a body."""
    gathers = MOST_GATHERED
    """The most that `expect` lets it gather."""

    def __init__(self, sock: socket.socket, poller: FairPoller) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.requests = 0
        """Requests sent on it so far."""
        self.peer = ""
        """The address it leads to."""
        self.closed = False
        self.window = 0
        """Bytes that the socket holds while nobody reads it; 0 if that is not known."""
        self._low = 1
        self._poller = poller
        self._watched = False
        self._on_readable: Callable[[], None] | None = None

    def watch(self, on_readable: Callable[[], None]) -> None:
        """Call this whenever there is something to read, until `pause` or `rest`. Raises OSError."""
        self._on_readable = on_readable
        self._observe()

    def _observe(self) -> None:
        if not self._watched:
            self._poller.add(self.fd, self._readable)
            self._watched = True

    def pause(self) -> None:
        """Leave what comes in the socket."""
        if self._watched:
            self._watched = False
            self._poller.remove(self.fd)

    def rest(self) -> None:
        """The response is read or given up: whatever comes now is unwanted."""
        self._on_readable = None
        try:
            self._wake_at(1)
            self._observe()
        except OSError:
            self.close()  # unwatched, its end would not be noticed

    def _readable(self) -> None:
        if self._on_readable is not None:
            self._on_readable()
        elif not self.usable():
            self.close()

    def usable(self) -> bool:
        """Whether an idle connection may carry another request: nothing has arrived, not even an end."""
        try:
            self.peek(memoryview(bytearray(1)))
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def peek(self, memory: memoryview) -> int:
        """Copy the next bytes and leave them there; 0 at their end. Raises BlockingIOError, OSError."""
        return self.sock.recv_into(memory, 0, socket.MSG_PEEK)

    @property
    def spoilt(self) -> bool:
        """Whether more has come than the responses that were read."""
        return bytes_unread(self.fd) > 0

    def send(self, request: bytes) -> bool:
        """Whether the whole request was taken: a kilobyte fits the empty send buffer."""
        return self.sock.send(request) == len(request)

    def expect(self, count: int, worth: int = GATHERED) -> None:
        """Let the socket wake us when so many bytes are there, or `worth` (SO_RCVLOWAT, socket(7)).

        `worth` is kept between `GATHERED` and `gathers`.
        """
        self._wake_at(max(1, min(count, max(worth, GATHERED), self.gathers)))

    def hold(self, count: int) -> None:
        """Let `count` bytes come and wake nobody, unless the socket is full or at its end before."""
        self._wake_at(min(count + 1, self.window))

    @property
    def unread(self) -> int:
        """Bytes that have come and are with no reader."""
        return bytes_unread(self.fd)

    def _wake_at(self, low: int) -> None:
        if low != self._low:
            self._low = low
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low)

    def widen(self) -> None:
        """Have the socket hold as many bytes as it may, not only once it has been read for a while.

        To wait for so many bytes must not deadlock, so the kernel makes room for them and opens the window;
        half of tcp_rmem's maximum is the most (tcp_set_rcvlowat() in net/ipv4/tcp.c).
        """
        self.window = self._low = _widened(self.sock)
        self._wake_at(1)

    @property
    def pending(self) -> int:
        """Bytes that wait between the socket and the reader, unseen by whoever watches the socket."""
        return 0

    def recv_into(self, memory: memoryview) -> int:
        """Bytes of the response, 0 at its end; BlockingIOError if there are none now."""
        return self.sock.recv_into(memory)

    def close(self) -> None:
        self.pause()
        self._on_readable = None
        self.closed = True
        self.sock.close()


class TlsConnection(Connection):
    """A connection over TLS, decrypted in this process.

    Ciphertext stays in the socket until it is read, a record at a time; a second read for a record's header
    costs no more than reading large pieces, which must be copied twice.
    """

    spliceable = False
    grain = TLS_RECORD
    gathers = GATHERED

    def __init__(self, sock: socket.socket, poller: FairPoller, context: TlsContext, host: str) -> None:
        super().__init__(sock, poller)
        self._tls = context.session(sock, host)
        self._dry = False
        """Whether the last reading found no whole record, so that part of one may have left the socket."""

    async def begin(self) -> None:
        """Shake hands."""
        arrived = asyncio.Event()
        self.watch(arrived.set)
        try:
            while True:
                arrived.clear()
                try:
                    self._tls.shake_hands()
                except BlockingIOError:
                    await arrived.wait()
                else:
                    return
        finally:
            self.pause()

    def peek(self, memory: memoryview) -> int:
        self._dry = True
        count = self._tls.peek(memory)
        self._dry = False
        return count

    @property
    def spoilt(self) -> bool:
        # What is in the socket may be a session ticket.
        return self._tls.pending > 0 or (bytes_unread(self.fd) > 0 and not self.usable())

    def send(self, request: bytes) -> bool:
        return self._tls.send(request) == len(request)

    @property
    def pending(self) -> int:
        return self._tls.pending

    @property
    def unread(self) -> int:
        return bytes_unread(self.fd) + self._tls.pending + (TLS_RECORD if self._dry else 0)

    def expect(self, count: int, worth: int = GATHERED) -> None:
        # Up to one record is in OpenSSL's hands.
        super().expect(count - TLS_RECORD, worth)

    def recv_into(self, memory: memoryview) -> int:
        self._dry = True
        count = self._tls.recv_into(memory)
        self._dry = count < len(memory)
        return count
