"""Remembers where the last objects of a stream ended, to detect a reader that stopped at an object's end.

A program that expects one archive may stop at the end mark of the first object; `Join` is the remedy.
"""

from __future__ import annotations

from collections import deque

from streamer.units import KIB

LAST_ENDS = 1024
"""Number of object ends remembered: a FIFO holds 1 MiB, and an archive has more than 1 KiB."""
MOST_BUFFERED = 128 * KIB
"""Bytes that a buffered reader reads past what it uses: the buffer of Python's `open` from 3.14 on."""


class ObjectEnds:
    """Ends of the last objects delivered in the current epoch."""

    def __init__(self) -> None:
        self._ends: deque[tuple[int, int]] = deque(maxlen=LAST_ENDS)
        """Offset in the stream after each object, and the object's size."""

    def clear(self) -> None:
        """Forget all ends, for a new epoch."""
        self._ends.clear()

    def add(self, offset: int, size: int) -> None:
        """Note that an object of `size` bytes ends before `offset`."""
        self._ends.append((offset, size))

    def stopped_at_one(self, offset: int) -> bool:
        """Return whether a reader that has taken `offset` bytes of the stream stopped at an object's end.

        A buffered reader may have read up to `MOST_BUFFERED` bytes past the end. A 64th of the object is a
        limit too, so that a reader is rarely there by chance.
        """
        return any(0 <= offset - end <= min(MOST_BUFFERED, size // 64) for end, size in self._ends)
