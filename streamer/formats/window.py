"""Base of all record readers: the buffer between a byte stream and its records, and the read loop.

    source.readinto -> [ ....start####end.... ] -> records

One buffer holds the bytes that have arrived and are not cut into records yet. Each turn of the loop fills its
free part with as much as the source has (up to a block), cuts out every whole record and returns these as one
list. The rest, the start of an incomplete record, moves to the front. A record that is larger than the buffer
doubles it, so memory grows with the bytes that have *arrived*, never with a length in a header.

The source returns 0 at the end of the stream, and raises if that end is not proven (`PipeStream`). A stream
that ends inside a record raises `CutRecord`. Whole records before a bad one are returned before the error is
raised.

A caller that skips corrupt records (`streamer.readers.core.skipping`) sets `keeps_places`: a corrupt record
whose end is known is then returned as a `BadRecord`, in its place. After any other error the caller may
`drop_arrived` bytes up to a border that it knows, `move_to` it, and call `batches` again.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from streamer.errors import CorruptRecord, CutRecord, StreamError
from streamer.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK_BYTES = 1 << 20
"""Bytes of a block: the capacity of an unprivileged user's largest pipe (contract §1.7-8)."""


class Source(Protocol):
    """Source of a record reader: an unbuffered binary stream, such as `io.RawIOBase`."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Read bytes into `buffer`; return how many, 0 at the end, or None if none has arrived."""


@dataclass(frozen=True, slots=True)
class BadRecord:
    """The place of a corrupt record in a list of records."""

    offset: int
    """Offset of the record in the reader's stream, in bytes."""
    reason: str


class RecordReader(ABC):
    """Cuts one stream into records, once; does not close its source.

    `block_bytes`: minimum size of the buffer. Iterate over the reader for single records, or call
    `batches()`. Both raise `CorruptRecord`, `CutRecord`, and the source's errors.
    """

    what = "record"
    """Name of one record in error texts."""
    contiguous = True
    """Whether each record ends where the next one begins."""

    def __init__(self, source: Source, *, block_bytes: int = BLOCK_BYTES) -> None:
        if block_bytes < 1:
            raise ValueError(f"block_bytes must be at least 1, not {block_bytes}")
        self._source = source
        self._buffer: bytearray | mmap.mmap = bytearray(block_bytes)
        self._view = memoryview(self._buffer)
        self._start = 0
        """Index in the buffer of the first byte not yet cut into a record."""
        self._end = 0
        """Index after the last byte that arrived."""
        self._base = 0
        """Offset in the stream of the buffer's first byte."""
        self._wanted = 0
        """Minimum bytes of the incomplete record, from `_start` on."""
        self._fault: StreamError | None = None
        self.starts: list[int] | None = None
        """Offsets in the stream of the last list's records, and of those left out; None: they are not noted.
        Set it to an empty list before the first record to have them.
        """
        self.left_out: list[tuple[int, str]] = []
        """Offset and fault of the corrupt records left out of the last list, if `starts` are noted."""
        self.keeps_places = False
        """Whether a corrupt record whose end is known is returned as a `BadRecord`. Set it before the first
        record.
        """
        self.bad_places: list[int] = []
        """Indices of the last list's entries that are `BadRecord`s."""

    @property
    def offset(self) -> int:
        """Offset in the stream of the next record, in bytes."""
        return self._base + self._start

    @property
    def skipped_records(self) -> int:
        """Number of corrupt records that were left out so far."""
        return 0

    def __iter__(self) -> Iterator[bytes]:
        for batch in self.batches():
            yield from batch

    def batches(self) -> Iterator[list[bytes]]:
        """Yield lists of records as blocks arrive, and an empty list when the source has no bytes now.

        With `keeps_places` also an empty list for a block that completes no record, so that the caller sees a
        border in each block that arrives.
        """
        while True:
            self._forget_starts()
            self.bad_places.clear()
            if (batch := self._cut()) or self.left_out or self.keeps_places:
                yield batch
            if self._fault is not None:
                raise self._fault
            arrived = self._fill()
            if arrived is None:
                yield []
            elif arrived == 0:
                break
        self._forget_starts()
        if batch := self._finish():
            yield batch

    def _forget_starts(self) -> None:
        if self.starts:
            self.starts.clear()
            self.left_out.clear()

    @property
    def arrived(self) -> int:
        """Offset in the stream after the last byte that has arrived."""
        return self._base + self._end

    @property
    def expected(self) -> int:
        """Least offset in the stream of the end of the incomplete record; `offset` if none has begun."""
        return self.offset + (self._wanted if self.offset < self.arrived else 0)

    def move_to(self, offset: int) -> None:
        """Go on with a record that begins at this offset, between two lists, also after an error.

        `offset`: in the last block that arrived, or `arrived`.
        """
        self._start, self._wanted, self._fault = offset - self._base, 0, None
        self._forget()

    def drop_arrived(self) -> int | None:
        """Drop all bytes that have arrived, and wait for others; return as `Source.readinto`."""
        self.move_to(self.arrived)
        return self._fill()

    def hand_over(self) -> tuple[bytes, int]:
        """Return the bytes that have arrived and are not returned as records, and their offset in the stream.

        Another reader of the stream may `go_on` with them. Call this after a list of `batches()`.
        """
        return bytes(self._view[self._start : self._end]), self.offset

    def go_on(self, rest: bytes, offset: int) -> None:
        """Continue the stream with the bytes and the offset that another reader's `hand_over` returned."""
        self.begin_with(rest, offset)
        self._cut()

    def begin_with(self, rest: bytes, offset: int) -> None:
        """Begin at `offset` of the stream, with bytes that have arrived; they may contain whole records."""
        if len(self._buffer) < 2 * len(rest):
            self._resize(2 * len(rest), 0)
        self._view[: len(rest)] = rest
        self._start, self._end, self._base = 0, len(rest), offset
        self._forget()

    def _forget(self) -> None:  # noqa: B027 - most formats have nothing to forget
        """Drop a format's state about the bytes in the window."""

    @abstractmethod
    def _cut(self) -> list[bytes]:
        """Return every whole record in the window; set `_start`, `_wanted`, and `_fault` at a bad one."""

    def _finish(self) -> list[bytes]:
        """Return the records that the end of the stream completes. Raises CutRecord."""
        if left := self._end - self._start:
            raise CutRecord(
                f"the stream ends inside a {self.what} at offset {self.offset}: "
                f"{counted(self._wanted, 'byte')} wanted, {left} arrived"
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
            self._resize(2 * len(self._buffer), left)
        arrived = self._source.readinto(self._view[left:])
        self._end += arrived or 0
        return arrived

    def _resize(self, size: int, left: int) -> None:
        """Make the buffer larger; keep its first `left` bytes.

        An anonymous mapping takes memory for the pages that were written only, and grows without a copy.
        Raises MemoryError; the window stays as it was then.
        """
        try:
            if isinstance(self._buffer, mmap.mmap):
                self._view.release()
                self._buffer.resize(size)
            else:
                grown = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                grown[:left] = self._view[:left]
                self._buffer = grown
        except OSError as error:
            raise MemoryError(f"no memory for a {self.what} of more than {left} bytes") from error
        finally:
            self._view = memoryview(self._buffer)
