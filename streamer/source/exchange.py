"""One answer on one lane: its head by peeking, its body by splice.

Readiness-driven: the loop calls `_on_readable`, which does one step and returns. The head is peeked
(MSG_PEEK) and only its own bytes are taken out of the socket, so that the body's first byte is the next
one that splice(2) will find. A receiver without room stops the watching of the socket until it has some;
nothing is read meanwhile, so TCP holds the server back.

A right answer is 206 (or 200) with a Content-Length. Any other is read whole into memory, bounded, and
returned as a `Refusal`; a redirect, or a 2xx whose body cannot be spliced, raises `Unspliceable`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

import httptools

from streamer.errors import BadAnswer, Transient, Truncated, Where
from streamer.source.lanes import Lane
from streamer.source.ranges import NoRoom, SpliceReceiver

READ_TIMEOUT = 30.0
"""Seconds without a byte before a lane counts as dead; not counted while the receiver has no room."""
MAX_HEAD = 64 * 1024
MAX_REFUSAL = 256 * 1024


@dataclass(slots=True)
class Head:
    """Status line and headers; names in lower case."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    keep_alive: bool = False

    @property
    def content_length(self) -> int | None:
        value = self.headers.get("content-length", "")
        return int(value) if value.isdecimal() else None


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer that is no range: its head and its whole body."""

    head: Head
    body: bytes


class Unspliceable(Exception):
    """A redirect, or a successful answer whose body is chunked or of unknown length."""


class _Parser:
    """httptools' callbacks, gathered into a Head."""

    def __init__(self) -> None:
        self.head = Head()
        self.body = bytearray()
        self.complete = False
        self._parser = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.head.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.head.status = self._parser.get_status_code()
        self.head.keep_alive = self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.complete = True

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)


class Exchange:
    """Reads one answer into `into`. `check` judges the head of a successful one, by raising."""

    def __init__(
        self, lane: Lane, into: SpliceReceiver, where: Where, *, check: Callable[[Head], None]
    ) -> None:
        self._lane = lane
        self._into = into
        self._where = where
        self._check = check
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[Refusal | None] = self._loop.create_future()
        self._parser = _Parser()
        self._head = b""
        self._left = -1
        """Body bytes still to come; -1 until the head of a right answer is here."""
        self._refused = False
        self._watching = False
        self._bytes_seen = 0
        self.keep_alive = False
        """Whether the lane may be used again; meaningful once `run` has returned."""

    @property
    def heard(self) -> bool:
        """Whether any byte of an answer has come."""
        return self._bytes_seen > 0

    async def run(self) -> Refusal | None:
        """None once the body is with the receiver, or the refusal.

        Raises SourceError; Unspliceable. The lane's socket is never left watched.
        """
        self._timer = self._loop.call_later(READ_TIMEOUT, self._check_progress, 0)
        self._watch()
        try:
            return await self._done
        finally:
            self._timer.cancel()
            self._into.on_room = None
            self._unwatch()

    def _watch(self) -> None:
        if not self._watching and not self._done.done():
            self._watching = True
            self._loop.add_reader(self._lane.fd, self._on_readable)

    def _unwatch(self) -> None:
        if self._watching:
            self._watching = False
            self._loop.remove_reader(self._lane.fd)

    def _check_progress(self, seen: int) -> None:
        if self._watching and self._bytes_seen == seen:
            self._finish(Transient(f"no byte for {READ_TIMEOUT:g} s", self._where))
        else:
            self._timer = self._loop.call_later(READ_TIMEOUT, self._check_progress, self._bytes_seen)

    def _finish(self, outcome: BaseException | Refusal | None) -> None:
        self._unwatch()
        if self._done.done():
            return
        if isinstance(outcome, BaseException):
            self._done.set_exception(outcome)
        else:
            self._done.set_result(outcome)

    def _on_readable(self) -> None:
        if self._done.done():
            return
        try:
            if self._left < 0 and not self._refused:
                self._read_head()
            if self._left > 0:
                self._move_body()
            elif self._refused:
                self._read_refusal()
        except BlockingIOError:
            return
        except OSError as error:
            self._finish(Transient(f"the connection broke ({error.strerror or error})", self._where))
        except httptools.HttpParserError as error:
            self._finish(BadAnswer(f"not an HTTP answer ({error})", self._where))
        except BaseException as error:  # noqa: BLE001 - handed to whoever awaits `run`
            self._finish(error)

    def _read_head(self) -> None:
        """Take the head out of the socket, not a byte more; interim 1xx answers are passed over."""
        sock = self._lane.sock
        while True:
            peeked = sock.recv(16 * 1024, socket.MSG_PEEK)
            if not peeked:
                raise Transient("the connection was closed before an answer", self._where)
            self._bytes_seen += 1
            known = len(self._head)
            end = (self._head + peeked).find(b"\r\n\r\n", max(0, known - 3))
            take = len(peeked) if end < 0 else end + 4 - known
            self._head += sock.recv(take)
            if len(self._head) > MAX_HEAD:
                raise BadAnswer(f"the head of the answer is longer than {MAX_HEAD} bytes", self._where)
            if end < 0:
                continue
            self._parser.feed(self._head)
            if not self._parser.head.status:
                raise BadAnswer("not an HTTP answer (no status line)", self._where)
            if not 100 <= self._parser.head.status < 200:
                break
            self._parser, self._head = _Parser(), b""
        self._judge(self._parser.head)

    def _judge(self, head: Head) -> None:
        self.keep_alive = head.keep_alive
        if 300 <= head.status < 400:
            raise Unspliceable
        if head.status not in (200, 206):
            self._refused = True
            if self._parser.complete:
                self._finish(Refusal(head, b""))
            return
        length = head.content_length
        if length is None or "transfer-encoding" in head.headers:
            raise Unspliceable
        self._check(head)
        self._left = length
        self._into.answered()

    def _move_body(self) -> None:
        try:
            count = self._into.take_from(self._lane.fd, self._left)
        except NoRoom:
            self._unwatch()
            self._into.on_room = self._watch
            return
        if count == 0:
            raise Truncated(f"the body ended {self._left} bytes early", self._where)
        self._bytes_seen += count
        self._left -= count
        if self._left == 0:
            self._finish(None)

    def _read_refusal(self) -> None:
        data = self._lane.sock.recv(64 * 1024)
        self._bytes_seen += len(data)
        if data:
            self._parser.feed(data)
        else:
            self.keep_alive = False
        if self._parser.complete or not data or len(self._parser.body) > MAX_REFUSAL:
            self.keep_alive = self.keep_alive and self._parser.complete
            self._finish(Refusal(self._parser.head, bytes(self._parser.body)))
