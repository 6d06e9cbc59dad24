"""The lists of one FIFO of several that one reader reads, with the position after what was returned."""

from __future__ import annotations

import select
import time
from typing import TYPE_CHECKING, Any

from streamer.readers.core.skipping import without_skipped

if TYPE_CHECKING:
    from collections.abc import Iterator

    from streamer.readers.core.plain import PipeReader
    from streamer.readers.core.stream import PipeStream

_CHECK_S = 1.0
"""Seconds between two reads of the trailer of a FIFO without bytes."""


class FifoSource:
    """The lists of one FIFO. Whoever takes from `list` keeps `left`, and that of the reader, right."""

    def __init__(self, reader: PipeReader, stream: PipeStream) -> None:
        self.reader = reader
        reader.come_to(stream.epoch)
        self._lists = reader.lists_of(stream)
        self.list: list[Any] = []
        self.left = 0
        """Entries of the list that have not been returned yet: the last ones."""

    def close(self) -> None:
        """End the epoch."""
        self._lists.close()

    def arrive(self) -> int | None:
        """Take the next list; return its length, 0 if no bytes have come, None at the end of the epoch."""
        found = next(self._lists, None)
        if found is None:
            return None
        self.list, self.left = found, len(found)
        return self.left

    def fill(self) -> bool:
        """Take lists until one has entries; return whether the epoch has one."""
        while not self.left:
            if self.arrive() is None:
                return False
        return True

    def take(self, most: int) -> list[Any]:
        """Return the good ones of at most so many of the next entries of the list."""
        begin = len(self.list) - self.left
        taken = self.list if most >= len(self.list) and not begin else self.list[begin : begin + most]
        self.left -= len(taken)
        self.reader.left = self.left
        return without_skipped(taken) if self.reader.skips else taken


def as_they_arrive(sources: dict[int, FifoSource]) -> Iterator[FifoSource]:
    """Yield the sources that have a list, as bytes arrive, until all have ended. `sources`: by descriptor."""
    poller = select.poll()
    for fd in sources:
        poller.register(fd, select.POLLIN)
    next_check = time.monotonic() + _CHECK_S
    while sources:
        ready = [fd for fd, _ in poller.poll(max(0.0, next_check - time.monotonic()) * 1000)]
        if time.monotonic() >= next_check:
            ready = list(sources)
            next_check = time.monotonic() + _CHECK_S
        for fd in ready:
            count = sources[fd].arrive()
            if count is None:
                poller.unregister(fd)
                del sources[fd]
            elif count:
                yield sources[fd]
