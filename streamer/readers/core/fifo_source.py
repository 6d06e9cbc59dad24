"""The lists of one FIFO of several that a reader mixes, in pieces, with the reader's position after each."""

from __future__ import annotations

import select
import time
from typing import TYPE_CHECKING, Any

from streamer.readers.core.skipping import SkippedRecord, without_skipped

if TYPE_CHECKING:
    from collections.abc import Iterator

    from streamer.readers.core.plain import PipeReader
    from streamer.readers.core.stream import PipeStream

_CHECK_S = 1.0
"""Seconds between two reads of the trailer of a FIFO without bytes."""


class FifoSource:
    """The lists of one FIFO, of which pieces are returned. The reader's position is after the last record."""

    def __init__(self, reader: PipeReader, stream: PipeStream) -> None:
        self.reader = reader
        reader.come_to(stream.epoch)
        self._lists = reader.lists_of(stream)
        self._list: list[Any] = []
        self._left = 0
        """Entries of the list that are in no piece yet."""

    def close(self) -> None:
        """End the epoch."""
        self._lists.close()

    def arrive(self) -> int | None:
        """Take the next list; return its length, 0 if no bytes have come, None at the end of the epoch."""
        found = next(self._lists, None)
        if found is None:
            return None
        self._list, self._left = found, len(found)
        return self._left

    def piece(self, most: int) -> list[Any] | None:
        """Return at most so many of the next entries, all of one list; None at the end of the epoch."""
        while not self._left:
            if self.arrive() is None:
                return None
        begin = len(self._list) - self._left
        piece = self._list[begin : begin + most]
        self._left -= len(piece)
        return piece

    def rest(self) -> list[Any]:
        """Return the list that has arrived, or what is left of it."""
        return self.piece(self._left) or []

    def each(self, piece: list[Any]) -> Iterator[Any]:
        """Yield the good records of a piece, one by one."""
        for left in range(len(piece) - 1, -1, -1):
            self.reader.left = self._left + left
            record = piece[-1 - left]
            if type(record) is not SkippedRecord:
                yield record

    def whole(self, piece: list[Any]) -> list[Any]:
        """Return the good records of a piece."""
        self.reader.left = self._left
        return without_skipped(piece) if self.reader.skips else piece


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
