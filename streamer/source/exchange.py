"""One answer on one lane: what is common to all ways of moving its body.

Readiness-driven: the lane calls `_on_readable`, which does one step and returns; in silence a timer does.
A receiver without room stops the watching of the socket until it has some; nothing is read meanwhile, so
TCP holds the server back. A receiver may also leave a body where it is (`_held`) and move it itself when its
turn has come. We are woken meanwhile only if the socket can hold no more, or its end has come early.

Only bytes of the wanted body are progress. A request without any for `stall_timeout` seconds ends, whatever
else arrives: interim (1xx) responses, header lines, the body of an error. Each of these has a limit of its
own, too.

A right answer is 206 (or 200) with a Content-Length. Any other is read whole into memory, bounded, and
returned as a `Refusal`; a redirect, or a 2xx whose body has no known length, raises `Unusual`.

How head and body are read is a subclass's: `SpliceExchange` leaves bodies in the kernel, `CopyExchange`
reads them, decrypted if the lane is TLS, into memory that the receiver provides.
"""

from __future__ import annotations

import asyncio
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import httptools

from streamer.errors import BadAnswer, Transient, Truncated, Where
from streamer.source.answer import (
    HEAD_END,
    HEAD_READ,
    MAX_HEAD,
    MAX_REFUSAL,
    MOST_INTERIM,
    AnswerParser,
    Head,
    Refusal,
    Unusual,
    too_many_interim,
)
from streamer.source.lanes import Lane
from streamer.source.ranges import CopyReceiver, NoRoom, SpliceReceiver, WaitingReceiver
from streamer.source.session import STALL_TIMEOUT

PATIENCE = 0.25
"""Seconds that few bytes may wait in a socket for more of them."""
WORTH_WAITING = 0.02
"""Seconds for which more bytes than usual may be waited for, at a lane's own rate."""
CLOCK = 0.001
"""What uvloop's clock tells apart."""
R = TypeVar("R", bound=WaitingReceiver[Any])


