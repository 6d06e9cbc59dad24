"""Inflates objects: those whose turn has come, and in a second thread those after them.

    loop    `InflatedObject.add` ──▶ compressed bytes of objects, in stream order
    Lookahead._inflate ──▶ content in memory, at most `most` bytes                      this thread
    Lookahead.content ──▶ content of the object whose turn has come, then its rest      the other thread

A turn of this thread lasts until no object has bytes to inflate, `most` bytes of content wait, or
MOST_AT_ONCE bytes are inflated. The loop starts the next one when bytes are added or delivered. When the
thread that delivers would wait for a step of this one, or for the reader, it inflates ahead too (`help`).

An object whose turn has not come keeps its bytes. If they cannot be inflated ahead, because they are damaged
or need more memory than there is for it, they are inflated again from the start in the object's turn. So what
is inflated ahead is either right or dropped, and the errors of objects come in stream order.

Invariants: an inflater and its content are used with the object's lock held, and the loop alone adds bytes.
Only this thread changes `_made`, and only the thread that delivers `_helped` and `_taken`.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from streamer.aio import WorkerThread, finished
from streamer.directory import scratch_folder
from streamer.errors import CorruptObject, ErrorContext, PenstockError, SinkError
from streamer.formats.transform import BadContent
from streamer.inflate import LARGEST_WINDOW, Inflater
from streamer.units import KIB, MIB

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator

    from streamer.plan import ObjectRef


def not_inflatable(ref: ObjectRef, what: str, offset: int) -> CorruptObject:
    """Return the error of an object that cannot be inflated. `offset`: byte of the object."""
    return CorruptObject(f"the object {what}", ErrorContext(ref.bucket, ref.key, offset))


@contextlib.contextmanager
def transforming(ref: ObjectRef, *, inflated: bool) -> Iterator[None]:
    """Raise the error of a transform as one of the object `ref`: CorruptObject, or SinkError for its spool.

    `inflated`: the transform has the object's content, whose offsets are not those of the object.
    """
    try:
        yield
    except BadContent as error:
        offset, text = error.offset, str(error)
        if inflated and offset is not None:
            offset, text = None, f"{text}; at byte {offset} of what it inflates to"
        raise CorruptObject(text, ErrorContext(ref.bucket, ref.key, offset)) from error
    except OSError as error:
        raise SinkError(
            f"cannot spool s3://{ref.bucket}/{ref.key} in {scratch_folder()}: {error.strerror}; an object "
            "that is inflated and wrapped is spooled whole: let TMPDIR name a directory with space for it"
        ) from error


STEP = 1 * MIB
"""Maximum bytes that a thread inflates at once. Between two steps it needs the interpreter's lock, for which
it may have to wait."""
MOST_AT_ONCE = 4 * MIB
"""Maximum bytes of one turn, however well they are compressed: some 5 ms, after which another channel may
need the thread."""
LEAST_AHEAD = 256 * KIB
"""Objects up to this many compressed bytes are not inflated ahead: content of 100 kB that one thread made and
another freed took 270,000 page faults a GB, and twice the CPU time."""
WINDOW_AHEAD = 23
"""Largest window of content inflated ahead: 8 MiB, which suffices for Zstandard's levels up to 19."""


class InflatedObject:
    """One object: `add` its bytes in order, take `pieces` of its content."""

    def __init__(self, ref: ObjectRef, *, ahead: bool) -> None:
        """`ahead`: whether bytes may be inflated before the object's turn."""
        self.ref = ref
        self.ahead = ahead
        self.lock = threading.Lock()
        self.fed = 0
        """Bytes added."""
        self.ended = False
        """Whether no byte will be added."""
        self.used = 0
        """Bytes passed to the inflater."""
        self.wanted = False
        """Whether the thread that delivers waits for the content."""
        self.spoiled = False
        """Whether the bytes cannot be inflated ahead."""
        self._inflater = self._new(WINDOW_AHEAD if ahead else LARGEST_WINDOW)
        self._adding = threading.Lock()
        """Held while bytes are added, or begun again with."""
        self._input: deque[bytes | bytearray] = deque()
        self._kept: list[bytes | bytearray] | None = [] if ahead else None
        """All bytes added; None when the object's turn has come."""
        self._inflated: deque[bytes] = deque()
        """Content that was inflated ahead."""

    def __repr__(self) -> str:
        return f"<InflatedObject {self.ref.key}, {self.used} of {self.fed} bytes used>"

    def _new(self, largest_window: int) -> Inflater:
        return Inflater(partial(not_inflatable, self.ref), largest_window=largest_window)

    @property
    def pending(self) -> bool:
        """Whether bytes that were added can be inflated."""
        return bool(self._input) or not self._inflater.drained

    @property
    def over_ahead(self) -> bool:
        """Whether the object will not be inflated ahead any more."""
        return self.wanted or self.spoiled or (self.ended and not self.pending)

    @property
    def has_content(self) -> bool:
        """Whether the next content was inflated ahead."""
        return bool(self._inflated)

    def add(self, data: bytes | bytearray, *, last: bool) -> None:
        """Add the object's next bytes; `last`: there are no more."""
        with self._adding:
            if self._kept is not None:
                self._kept.append(data)
            self._input.append(data)
            self.ended = last
        self.fed += len(data)

    def begin(self) -> int:
        """Begin the object's turn; return the bytes of content that are dropped, because it is spoiled."""
        if self._kept is None:
            return 0
        lost = 0
        with self._adding:
            if self.spoiled:
                lost = sum(map(len, self._inflated))
                self._inflated.clear()
                self._input = deque(self._kept)
                self._inflater, self.used = self._new(LARGEST_WINDOW), 0
            self._kept = None
        return lost

    def pieces(self, most: int) -> list[bytes]:
        """Return the next content, at most `most` bytes; none if more bytes are needed.

        Raises the error of a damaged object.
        """
        if self._inflated:
            pieces = [self._inflated.popleft()]
            most -= len(pieces[0])
            while self._inflated and len(self._inflated[0]) <= most:
                most -= len(self._inflated[0])
                pieces.append(self._inflated.popleft())
            return pieces
        return self._inflate(most)

    def inflate_ahead(self, most: int) -> int:
        """Inflate at most `most` bytes before the object's turn has come; return how many."""
        if self.over_ahead:
            return 0
        try:
            pieces = self._inflate(most)
        except (PenstockError, MemoryError):
            pieces = []
            self.spoiled = True
        if self._inflater.is_damaged:
            self.spoiled = True
        self._inflated.extend(pieces)
        return sum(map(len, pieces))

    def _inflate(self, most: int) -> list[bytes]:
        while True:
            if self._inflater.drained:
                if not self._input:
                    return []
                data = self._input.popleft()
                self.used += len(data)
                self._inflater.feed(data)
            if pieces := self._inflater.pieces(most):
                return pieces

    def finish(self) -> None:
        """Check that the object is complete, after all its content was taken. Raises its error."""
        self._inflater.finish()


