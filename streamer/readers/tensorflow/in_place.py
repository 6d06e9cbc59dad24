"""Reads batches of TFRecords that stay where the FIFO was read into.

    FIFO --read--> slot, frame after frame --> strings that point into it --> a tensor

A batch costs one copy, from the FIFO into its slot (`streamer.readers.tensorflow.foreign`), instead of three.
If all records are of one length, the reader reads no further than the end of the batch. It computes the CRC
of the bytes as they arrive, while they are in the processor's cache, and verifies all records of the batch by
it at once (`streamer.readers.tensorflow.checksums`). Otherwise it verifies one record after the other, and
copies what belongs to the next batch, 64 KiB at most for records of less, into the next slot.

This is the regular part of the work only. It ends at a frame that is not right, at the end of a stream inside
a record, and where batches are smaller than `LEAST_BYTES`. Then the reader goes on as a `BulkTFRecordReader`,
which returns lists of records, skips records or raises the error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from streamer.formats.crc import crc32c, mask
from streamer.formats.tfrecord import FRAME_BYTES, HEADER, HEADER_BYTES, KnownLengths
from streamer.formats.window import BLOCK_BYTES
from streamer.readers.tensorflow.bulk import BulkTFRecordReader
from streamer.readers.tensorflow.checksums import frames_crc, leading_run
from streamer.readers.tensorflow.foreign import POOL
from streamer.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from streamer.formats.tfrecord import Skipped
    from streamer.formats.window import Source
    from streamer.readers.tensorflow.foreign import BatchMemory, TensorFunctions

LEAST_BYTES = 4 * MIB
"""Least bytes of a batch that is made in place; each is a step of its own."""
SHRUNK = 4
"""Factor by which batches must be smaller than `LEAST_BYTES` to end what has begun."""
_LEAST_READ = 64 * KIB


class PlacedBatch:
    """A batch in place of a list of records."""

    def __init__(self, tensor: Any, records: int) -> None:
        self._tensors = [tensor]
        self._records = records

    def __len__(self) -> int:
        return self._records

    def take(self) -> Any:
        """Return the tensor, once, so that nothing here keeps it."""
        return self._tensors.pop()


class InPlaceReader(BulkTFRecordReader):
    """A `BulkTFRecordReader` whose lists are `PlacedBatch`es of `batch_size` records, while they are large.

    Raises MemoryError too.
    """

    def __init__(
        self,
        source: Source,
        functions: TensorFunctions,
        batch_size: int,
        *,
        drop_remainder: bool,
        max_corrupted_records_to_skip: int = 0,
        skipped: Skipped | None = None,
    ) -> None:
        super().__init__(source, max_corrupted_records_to_skip=max_corrupted_records_to_skip, skipped=skipped)
        self._placing: _Placing | None = _Placing(
            source, functions, batch_size, drop_remainder=drop_remainder
        )

    @property
    def offset(self) -> int:
        """See `RecordReader.offset`."""
        return super().offset if self._placing is None else self._placing.offset

    def batches(self) -> Iterator[Any]:
        """Yield as `RecordReader.batches`, first batches in place."""
        if (placing := self._placing) is not None:
            for batch in placing.batches():
                if self.starts is not None:
                    self.starts[:] = placing.starts.tolist() if batch else []
                yield batch
            self._placing = None
            self._forget_starts()
            self.begin_with(*placing.rest)
        yield from super().batches()


class _Placing:
    """The batches in place of a stream."""

    def __init__(
        self, source: Source, functions: TensorFunctions, batch_size: int, *, drop_remainder: bool
    ) -> None:
        self.rest: tuple[bytes, int] = b"", 0
        """After the last batch: the bytes that are in no batch, and their offset in the stream."""
        self.offset = 0
        """Offset in the stream of the batch."""
        self.starts = np.empty(0, np.int64)
        """Offsets in the stream of the records of the last batch."""
        self._source = source
        self._functions = functions
        self._batch_size = batch_size
        self._drop_remainder = drop_remainder
        self._offsets = np.empty(batch_size, np.int64)
        """Offset of each record in the slot."""
        self._lengths = np.empty(batch_size, np.int64)
        self._count = 0
        """Records of the batch."""
        self._slot: BatchMemory
        """The batch's, from the first one on."""
        self._start = self._end = 0
        """Indices in the slot of the first byte not yet cut, and after the last byte that arrived."""
        self._wanted = 0
        """Minimum bytes of the incomplete record."""
        self._mean = 0.0
        """Bytes of a frame, of this batch or the last one; 0 before the first record."""
        self._least = LEAST_BYTES
        self._frame: int | None = None
        """Bytes of each frame; 0 if they differ, None before the first one."""
        self._crc = self._summed = 0
        """CRC of the first bytes of the slot, and their number, while all frames are of one size."""
        self._known = KnownLengths()
        self._crc32c = crc32c()

    def batches(self) -> Generator[PlacedBatch | list[bytes], None, None]:
        """Yield batches, and an empty list while no bytes come."""
        self._slot = POOL.take(2 * BLOCK_BYTES)
        try:
            while self._cut() and not self._are_small():
                if self._count == self._batch_size:
                    yield self._place()
                    self._least = LEAST_BYTES // SHRUNK
                    continue
                arrived = self._fill()
                if arrived is None:
                    yield []
                elif arrived == 0:
                    whole = self._cut_each() and self._start == self._end
                    if whole and self._count and not self._drop_remainder:
                        yield self._place()
                    break
            self.rest = bytes(self._slot.view[: self._end]), self.offset
        finally:
            self._slot.taken = False

    def _are_small(self) -> bool:
        """Whether the batch is too small, by what has arrived."""
        if self._count:
            self._mean = self._start / self._count
        return 0 < max(self._mean, self._wanted - HEADER_BYTES) * self._batch_size < self._least

    def _place(self) -> PlacedBatch:
        """Return the records that were cut; begin the next batch with the bytes after them."""
        full, used = self._slot, self._start
        offsets, lengths = self._offsets[: self._count], self._lengths[: self._count]
        left = self._end - used
        self._slot = POOL.take(used + used // SHRUNK + left + 1)
        self._slot.view[:left] = full.view[used : self._end]
        self.starts = offsets + (self.offset - HEADER_BYTES)
        self.offset += used
        self._start, self._end, self._count, self._crc, self._summed = 0, left, 0, 0, 0
        if not self._frame and (lengths == lengths[0]).all():
            self._frame = int(lengths[0]) + FRAME_BYTES
        return PlacedBatch(full.lend(self._functions, offsets, lengths), len(offsets))

    def _fill(self) -> int | None:
        """Read what the batch still needs, a block at most; return as `Source.readinto`."""
        due = max(int((self._batch_size - self._count) * self._mean), self._wanted) - (
            self._end - self._start
        )
        if not self._frame:
            due = max(due, _LEAST_READ)
        stop = self._end + min(due if self._mean else BLOCK_BYTES, BLOCK_BYTES)
        if stop >= self._slot.size:  # a zero follows the last record
            self._slot.grow(2 * self._slot.size + BLOCK_BYTES)
        arrived = self._source.readinto(self._slot.view[self._end : stop])
        self._end += arrived or 0
        return arrived

    def _cut(self) -> bool:
        """Cut the records of the batch that have arrived; return whether all are right.

        Frames of one size are cut once all of the batch have arrived.
        """
        if self._frame is None and self._end >= HEADER_BYTES:
            length, stored = HEADER.unpack_from(self._slot.view)
            if not self._known.holds(length, stored):
                return False
            self._mean = self._frame = length + FRAME_BYTES
        if not self._frame:
            return self._cut_each()
        size = self._frame * self._batch_size
        stop = min(size, self._end)
        self._crc = self._crc32c(self._slot.view[self._summed : stop], self._crc)
        self._summed = stop
        return stop < size or self._cut_alike(self._frame)

    def _cut_alike(self, frame: int) -> bool:
        """Cut all records of the batch, which has arrived; do as `_cut_each` if a frame has another size."""
        view, count = self._slot.view, self._batch_size
        length, stored = HEADER.unpack_from(view)
        alike = length + FRAME_BYTES == frame and self._known.holds(length, stored)
        if not alike or len(frames := leading_run(view, 0, count, length, stored)) < count:
            self._frame = 0
            return self._cut_each()
        if frames_crc(frames["crc"], length, self._crc32c(view[:HEADER_BYTES])) != self._crc:
            return False
        self._offsets[:] = np.arange(HEADER_BYTES, count * frame, frame)
        self._lengths[:] = length
        self._start, self._count = count * frame, count
        return True

    def _cut_each(self) -> bool:
        """Cut the records of the batch that have arrived one by one; return whether all are right."""
        view, start, end = self._slot.view, self._start, self._end
        crc, unpack, known = self._crc32c, HEADER.unpack_from, self._known
        count, size = self._count, self._batch_size
        self._wanted = HEADER_BYTES
        while count < size and end - start >= HEADER_BYTES:
            length, stored = unpack(view, start)
            if known.get(length) != stored and not known.holds(length, stored):
                return False
            frame = length + FRAME_BYTES
            if end - start < frame:
                self._wanted = frame
                break
            self._offsets[count] = data = start + HEADER_BYTES
            self._lengths[count] = length
            if int.from_bytes(view[data + length : start + frame], "little") != mask(
                crc(view[data : data + length])
            ):
                return False
            start += frame
            count += 1
            self._start, self._count = start, count
        return True
