"""Base of all record readers: the buffer between a byte stream and its records, and the read loop.

    source.readinto -> [ ....start####end.... ] -> records

One buffer holds the bytes that have arrived and are not cut into records yet. Each turn of the loop fills its
free part with as much as the source has (up to a block), cuts out every whole record and returns these as one
list. The rest, the start of an incomplete record, moves to the front. A record that is larger than the buffer
doubles it, so memory grows with the bytes that have *arrived*, never with a length in a header.

    source.readv -> [ header | end, header | end, header ]   and   data, data, ...

The data of a large record, and of the next records if they have one length, is read into memory of its own
instead, which becomes the record without a copy (`streamer.formats.ahead`). The buffer has what is between.

The source returns 0 at the end of the stream, and raises if that end is not proven (`PipeStream`). A stream
that ends inside a record raises `CutRecord`. Whole records before a bad one are returned before the error is
raised.

A caller that skips corrupt records (`streamer.readers.core.skipping`) sets `keeps_places`: a corrupt record
whose end is known is then returned as a `CorruptPlace`, in its place. After any other error the caller may
`drop_arrived` bytes up to a border that it knows, `move_to` it, and call `batches` again.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from streamer.errors import CorruptRecord, CutRecord, StreamError
from streamer.formats.ahead import LARGE, LARGEST, REPEATED, DataAhead, Frame, joined
from streamer.formats.signatures import LOOKED_AT, foreign
from streamer.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BLOCK_BYTES = 1 << 20
"""Bytes of a block: the capacity of an unprivileged user's largest pipe (contract §1.7-8)."""


