"""A response before it is bytes, the socket that it goes to, and the right responses of a small S3 server.

A fault changes the response, or writes to the socket in its place. What is right here must be right for any
S3 client: nothing in this package but `cells` knows Penstock.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import ssl
import time
from dataclasses import dataclass, field

from tests.kit.raw import Request, etag

SIZES = {"data/0": 700_000, "data/1": 1, "data/2": 90_000}
"""Bytes of each object of every bucket."""
MANIFEST = "m.json"


def content(key: str) -> bytes:
    """The object with this key, in every bucket."""
    return random.Random(key).randbytes(SIZES[key])


CONTENTS = {key: content(key) for key in SIZES}
TRUTH = b"".join(CONTENTS[key] for key in sorted(CONTENTS))


def operation_of(request: Request) -> str:
    """Which of the four kinds of request this is."""
    if not request.key:
        return "listing"
    if request.key == MANIFEST:
        return "manifest"
    return "HEAD" if request.method == "HEAD" else "body"


@dataclass
class Response:
    """Every field of it, for a fault to change."""

    status_line: bytes = b"HTTP/1.1 200 OK"
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""
    head_only: bool = False
    """Whether the request was a HEAD."""

    def names(self, name: str) -> bool:
        return any(each.lower() == name.lower().encode() for each, _ in self.headers)

    def without(self, name: str) -> None:
        self.headers = [
            (each, value) for each, value in self.headers if each.lower() != name.lower().encode()
        ]

    def put(self, name: str, value: bytes) -> None:
        """Set the header, once."""
        self.without(name)
        self.headers.append((name.encode(), value))

    def status(self, code: int, error: str = "") -> None:
        """Make it an error response with S3's document, or with none if `error` is empty."""
        self.status_line = b"HTTP/1.1 %d Hostile" % code
        document = f"<Error><Code>{error}</Code><Message>hostile</Message></Error>" if error else ""
        self.body = document.encode()
        for name in ("Content-Range", "ETag"):
            self.without(name)
        self.put("Content-Length", b"%d" % len(self.body))

    def header(self) -> bytes:
        lines = b"".join(b"%s: %s\r\n" % each for each in self.headers)
        return self.status_line + b"\r\n" + lines + b"\r\n"

    def sent_body(self) -> bytes:
        return b"" if self.head_only else self.body


class Wire:
    """The server's end of one connection."""

    PATIENCE = 25.0
    """Seconds that any fault goes on for, at most; a client that has not left by then has failed."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.tls = isinstance(sock, ssl.SSLSocket)
        self.until = time.monotonic() + self.PATIENCE

    @property
    def alive(self) -> bool:
        return time.monotonic() < self.until

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def raw(self, data: bytes) -> None:
        """Bytes below TLS."""
        with socket.socket(fileno=socket.dup(self.sock.fileno())) as plain:
            plain.sendall(data)

    def drip(self, data: bytes, pause: float = 0.1) -> None:
        """A byte at a time, for as long as the client listens."""
        for at in range(len(data)):
            if not self.alive:
                return
            self.send(data[at : at + 1])
            time.sleep(pause)

    def silence(self) -> None:
        """Wait until the client leaves."""
        self.sock.settimeout(max(0.1, self.until - time.monotonic()))
        with contextlib.suppress(OSError):
            while self.sock.recv(65536):
                pass

    def endless(self, data: bytes, *, most: int = 1 << 30) -> None:
        """One piece again and again, until the client leaves."""
        sent, block = 0, data * max(1, 65536 // len(data))
        while self.alive and sent < most:
            self.send(block)
            sent += len(block)

    def cut(self) -> None:
        """End below TLS, without its close_notify."""
        self.sock.shutdown(socket.SHUT_RDWR)


def right(request: Request) -> Response:
    """The right response."""
    operation = operation_of(request)
    common = [
        (b"x-amz-request-id", b"HOSTILE1"),
        (b"Date", time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime()).encode()),
        (b"Last-Modified", b"Sun, 01 Nov 2026 00:00:00 GMT"),
        (b"Content-Type", b"application/octet-stream"),
        (b"Connection", b"keep-alive"),
    ]
    if operation == "listing":
        body = listing(request.query.get("prefix", ""))
        return Response(headers=[*common, (b"Content-Length", b"%d" % len(body))], body=body)
    data = manifest(request.bucket) if operation == "manifest" else CONTENTS.get(request.key)
    if data is None:
        missing = Response(headers=common, head_only=request.method == "HEAD")
        missing.status(404, "NoSuchKey")
        return missing
    tag = b'"%s"' % etag(data).encode()
    headers = [*common, (b"ETag", tag)]
    line = b"HTTP/1.1 200 OK"
    if request.span and operation != "HEAD":
        start, end = request.span[0], min(request.span[1], len(data))
        headers.append((b"Content-Range", b"bytes %d-%d/%d" % (start, end - 1, len(data))))
        line, data = b"HTTP/1.1 206 Partial Content", data[start:end]
    headers.append((b"Content-Length", b"%d" % len(data)))
    return Response(line, headers, data, head_only=operation == "HEAD")


def listing(prefix: str = "", *, more: str = "", keys: list[str] | None = None, extra: str = "") -> bytes:
    """A page; `more`: the token of the next; `extra`: XML at its end."""
    entries = "".join(
        f"<Contents><Key>{key}</Key><Size>{SIZES.get(key, 1)}</Size>"
        f"<ETag>&quot;{etag(CONTENTS.get(key, b''))}&quot;</ETag></Contents>"
        for key in (sorted(SIZES) if keys is None else keys)
        if key.startswith(prefix)
    )
    token = f"<NextContinuationToken>{more}</NextContinuationToken>" if more else ""
    return (
        f'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult><IsTruncated>{str(bool(more)).lower()}'
        f"</IsTruncated>{token}{entries}{extra}</ListBucketResult>"
    ).encode()


def manifest(bucket: str) -> bytes:
    return json.dumps([{"prefix": f"s3://{bucket}/"}, *sorted(SIZES)]).encode()
