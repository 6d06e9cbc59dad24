"""An S3 server made of one function that writes to the socket itself: for bodies that break where it says.

Connections are kept, over TLS too. The function writes a response and returns how the connection goes on.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from tests.kit.raw import DEADLINE, HEAD_END, Request, answer, etag, listing, parse

After = Literal["keep", "fin", "reset"]
"""What follows a response: the next request, the end of the connection, or a reset of it."""


@dataclass
class WireServer:
    """Objects by `bucket/key`, and how each of their bodies is sent."""

    url: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)
    fault: Callable[[Wired], After] | None = None
    """Sends the body of an object; None: as it is."""
    asked: Counter[str] = field(default_factory=Counter)
    """GETs of each object so far."""
    connections: int = 0


@dataclass
class Wired:
    """One GET of an object, whose response header is not sent."""

    sock: socket.socket
    request: Request
    number: int
    """Number of GETs of this object, this one included."""
    start: int
    data: bytes
    """The bytes of the range that is asked for."""
    total: int
    tag: str

    def header(self, length: int | None = None, *, chunked: bool = False, close: bool = False) -> bytes:
        """The right header; `length`: another Content-Length; -1: none."""
        fields = {"ETag": f'"{self.tag}"', "Last_Modified": "Sun, 01 Nov 2026 00:00:00 GMT"}
        status = 200
        if self.request.span is not None:
            status = 206
            fields["Content-Range"] = f"bytes {self.start}-{self.start + len(self.data) - 1}/{self.total}"
        if close:
            fields["Connection"] = "close"
        whole = answer(
            status, b"", **fields, Content_Length=str(len(self.data) if length is None else length)
        )
        if chunked or length == -1:
            lines = [each for each in whole.split(b"\r\n") if not each.lower().startswith(b"content-length")]
            whole = b"\r\n".join(lines)
        if chunked:
            whole = whole.replace(b"\r\n", b"\r\nTransfer-Encoding: chunked\r\n", 1)
        return whole

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def right(self) -> After:
        self.send(self.header() + self.data)
        return "keep"


@contextlib.contextmanager
def wire_server(  # noqa: C901, PLR0915 - one server
    context: ssl.SSLContext | None = None,
) -> Iterator[WireServer]:
    """Serve until the end of the block, over TLS with `context`."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=256)
    scheme = "https" if context else "http"
    server = WireServer(f"{scheme}://127.0.0.1:{listening.getsockname()[1]}")
    lock, open_sockets = threading.Lock(), set[socket.socket]()

    def respond(sock: socket.socket, request: Request) -> After:
        if not request.key:
            prefix = request.query.get("prefix", "")
            keys = [key.partition("/")[2] for key in sorted(server.objects)]
            found = [
                (
                    key,
                    len(server.objects[f"{request.bucket}/{key}"]),
                    etag(server.objects[f"{request.bucket}/{key}"]),
                )
                for key in keys
                if key.startswith(prefix)
            ]
            sock.sendall(listing(*found))
            return "keep"
        name = f"{request.bucket}/{request.key}"
        data = server.objects.get(name)
        if data is None:
            sock.sendall(answer(404, b"<Error><Code>NoSuchKey</Code></Error>"))
            return "keep"
        start, end = request.span or (0, len(data))
        if request.method == "HEAD":
            sock.sendall(answer(200, b"", ETag=f'"{etag(data)}"', Content_Length=str(len(data))))
            return "keep"
        with lock:
            server.asked[name] += 1
            number = server.asked[name]
        wired = Wired(sock, request, number, start, data[start:end], len(data), etag(data))
        return (server.fault or Wired.right)(wired)

    def serve(plain: socket.socket) -> None:
        sock = plain
        try:
            plain.settimeout(DEADLINE)
            if context is not None:
                sock = context.wrap_socket(plain, server_side=True)
            data = b""
            while True:
                while HEAD_END not in data:
                    if not (more := sock.recv(65536)):
                        return
                    data += more
                first, _, data = data.partition(HEAD_END)
                after = respond(sock, parse(first))
                if after == "reset":
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                if after != "keep":
                    return
        except OSError:
            return
        finally:
            with lock:
                open_sockets.discard(plain)
            sock.close()

    def accept() -> None:
        threads = []
        while True:
            try:
                sock, _ = listening.accept()
            except OSError:
                break
            with lock:
                server.connections += 1
                open_sockets.add(sock)
            threads.append(threading.Thread(target=serve, args=(sock,), name="wire server"))
            threads[-1].start()
        with lock:
            for sock in open_sockets:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()

    thread = threading.Thread(target=accept, name="wire server")
    thread.start()
    try:
        yield server
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join()
