"""Response headers, and the bodies of errors: what is read of a response that is no bytes of an object.

A header is peeked at (MSG_PEEK, SSL_peek) and only its own bytes are taken off the connection, so that the
next byte there is the first of the body: one that splice(2) finds. `HeaderParser` is pure; `ResponseReader`
waits for one connection.

Nothing read here is progress: connection, header and an error's body have `stall_timeout` seconds together.
Interim (1xx) responses, header bytes and error bodies have limits of their own, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import httptools

from streamer.errors import BadAnswer, ErrorContext, Transient
from streamer.s3.client.faults import broken
from streamer.s3.http.connection import Connection

HEADER_END = b"\r\n\r\n"
HEADER_READ = 2 * 1024
"""Bytes to look at for a header; S3's are shorter."""
HEEDED = {
    name.encode(): name
    for name in (
        "content-length",
        "content-range",
        "date",
        "etag",
        "retry-after",
        "transfer-encoding",
        "x-amz-request-id",
        "x-amz-version-id",
    )
}
"""Fields that are kept, as they are parsed and as they are kept."""
MAX_HEADER = 64 * 1024
MAX_ERROR_BODY = 256 * 1024
ERROR_READ = 64 * 1024
MOST_INTERIM = 32
"""Interim (1xx) responses before one response; a server that sends more never comes to it."""
LONGEST_NUMBER = 20
"""Digits of a length that no object has."""


@dataclass(slots=True)
class ResponseHeader:
    """Status, and the fields that are `HEEDED`; names in lower case."""

    status: int = 0
    fields: dict[str, str] = field(default_factory=dict)
    keep_alive: bool = False

    @property
    def content_length(self) -> int | None:
        value = self.fields.get("content-length", "")
        return int(value) if value.isdecimal() and len(value) < LONGEST_NUMBER else None


class _Message:
    """The callbacks of httptools for one response."""

    def __init__(self) -> None:
        self.header = ResponseHeader()
        self.body = bytearray()
        self.complete = False
        self._parser = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        kept = HEEDED.get(name.lower())
        if kept is not None:
            self.header.fields[kept] = value.decode("utf-8", "replace")

    def on_headers_complete(self) -> None:
        self.header.status = self._parser.get_status_code()
        self.header.keep_alive = self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.complete = True

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def release(self) -> None:
        """Let go of the parser, which holds our methods in a reference cycle. Nothing is fed any more."""
        del self._parser


class HeaderParser:
    """The header of one response, after any interim ones. Pure."""

    def __init__(self, context: ErrorContext) -> None:
        self._context = context
        self._data = b""
        self._interim = 0
        self.message = _Message()

    def feed(self, data: bytes) -> tuple[int, bool]:
        """The bytes of `data` that belong to headers, and whether the final header is whole.

        `data`: what follows the bytes that belonged to headers before. Raises BadAnswer.
        """
        end = (self._data + data).find(HEADER_END, max(0, len(self._data) - 3))
        used = len(data) if end < 0 else end + len(HEADER_END) - len(self._data)
        self._data += data[:used]
        if len(self._data) > MAX_HEADER:
            raise BadAnswer(f"the response header is longer than {MAX_HEADER} bytes", self._context)
        if end < 0:
            return used, False
        try:
            self.message.feed(self._data)
        except httptools.HttpParserError as error:
            raise BadAnswer(f"not an HTTP response ({error})", self._context) from error
        status = self.message.header.status
        if not status:
            raise BadAnswer("not an HTTP response (no status line)", self._context)
        if not 100 <= status < 200:
            return used, True
        self._interim += 1
        if self._interim > MOST_INTERIM:
            raise BadAnswer(
                f"over {MOST_INTERIM} interim (1xx) responses came before the response", self._context
            )
        self.message.release()
        self.message, self._data = _Message(), b""
        return used, False


class ResponseReader:
    """Reads one response header from a connection, and the body of an error after it."""

    def __init__(
        self, connection: Connection, context: ErrorContext, *, within: float, stall_timeout: float
    ) -> None:
        """`within`: seconds until the last byte that is read here; the rest of `stall_timeout`."""
        self.begun = False
        """Whether any byte of a response has arrived."""
        self._connection = connection
        self._context = context
        self._stall_timeout = stall_timeout
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + within
        self._parser = HeaderParser(context)
        self._done: asyncio.Future[bool] | None = None
        self._step: Callable[[], bool] = self._read_header

    async def header(self) -> ResponseHeader:
        """Read the header. Raises SourceError."""
        if not await self._run(self._read_header):
            raise Transient(f"no response for {self._stall_timeout:g} s", self._context)
        return self._parser.message.header

    async def error_body(self) -> bytes:
        """Read the body after the header, or what has come of it in time, some `MAX_ERROR_BODY` at most."""
        if not self.complete:
            await self._run(self._read_error)
        return bytes(self._parser.message.body)

    @property
    def complete(self) -> bool:
        """Whether the response has no byte that is not read."""
        return self._parser.message.complete

    def release(self) -> None:
        """End the use of this reader."""
        self._parser.message.release()

    async def _run(self, step: Callable[[], bool]) -> bool:
        """Repeat `step` as bytes arrive, until it says that it is done; false if that came too late."""
        self._step = step
        self._done = self._loop.create_future()
        timer = self._loop.call_at(self._deadline, self._time_out)
        try:
            self._connection.expect(1)
            self._connection.watch(self._on_readable)
            if self._connection.pending:
                self._on_readable()  # bytes that no socket reports
            return await self._done
        finally:
            timer.cancel()

    def _time_out(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(False)

    def _on_readable(self) -> None:
        if self._done is None or self._done.done():
            return
        try:
            while not self._step():
                pass
            self._done.set_result(True)
        except BlockingIOError:
            return
        except OSError as error:
            self._done.set_exception(broken(error, self._context))
        except Exception as error:  # noqa: BLE001 - raised by the task that waits
            self._done.set_exception(error)

    def _read_header(self) -> bool:
        """Take some of the header off the connection; whether that was its end."""
        memory = memoryview(bytearray(HEADER_READ))
        count = self._connection.peek(memory)
        if not count:
            raise Transient("the connection was closed before a response", self._context)
        self.begun = True
        used, whole = self._parser.feed(bytes(memory[:count]))
        self._connection.recv_into(memory[:used])
        return whole

    def _read_error(self) -> bool:
        """Take some of the body; whether that was its end, or as much as is wanted."""
        message, memory = self._parser.message, memoryview(bytearray(ERROR_READ))
        count = self._connection.recv_into(memory)
        try:
            message.feed(bytes(memory[:count]))
        except httptools.HttpParserError as error:
            raise BadAnswer(f"not an HTTP response ({error})", self._context) from error
        return not count or message.complete or len(message.body) > MAX_ERROR_BODY
