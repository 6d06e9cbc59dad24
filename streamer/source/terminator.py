"""A TLS terminator: a process between TLS connections to S3 and plain sockets of the sidecar's.

    S3 ══TLS══ TCP socket ──decrypt──▶ socket pair ──splice──▶ pipe or FIFO
                            this process │ the sidecar

Decrypting is most of what a byte over TLS costs, and one interpreter does it on one core. So lanes can be
spread over several of these processes, and to the sidecar each lane is a plain connection, whose bodies it
splices without seeing them. The sidecar, which knows addresses and time limits, makes the connection and
hands it over; here it gets its handshake, and then bytes pass in both ways until either side closes.

One thread runs everything with epoll, and nothing in it blocks. A connection whose plain socket is full is
not read any more, so TCP holds S3 back; what waits here is at most one read of the network, for each.

Messages are JSON, one a packet (SOCK_SEQPACKET). From the sidecar:

    {"trust": PATH}                 first of all: the certificates to believe
    {"lane": ID, "host": NAME}      with the connected TCP socket and the plain one beside it (SCM_RIGHTS)

To the sidecar, once for each lane, after its handshake: {"lane": ID}, and if it failed "untrusted" or
"broken" with the reason. This ends when the control socket does, and all connections with it.

Run by path, in an interpreter without site-packages: `python -I -S terminator.py CONTROL_DESCRIPTOR`.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import ssl
import sys

LONGEST_MESSAGE = 8 * 1024
READ_SIZE = 256 * 1024
"""Bytes of ciphertext to read at a time."""
RECORD = 17 * 1024
"""A TLS record, rounded up."""
IN, OUT = select.EPOLLIN, select.EPOLLOUT


class ClosedError(Exception):
    """A side of the connection has closed, and the other has all that came of it."""


class Connection:
    """One TLS connection and the plain socket that stands for it; both are closed together, once.

    Its steps raise OSError (ssl.SSLError is one) or ClosedError when it is over.
    """

    def __init__(
        self, number: int, tcp: socket.socket, plain: socket.socket, context: ssl.SSLContext, host: str
    ) -> None:
        self.number = number
        self.tcp = tcp
        self.plain = plain
        self.ready = False
        """Whether the handshake is over."""
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
        self._ended = False
        """Whether S3 says no more."""
        self._to_sidecar = b""
        self._to_s3 = b""

    def close(self) -> None:
        self.tcp.close()
        self.plain.close()

    def wanted(self) -> tuple[int, int]:
        """The events to wait for, of the TCP socket and of the plain one."""
        tcp = (0 if self._to_sidecar else IN) | (OUT if self._to_s3 else 0)
        plain = (OUT if self._to_sidecar else 0) | (IN if self.ready and not self._to_s3 else 0)
        return tcp, plain

    def shake_hands(self, cipher: memoryview) -> None:
        """Go on with the handshake."""
        self._fill(cipher)
        try:
            self._tls.do_handshake()
            self.ready = True
        except ssl.SSLWantReadError:
            if self._ended:
                raise ClosedError from None
        finally:
            self.send()

    def _fill(self, cipher: memoryview) -> None:
        with contextlib.suppress(BlockingIOError):
            if count := self.tcp.recv_into(cipher):
                self._incoming.write(cipher[:count])
            else:
                self._ended = True
                self._incoming.write_eof()

    def receive(self, cipher: memoryview, clear: memoryview) -> None:
        """Pass on what S3 has sent. `clear` has room for all that `cipher` and a record more may hold."""
        self._fill(cipher)
        count, read, size = 0, self._tls.read, len(clear)
        try:
            while got := int(read(size - count, clear[count:])):  # a record each
                count += got
            self._ended = True
        except ssl.SSLWantReadError:
            pass
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            self._ended = True
        if count:
            sent = 0
            with contextlib.suppress(BlockingIOError):
                sent = self.plain.send(clear[:count])
            self._to_sidecar = bytes(clear[sent:count])
        if self._outgoing.pending:  # an answer to a key update
            self.send()
        self._end()

    def deliver(self) -> None:
        """Pass on what the sidecar did not take at once."""
        with contextlib.suppress(BlockingIOError):
            self._to_sidecar = self._to_sidecar[self.plain.send(self._to_sidecar) :]
        self._end()

    def _end(self) -> None:
        if self._ended and not self._to_sidecar:
            raise ClosedError

    def ask(self, clear: memoryview) -> None:
        """Pass on what the sidecar has sent."""
        with contextlib.suppress(BlockingIOError):
            count = self.plain.recv_into(clear)
            if not count:
                raise ClosedError
            self._tls.write(clear[:count])
            self.send()

    def send(self) -> None:
        """To S3, as much of what is encrypted as the network takes."""
        self._to_s3 += self._outgoing.read()
        if self._to_s3:
            with contextlib.suppress(BlockingIOError):
                self._to_s3 = self._to_s3[self.tcp.send(self._to_s3) :]


class Terminator:
    """All connections of this process."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._context = ssl.create_default_context(cafile=json.loads(control.recv(LONGEST_MESSAGE))["trust"])
        self._epoll = select.epoll()
        self._epoll.register(control.fileno(), IN)
        self._connections: dict[int, Connection] = {}
        """By each of its two descriptors."""
        self._watched: dict[int, int] = {}
        """Events that are waited for, by descriptor."""
        self._cipher = memoryview(bytearray(READ_SIZE))
        self._clear = memoryview(bytearray(READ_SIZE + RECORD))

    def run(self) -> None:
        """Serve until the sidecar is gone."""
        while True:
            for fd, events in self._epoll.poll():
                if fd == self._control.fileno():
                    if not self._take():
                        return
                elif connection := self._connections.get(fd):
                    self._serve(connection, fd, events)

    def _take(self) -> bool:
        """A new connection; False if there will be none any more."""
        message, fds, _, _ = socket.recv_fds(self._control, LONGEST_MESSAGE, 2)
        if not message:
            return False
        told = json.loads(message)
        tcp, plain = (socket.socket(fileno=fd) for fd in fds)
        connection = Connection(told["lane"], tcp, plain, self._context, told["host"])
        for sock in (tcp, plain):
            sock.settimeout(0)
            self._connections[sock.fileno()] = connection
            self._watched[sock.fileno()] = 0
            self._epoll.register(sock.fileno(), 0)
        self._serve(connection, tcp.fileno(), IN)
        return True

    def _serve(self, connection: Connection, fd: int, events: int) -> None:
        try:
            if not connection.ready:
                self._begin(connection, fd)
            elif fd == connection.tcp.fileno():
                if events & OUT:
                    connection.send()
                if events & ~OUT:
                    connection.receive(self._cipher, self._clear)
            else:
                if events & OUT:
                    connection.deliver()
                if events & ~OUT:
                    connection.ask(self._clear)
        except (OSError, ClosedError):
            self._drop(connection)
            return
        for sock, wanted in zip((connection.tcp, connection.plain), connection.wanted(), strict=True):
            if self._watched[sock.fileno()] != wanted:
                self._watched[sock.fileno()] = wanted
                self._epoll.modify(sock.fileno(), wanted)

    def _begin(self, connection: Connection, fd: int) -> None:
        if fd == connection.plain.fileno():
            raise ClosedError  # nothing else can happen to it yet: the sidecar waits no longer
        try:
            connection.shake_hands(self._cipher)
        except ssl.SSLCertVerificationError as error:
            self._tell(connection, untrusted=str(error))
            raise
        except OSError as error:
            self._tell(connection, broken=error.strerror or str(error))
            raise
        except ClosedError:
            self._tell(connection, broken="closed in the TLS handshake")
            raise
        if connection.ready:
            self._tell(connection)

    def _tell(self, connection: Connection, **why: str) -> None:
        self._control.send(json.dumps({"lane": connection.number, **why}).encode())

    def _drop(self, connection: Connection) -> None:
        for sock in (connection.tcp, connection.plain):
            del self._connections[sock.fileno()]
            del self._watched[sock.fileno()]
            self._epoll.unregister(sock.fileno())
        connection.close()


def main() -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the sidecar is gone
        Terminator(socket.socket(fileno=int(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
