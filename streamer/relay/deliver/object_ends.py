"""Offsets at which the last objects of an epoch's stream ended, to notice a reader that stopped at one.

Programs that read one archive after the other may stop at the end mark of the first (`Join` is for those).
"""

from __future__ import annotations

from collections import deque

from streamer.units import KIB

LAST_ENDS = 64
"""Objects whose ends are remembered: more than a FIFO holds of objects that are large enough to judge by."""
MOST_BUFFERED = 128 * KIB
"""Bytes that readers take ahead of what they use: the buffer of Python's `open` from 3.14 on."""


class ObjectEnds:
    """The ends of the last objects delivered."""

    def __init__(self) -> None:
        self._ends: deque[tuple[int, int]] = deque(maxlen=LAST_ENDS)
        """Offset in the stream after each object, and the object's size."""

    def clear(self) -> None:
        """Begin a new epoch."""
        self._ends.clear()

    def add(self, offset: int, size: int) -> None:
        """Note that an object of `size` bytes ends before `offset`."""
        self._ends.append((offset, size))

    def stopped_at_one(self, offset: int) -> bool:
        """Return whether a reader that has taken `offset` bytes of the stream stopped at an object's end.

        A buffered reader has read on by less than a buffer. A 64th of the object is the limit too, so that
        a reader is rarely there by chance.
        """
        return any(0 <= offset - end <= min(MOST_BUFFERED, size // 64) for end, size in self._ends)
