"""Persistent connections, one request at a time on each. `pool` opens them and keeps the idle ones.

The poller watches a connection's socket from its first request until it is closed, except while nothing waits
for its bytes, because registering a socket for every request costs a tenth of a small object. If bytes arrive
while a connection carries no request, the server has closed it or is about to, so it is closed at once. A
request that was sent before that fails without a byte, and the client sends it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING

from streamer.linux import bytes_unread

if TYPE_CHECKING:
    from streamer.aio import FairPoller, OnReadable
    from streamer.s3.http.tls import TlsContext

LOW_WATER = 256 * 1024
"""Receive low-water mark (SO_RCVLOWAT) in bytes. Waking less often means fewer, larger splices: 25 % less CPU
per byte, measured."""
MOST_LOW_WATER = 1024 * 1024
"""The largest low-water mark, for fast connections: 10 % less CPU again. A pipe holds no more bytes."""
LARGEST_WINDOW = 16 * 1024 * 1024
"""Receive window in bytes that a socket requests; no part is larger by default."""
TLS_RECORD = 17 * 1024
"""Most bytes of a TLS record with its header and tag, rounded up."""


def largest_window() -> int:
    """Return the largest receive window in bytes that the kernel grants; see `Connection.widen`."""
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
    """Bytes of `unread` that contain at least one byte of a body."""
    max_low_water = MOST_LOW_WATER
    """The largest low-water mark that `expect` sets."""

    def __init__(self, sock: socket.socket, poller: FairPoller) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.requests = 0
        """Number of requests sent on this connection so far."""
        self.peer = ""
        """The server's address."""
        self.closed = False
        self.looked_at = -1.0
        """Time of the event loop when the last body had arrived, and no byte after it."""
        self.window = 0
        """Receive window: bytes that the socket holds while they are not read; 0 if unknown."""
        self._low_water = 1
        self._poller = poller
        self._watched = False

    def watch(self, on_readable: OnReadable) -> None:
        """Call `on_readable` whenever the socket is readable, until `pause` or `rest`. Raises OSError."""
        self._poller.add(self.fd, on_readable)
        self._watched = True

    def pause(self) -> None:
        """Stop watching the socket; arriving bytes stay in it."""
        if self._watched:
            self._watched = False
            self._poller.remove(self.fd)

    def rest(self) -> None:
        """Watch an idle connection and close it as soon as anything arrives."""
        try:
            self._set_low_water(1)
            self.watch(self._close_if_ended)
        except OSError:
            self.close()  # an unwatched socket does not report the server's close

    def _close_if_ended(self) -> None:
        if not self.usable():
            self.close()

    def usable(self) -> bool:
        """Return whether an idle connection may carry another request: no byte and no end has arrived."""
        try:
            self.peek(memoryview(bytearray(1)))
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def peek(self, memory: memoryview) -> int:
        """Copy the next bytes without taking them; return 0 at the end. Raises BlockingIOError, OSError."""
        return self.sock.recv_into(memory, 0, socket.MSG_PEEK)

    def has_surplus(self) -> bool:
        """Return whether bytes have arrived after the last response."""
        return bytes_unread(self.fd) > 0

    def send(self, request: bytes) -> bool:
        """Send a request; return whether all of it was sent. The empty send buffer takes a kilobyte."""
        return self.sock.send(request) == len(request)

    def expect(self, count: int, worth: int = LOW_WATER, stay: int = 0) -> None:
        """Make the socket readable once it holds `count` bytes, or `worth` beyond `stay` if that is less.

        Sets SO_RCVLOWAT (socket(7)). `worth` is limited to `LOW_WATER` to `max_low_water`.
        """
        self._set_low_water(max(1, min(count, stay + min(max(worth, LOW_WATER), self.max_low_water))))

    def hold(self, count: int) -> None:
        """Make the socket readable only with more than `count` bytes, or when it is full or at its end."""
        self._set_low_water(min(count + 1, self.window))

    @property
    def unread(self) -> int:
        """Number of bytes that have arrived and have not been read."""
        return bytes_unread(self.fd)

    def _set_low_water(self, low_water: int) -> None:
        if low_water != self._low_water:
            self._low_water = low_water
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)

    def widen(self) -> None:
        """Open the largest receive window at once; by default the kernel widens it only while it is read.

        SO_RCVLOWAT makes the kernel open a window of its value, so that waiting for as many bytes cannot
        deadlock. The limit is half of tcp_rmem's maximum (tcp_set_rcvlowat() in net/ipv4/tcp.c).
        """
        self.window = self._low_water = _widened(self.sock)
        self._set_low_water(1)

    @property
    def pending(self) -> int:
        """Number of bytes that have left the socket and have not been read; epoll does not report them."""
        return 0

    def recv_into(self, memory: memoryview) -> int:
        """Read bytes of the response; return their number, 0 at the end. Raises BlockingIOError, OSError."""
        return self.sock.recv_into(memory)

    def close(self) -> None:
        self.pause()
        self.closed = True
        self.sock.close()


class TlsConnection(Connection):
    """A connection over TLS, decrypted in this process.

    Ciphertext stays in the socket until its bytes are read.
    """

    spliceable = False
    grain = TLS_RECORD
    max_low_water = 2 * LOW_WATER  # as many bytes as a stage reads at once

    def __init__(self, sock: socket.socket, poller: FairPoller, context: TlsContext, host: str) -> None:
        super().__init__(sock, poller)
        self._tls = context.session(sock, host)
        self._partial_record = False
        """Whether the last read ended inside a record, so that a part of it may have left the socket."""

    async def begin(self) -> None:
        """Complete the TLS handshake."""
        arrived = asyncio.Event()
        self.watch(arrived.set)
        try:
            while True:
                arrived.clear()
                try:
                    self._tls.handshake()
                except BlockingIOError:
                    await arrived.wait()
                else:
                    return
        finally:
            self.pause()

    def peek(self, memory: memoryview) -> int:
        self._partial_record = True
        count = self._tls.peek(memory)
        self._partial_record = False
        return count

    def has_surplus(self) -> bool:
        if not self.unread:
            return False
        try:
            return self.peek(memoryview(bytearray(1))) > 0
        except OSError:
            return False  # a session ticket, or the end

    def send(self, request: bytes) -> bool:
        try:
            return self._tls.send(request)
        except ConnectionError:
            # A server that refuses a client without a certificate says so before it closes.
            with contextlib.suppress(BlockingIOError):
                self._tls.peek(memoryview(bytearray(1)))
            raise

    @property
    def pending(self) -> int:
        return self._tls.pending

    @property
    def unread(self) -> int:
        return bytes_unread(self.fd) + self._tls.pending + (TLS_RECORD if self._partial_record else 0)

    def expect(self, count: int, worth: int = LOW_WATER, stay: int = 0) -> None:
        # OpenSSL may hold up to one record.
        super().expect(count - TLS_RECORD, worth, stay)

    def recv_into(self, memory: memoryview) -> int:
        self._partial_record = True
        count = self._tls.recv_into(memory)
        self._partial_record = count < len(memory)
        return count
