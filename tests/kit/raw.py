"""S3 servers made of one function, over real sockets: for answers that no library would send.

`raw_server` sends what its function returns, one request a connection. `wire_server` keeps connections, over
TLS too, and its function writes bodies to the socket itself, to break where it says.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

HEAD_END = b"\r\n\r\n"
DEADLINE = 60.0
"""Seconds that a connection may stay open for."""
After = Literal["keep", "fin", "reset"]
"""What follows a response: the next request, the end of the connection, or a reset of it."""


@dataclass(frozen=True)
class Request:
    """One request as it arrived; names of headers in lower case."""

    method: str
    target: str
    """Path and query, encoded as they are sent."""
    path: str
    query: dict[str, str]
    headers: dict[str, str]

    @property
    def bucket(self) -> str:
        return self.path[1:].partition("/")[0]

    @property
    def key(self) -> str:
        """The key below `/bucket/`; empty for a request about the bucket."""
        return self.path[1:].partition("/")[2]

    @property
    def span(self) -> tuple[int, int] | None:
        """The range that is asked for: first byte and end."""
        first, dash, last = self.headers.get("range", "").removeprefix("bytes=").partition("-")
        return (int(first), int(last) + 1) if dash else None


def parse(head: bytes) -> Request:
    """A request from its head, up to the empty line."""
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ")
    parts = urlsplit(target)
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
    return Request(method, target, unquote(parts.path), query, headers)


@functools.lru_cache(maxsize=4096)
def etag(data: bytes) -> str:
    """S3's ETag of an object that was put in one part."""
    return hashlib.md5(data).hexdigest()


@dataclass
class RawServer:
    """Listens, and has `reply` answer each request."""

    url: str
    seen: list[Request] = field(default_factory=list)


def answer(status: int, body: bytes = b"", **headers: str) -> bytes:
    """A whole response; `_` in names of headers for `-`. Content-Length is the body's unless given."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    if "Content-Length" not in named:
        named["Content-Length"] = str(len(body))
    lines = "".join(f"{name}: {value}\r\n" for name, value in named.items())
    return f"HTTP/1.1 {status} OK\r\n{lines}\r\n".encode() + body


def listing(*entries: tuple[str, int, str], more: str = "", inside: str = "") -> bytes:
    """A page of a listing: key, size and ETag each; `more`: the token of the next; `inside`: further XML."""
    contents = "".join(
        f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size><ETag>&quot;{etag}&quot;</ETag></Contents>"
        for key, size, etag in entries
    )
    token = f"<NextContinuationToken>{escape(more)}</NextContinuationToken>" if more else ""
    return answer(
        200,
        f"<ListBucketResult><IsTruncated>{str(bool(more)).lower()}</IsTruncated>{token}{contents}{inside}"
        f"</ListBucketResult>".encode(),
    )


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


def requests(sock: socket.socket) -> Iterator[Request]:
    """Yield the requests of a connection until its end."""
    data = b""
    while True:
        while HEAD_END not in data:
            if not (more := sock.recv(65536)):
                return
            data += more
        first, _, data = data.partition(HEAD_END)
        yield parse(first)


@contextlib.contextmanager
def _serving(serve: Callable[[socket.socket], None], context: ssl.SSLContext | None = None) -> Iterator[str]:
    """Have `serve` handle each connection, in a thread of its own, and yield the address.

    Connections that are open at the end of the block are shut down.
    """
    listening = socket.create_server(("127.0.0.1", 0), backlog=256)
    lock, open_sockets = threading.Lock(), set[socket.socket]()

    def handle(plain: socket.socket) -> None:
        sock = plain
        with contextlib.suppress(OSError):
            plain.settimeout(DEADLINE)
            if context is not None:
                sock = context.wrap_socket(plain, server_side=True)
            serve(sock)
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
                open_sockets.add(sock)
            threads.append(threading.Thread(target=handle, args=(sock,), name="raw server"))
            threads[-1].start()
        with lock:
            for sock in open_sockets:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()

    thread = threading.Thread(target=accept, name="raw server")
    thread.start()
    try:
        yield f"{'https' if context else 'http'}://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join()


@contextlib.contextmanager
def raw_server(reply: Callable[[Request], bytes]) -> Iterator[RawServer]:
    """Serve until the end of the block; one request a connection."""
    server = RawServer("")

    def serve(sock: socket.socket) -> None:
        for request in requests(sock):
            server.seen.append(request)
            sock.sendall(reply(request))
            sock.shutdown(socket.SHUT_WR)
            return

    with _serving(serve) as server.url:
        yield server


@contextlib.contextmanager
def wire_server(context: ssl.SSLContext | None = None) -> Iterator[WireServer]:
    """Serve until the end of the block, over TLS with `context`."""
    server, lock = WireServer(), threading.Lock()

    def respond(sock: socket.socket, request: Request) -> After:
        if not request.key:
            prefix = f"{request.bucket}/{request.query.get('prefix', '')}"
            found = [
                (name.partition("/")[2], len(data), etag(data))
                for name, data in sorted(server.objects.items())
                if name.startswith(prefix)
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

    def serve(sock: socket.socket) -> None:
        with lock:
            server.connections += 1
        for request in requests(sock):
            after = respond(sock, request)
            if after == "reset":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            if after != "keep":
                return

    with _serving(serve, context) as server.url:
        yield server