class Lookahead:
    """Inflates the objects of one epoch; its owner closes it once."""

    def __init__(self, most: int) -> None:
        """`most`: bytes of content that may wait, plus a step of each thread; 0 to inflate nothing ahead."""
        self.thread = WorkerThread("inflate-ahead")
        self._most = most
        self._objects: deque[InflatedObject] = deque()
        """Objects that are not inflated to their end, in stream order."""
        self._made = 0
        self._helped = 0
        self._taken = 0
        """Bytes of content inflated ahead in this thread, in the other one, and delivered or dropped."""
        self._turn: asyncio.Future[None] | None = None
        self._closing = False

    def __repr__(self) -> str:
        return (
            f"<Lookahead {self._made + self._helped - self._taken} bytes ahead, {len(self._objects)} objects>"
        )

    def may_precede(self, ref: ObjectRef) -> bool:
        """Return whether bytes of the object are inflated before its turn."""
        return self._most > 0 and ref.size > LEAST_AHEAD

    def begin(self, ref: ObjectRef) -> InflatedObject:
        """Return the object to add bytes to; it is inflated after those that were begun before it."""
        each = InflatedObject(ref, ahead=self.may_precede(ref))
        if each.ahead:
            self._objects.append(each)
        return each

    def start(self) -> None:
        """Begin a turn if there is work and no turn runs. Called when bytes are added or delivered."""
        if self._turn is None and not self._closing and (each := self._next()) is not None:
            each.lock.release()
            self._turn = self.thread.start(self._inflate)
            self._turn.add_done_callback(self._on_end)

    def _on_end(self, turn: asyncio.Future[None]) -> None:
        self._turn = None
        if not turn.cancelled():
            turn.result()
            self.start()  # bytes may have come at the turn's end

    def _next(self) -> InflatedObject | None:
        """Return the object to go on with, locked, or None if there is nothing to do now."""
        if self._made + self._helped - self._taken >= self._most:
            return None
        for each in list(self._objects):
            if not each.over_ahead and each.pending and each.lock.acquire(blocking=False):
                return each
        return None

    def _step(self, each: InflatedObject) -> int:
        try:
            return each.inflate_ahead(STEP)
        finally:
            each.lock.release()

    def _inflate(self) -> None:
        end = self._made + MOST_AT_ONCE
        while not self._closing and self._made < end and (each := self._next()) is not None:
            self._made += self._step(each)
            while self._objects and self._objects[0].over_ahead:
                self._objects.popleft()

    def help(self) -> bool:
        """Inflate one step in the thread that delivers, which would wait; return False if no step is due."""
        if self._closing or (each := self._next()) is None:
            return False
        self._helped += self._step(each)
        return True

    def content(self, each: InflatedObject, most: int) -> list[bytes]:
        """Return content of the object whose turn has come, in the thread that delivers; see `pieces`."""
        each.wanted = True
        while not each.lock.acquire(blocking=False):  # the other thread is in a step of it
            if not self.help():
                each.lock.acquire()
                break
        try:
            self._taken += each.begin()
            ahead = each.has_content
            pieces = each.pieces(most)
        finally:
            each.lock.release()
        if ahead:
            self._taken += sum(map(len, pieces))
        return pieces

    async def close(self) -> None:
        """End the turn after its current step, also if cancelled, and drop all objects."""
        self._closing = True
        try:
            if (turn := self._turn) is not None:
                await finished(turn)
        finally:
            self._objects.clear()
            self.thread.close()
