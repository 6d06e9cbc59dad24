"""Reads response headers and the bodies of errors.

`ResponseReader` peeks at the bytes of a header (MSG_PEEK, SSL_peek) and then reads the header only, so the
next byte of the connection is the first of the body, where splice(2) can begin. `HeaderParser` does no I/O.

Connection, header and an error's body have `stall_timeout` seconds together, because their bytes are no
progress. The number of interim (1xx) responses and the sizes of headers and error bodies are limited too.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import httptools

from streamer.errors import ErrorContext, InvalidResponse, Transient
from streamer.s3.client.faults import broken
from streamer.s3.http.connection import Connection

HEADER_END = b"\r\n\r\n"
HEADER_READ = 2 * 1024
"""Bytes to peek at for a header; S3's headers are shorter."""
_SCRATCH = memoryview(bytearray(HEADER_READ))
"""Buffer for reading headers; no call relies on its content."""
KEPT_FIELDS = {
    name.encode(): name
    for name in (
        "content-encoding",
        "content-length",
        "content-range",
        "date",
        "etag",
        "last-modified",
        "retry-after",
        "transfer-encoding",
        "x-amz-checksum-crc32",
        "x-amz-checksum-crc32c",
        "x-amz-checksum-crc64nvme",
        "x-amz-checksum-sha1",
        "x-amz-checksum-sha256",
        "x-amz-request-id",
        "x-amz-version-id",
    )
}
"""The header fields that are kept, by the bytes of their names."""
_METADATA = re.compile(rb"(?im)^x-amz-meta-[^\r\n]*\r\n")
"""Header fields of an object's user metadata."""
MAX_HEADER = 64 * 1024
BODY_READ = 64 * 1024
MOST_INTERIM = 32
"""Most interim (1xx) responses before one response; a server could send them without end."""
LONGEST_NUMBER = 20
"""Digits of a Content-Length that is too large for any object."""


@dataclass(slots=True)
class ResponseHeader:
    """Status of a response, and those of its fields in `KEPT_FIELDS`; names in lower case."""

    status: int = 0
    fields: dict[str, str] = field(default_factory=dict)
    keep_alive: bool = False

    @property
    def content_length(self) -> int | None:
        value = self.fields.get("content-length", "")
        return int(value) if value.isascii() and value.isdecimal() and len(value) < LONGEST_NUMBER else None

    @property
    def has_length(self) -> bool:
        """Whether the body ends before the connection does."""
        return "content-length" in self.fields or "transfer-encoding" in self.fields


class _Message:
    """The callbacks of httptools for one response."""

    def __init__(self) -> None:
        self.header = ResponseHeader()
        self._fields: dict[bytes, bytes] = {}
        self.on_header = self._fields.__setitem__
        self.body = bytearray()
        self.complete = False
        self.followed = False
        """Whether another message follows."""
        self._parser = httptools.HttpResponseParser(self)

    def on_message_begin(self) -> None:
        self.followed = self.complete

    def on_headers_complete(self) -> None:
        for name, value in self._fields.items():
            field_name = KEPT_FIELDS.get(name.lower())
            if field_name is not None:
                self.header.fields[field_name] = value.decode("utf-8", "replace")
        self.header.status = self._parser.get_status_code()
        self.header.keep_alive = self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.complete = True

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def release(self) -> None:
        """Drop the parser, which forms a reference cycle with this object; `feed` cannot be called again."""
        del self._parser


class HeaderParser:
    """Parses the header of one response, after any interim responses. Does no I/O."""

    def __init__(self, context: ErrorContext) -> None:
        self._context = context
        self._data = b""
        self._interim = 0
        self.message = _Message()

    def feed(self, data: bytes) -> tuple[int, bool]:
        """Return how many bytes of `data` belong to headers, and whether the final header is complete.

        `data`: the bytes after those that earlier calls counted. Raises InvalidResponse.
        """
        end = (self._data + data).find(HEADER_END, max(0, len(self._data) - 3))
        used = len(data) if end < 0 else end + len(HEADER_END) - len(self._data)
        self._data += data[:used]
        if len(self._data) > MAX_HEADER:
            raise InvalidResponse(f"the response header is longer than {MAX_HEADER} bytes", self._context)
        if end < 0:
            return used, False
        try:
            self.message.feed(self._data)
        except httptools.HttpParserError as error:
            # Servers send what users have stored as metadata, also control characters.
            self.message.release()
            self.message = _Message()
            try:
                self.message.feed(_METADATA.sub(b"", self._data))
            except httptools.HttpParserError:
                raise InvalidResponse(f"not an HTTP response ({error})", self._context) from error
        status = self.message.header.status
        if not status:
            raise InvalidResponse("not an HTTP response (no status line)", self._context)
        if not 100 <= status < 200:
            return used, True
        self._interim += 1
        if self._interim > MOST_INTERIM:
            raise InvalidResponse(
                f"over {MOST_INTERIM} interim (1xx) responses came before the response", self._context
            )
        self.message.release()
        self.message, self._data = _Message(), b""
        return used, False


