"""TFRecord frames: u64 length, its masked CRC-32C, the data, the data's masked CRC-32C (contract §5.3).

Both CRCs are checked. A length is believed only after its own CRC agreed; where it does not, nothing behind
it can be found again, so that is never skipped. A data CRC leaves the frame intact, and so bad data may be
skipped on request: `max_corrupted_records_to_skip` bounds a *run* of bad records, as the incumbent's does.
"""

from __future__ import annotations

import logging
import struct
from typing import TYPE_CHECKING

from streamer.formats.crc import MASK_DELTA, crc32c, masked_crc32c
from streamer.formats.window import BLOCK_BYTES, RecordReader

if TYPE_CHECKING:
    from streamer.formats.window import Source

logger = logging.getLogger("penstock")

_HEAD = struct.Struct("<QI")
_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_WORD = 0xFFFFFFFF
_FRAME = _HEAD.size + _CRC.size


def encode(payload: bytes) -> bytes:
    """The TFRecord frame of `payload`."""
    length = _LENGTH.pack(len(payload))
    return b"".join((length, _CRC.pack(masked_crc32c(length)), payload, _CRC.pack(masked_crc32c(payload))))


class TFRecordReader(RecordReader):
    """The records of a TFRecord stream.

    Raises CorruptRecord at a CRC that does not agree, unless it is a data CRC and not more than
    `max_corrupted_records_to_skip` records in a row are bad (contract §6.3).
    """

    what = "TFRecord"

    def __init__(
        self, source: Source, *, max_corrupted_records_to_skip: int = 0, block_bytes: int = BLOCK_BYTES
    ) -> None:
        super().__init__(source, block_bytes=block_bytes)
        self.skipped = 0
        """Records left out so far because their data CRC did not agree."""
        self._limit = max_corrupted_records_to_skip
        self._run = 0
        self._crc32c = crc32c()

    def _cut(self) -> list[bytes]:
        view, start, end = self._view, self._start, self._end
        crc, head, tail = self._crc32c, _HEAD.unpack_from, _CRC.unpack_from
        batch: list[bytes] = []
        self._wanted = _HEAD.size
        while end - start >= _HEAD.size:
            length, stored = head(view, start)
            found = crc(view[start : start + 8])
            if stored != ((found >> 15 | found << 17) + MASK_DELTA) & _WORD:
                self._fault = self._corrupt(self._base + start, "CRC check on header failed")
                break
            if end - start < length + _FRAME:
                self._wanted = length + _FRAME
                break
            stop = start + _HEAD.size + length
            record = bytes(view[start + _HEAD.size : stop])
            found = crc(record)
            if tail(view, stop)[0] != ((found >> 15 | found << 17) + MASK_DELTA) & _WORD:
                if not self._may_skip(start):
                    break
            else:
                self._run = 0
                batch.append(record)
            start = stop + _CRC.size
        self._start = start
        return batch

    def _may_skip(self, start: int) -> bool:
        fault = self._corrupt(self._base + start, "CRC check on data failed")
        self._run += 1
        if self._run > self._limit:
            self._fault = fault
            return False
        self.skipped += 1
        logger.warning("skipped: %s (%d in a row, %d in all)", fault, self._run, self.skipped)
        return True