class Exchange(ABC, Generic[R]):
    """Reads one answer into `into`. `check` judges the head of a successful one, by raising."""

    def __init__(
        self,
        lane: Lane,
        into: R,
        where: Where,
        *,
        check: Callable[[Head], None],
        stall_timeout: float = STALL_TIMEOUT,
    ) -> None:
        self._lane = lane
        self._into = into
        self._where = where
        self._check = check
        self._stall_timeout = stall_timeout
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[Refusal | None] = self._loop.create_future()
        self._parser = AnswerParser()
        self._head = b""
        self._left = -1
        """Body bytes still to come; -1 until the head of a right answer is here."""
        self._length = 0
        self._answered_at = 0.0
        self._refused = False
        self._watching = False
        self._held = False
        self._heard = False
        self._interim = 0
        """Interim (1xx) responses so far."""
        self.keep_alive = False
        """Whether the lane may be used again; meaningful once `run` has returned."""

    @property
    def heard(self) -> bool:
        """Whether any byte of an answer has come."""
        return self._heard

    @property
    def fd(self) -> int:
        """As `streamer.source.ranges.Body`."""
        return self._lane.fd

    @property
    def pending(self) -> int:
        """As `streamer.source.ranges.Body`."""
        return self._lane.pending

    @property
    def left(self) -> int:
        """As `streamer.source.ranges.Body`."""
        return self._left

    async def run(self, waited: float = 0.0) -> Refusal | None:
        """None once the body is with the receiver, or the refusal.

        `waited`: seconds of the stall timeout that connecting took. Raises SourceError; Unusual. The lane no
        longer calls when it returns.
        """
        self._timer = self._loop.call_later(PATIENCE, self._check_progress, 0, waited)
        try:
            self._lane.expect(1)
            self._watch()
            return await self._done
        finally:
            self._timer.cancel()
            if self._into.on_room == self.want:  # not that of another request, which has taken over
                self._into.on_room = None
            self._into.forget(self)
            self._watching = False
            self._lane.rest()
            self._parser.release()

    def _watch(self) -> None:
        if not self._watching and not self._done.done():
            self._watching = True
            self._lane.watch(self._on_readable)

    def _unwatch(self) -> None:
        self._watching = False
        self._lane.pause()

    @property
    def _progress(self) -> int:
        """Grows with every byte of the wanted body that has arrived, and with nothing else."""
        if self._left <= 0:
            return 0
        return 1 + self._length - self._left + self._lane.unread // self._lane.grain

    def _check_progress(self, progress: int, silent: float) -> None:
        """`progress`: what it was when `silent` seconds without more began."""
        reached = self._progress
        whole = self._held and 0 < self._left <= self._lane.unread
        if (self._left > 0 and not self._watching) or whole or reached > progress:
            silent = 0.0
        elif silent + PATIENCE >= self._stall_timeout:
            if self._refused:
                self._refuse(b"")  # its status says more than that its body does not end
            else:
                self._finish(Transient(f"no byte for {self._stall_timeout:g} s", self._where, silent=silent))
            return
        else:
            self._on_readable()  # what little has come shall not wait for more
            if self._done.done():
                return
            before, reached = reached, self._progress
            silent = silent + PATIENCE if reached <= before else 0.0
            if not self._held:
                self._lane.expect(1)
        self._timer = self._loop.call_later(PATIENCE, self._check_progress, reached, silent)

    def _finish(self, outcome: BaseException | Refusal | None) -> None:
        self._watching = False
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
            self._step()
            self._expect_more()
        except BlockingIOError:
            self._expect_more()
        except NoRoom:
            self._unwatch()
            self._into.on_room = self.want
        except BaseException as error:  # noqa: BLE001 - handed to whoever awaits `run`
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, OSError):
            error = Transient(f"the connection broke ({error.strerror or error})", self._where)
        elif isinstance(error, httptools.HttpParserError):
            error = BadAnswer(f"not an HTTP answer ({error})", self._where)
        self._finish(error)

    def _expect_more(self) -> None:
        """Wait for as many bytes of the body as come within `WORTH_WAITING` at the rate so far."""
        if self._held:
            self._lane.hold(self._left)
        elif self._left > 0:
            elapsed = max(self._loop.time() - self._answered_at, CLOCK)
            due = int((self._length - self._left) * WORTH_WAITING / elapsed)
            self._lane.expect(self._left, 1 << due.bit_length())  # rounded, so that it seldom changes

    def want(self) -> None:
        """As `streamer.source.ranges.Body`; also for a receiver that has room again."""
        self._held = False
        try:
            self._expect_more()
            self._watch()
        except OSError as error:  # no memory for the watch
            self._fail(error)

    def _step(self) -> None:
        """Read what there is now. Raises BlockingIOError if it is nothing, NoRoom if it must wait."""
        if self._left < 0 and not self._refused:
            self._read_head()
        if self._left > 0:
            if self._held and self._lane.unread >= self._left:
                self._unwatch()  # all is here, and waits for its turn: there is nothing to be woken for
                return
            full, self._held = self._held or not self._lane.window, False
            self._held = self._into.leaves(self, full=full)
            if not self._held:
                self._take()
        elif self._refused and not self._done.done():
            self._take()

    @abstractmethod
    def _read_head(self) -> None:
        """Read of the answer until its head is there, and no more of the body than comes with it."""

    @abstractmethod
    def _take(self) -> None:
        """Read some of the body, into the receiver, or of a refusal's. Raises as `_step` does."""

    def _parse(self, end: int) -> bool:
        """Parse `self._head` up to `end` bytes; whether that was an answer's, not an interim 1xx one's."""
        self._parser.feed(self._head[:end])
        if not self._parser.head.status:
            raise BadAnswer("not an HTTP answer (no status line)", self._where)
        if not 100 <= self._parser.head.status < 200:
            return True
        self._interim += 1
        if self._interim > MOST_INTERIM:
            raise too_many_interim(self._where)
        self._parser.release()
        self._parser, self._head = AnswerParser(), self._head[end:]
        return False

    def _bounded(self) -> None:
        if len(self._head) > MAX_HEAD:
            raise BadAnswer(f"the head of the answer is longer than {MAX_HEAD} bytes", self._where)

    def _judge(self, head: Head) -> None:
        self.keep_alive = head.keep_alive
        if 300 <= head.status < 400:
            raise Unusual
        if head.status not in (200, 206):
            self._refused = True
            if self._parser.complete:
                self._finish(Refusal(head, b""))
            return
        length = head.content_length
        if length is None or "transfer-encoding" in head.headers:
            raise Unusual
        self._check(head)
        self._left = self._length = length
        self._answered_at = self._loop.time()
        self._into.answered()

    def _arrived(self, count: int) -> None:
        """`count` more bytes of the body are with the receiver."""
        if count == 0:
            raise Truncated(f"the body ended {self._left} bytes early", self._where)
        self._left -= count
        if self._left == 0:
            self._finish(None)

    def _refuse(self, data: bytes) -> None:
        """The next bytes of a refusal's body; none at the end of the connection."""
        if data:
            self._parser.feed(data)
        else:
            self.keep_alive = False
        if self._parser.complete or not data or len(self._parser.body) > MAX_REFUSAL:
            self.keep_alive = self.keep_alive and self._parser.complete
            self._finish(Refusal(self._parser.head, bytes(self._parser.body)))


