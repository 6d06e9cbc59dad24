"""Keeps a stream at record borders, where a failed channel can be ended by bytes that every reader refuses.

    hold      a failed channel's FIFO stays open and silent (the default)
    close     its reader sees the end of the file, as if the epoch were over; only the trailer says otherwise
    poison    its reader sees an invalid record header after the last whole record, then the end

Bytes that every reader refuses exist at a record's border alone. Inside a record readers differ: a cut record
is fatal to dmlc's reader, and comes out of SageMaker's with a tail of garbage and no error (contract §6.3);
a filled-in one would be a wrong record for a reader without checksums. So `poison` needs to find the ends of
records, and lets none begin that may not become whole: `FrameAligner` stands between source and FIFO and
passes on whole frames only, as far as `MOST_HELD` bytes go. The FIFO is held where a longer frame is under
way, and where a border is not certain (after a restart, or in bytes of another format).

The invalid header differs from a right one in the field that readers check: RecordIO's magic, TFRecord's
checksum of the length. A reader that checks neither is asked for a record longer than any memory.
"""

from __future__ import annotations

from typing import Literal

from streamer.formats import recordio, tfrecord
from streamer.units import MIB

WhenFailed = Literal["hold", "poison", "close"]
Framing = Literal["RecordIO", "TFRecord"]

POISON: dict[Framing, bytes] = {"RecordIO": recordio.INVALID_HEADER, "TFRecord": tfrecord.INVALID_HEADER}
"""The bytes that end a poisoned FIFO."""

MOST_HELD = 8 * MIB
"""Bytes of one record that are kept back until it is whole."""


class FrameAligner:
    """Cuts the bytes of one stream after whole frames.

    The parts of a RecordIO record count as frames: between two of them a reader expects a header as well.
    """

    def __init__(self, framing: Framing, *, at_record: bool) -> None:
        """`at_record`: whether the stream's first byte is the first of a record."""
        self._frame_size = recordio.frame_size if framing == "RecordIO" else tfrecord.frame_size
        self._header_bytes = recordio.HEADER.size if framing == "RecordIO" else tfrecord.HEADER_BYTES
        self._aligned = at_record
        """Whether the borders of frames are certain from here on."""
        self._lost = False
        """Whether the bytes are of another format."""
        self._held = bytearray()
        """The first bytes of a frame."""
        self._wanted = 0
        """Bytes of that whole frame; 0 while its header is not whole."""
        self._passing = 0
        """Bytes to come of a frame that is too long to be held."""

    def __repr__(self) -> str:
        return f"<FrameAligner {'at a border' if self.at_border else 'inside'}, {len(self._held)} bytes held>"

    @property
    def at_border(self) -> bool:
        """Whether the bytes passed on so far surely end with a frame."""
        return self._aligned and not self._passing

    @property
    def held(self) -> int:
        """Bytes kept back."""
        return len(self._held)

    def begins(self) -> None:
        """Note that a record begins with the next byte, if that was not certain."""
        self._aligned = not self._lost

    def pass_on(self, data: bytes) -> bytes:
        """What may leave now that `data` has come: as many whole frames as there are."""
        if not self._aligned:
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
        while len(data) - at >= self._header_bytes:
            size = self._frame_size(data, at)
            if size is None:
                self._aligned, self._lost = False, True
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
