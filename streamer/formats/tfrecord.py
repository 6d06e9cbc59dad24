"""TFRecord frames: u64 length, its masked CRC-32C, the data, the data's masked CRC-32C (contract §5.3).

The reader checks both CRCs. If a length's CRC is wrong, no later frame can be found, so this error is never
skipped. If the data's CRC is wrong, the next frame can be found, so bad data may be skipped:
`max_corrupted_records_to_skip` bounds a *run* of bad records, as in SageMaker's reader.
"""

from __future__ import annotations

import logging
import struct
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from streamer.formats.crc import MASK_DELTA, crc32c, mask, masked_crc32c
from streamer.formats.window import BLOCK_BYTES, CorruptPlace, RecordReader
from streamer.units import counted

if TYPE_CHECKING:
    from streamer.formats.window import Source

logger = logging.getLogger("penstock")

HEADER = struct.Struct("<QI")
"""Length of the data, and masked CRC of the length."""
HEADER_BYTES = HEADER.size
_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_WORD = 0xFFFFFFFF
FRAME_BYTES = HEADER.size + _CRC.size
"""Bytes of a frame besides its data."""
DATA_FAULT = "CRC check on data failed"
_KNOWN_LENGTHS = 1 << 16
"""Maximum number of lengths whose CRC is cached."""
REMEMBERED = 10_000
"""Maximum number of skipped records whose position is kept; the last ones are."""


@dataclass(slots=True)
class Skipped:
    """Records that were skipped because the CRC of their data was wrong."""

    records: int = 0
    """Number of skipped records."""
    positions: deque[tuple[str, int]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """Name of the stream and byte offset of the frame, for the last `REMEMBERED` skipped records."""


class KnownLengths(dict[int, int]):
    """Masked CRC by length, of the lengths seen so far: most streams have few different lengths."""

    def holds(self, length: int, stored: int) -> bool:
        """Return whether `stored` is the masked CRC of `length`; if so, the length is known."""
        if self.get(length) == stored:
            return True
        if masked_crc32c(_LENGTH.pack(length)) != stored:
            return False
        if len(self) >= _KNOWN_LENGTHS:
            self.clear()
        self[length] = stored
        return True


def encode(payload: bytes) -> bytes:
    """Return the TFRecord frame of `payload`."""
    length = _LENGTH.pack(len(payload))
    return b"".join((length, _CRC.pack(masked_crc32c(length)), payload, _CRC.pack(masked_crc32c(payload))))


class TFRecordReader(RecordReader):
    """Reads the records of a TFRecord stream.

    Raises CorruptRecord at a wrong CRC, unless it is the CRC of data and at most
    `max_corrupted_records_to_skip` records in a row are bad (contract §6.3). Skipped records are logged, and
    counted in `skipped`, which several readers may share.
    """

    what = "TFRecord"
    kind = "TFRecord"

    def __init__(
        self,
        source: Source,
        *,
        max_corrupted_records_to_skip: int = 0,
        skipped: Skipped | None = None,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        super().__init__(source, block_bytes=block_bytes)
        self.skipped = Skipped() if skipped is None else skipped
        self._name = str(getattr(source, "name", ""))
        self._known = KnownLengths()
        self._limit = max_corrupted_records_to_skip
        self._run = 0
        self._crc32c = crc32c()

    @property
    def skipped_records(self) -> int:
        """See `RecordReader.skipped_records`; with those of readers that share `skipped`."""
        return self.skipped.records

    def _cut(self) -> list[bytes]:
        batch: list[bytes] = []
        if self._ahead and not self._cut_ahead(batch):
            return batch
        view, start, end = self._view, self._start, self._end
        crc, unpack_header, tail, known = self._crc32c, HEADER.unpack_from, _CRC.unpack_from, self._known
        starts = self.starts
        self._wanted, self._frame = HEADER_BYTES, None
        while end - start >= HEADER_BYTES:
            length, stored = unpack_header(view, start)
            if known.get(length) != stored and not known.holds(length, stored):
                self._fault = self._corrupt(self._base + start, "CRC check on header failed")
                break
            if end - start < length + FRAME_BYTES:
                self._note_incomplete(HEADER_BYTES, length, _CRC.size, batch)
                break
            stop = start + HEADER_BYTES + length
            record = bytes(view[start + HEADER_BYTES : stop])
            found = crc(record)
            if tail(view, stop)[0] == ((found >> 15 | found << 17) + MASK_DELTA) & _WORD:
                self._run = 0
                batch.append(record)
            elif not self._leave_out(start, length, batch):
                break
            if starts is not None:
                starts.append(self._base + start)
            start = stop + _CRC.size
        self._start = start
        return batch

    def _has_header(self, length: int) -> bool:
        found, stored = HEADER.unpack_from(self._view, self._start)
        return found == length and self._known.holds(length, stored)

    def _admit(self, record: bytes, batch: list[bytes]) -> bool:
        if _CRC.unpack_from(self._view, self._start + HEADER_BYTES)[0] == mask(self._crc32c(record)):
            self._run = 0
            return super()._admit(record, batch)
        if not self._leave_out(self._start, len(record), batch):
            return False
        if self.starts is not None:
            self.starts.append(self._base + self._start)
        return True

    def _leave_out(self, start: int, length: int, batch: list[bytes]) -> bool:
        """Return whether the record at `start`, whose data is wrong, may be left out, or have a place."""
        if not self.keeps_places:
            return self._may_skip(start, length)
        self.bad_places.append(len(batch))
        batch.append(CorruptPlace(self._base + start, DATA_FAULT))  # type: ignore[arg-type]
        return True

    def _may_skip(self, start: int, length: int) -> bool:
        offset = self._base + start
        fault = self._corrupt(offset, DATA_FAULT)
        self._run += 1
        if self._run > self._limit:
            self._fault, self._fault_end = fault, offset + length + FRAME_BYTES
            return False
        self.skipped.records += 1
        self.skipped.positions.append((self._name, offset))
        text = f"{fault}; {counted(length, 'byte')} ({self._run} in a row, {self.skipped.records} in all)"
        if self.starts is None:
            logger.warning("skipped: %s", text)
        else:
            self.left_out.append((offset, text))
        return True
