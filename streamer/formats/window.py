"""The window between a byte stream and its records, and the loop that every record reader shares.

    source.readinto -> [ ....start####end.... ] -> records

One buffer holds what arrived and was not yet cut. Each turn fills the free part of it with as much as the
source has (up to a block), cuts every whole record out of it and hands them over as one list. What is left,
the head of a record that is still on its way, moves to the front; a record larger than the buffer makes it
double, so memory follows the bytes that *arrived*, never a length that some header declares.

Endings: the source returns 0 at the end of the stream and raises if that end is not the real one
(`PipeStream` does). A record that the end cuts is `CutRecord`, never data. Records that stood whole
before a bad one are handed over before the error is raised.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

from streamer.errors import CorruptRecord, CutRecord

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK_BYTES = 1 << 20
"""Size of a block: the most a pipe of an unprivileged user holds (contract §1.7-8)."""


class Source(Protocol):
    """What a record reader reads from: an unbuffered binary stream, such as `io.RawIOBase`."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Put bytes into `buffer`; how many, 0 at the end, or None if there are none for now."""


class RecordReader(ABC):
    """Cuts one stream into records. It is used up by one pass; it does not close its source.

    `block_bytes` is the least size of the buffer. Iterate over it for single records, or take
    `batches()`. Both raise `CorruptRecord` and `CutRecord`, and what the source raises.
    """

    what = "record"
    """The format's name for its unit, in error texts."""

    def __init__(self, source: Source, *, block_bytes: int = BLOCK_BYTES) -> None:
        if block_bytes < 1:
            raise ValueError(f"block_bytes must be at least 1, not {block_bytes}")
        self._source = source
        self._buffer = bytearray(block_bytes)
        self._view = memoryview(self._buffer)
        self._start = 0
        """Index in the buffer of the first byte not yet cut into a record."""
        self._end = 0
        """Index behind the last byte that arrived."""
        self._base = 0
        """Offset in the stream of the buffer's first byte."""
        self._wanted = 0
        """Bytes, from `_start`, that the record which is on its way needs at least."""
        self._fault: CorruptRecord | None = None

    @property
    def offset(self) -> int:
        """Offset in the stream of the next record, in bytes."""
        return self._base + self._start

    def __iter__(self) -> Iterator[bytes]:
        for batch in self.batches():
            yield from batch

    def batches(self) -> Iterator[list[bytes]]:
        """Lists of records as blocks arrive; an empty list when the source has nothing for now."""
        while True:
            if batch := self._cut():
                yield batch
            if self._fault is not None:
                raise self._fault
            arrived = self._fill()
            if arrived is None:
                yield []
            elif arrived == 0:
                break
        if batch := self._finish():
            yield batch

    def hand_over(self) -> tuple[bytes, int]:
        """What arrived and is not part of a record handed over yet, and its offset in the stream.

        With it another reader of the same stream may `go_on`; to be taken behind a list of `batches()`.
        """
        return bytes(self._view[self._start : self._end]), self.offset

    def go_on(self, rest: bytes, offset: int) -> None:
        """Forget the window, and continue the stream where another reader handed it over."""
        if len(self._buffer) < 2 * len(rest):
            self._buffer = bytearray(2 * len(rest))
            self._view = memoryview(self._buffer)
        self._view[: len(rest)] = rest
        self._start, self._end, self._base = 0, len(rest), offset
        self._forget()
        self._cut()

    def _forget(self) -> None:  # noqa: B027 - most formats have nothing to forget
        """Drop what a format remembers of the bytes in the window."""

    @abstractmethod
    def _cut(self) -> list[bytes]:
        """Every whole record in the window; sets `_start`, `_wanted`, and `_fault` at a bad one."""

    def _finish(self) -> list[bytes]:
        """What the end of the stream makes of the bytes that are left."""
        if left := self._end - self._start:
            raise CutRecord(
                f"the stream ends inside a {self.what} at offset {self.offset}: "
                f"{self._wanted} bytes wanted, {left} arrived"
            )
        return []

    def _corrupt(self, offset: int, why: str) -> CorruptRecord:
        return CorruptRecord(f"{self.what} at offset {offset} of the stream: {why}")

    def _fill(self) -> int | None:
        left = self._end - self._start
        if self._start:
            self._view[:left] = self._view[self._start : self._end]
            self._base += self._start
            self._start, self._end = 0, left
        if left > len(self._buffer) // 2:
            # Half of the buffer is always free to read into, so a large record costs few reads.
            grown = bytearray(2 * len(self._buffer))
            grown[:left] = self._view[:left]
            self._buffer, self._view = grown, memoryview(grown)
        arrived = self._source.readinto(self._view[left:])
        self._end += arrived or 0
        return arrived
