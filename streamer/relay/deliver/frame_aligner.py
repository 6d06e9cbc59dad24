"""What a reader that knows nothing of trailers sees of a channel that has failed for good.

    hold      nothing: its FIFO stays open and silent (the default)
    close     the end of the file, as if the epoch were over; only the trailer tells that it is not
    poison    behind the last whole record a head that no reader of the format accepts, then the end

Bytes that every reader refuses exist at a record's border alone. Inside a record known readers differ: a cut
one is fatal to dmlc's reader, and comes out of SageMaker's with a tail of garbage and no error (contract
§6.3); what is filled in would be a wrong record for whoever keeps no checksum. So `poison` needs to know
where records end, and lets none begin that may not become whole: `FrameAligner` stands between source and
FIFO and passes on whole frames only, as far as `MOST_HELD` bytes go. Where a longer one is under way, or a
place in the stream is not known to be a border (behind a restart, or in bytes of another format), the FIFO is
held.

The head differs from a right one in what readers check: RecordIO's magic, TFRecord's checksum of the length.
Those that check nothing are asked for a record longer than any memory.
"""

from __future__ import annotations

import struct
from typing import Literal

from streamer.units import MIB

WhenFailed = Literal["hold", "poison", "close"]
Framing = Literal["RecordIO", "TFRecord"]

POISON: dict[Framing, bytes] = {
    "RecordIO": struct.pack("<II", 0xCED7230A ^ 0xFFFFFFFF, 0xFFFFFFFF),
    "TFRecord": struct.pack("<QI", 1 << 62, 0x00F0857F ^ 0xFFFFFFFF),
}
"""One head: a magic of which every bit is wrong, with the longest length; a length of 2^62 bytes, with every
bit of its masked CRC-32C wrong."""

MOST_HELD = 8 * MIB
"""Bytes of one record that are kept back until it is whole."""

_RECORDIO = struct.Struct("<II")
_TFRECORD = struct.Struct("<QI")
_MAGIC = 0xCED7230A
_LONGEST = 1 << 40
"""Bytes of a TFRecord beyond which its head is taken for something else."""


class FrameAligner:
    """Cuts the bytes of one stream behind whole frames.

    The parts of a RecordIO record count as frames: between two of them a reader expects a head as well.
    """

    def __init__(self, framing: Framing, *, known: bool) -> None:
        """`known`: whether the stream's first byte begins a record."""
        self._size_of = _recordio_size if framing == "RecordIO" else _tfrecord_size
        self._head = _RECORDIO.size if framing == "RecordIO" else _TFRECORD.size
        self._known = known
        self._lost = False
        """Whether the bytes are of another format."""
        self._held = bytearray()
        """The begin of a frame."""
        self._wanted = 0
        """Bytes that the frame has, if that is known."""
        self._passing = 0
        """Bytes to come of a frame that is too long to be held."""

    def __repr__(self) -> str:
        return f"<Records {'at a border' if self.at_border else 'inside'}, {len(self._held)} bytes held>"

    @property
    def at_border(self) -> bool:
        """Whether the bytes passed on so far surely end with a frame."""
        return self._known and not self._passing

    @property
    def held(self) -> int:
        """Bytes kept back."""
        return len(self._held)

    def begins(self) -> None:
        """A record begins with the next byte, if that is not known."""
        self._known = not self._lost

    def pass_on(self, data: bytes) -> bytes:
        """What may leave now that `data` has come: as many whole frames as there are."""
        if not self._known:
            return data
        if self._held:
            self._held += data
            if len(self._held) < self._wanted:
                return b""
            data = bytes(self._held)
            self._held.clear()
        at = min(self._passing, len(data))
        self._passing -= at
        self._wanted = 0
        while len(data) - at >= self._head:
            size = self._size_of(data, at)
            if size is None:
                self._known, self._lost = False, True
                return data
            if len(data) - at < size:
                if size > MOST_HELD:
                    self._passing = size - (len(data) - at)
                    return data
                self._wanted = size
                break
            at += size
        self._held += memoryview(data)[at:]
        return data[:at]

    def rest(self) -> bytes:
        """What is held although the stream is over: a last record that its object holds no more of."""
        rest = bytes(self._held)
        self._held.clear()
        return rest


def _recordio_size(data: bytes, at: int) -> int | None:
    """Bytes of the frame with this head, or None if it is none."""
    magic, word = _RECORDIO.unpack_from(data, at)
    return _RECORDIO.size + ((word & 0x1FFFFFFF) + 3 & ~3) if magic == _MAGIC else None


def _tfrecord_size(data: bytes, at: int) -> int | None:
    length, _ = _TFRECORD.unpack_from(data, at)
    return int(length) + _TFRECORD.size + 4 if length <= _LONGEST else None
