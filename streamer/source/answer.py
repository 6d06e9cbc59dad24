"""What an HTTP answer says before its body: status, the headers that anybody asks for. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

import httptools

from streamer.errors import BadAnswer, Where

HEAD_END = b"\r\n\r\n"
HEAD_READ = 2 * 1024
"""Bytes to read for a head; what comes of the body with it is copied once more."""
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
"""Headers that anybody asks for, as they are parsed and as they are kept."""
MAX_HEAD = 64 * 1024
MAX_REFUSAL = 256 * 1024
MOST_INTERIM = 32
"""Interim (1xx) responses before one response; each more is a server that never comes to it."""
LONGEST_NUMBER = 20
"""Digits of a length that no object has."""


@dataclass(slots=True)
class Head:
    """Status line, and those headers that are `HEEDED`; names in lower case."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    keep_alive: bool = False

    @property
    def content_length(self) -> int | None:
        value = self.headers.get("content-length", "")
        return int(value) if value.isdecimal() and len(value) < LONGEST_NUMBER else None


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer that is no range: its head and its whole body."""

    head: Head
    body: bytes


class Unusual(Exception):
    """A redirect, or a successful answer whose body is chunked or of unknown length."""


def too_many_interim(where: Where) -> BadAnswer:
    """The error for a server that sends more than `MOST_INTERIM` of them."""
    return BadAnswer(f"over {MOST_INTERIM} interim (1xx) responses came before the response", where)


class AnswerParser:
    """httptools' callbacks, gathered into a Head."""

    def __init__(self) -> None:
        self.head = Head()
        self.body = bytearray()
        self.complete = False
        self._parser = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        heeded = HEEDED.get(name.lower())
        if heeded is not None:
            self.head.headers[heeded] = value.decode("utf-8", "replace")

    def on_headers_complete(self) -> None:
        self.head.status = self._parser.get_status_code()
        self.head.keep_alive = self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.complete = True

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def release(self) -> None:
        """Nothing is fed any more: let go of the parser, which holds our methods in a cycle of garbage."""
        del self._parser
