"""Parses the headers of responses, and the bodies after them. Does no I/O.

The number of interim (1xx) responses and the size of a header are limited.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import httptools

from streamer.errors import ErrorContext, InvalidResponse

HEADER_END = b"\r\n\r\n"
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
        "x-amz-checksum-type",
        "x-amz-request-id",
        "x-amz-version-id",
    )
}
"""The header fields that are kept, by the bytes of their names."""
_KEPT_OF_ERRORS = KEPT_FIELDS | {name.encode(): name for name in ("content-type", "server", "via")}
"""Those of an error response: they tell who has sent it."""
_NEEDED = b"|".join([*_KEPT_OF_ERRORS, b"connection", b"HTTP/[^:]*?"])
_NOT_NEEDED = re.compile(
    rb"^(?!(?:%b)[ \t]*(?::|\r\n))[^\r\n]+\r\n(?:[ \t][^\r\n]*\r\n)*" % _NEEDED, re.IGNORECASE | re.MULTILINE
)
"""Header fields that nobody reads, each with its continuation lines."""
MAX_HEADER = 64 * 1024
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
        self.header.status = status = self._parser.get_status_code()
        kept = KEPT_FIELDS if status < 400 else _KEPT_OF_ERRORS
        for name, value in self._fields.items():
            field_name = kept.get(name.lower())
            if field_name is not None:
                self.header.fields[field_name] = value.decode("utf-8", "replace")
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
            # Servers send what users have stored: metadata, Content-Disposition, also control characters.
            self.message.release()
            self.message = _Message()
            try:
                self.message.feed(_NOT_NEEDED.sub(b"", self._data))
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
