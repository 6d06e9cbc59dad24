"""Writes an epoch's transformed bytes to its outlet, from the event loop or from the thread that transforms.

The thread calls `queue` and `drain` during its turn, and the loop writes between two turns. So one of the two
writes at a time, and bytes stay in order. The loop accounts what the thread has written (`count`).
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

from streamer.linux import ALL
from streamer.sink.outlet import PipeOutlet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from streamer.relay.statistics import StateTimer
    from streamer.sink.outlet import Outlet

_MAX_VECTORS = 64
"""Pieces passed to one writev(2); the kernel allows 1,024."""


class ByteQueue:
    """Queue of byte pieces that drain into a descriptor; a `streamer.sink.outlet.Drainable`."""

    def __init__(self, pieces: Iterable[bytes | bytearray | memoryview] = ()) -> None:
        self._left = deque(memoryview(piece) for piece in pieces if piece)

    def __bool__(self) -> bool:
        return bool(self._left)

    def drop(self, most: int) -> int:
        """Remove the first bytes, at most `most`; return how many."""
        left = most
        while left and self._left:
            first = self._left.popleft()
            if left < len(first):
                self._left.appendleft(first[left:])
            left -= min(left, len(first))
        return most - left

    def drain_into(self, fd: int, most: int = ALL) -> int:
        vectors: list[memoryview] = []
        size = 0
        for piece in islice(self._left, _MAX_VECTORS):
            vectors.append(piece[: most - size])
            size += len(vectors[-1])
        return self.drop(os.writev(fd, vectors))


class EpochWriter:
    """Writes one epoch's stream to `outlet`."""

    def __init__(
        self, outlet: Outlet, *, timer: StateTimer, account: Callable[[int], None], again: int = 0
    ) -> None:
        """`account` is called with the number of bytes that the outlet accepts.

        `again`: the first bytes of the stream to drop, because the outlet accepted them before a restart.
        """
        self.timer = timer
        self.again = again
        """Bytes still to drop."""
        self._outlet = outlet
        self._account = account
        self._pipe = outlet if isinstance(outlet, PipeOutlet) else None
        """Outlet that the thread may write, too."""
        self._written = 0
        """Bytes that the outlet has accepted from `drain`; only the thread changes it during a turn."""
        self._counted = 0
        """Bytes of `_written` that `account` was called with."""

    def __repr__(self) -> str:
        return f"<EpochWriter {self._outlet}, {self.again} bytes to drop>"

    def queue(self, pieces: Iterable[bytes | bytearray | memoryview]) -> ByteQueue:
        """Return what is to be written of the next pieces, without bytes accepted before a restart."""
        left = ByteQueue(pieces)
        if self.again:
            self.again -= left.drop(self.again)
        return left

    def drain(self, left: ByteQueue) -> None:
        """Write what the outlet accepts now, in the thread."""
        with contextlib.suppress(OSError):  # the loop repeats a write that fails, and handles its error
            while left and self._pipe is not None:
                self._written += self._pipe.drain(left)

    def count(self) -> None:
        """Pass on to `account` what the outlet has accepted from `drain`."""
        count = self._written - self._counted
        self._counted += count
        self._account(count)

    async def write(self, pieces: Iterable[bytes | bytearray | memoryview]) -> None:
        """Write the next pieces of the stream, on the loop. Raises ReaderGone."""
        await self.push(self.queue(pieces))

    async def push(self, left: ByteQueue) -> None:
        """Write what `drain` has left. Raises ReaderGone."""
        while left:
            self.timer.enter("moving")
            try:
                count = self._outlet.push(left)
            except BlockingIOError:
                self.timer.enter("blocked")
                await self._outlet.writable()
                continue
            self._account(count)
        self.timer.enter("moving")