class ResponseReader:
    """Reads one response header from a connection, and an error's body after it."""

    def __init__(
        self, connection: Connection, context: ErrorContext, *, within: float, stall_timeout: float
    ) -> None:
        """`within`: seconds that are left of `stall_timeout` for header and error body."""
        self.begun = False
        """Whether any byte of a response has arrived."""
        self._connection = connection
        self._context = context
        self._stall_timeout = stall_timeout
        self._loop = asyncio.get_running_loop()
        self.deadline = self._loop.time() + within
        """Time of the event loop until which header and error body must have come."""
        self._parser = HeaderParser(context)

    async def header(self) -> ResponseHeader:
        """Read the header. Raises SourceError."""
        if not await self._run(self.read_header):
            raise Transient(f"no response for {self._stall_timeout:g} s", self._context)
        return self.parsed

    @property
    def parsed(self) -> ResponseHeader:
        """The header, once it is read."""
        return self._parser.message.header

    async def body(self, most: int) -> bytes:
        """Return what arrives of the body in time, at most about `most` bytes; the reader keeps none."""
        if not self.complete:
            await self._run(partial(self._read_body, most))
        message = self._parser.message
        body, message.body = bytes(message.body), bytearray()
        return body

    @property
    def complete(self) -> bool:
        """Whether every byte of the response has been read."""
        return self._parser.message.complete

    @property
    def followed(self) -> bool:
        """Whether bytes follow the last byte of the response."""
        return self._parser.message.followed or self._connection.has_surplus()

    def release(self) -> None:
        """End the use of this reader."""
        self._parser.message.release()

    async def _run(self, step: Callable[[], bool]) -> bool:
        """Repeat `step` as bytes arrive until it returns true; return false after the deadline.

        No attribute refers to `step`, a method of this object, because such a cycle would keep each request's
        objects until the next garbage collection.
        """
        done: asyncio.Future[bool] = self._loop.create_future()
        timer = self._loop.call_at(self.deadline, _time_out, done)
        try:
            on_readable = partial(self._on_readable, step, done)
            self._connection.expect(1)
            self._connection.watch(on_readable)
            if self._connection.pending:
                on_readable()  # epoll does not report decrypted bytes
            return await done
        finally:
            timer.cancel()

    def _on_readable(self, step: Callable[[], bool], done: asyncio.Future[bool]) -> None:
        if done.done():
            self._connection.pause()  # bytes of the body that nobody takes yet would be reported for ever
            return
        try:
            while not step():
                pass
            done.set_result(True)
        except BlockingIOError:
            return
        except OSError as error:
            done.set_exception(broken(error, self._context))
        except Exception as error:  # noqa: BLE001 - raised by the task that waits
            done.set_exception(error)

    def read_header(self) -> bool:
        """Read some bytes of the header; return whether it is complete. Raises as `Connection.peek`."""
        count = self._connection.peek(_SCRATCH)
        if not count:
            raise Transient("the connection was closed before a response", self._context)
        self.begun = True
        used, whole = self._parser.feed(bytes(_SCRATCH[:count]))
        self._connection.recv_into(_SCRATCH[:used])
        return whole

    def _read_body(self, most: int) -> bool:
        """Read some bytes of the body; return whether its end or the limit is reached."""
        message, memory = self._parser.message, memoryview(bytearray(BODY_READ))
        count = self._connection.recv_into(memory)
        try:
            message.feed(bytes(memory[:count]))
        except httptools.HttpParserError as error:
            raise InvalidResponse(f"not an HTTP response ({error})", self._context) from error
        if not count and not message.header.has_length:
            message.complete = True
        return not count or message.complete or len(message.body) > most


def _time_out(done: asyncio.Future[bool]) -> None:
    if not done.done():
        done.set_result(False)
