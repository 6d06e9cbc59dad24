"""Reads batches of TFRecords that stay where the FIFO was read into.

    FIFO --read--> slot, frame after frame --> strings that point into it --> a tensor

A batch costs one copy, from the FIFO into its slot (`streamer.readers.tensorflow.slots`), instead of three.
The reader reads no further than the end of the batch if all records are of one length; else it copies what
belongs to the next batch, 64 KiB at most for records of less, into the next slot.

It does the regular part of the work only. It ends at a frame that is not right, at the end of a stream inside
a record, and where batches are smaller than `LEAST_BYTES`. Another reader goes on with the `rest`, skips
records or raises the error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from streamer.formats.crc import crc32c, mask
from streamer.formats.tfrecord import FRAME_BYTES, HEADER, HEADER_BYTES, KnownLengths
from streamer.formats.window import BLOCK_BYTES
from streamer.readers.tensorflow.checksums import leading_run, masked
from streamer.readers.tensorflow.slots import POOL
from streamer.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Generator

    from streamer.formats.window import Source
    from streamer.readers.tensorflow.foreign import TensorFunctions
    from streamer.readers.tensorflow.slots import Slot

LEAST_BYTES = 4 * MIB
"""Least bytes of a batch that is made in place; each is a step of its own."""
SHRUNK = 4
"""Factor by which batches must be smaller than `LEAST_BYTES` to end what has begun."""
RUN = 8
"""Least number of frames of one length that are verified together."""
_LEAST_READ = 64 * KIB


class InPlaceReader:
    """Reads batches of `batch_size` records from `source`, which it does not close.

    Raises MemoryError, and the source's errors.
    """

    def __init__(
        self, source: Source, functions: TensorFunctions, batch_size: int, *, drop_remainder: bool
    ) -> None:
        self.rest: tuple[bytes, int] = b"", 0
        """After the last batch: the bytes that are in no batch, and their offset in the stream."""
        self._source = source
        self._functions = functions
        self.batch_size = batch_size
        """Records of a batch."""
        self._drop_remainder = drop_remainder
        self._offsets = np.empty(batch_size, np.int64)
        """Of the records of the batch, in the slot."""
        self._lengths = np.empty(batch_size, np.int64)
        self._count = 0
        """Records of the batch."""
        self._slot: Slot
        """The batch's, from the first one on."""
        self._start = self._end = 0
        """Indices in the slot of the first byte not yet cut, and after the last byte that arrived."""
        self._base = 0
        """Offset in the stream of the batch."""
        self._wanted = 0
        """Minimum bytes of the incomplete record."""
        self._mean = 0.0
        """Bytes of a frame, of this batch or the last one; 0 before the first record."""
        self._least = LEAST_BYTES
        self._one_length = True
        self._known = KnownLengths()
        self._crc32c = crc32c()

    def batches(self) -> Generator[list[Any] | None, None, None]:
        """Yield tensors, each in a list, and None while no bytes come."""
        self._slot = POOL.take(2 * BLOCK_BYTES)
        try:
            while self._cut() and not self._are_small():
                if self._count == self.batch_size:
                    yield [self._place()]
                    self._least = LEAST_BYTES // SHRUNK
                    continue
                arrived = self._fill()
                if arrived is None:
                    yield None
                elif arrived == 0:
                    if self._start == self._end and self._count and not self._drop_remainder:
                        yield [self._place()]
                    break
            self.rest = bytes(self._slot.view[: self._end]), self._base
        finally:
            self._slot.taken = False

    def _are_small(self) -> bool:
        """Whether the batch is too small, by what has arrived."""
        if self._count:
            self._mean = self._start / self._count
        return 0 < max(self._mean, self._wanted - HEADER_BYTES) * self.batch_size < self._least

    def _place(self) -> Any:
        """Return a tensor of the records that were cut; begin the next batch with the bytes after them."""
        full, used, count = self._slot, self._start, self._count
        left = self._end - used
        self._slot = POOL.take(used + used // SHRUNK + left + 1)
        self._slot.view[:left] = full.view[used : self._end]
        self._base += used
        self._start, self._end, self._count = 0, left, 0
        return full.lend(self._functions, self._offsets[:count], self._lengths[:count])

    def _fill(self) -> int | None:
        """Read what the batch still needs, a block at most; return as `Source.readinto`."""
        due = max(int((self.batch_size - self._count) * self._mean), self._wanted) - (self._end - self._start)
        if not self._one_length:
            due = max(due, _LEAST_READ)
        stop = self._end + min(due if self._mean else BLOCK_BYTES, BLOCK_BYTES)
        if stop >= self._slot.size:  # a zero follows the last record
            self._slot.grow(2 * self._slot.size + BLOCK_BYTES)
        arrived = self._source.readinto(self._slot.view[self._end : stop])
        self._end += arrived or 0
        return arrived

    def _cut(self) -> bool:
        """Cut the records of the batch that have arrived; return whether all are right."""
        view, start, end = self._slot.view, self._start, self._end
        crc, unpack, known = self._crc32c, HEADER.unpack_from, self._known
        count, size = self._count, self.batch_size
        right, self._wanted = True, HEADER_BYTES
        while count < size and end - start >= HEADER_BYTES:
            length, stored = unpack(view, start)
            if known.get(length) != stored and not self._learn(length, stored):
                right = False
                break
            frame = length + FRAME_BYTES
            if end - start < frame:
                self._wanted = frame
                break
            many = min((end - start) // frame, size - count)
            if many >= RUN and unpack(view, start + frame) == (length, stored):
                many = self._cut_run(start, length, stored, many)
            else:
                many = 1
                self._offsets[count] = data = start + HEADER_BYTES
                self._lengths[count] = length
                found = mask(crc(view[data : data + length]))
                if int.from_bytes(view[data + length : start + frame], "little") != found:
                    many = 0
            if not many:
                right = False
                break
            start += many * frame
            count += many
            self._start, self._count = start, count
        return right

    def _learn(self, length: int, stored: int) -> bool:
        """Return whether `stored` is the CRC of the length of a frame."""
        first = not self._known
        if not self._known.holds(length, stored):
            return False
        self._one_length = first
        return True

    def _cut_run(self, start: int, length: int, stored: int, many: int) -> int:
        """Cut the next frames of one length, `many` at most; return how many, 0 if one has a wrong CRC."""
        view, crc, data = self._slot.view, self._crc32c, start + HEADER_BYTES
        frames = leading_run(view, start, many, length, stored)
        many = len(frames)
        offsets = range(data, data + frames.nbytes, frames.itemsize)
        crcs = np.array([crc(view[offset : offset + length]) for offset in offsets], np.uint32)
        if (masked(crcs) != frames["crc"]).any():
            return 0
        self._offsets[self._count : self._count + many] = offsets
        self._lengths[self._count : self._count + many] = length
        return many