class SpliceExchange(Exchange[SpliceReceiver]):
    """The head by peeking, the body by splice.

    The head is peeked (MSG_PEEK) and only its own bytes are taken out of the socket, so that the body's
    first byte is the next one that splice(2) will find.
    """

    def move_into(self, fd: int) -> int:
        """As `streamer.source.ranges.SplicedBody`."""
        if self._done.done():
            return 0
        try:
            count = os.splice(self._lane.fd, fd, self._left, flags=os.SPLICE_F_NONBLOCK | os.SPLICE_F_MOVE)
            self._into.moved(count)
            self._arrived(count)
        except (BlockingIOError, BrokenPipeError):
            raise
        except (OSError, Truncated) as error:
            self._fail(error)
            return 0
        return count

    def _read_head(self) -> None:
        sock = self._lane.sock
        while True:
            peeked = sock.recv(HEAD_READ, socket.MSG_PEEK)
            if not peeked:
                raise Transient("the connection was closed before an answer", self._where)
            self._heard = True
            known = len(self._head)
            end = (self._head + peeked).find(HEAD_END, max(0, known - 3))
            take = len(peeked) if end < 0 else end + 4 - known
            self._head += sock.recv(take)
            self._bounded()
            if end >= 0 and self._parse(end + 4):
                break
        self._judge(self._parser.head)

    def _take(self) -> None:
        if self._refused:
            self._refuse(self._lane.sock.recv(64 * 1024))
        else:
            self._arrived(self._into.take_from(self))


class CopyExchange(Exchange[CopyReceiver]):
    """All by reading; the body into the receiver's own memory.

    One piece at a time, so that others get their turn; over TLS up to the end of a record, since of what is
    left of it the socket would not tell.
    """

    def pull(self) -> int:
        """As `streamer.source.ranges.CopiedBody`."""
        if self._done.done():
            return 0
        before = self._left
        try:
            self._take()
        except BlockingIOError:
            pass
        except BaseException as error:  # noqa: BLE001 - handed to whoever awaits `run`
            self._fail(error)
        return before - self._left

    def _read_head(self) -> None:
        while self._left < 0 and not self._refused:
            self._read(0)

    def _take(self) -> None:
        taken = self._read(self._left)
        while not self._done.done() and (rest := max(self._lane.gulp - taken, self._lane.pending)) > 0:
            taken += self._read(min(rest, self._left))

    def _read(self, most: int) -> int:
        """Bytes read, `most` of a body; 0 at the end of the connection.

        Raises BlockingIOError if there are none now.
        """
        if self._left > 0:
            count = self._lane.recv_into(self._into.room(most))
            self._into.filled(count)
            self._arrived(count)
            return count
        room = bytearray(HEAD_READ)
        data = bytes(room[: self._lane.recv_into(memoryview(room))])
        if self._refused:
            self._refuse(data)
        elif data:
            self._add_to_head(data)
        else:
            raise Transient("the connection was closed before an answer", self._where)
        return len(data)

    def _add_to_head(self, data: bytes) -> None:
        self._heard = True
        self._head += data
        self._bounded()
        while (end := self._head.find(HEAD_END)) >= 0:
            rest = self._head[end + len(HEAD_END) :]
            if not self._parse(end + len(HEAD_END)):
                continue
            self._judge(self._parser.head)
            if rest and self._refused:
                self._refuse(rest)
            elif rest:
                self._into.feed(rest)
                self._arrived(len(rest))
            return
