"""Notices that one rank of a shared stream has held back others for so long that they are to be separated.

    the stream waits for a FIFO ──GRACE / 2──▶ look ──GRACE / 2──▶ look ─▶ separate

A rank holds back another one if the stream waits for a FIFO of the first, which is full or has no reader,
while a FIFO of the second has a reader and is empty. Two looks in succession must find that. No byte of the
stream moves between them, so the second rank's FIFO was empty all the time. While every other FIFO has bytes,
as in an evaluation of all ranks, nobody is held back, and the looks go on.

The decision is pure (`held_back`). The clock costs nothing while bytes move: it is set when the stream begins
to wait, and looked at by one timer.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

GRACE = 20.0
"""Seconds for which a rank may hold back others. A program that reads FIFO after FIFO waits for them once.
The processes of a job open their FIFOs within some seconds of each other, and ranks that train in lockstep
read at one pace."""


@dataclass(frozen=True, slots=True)
class FifoProgress:
    """What a FIFO of a shared stream is at."""

    name: str
    waits_for_stream: bool
    """Whether it has a reader, and is empty."""
    stops_stream: bool
    """Whether the stream waits for it: it is full, or has no reader."""


@dataclass(frozen=True, slots=True)
class HeldBack:
    """FIFOs that held back others."""

    by: tuple[str, ...]
    seconds: float
    """How long the stream waited for them, at the least."""


def held_back(ranks: Iterable[Sequence[FifoProgress]]) -> tuple[str, ...]:
    """Return the FIFOs that hold back another rank; none if no rank is held back.

    FIFOs of one rank are copies, which cannot be separated.
    """
    by: list[str] = []
    waiting = False
    for fifos in ranks:
        stops = [fifo.name for fifo in fifos if fifo.stops_stream]
        by += stops
        waiting = waiting or (not stops and any(fifo.waits_for_stream for fifo in fifos))
    return tuple(by) if waiting else ()


class HeldBackWatch:
    """Calls `on_held_back` once, when a rank has held back others for `grace` seconds."""

    def __init__(
        self,
        look: Callable[[], tuple[str, ...]],
        on_held_back: Callable[[HeldBack], None],
        *,
        grace: float,
    ) -> None:
        """`look`: returns the FIFOs that hold back others now."""
        self._look_now = look
        self._on_held_back = on_held_back
        self._grace = grace
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None
        """Loop time since which the stream waits; None: it does not wait."""
        self._found: tuple[float, tuple[str, ...]] | None = None
        """The wait in which the last look found FIFOs that hold back others, and these."""
        self._timer: asyncio.TimerHandle | None = None

    def wait(self) -> None:
        """Note that the stream waits for a FIFO."""
        if self._since is None:
            self._since = self._loop.time()
            if self._timer is None:
                self._set_timer(self._since)

    def go_on(self) -> None:
        """Note that the stream goes on."""
        self._since = None

    def close(self) -> None:
        """Stop the clock."""
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self, since: float) -> None:
        self._timer = self._loop.call_at(since + self._grace / 2, self._look)

    def _look(self) -> None:
        self._timer, since, now = None, self._since, self._loop.time()
        if since is None:
            return
        if now < since + self._grace / 2:
            self._set_timer(since)  # another wait than that which set the timer
            return
        by = self._look_now()
        if by and self._found == (since, by):
            self._on_held_back(HeldBack(by, now - since))
            return
        self._found = (since, by) if by else None
        self._set_timer(now)
