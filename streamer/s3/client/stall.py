"""Ends a body of which no byte arrives for the stall timeout."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from streamer.errors import ErrorContext, Transient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

RESCHEDULE_FRACTION = 1 / 64
"""Fraction of the stall timeout that passes before a body's timer is moved again."""


class Stall:
    """The timer of one body: `moved` restarts the timer, `pause` stops it until the next `moved`.

    A body can arrive in a hundred thousand pieces, so not every piece moves the timer. The timer ends
    between `seconds` and `(1 + RESCHEDULE_FRACTION) * seconds` after the last byte.
    """

    def __init__(self, seconds: float, limit: asyncio.Timeout) -> None:
        self._seconds = seconds
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._due = 0.0
        """Time of the loop's clock before which the timer is not moved."""

    def moved(self) -> None:
        """Restart the timer: a byte of the body has arrived, or the receiver has room again."""
        now = self._loop.time()
        if now >= self._due:
            self._due = now + RESCHEDULE_FRACTION * self._seconds
            self._limit.reschedule(self._due + self._seconds)

    def pause(self) -> None:
        """Stop the timer: the receiver is full, so the body waits for the receiver and not for S3."""
        self._due = 0.0
        self._limit.reschedule(None)


@contextlib.asynccontextmanager
async def within_stall(seconds: float, context: ErrorContext) -> AsyncIterator[Stall]:
    """Raise Transient when `seconds` pass without a byte of the body."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield Stall(seconds, limit)
    except TimeoutError as error:
        if limit.expired():
            raise Transient(f"no byte for {seconds:g} s", context, silent=seconds) from error
        raise
