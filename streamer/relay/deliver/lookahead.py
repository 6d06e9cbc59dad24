"""Inflates the objects that follow the one being delivered, in a second thread.

    loop    add ──▶ objects in stream order ──▶ content in memory, at most `most` bytes     this thread
    loop    Inflation ──▶ the object whose turn has come ──▶ its content, then the rest     the other thread

A turn of the thread lasts until no object has bytes to inflate, `most` bytes of content wait, or
MOST_INFLATED bytes are inflated. The loop starts the next one when bytes are added or delivered.

When the thread that delivers would wait for a step of this one, or for the reader, it inflates ahead too
(`help`).

Invariants: only this thread changes `_made`, and only the thread that delivers `_helped` and `_taken`.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from streamer.aio import finished
from streamer.units import MIB

if TYPE_CHECKING:
    import asyncio

    from streamer.aio import WorkerThread
    from streamer.relay.deliver.object_inflater import ObjectInflater

STEP = 1 * MIB
"""Maximum bytes that a thread inflates at once. Between two steps it needs the interpreter's lock, for which
it may have to wait; `PIECE` is for one thread."""
MOST_INFLATED = 4 * MIB
"""Maximum bytes of one turn, after which the thread may be needed by another channel."""


class Lookahead:
    """Inflates objects ahead of their turn; its owner closes it once."""

    def __init__(self, thread: WorkerThread, most: int) -> None:
        """`most`: bytes of content that may wait, plus a step of each thread."""
        self._thread = thread
        self._most = most
        self._objects: deque[ObjectInflater] = deque()
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

    def add(self, each: ObjectInflater) -> None:
        """Inflate this object after those that were added before it."""
        self._objects.append(each)

    def took(self, count: int) -> None:
        """Note that `count` bytes of content are delivered or dropped."""
        self._taken += count

    def start(self) -> None:
        """Begin a turn if there is work and no turn runs. Called when bytes are added or delivered."""
        if self._turn is None and not self._closing and (each := self._next()) is not None:
            each.lock.release()
            self._turn = self._thread.start(self._inflate)
            self._turn.add_done_callback(self._on_end)

    def _on_end(self, turn: asyncio.Future[None]) -> None:
        self._turn = None
        if not turn.cancelled():
            turn.result()
            self.start()  # bytes may have come at the turn's end

    def _next(self) -> ObjectInflater | None:
        """Return the object to go on with, locked, or None if there is nothing to do now."""
        if self._made + self._helped - self._taken >= self._most:
            return None
        for each in list(self._objects):
            if not each.over_ahead and each.pending and each.lock.acquire(blocking=False):
                return each
        return None

    def _step(self, each: ObjectInflater) -> int:
        try:
            return each.inflate_ahead(STEP)
        finally:
            each.lock.release()

    def _inflate(self) -> None:
        end = self._made + MOST_INFLATED
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

    async def close(self) -> None:
        """End the turn after its current step, also if cancelled, and drop all objects."""
        self._closing = True
        if (turn := self._turn) is not None:
            await finished(turn)
        self._objects.clear()
