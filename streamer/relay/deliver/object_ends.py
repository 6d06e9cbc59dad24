"""Where the objects of a stream begin and end, and where a restart may go on in one that is transformed.

A program that expects one archive may stop at the end mark of the first object, and `Join` is the remedy: so
the ends of the last objects are remembered, to detect a reader that stopped there. If objects are inflated or
joined, a restart goes on at the last resume point that was reported, the first byte of an object, and
inflates or joins again from there.

The epoch's key list (`streamer.sink.key_list`) has a line for each object that begins. If this machine
refuses a line, `KeyList.reach` reports it as a full pipe does, and delivery waits in `writable`. So the FIFO
never has a byte whose line the file lacks.
"""

from __future__ import annotations

import errno
from collections import deque
from typing import TYPE_CHECKING

from streamer.errors import ReaderGone, Shortage
from streamer.plan import ResumePoint
from streamer.retry import retry_while_refused
from streamer.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamer.plan import Position
    from streamer.retry import RetryPolicy
    from streamer.sink.key_list import KeyListWriter
    from streamer.sink.outlet import Outlet


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


class KeyList:
    """Says which object the bytes of one epoch are of. Its owner closes it once."""

    def __init__(
        self, writer: KeyListWriter, policy: RetryPolicy, on_shortage: Callable[[Shortage | None], None]
    ) -> None:
        """`policy`: of waits while this machine refuses lines. `on_shortage`: see `retry_while_refused`."""
        self._writer = writer
        self._policy = policy
        self._on_shortage = on_shortage

    def reach(self, consumed: int, count: int, delivered: int) -> None:
        """List the objects that begin in `count` bytes of the plan from `consumed` on.

        `delivered`: offset of the first of them in the stream. Raises BlockingIOError if this machine refuses
        a line; the caller waits in `writable`, and repeats the call.
        """
        try:
            self._writer.reach(consumed, count, delivered)
        except Shortage as error:
            raise BlockingIOError(errno.EAGAIN, "the key list takes nothing now") from error

    async def writable(self, outlet: Outlet) -> None:
        """Wait until the lines that this machine has refused are written.

        Raises Shortage if the machine refuses them for too long, ReaderGone if the reader of `outlet` closes.
        """

        async def flush() -> None:
            if outlet.reader_gone:
                raise ReaderGone("the reader closed the pipe")
            self._writer.flush()

        await retry_while_refused(flush, self._policy, self._on_shortage)

    def close(self) -> None:
        """Close the list."""
        self._writer.close()
