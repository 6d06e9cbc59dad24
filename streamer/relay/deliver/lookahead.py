"""Inflates the bytes that follow those being delivered, in a second thread.

    loop       add ──▶ runs in stream order ──▶ content in memory, at most `most` bytes     this thread
    loop       Inflation ──▶ the run whose turn has come ──▶ its content, then the rest     the other thread

A turn of the thread lasts until no run has bytes to inflate, `most` bytes of content wait, or MOST_INFLATED
bytes are inflated. The loop starts the next one when bytes are added or delivered.

When the thread that delivers would wait for a step of this one, or for the reader, it inflates ahead too
(`help`).

Invariants: only this thread changes `_made`, and only the thread that delivers `_helped` and `_taken`.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from streamer.aio import finished
from streamer.units import KIB, MIB

if TYPE_CHECKING:
    import asyncio

    from streamer.aio import WorkerThread
    from streamer.relay.deliver.run import Run

STEP = 1 * MIB
"""Maximum bytes that a thread inflates at once. Between two steps it needs the interpreter's lock, for which
it may have to wait; `PIECE` is for one thread."""
SHORTEST_RUN = 512 * KIB
"""Least compressed bytes after which a further run of an object may begin. Where it begins is searched for
with the interpreter's lock, so most bytes should not be searched."""
MOST_INFLATED = 4 * MIB
"""Maximum bytes of one turn, after which the thread may be needed by another channel."""


class Lookahead:
    """Inflates runs ahead of their turn; its owner closes it once."""

    def __init__(self, thread: WorkerThread, most: int, *, shortest_run: int = SHORTEST_RUN) -> None:
        """`most`: bytes of content that may wait, plus a step of each thread.

        `shortest_run`: compressed bytes after which a further run of an object may begin.
        """
        self.shortest_run = shortest_run
        self._thread = thread
        self._most = most
        self._runs: deque[Run] = deque()
        """Runs that are not inflated to their end, in stream order."""
        self._made = 0
        self._helped = 0
        self._taken = 0
        """Bytes of content inflated ahead in this thread, in the other one, and delivered or dropped."""
        self._turn: asyncio.Future[None] | None = None
        self._closing = False

    def __repr__(self) -> str:
        return f"<Lookahead {self._made + self._helped - self._taken} bytes ahead, {len(self._runs)} runs>"

    def add(self, run: Run) -> None:
        """Inflate this run after those that were added before it."""
        self._runs.append(run)

    def took(self, count: int) -> None:
        """Note that so many bytes of content are delivered or dropped."""
        self._taken += count

    def start(self) -> None:
        """Begin a turn if there is work and none runs. Called when bytes are added or delivered."""
        if self._turn is None and not self._closing and (run := self._next()) is not None:
            run.lock.release()
            self._turn = self._thread.start(self._inflate)
            self._turn.add_done_callback(self._on_end)

    def _on_end(self, turn: asyncio.Future[None]) -> None:
        self._turn = None
        if not turn.cancelled():
            turn.result()
            self.start()  # bytes may have come at the turn's end

    def _next(self) -> Run | None:
        """Return the run to go on with, locked, or None if there is nothing to do now."""
        if self._made + self._helped - self._taken >= self._most:
            return None
        for run in list(self._runs):
            if not run.over_ahead and run.pending and run.lock.acquire(blocking=False):
                return run
        return None

    def _step(self, run: Run) -> int:
        try:
            return run.inflate_ahead(STEP)
        finally:
            run.lock.release()

    def _inflate(self) -> None:
        end = self._made + MOST_INFLATED
        while not self._closing and self._made < end and (run := self._next()) is not None:
            self._made += self._step(run)
            while self._runs and self._runs[0].over_ahead:
                self._runs.popleft()

    def help(self) -> bool:
        """Inflate one step in the thread that delivers, which would wait; return False if none is to do."""
        if self._closing or (run := self._next()) is None:
            return False
        self._helped += self._step(run)
        return True

    async def close(self) -> None:
        """End the turn after its current step and drop all runs. If cancelled, waits for it all the same."""
        self._closing = True
        if (turn := self._turn) is not None:
            await finished(turn)
        self._runs.clear()
