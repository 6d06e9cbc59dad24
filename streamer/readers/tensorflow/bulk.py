"""Cuts TFRecords a block at a time, so that many records share the cost of a Python step.

`TFRecordReader` spends half a microsecond in the interpreter for each frame. For records of a few hundred
bytes that is more than all other costs together. This reader returns the same records and raises the same
errors, but processes all frames of a block together:

    borders   frames of one length are verified in one NumPy comparison; small frames of other lengths are
              verified one by one, each length by its CRC, which is computed once for each length
    records   one slice each, without an interpreted step for frames of one length
    data CRC  of many records of one length in one pass over all of them
              (`streamer.readers.tensorflow.checksums`); else of every record, by `map` over a compiled
              function, compared as one vector

Records that are large or of mixed lengths are cut by `TFRecordReader`, because this way is no faster there.
NumPy comes with TensorFlow; plain Python readers do not import this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from streamer.errors import CorruptRecord
from streamer.formats.tfrecord import FRAME_BYTES, HEADER, HEADER_BYTES, TFRecordReader
from streamer.formats.window import FailedRecord
from streamer.readers.tensorflow.checksums import frames_crc, leading_run, masked

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Words = NDArray[np.uint32]

SMALL = 2048
"""Bytes of the next record up to which frames of mixed lengths are cut in bulk, at the cost of one copy."""
RUN = 16
"""Least number of frames of one length that are processed as a run."""
TOGETHER = 256
"""Least number of frames of a run whose data is verified in one pass, if the last run had the same length."""


class BulkTFRecordReader(TFRecordReader):
    """A `TFRecordReader` that is faster for many small records."""

    _last_length = -1
    """Record length of the last run; a check of many records at once pays only for a length that recurs."""

    def batches(self) -> Iterator[list[bytes]]:
        """Yield as `RecordReader.batches`, and a `FailedRecord` for each corrupt record whose end is known.

        `starts` then has the offset of that record.
        """
        while True:
            try:
                yield from super().batches()
            except CorruptRecord as error:  # noqa: PERF203 - once for each corrupt record
                self._forget_starts()
                offset = self.offset
                if not self.pass_over_fault():
                    raise
                self.skipped.records += 1
                self.skipped.positions.append((self._name, offset))
                if self.starts is not None:
                    self.starts.append(offset)
                yield FailedRecord(error)
            else:
                return

    def _cut(self) -> list[bytes]:
        if self._ahead:
            return super()._cut()
        self._frame = None
        batch = self._run_of_one_length()
        if self._fault is None:
            batch += self._any_lengths() if self._next_is_small else super()._cut()
        return batch

    @property
    def _next_is_small(self) -> bool:
        whole = self._end - self._start >= HEADER_BYTES
        return whole and HEADER.unpack_from(self._view, self._start)[0] <= SMALL

    def _run_of_one_length(self) -> list[bytes]:
        """Return the records of the next frames that are as long as the first one."""
        start = self._start
        if self._end - start < HEADER_BYTES:
            return []
        length, stored = HEADER.unpack_from(self._view, start)
        count = (self._end - start) // (length + FRAME_BYTES)
        if count < RUN or not length or not self._known.holds(length, stored):
            return []
        frames = leading_run(self._view, start, count, length, stored)
        if (count := len(frames)) < RUN:
            return []
        records: list[bytes] = frames["data"].tolist()
        starts = range(start, start + frames.nbytes, frames.itemsize)
        same_length, self._last_length = length == self._last_length, length
        if same_length and count >= TOGETHER and self._all_agree(frames["crc"], length, starts):
            self._run, self._start = 0, starts.stop
            self._note(starts)
            return records
        return self._proven(records, frames["crc"], starts, starts.stop)

    def _all_agree(self, stored: Words, length: int, starts: range) -> bool:
        """Return whether every frame of a run has the CRC of its data."""
        head = self._crc32c(self._view[starts.start : starts.start + HEADER_BYTES])
        whole = self._crc32c(self._view[starts.start : starts.stop])
        return whole == frames_crc(stored, length, head)

    def _any_lengths(self) -> list[bytes]:
        """Return the records of all whole frames that are left."""
        view, start, end = self._view, self._start, self._end
        head, known = HEADER.unpack_from, self._known
        starts: list[int] = []
        self._wanted = HEADER_BYTES
        fault = None
        position = start
        while end - position >= HEADER_BYTES:
            length, stored = head(view, position)
            if known.get(length) != stored and not known.holds(length, stored):
                fault = self._corrupt(self._base + position, "CRC check on header failed")
                break
            if end - position < length + FRAME_BYTES:
                self._wanted = length + FRAME_BYTES
                break
            starts.append(position)
            position += length + FRAME_BYTES
        if not starts:
            self._fault = fault
            return []
        block = bytes(view[start:position])
        stops = [*starts[1:], position]
        first, last = HEADER_BYTES - start, FRAME_BYTES - HEADER_BYTES + start
        records = [block[a + first : b - last] for a, b in zip(starts, stops, strict=True)]
        words: Words = np.ndarray((len(block) - 3,), "<u4", block, strides=(1,))  # a word at every byte
        batch = self._proven(records, words[np.asarray(stops) - last], starts, position)
        self._fault = self._fault or fault
        return batch

    def _proven(
        self, records: list[bytes], stored: Words, starts: range | list[int], stop: int
    ) -> list[bytes]:
        """Return `records`, whose frames begin at `starts` and end at `stop`, without the corrupt ones."""
        crcs: Words = np.fromiter(map(self._crc32c, records), np.uint32, len(records))
        self._start = stop
        bad: list[int] = np.flatnonzero(masked(crcs) != stored).tolist()
        if not bad:
            self._run = 0
            self._note(starts)
            return records
        last_bad = -1
        for number in bad:
            if number != last_bad + 1:
                self._run = 0
            last_bad = number
            if not self._may_skip(starts[number], len(records[number])):
                self._start = starts[number]
                break
        else:
            number = len(records)
            if last_bad != number - 1:
                self._run = 0
        self._note(starts[:number])
        left_out = set(bad)
        return [record for index, record in enumerate(records[:number]) if index not in left_out]

    def _note(self, starts: range | list[int]) -> None:
        """Add the offsets in the stream of frames that begin at `starts` in the buffer, if they are noted."""
        if self.starts is not None:
            self.starts.extend([self._base + start for start in starts])
