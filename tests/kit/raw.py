"""An S3 server made of one function, over real sockets: for answers that no library would send."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

HEAD_END = b"\r\n\r\n"
DEADLINE = 60.0
"""Seconds that a connection may stay open for."""


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


@contextlib.contextmanager
def raw_server(reply: Callable[[Request], bytes]) -> Iterator[RawServer]:
    """Serve until the end of the block; one request a connection."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = RawServer(f"http://127.0.0.1:{listening.getsockname()[1]}")

    def serve(sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            sock.settimeout(DEADLINE)
            head = b""
            while HEAD_END not in head:
                if not (data := sock.recv(65536)):
                    return
                head += data
            request = parse(head.partition(HEAD_END)[0])
            server.seen.append(request)
            sock.sendall(reply(request))
            sock.shutdown(socket.SHUT_WR)

    def accept() -> None:
        threads = []
        while True:
            try:
                sock, _ = listening.accept()
            except OSError:
                break
            threads.append(threading.Thread(target=serve, args=(sock,), name="raw server"))
            threads[-1].start()
        for thread in threads:
            thread.join()

    thread = threading.Thread(target=accept, name="raw server")
    thread.start()
    try:
        yield server
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join()
