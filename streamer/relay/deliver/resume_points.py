"""Resume points of a stream whose objects are inflated or joined: the first bytes of objects.

A restart goes on at the last point that was reported, and inflates or joins again from there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamer.plan import ResumePoint
from streamer.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamer.plan import Position

MARK_EVERY = 8 * MIB
"""Minimum bytes of a stream between two resume points, which a restart inflates or joins again."""


class ResumePoints:
    """Reports the resume points of one channel, at least `MARK_EVERY` bytes of its stream apart."""

    def __init__(self, first: Position, report: Callable[[ResumePoint], None]) -> None:
        """`first`: where the channel begins."""
        self._report = report
        self._last = (first.epoch, first.offset)
        """Epoch and offset of the last point reported."""

    def reach(self, epoch: int, point: ResumePoint) -> None:
        """Report the start of an object, if enough bytes lie between it and the last point reported."""
        last = self._last[1] if self._last[0] == epoch else 0
        if point.streamed - last >= MARK_EVERY:
            self._last = (epoch, point.streamed)
            self._report(point)