class Source(Protocol):
    """Source of a record reader: an unbuffered binary stream, such as `io.RawIOBase`.

    It may have a `readv` too, which reads into several buffers, one after the other.
    """

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Read bytes into `buffer`; return how many, 0 at the end, or None if no byte has arrived."""


class FailedRecord(list[Any]):
    """An empty list in the place of a corrupt record, for callers that go on after its error."""

    def __init__(self, error: CorruptRecord) -> None:
        super().__init__()
        self.error = error


@dataclass(frozen=True, slots=True)
class CorruptPlace:
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
    kind = ""
    """The format's name in `RecordFormat`."""
    contiguous = True
    """Whether each record ends where the next one begins."""

    def __init__(self, source: Source, *, block_bytes: int = BLOCK_BYTES) -> None:
        if block_bytes < 1:
            raise ValueError(f"block_bytes must be at least 1, not {block_bytes}")
        self._source = source
        self._readv = getattr(source, "readv", lambda views: source.readinto(views[0]))
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
        self._frame: Frame | None = None
        """Frame of the incomplete record, if its length is known."""
        self._ahead: list[DataAhead] = []
        """Data of the next records, if it is not in the buffer. The frame of each is `_frame`."""
        self._block = block_bytes
        self._fault: StreamError | None = None
        self._fault_end: int | None = None
        """Offset in the stream after the corrupt record of `_fault`; None if it is unknown."""
        self.starts: list[int] | None = None
        """Offsets in the stream of the last list's records, and of those left out; None: they are not noted.
        Set it to an empty list before the first record to have them.
        """
        self.left_out: list[tuple[int, str]] = []
        """Offset and fault of the corrupt records left out of the last list, if `starts` are noted."""
        self.keeps_places = False
        """Whether a corrupt record whose end is known is returned as a `CorruptPlace`. Set it before the
        first record.
        """
        self.bad_places: list[int] = []
        """Indices of the last list's entries that are `CorruptPlace`s."""

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
        return self._base + self._end + sum(data.arrived for data in self._ahead)

    @property
    def expected(self) -> int:
        """Least offset in the stream of the end of the incomplete record; `offset` if no record has begun."""
        return self.offset + (self._wanted if self.offset < self.arrived else 0)

    def move_to(self, offset: int) -> None:
        """Go on with a record that begins at this offset, between two lists, also after an error.

        `offset`: in the last block that arrived, or `arrived`.
        """
        self._attach()
        self._start, self._wanted, self._fault = offset - self._base, 0, None
        self._frame = None
        self._forget()

    def pass_over_fault(self) -> bool:
        """Go on after the corrupt record of the last error; return whether the end of the record is known."""
        end, self._fault_end = self._fault_end, None
        if end is None:
            return False
        self.move_to(end)
        return True

    def drop_arrived(self) -> int | None:
        """Drop all bytes that have arrived, and wait for others; return as `Source.readinto`."""
        self.move_to(self.arrived)
        return self._fill()

    def hand_over(self) -> tuple[bytes, int]:
        """Return the bytes that have arrived and are not returned as records, and their offset in the stream.

        Another reader of the stream may `go_on` with them. Call this after a list of `batches()`.
        """
        return self._rest(), self.offset

    def go_on(self, rest: bytes, offset: int) -> None:
        """Continue the stream with the bytes and the offset that another reader's `hand_over` returned."""
        self.begin_with(rest, offset)
        self._cut()

    def begin_with(self, rest: bytes, offset: int) -> None:
        """Begin at `offset` of the stream, with bytes that have arrived; they may contain whole records."""
        self._put(rest, offset)
        self._forget()

    def _put(self, rest: bytes, offset: int) -> None:
        if len(self._buffer) < 2 * len(rest):
            self._resize(2 * len(rest), 0)
        self._view[: len(rest)] = rest
        self._start, self._end, self._base = 0, len(rest), offset
        self._ahead, self._frame = [], None

    def _rest(self) -> bytes:
        """Return the bytes that have arrived and are not cut into records."""
        view = self._view[self._start : self._end]
        if not self._ahead or self._frame is None:
            return bytes(view)
        return joined(view, self._frame.header, self._frame.between, self._ahead)

    def _attach(self) -> None:
        """Put all bytes that have arrived into the buffer."""
        if self._ahead:
            self._put(self._rest(), self._base + self._start)

    def _forget(self) -> None:  # noqa: B027 - most formats have nothing to forget
        """Drop a format's state about the bytes in the window."""

    @abstractmethod
    def _cut(self) -> list[bytes]:
        """Return every whole record in the window; set `_start`, `_wanted`, and `_fault` at a bad one."""

    def _finish(self) -> list[bytes]:
        """Return the records that the end of the stream completes. Raises CutRecord."""
        if left := self.arrived - self._base - self._start:
            raise CutRecord(
                f"the stream ends inside a {self.what} at offset {self.offset}: "
                f"{counted(self._wanted, 'byte')} wanted, {left} arrived"
            )
        return []

    def _foreign(self) -> str | None:
        """Return what the stream is, if it begins as another format; None after its first bytes."""
        found = None if self.offset else foreign(bytes(self._view[: min(self._end, LOOKED_AT)]), self.kind)
        return found and found.refusal(self.kind)

    def _corrupt(self, offset: int, why: str) -> CorruptRecord:
        if offset == 0:
            why = self._foreign() or why
        return CorruptRecord(f"{self.what} at offset {offset} of the stream: {why}")

    def _fill(self) -> int | None:
        left = self._end - self._start
        if self._start:
            self._view[:left] = self._view[self._start : self._end]
            self._base += self._start
            self._start, self._end = 0, left
        if self._ahead or self._detach():
            return self._fill_ahead()
        if left > len(self._buffer) // 2:
            # Half of the buffer is always free to read into, so a large record costs few reads.
            self._resize(2 * len(self._buffer), left)
        arrived = self._source.readinto(self._view[left:])
        self._end += arrived or 0
        return arrived

    def _note_incomplete(self, header: int, length: int, after: int, batch: Sequence[object] = ()) -> None:
        """Note the frame of the incomplete record, which follows those of `batch`."""
        before = batch[-1] if batch else None
        repeated = isinstance(before, bytes) and len(before) == length
        self._frame = Frame(header, length, after, repeated)
        self._wanted = header + length + after

    def _detach(self) -> bool:
        """Begin to read data into memory of its own, if that is cheaper; return whether it is."""
        frame = self._frame
        if frame is None or not (count := self._number_ahead(frame)):
            return False
        try:
            ahead = [DataAhead(frame.length) for _ in range(count)]
        except MemoryError:
            return False
        header, stop = frame.header, frame.header + frame.length
        ahead[0].put(self._view[header : min(stop, self._end)])
        after = bytes(self._view[stop : self._end])
        if len(self._buffer) < (needed := header + count * frame.between):
            self._resize(needed, header)
        self._view[header : header + len(after)] = after
        self._end = min(header, self._end) + len(after)
        self._ahead = ahead
        return True

    def _cut_ahead(self, batch: list[bytes]) -> bool:
        """Cut the records whose data is ahead; return whether the buffer has what follows them."""
        while self._ahead and self._frame is not None:
            frame, data, have = self._frame, self._ahead[0], self._end - self._start
            if have < frame.header:
                self._wanted = frame.header
                return False
            if not self._has_header(data.size):
                self._attach()
                return True
            if not data.whole or have < frame.header + frame.after:
                self._wanted = frame.header + data.size + frame.after
                return False
            if not self._admit(data.record(), batch):
                return False
            self._start += frame.header + frame.after
            self._base += self._ahead.pop(0).size
        return True

    def _has_header(self, length: int) -> bool:  # noqa: ARG002 - most formats have a header
        """Return whether the header at `_start` is right, and of a whole record of this length."""
        return True

    def _admit(self, record: bytes, batch: list[bytes]) -> bool:
        """Add the record ahead that begins at `_start`, or a `CorruptPlace`; return False for a fault."""
        batch.append(record)
        if self.starts is not None:
            self.starts.append(self._base + self._start)
        return True

    def _number_ahead(self, frame: Frame) -> int:
        """Return the number of records whose data is read into memory of its own next."""
        length = frame.length
        least = self._block // (REPEATED if frame.repeated else LARGE)
        if not max(1, least) <= length <= LARGEST:
            return 0
        rest = frame.header + length + frame.after - self._end
        return 1 + (max(0, self._block - rest) // (length + frame.between) if frame.repeated else 0)

    def _fill_ahead(self) -> int | None:
        """Read the rest of the next data, and what is between; return as `Source.readinto`."""
        assert self._frame is not None  # noqa: S101 - it is set before
        at, stop = self._end, self._frame.header
        parts: list[tuple[memoryview, DataAhead | None]] = []
        for data in self._ahead:
            if at < stop:
                parts.append((self._view[at:stop], None))
                at = stop
            if not data.whole:
                parts.append((data.rest, data))
            stop += self._frame.between
        if at < stop:
            parts.append((self._view[at:stop], None))
        arrived: int | None = self._readv([view for view, _ in parts])
        left = arrived or 0
        for view, owner in parts:
            count = min(left, len(view))
            left -= count
            if owner is None:
                self._end += count
            else:
                owner.move(count)
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
