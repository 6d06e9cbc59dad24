"""RecordIO frames as dmlc-core defines them and SageMaker uses them (contract §5.1).

    u32 magic, u32 cflag << 29 | length, payload, zeros up to a border of 4 bytes
    cflag: 0 whole record, 1 first part, 2 middle part, 3 last part

Known readers disagree about a record of several parts: AWS's readers concatenate the parts; dmlc's readers
put the magic back between them, because dmlc's writer cuts records at the magic and drops it. This reader
concatenates, and logs it once, unless `rejoin_magic` is set, for streams of dmlc's writer
(`record_format="MXRecordIO"`). The encoder writes only whole records, which all readers decode alike.
"""

from __future__ import annotations

import logging
import struct
from typing import TYPE_CHECKING

from streamer.errors import CutRecord, RecordTooLarge
from streamer.formats.window import BLOCK_BYTES, RecordReader
from streamer.units import counted

if TYPE_CHECKING:
    from streamer.formats.window import Source

logger = logging.getLogger("penstock")

MAGIC = 0xCED7230A
MAX_PAYLOAD = (1 << 29) - 1
"""Maximum bytes of payload in one frame."""

HEADER = struct.Struct("<II")
"""Magic, and part flag with the length of the payload."""
_MAGIC_BYTES = struct.pack("<I", MAGIC)
_WHOLE, _FIRST, _MIDDLE, _LAST = range(4)


def header(length: int) -> bytes:
    """Return the 8-byte header of a whole record of `length` bytes. Raises ValueError above `MAX_PAYLOAD`."""
    if not 0 <= length <= MAX_PAYLOAD:
        raise ValueError(f"a RecordIO record holds at most {MAX_PAYLOAD} bytes, not {length}")
    return HEADER.pack(MAGIC, length)


def padding(length: int) -> bytes:
    """Return the 0 to 3 zero bytes after a payload of `length` bytes."""
    return b"\0" * (-length % 4)


def encode(payload: bytes) -> bytes:
    """Return the frame of `payload` as one whole record. Raises ValueError above `MAX_PAYLOAD` bytes."""
    return b"".join((header(len(payload)), payload, padding(len(payload))))


class RecordIOReader(RecordReader):
    """Reads the records of a RecordIO stream; joins the parts of a record.

    `rejoin_magic`: put the magic back between parts, for streams that dmlc's (MXNet's) writer made.
    `max_payload`: maximum bytes of a record; None for no limit. Raises CorruptRecord at a wrong magic or a
    part out of order, RecordTooLarge at the header that exceeds `max_payload`.
    """

    what = "RecordIO record"
    kind = "RecordIO"

    def __init__(
        self,
        source: Source,
        *,
        rejoin_magic: bool = False,
        max_payload: int | None = None,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        super().__init__(source, block_bytes=block_bytes)
        self._max_payload = max_payload
        self._joint = _MAGIC_BYTES if rejoin_magic else b""
        self._parts: list[bytes] = []
        """Parts of the incomplete record; empty between records."""
        self._reported = rejoin_magic
        """Whether it was logged that parts are concatenated."""
        self._first_part = 0
        """Offset in the stream of the first of these parts."""

    @property
    def offset(self) -> int:
        return self._first_part if self._parts else super().offset

    @property
    def expected(self) -> int:
        return super().offset + self._wanted if self.offset < self.arrived else self.offset

    def hand_over(self) -> tuple[bytes, int]:
        rest, offset = super().hand_over()
        frames: list[bytes] = []
        for flag, part in zip((_FIRST, *[_MIDDLE] * len(self._parts)), self._parts, strict=False):
            frames += (HEADER.pack(MAGIC, flag << 29 | len(part)), part, padding(len(part)))
        parts = b"".join(frames)
        return parts + rest, offset

    def _forget(self) -> None:
        self._parts = []

    def _cut(self) -> list[bytes]:
        batch: list[bytes] = []
        if self._ahead and not self._cut_ahead(batch):
            return batch
        view, start, end = self._view, self._start, self._end
        unpack_header = HEADER.unpack_from
        self._wanted, self._frame = HEADER.size, None
        while end - start >= HEADER.size:
            magic, word = unpack_header(view, start)
            if magic != MAGIC:
                self._fault = self._corrupt(self._base + start, f"invalid magic number {magic:#010x}")
                break
            length = word & MAX_PAYLOAD
            if self._max_payload is not None:
                size = sum(map(len, self._parts)) + length
                if size > self._max_payload:
                    self._fault = RecordTooLarge(
                        f"{self.what} at offset {self._base + start} of the stream: {size} bytes, and the "
                        f"reader takes {self._max_payload} at most; raise that limit, or write smaller ones"
                    )
                    break
            frame = HEADER.size + (length + 3 & ~3)
            if end - start < frame:
                self._wanted = frame
                if word >> 29 == _WHOLE and not self._parts:
                    self._note_incomplete(HEADER.size, length, -length % 4, batch)
                break
            payload = bytes(view[start + HEADER.size : start + HEADER.size + length])
            if word >> 29 == _WHOLE and not self._parts:
                batch.append(payload)
                if self.starts is not None:
                    self.starts.append(self._base + start)
            elif not self._join(word >> 29, payload, start, batch):
                break
            start += frame
        self._start = start
        return batch

    def _has_header(self, length: int) -> bool:
        return HEADER.unpack_from(self._view, self._start) == (MAGIC, length)

    def _join(self, flag: int, payload: bytes, start: int, batch: list[bytes]) -> bool:
        allowed = (_MIDDLE, _LAST) if self._parts else (_WHOLE, _FIRST)
        if flag not in allowed:
            place = f"after {counted(len(self._parts), 'part')}" if self._parts else "where a record begins"
            self._fault = self._corrupt(self._base + start, f"part flag {flag} {place}")
            return False
        if not self._parts:
            self._first_part = self._base + start
        self._parts.append(payload)
        if flag == _LAST:
            if not self._reported:
                self._reported = True
                logger.warning(
                    "the parts of the %s at offset %d of the stream are concatenated, as AWS's readers do; "
                    "if MXNet's or dmlc's writer made it, four bytes between them are missing: read it with "
                    "record_format='MXRecordIO'",
                    self.what,
                    self._first_part,
                )
            batch.append(self._joint.join(self._parts))
            if self.starts is not None:
                self.starts.append(self._first_part)
            self._parts = []
        return True

    def _finish(self) -> list[bytes]:
        if self._parts and self.arrived == super().offset:
            raise CutRecord(
                f"the stream ends at offset {self.arrived} between the parts of a {self.what}: "
                f"{counted(len(self._parts), 'part')} arrived, the last one did not"
            )
        return super()._finish()
