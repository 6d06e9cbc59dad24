"""The server's end of a connection: plain, or TLS on its own socket pair; nothing here is the product's."""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl

import trustme

from tests.kit.virtual import ScheduledLoop


@functools.cache
def authority() -> tuple[ssl.SSLContext, bytes]:
    """What the server shows, and the certificate to trust; made once, as it takes a while."""
    ca = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("s3.test").configure_cert(context)
    return context, ca.cert_pem.bytes()


class Wire:
    """Bytes in and out. The last byte of a request stays unread, so that to close is to reset."""

    def __init__(self, loop: ScheduledLoop, sock: socket.socket) -> None:
        self._loop = loop
        self._sock = sock

    async def begin(self) -> None:
        """Whatever comes before the first request."""

    async def request(self) -> str:
        """The head of the next request; empty at the end of the connection."""
        while True:
            await self._readable()
            data = self._sock.recv(1 << 16, socket.MSG_PEEK)
            if not data:
                return ""
            if (end := data.find(b"\r\n\r\n")) >= 0:
                self._sock.recv(end + 3)
                return data[:end].decode()

    def finish(self) -> None:
        """Leave nothing unread: the next request may come, or a close that is no reset."""
        self._sock.recv(1)

    async def send(self, data: bytes) -> None:
        """Send all of it."""
        await self._loop.sock_sendall(self._sock, data)

    async def _readable(self) -> None:
        ready = self._loop.create_future()

        def wake() -> None:
            if not ready.done():
                ready.set_result(None)

        self._loop.add_reader(self._sock.fileno(), wake)
        try:
            await ready
        finally:
            self._loop.remove_reader(self._sock.fileno())


class TlsWire(Wire):
    """A wire over TLS. To close without `finish` cuts the connection off: no end of TLS, and no reset."""

    def __init__(self, loop: ScheduledLoop, sock: socket.socket) -> None:
        super().__init__(loop, sock)
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = authority()[0].wrap_bio(self._in, self._out, server_side=True)
        self._clear = b""

    async def begin(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                if not await self._fill():
                    raise ConnectionResetError from None
            else:
                await self._flush()
                return

    async def request(self) -> str:
        while (end := self._clear.find(b"\r\n\r\n")) < 0:
            try:
                data = self._tls.read(1 << 16)
            except ssl.SSLWantReadError:
                if not await self._fill():
                    return ""
            except ssl.SSLError:
                return ""
            else:
                if not data:
                    return ""
                self._clear += data
        head, self._clear = self._clear[:end], self._clear[end + 4 :]
        return head.decode()

    def finish(self) -> None:
        pass

    async def send(self, data: bytes) -> None:
        if data:
            self._tls.write(data)
            await self._flush()

    async def _fill(self) -> bool:
        await self._readable()
        if data := self._sock.recv(1 << 16):
            self._in.write(data)
        return bool(data)

    async def _flush(self) -> None:
        if data := self._out.read():
            await self._loop.sock_sendall(self._sock, data)


async def wired(loop: ScheduledLoop, sock: socket.socket, *, tls: bool) -> Wire:
    """The server's end, ready for requests."""
    wire = TlsWire(loop, sock) if tls else Wire(loop, sock)
    await asyncio.wait_for(wire.begin(), 30)
    return wire
