"""Passes on only whole records of a stream, so that a failed FIFO can end with bytes that readers refuse.

    hold      a failed channel's FIFO stays open without further bytes (the default)
    close     the reader sees an end of file, as after a whole epoch; only the trailer contradicts it
    poison    the reader sees an invalid record header after the last whole record, then the end of file

Bytes that every reader refuses exist only at a record border. Inside a record, readers differ: a cut record
is fatal to dmlc's reader, but SageMaker's reader returns it with a tail of garbage and no error (contract
§6.3); a filled-up record would be a wrong one for a reader without checksums. So `FrameAligner` finds the
ends of records, and holds a record back until it is whole, up to `MOST_HELD` bytes. If a longer record is in
transit, or a border is not certain (after a restart, or in bytes of another format), the FIFO is held.

The invalid header differs from a valid one in the field that readers check: RecordIO's magic, TFRecord's
checksum of the length. To a reader that checks neither, it announces a record longer than any memory.
"""

from __future__ import annotations

from typing import Literal

from streamer.formats import recordio, tfrecord
from streamer.units import MIB

WhenFailed = Literal["hold", "poison", "close"]
Framing = Literal["RecordIO", "TFRecord"]

POISON: dict[Framing, bytes] = {"RecordIO": recordio.INVALID_HEADER, "TFRecord": tfrecord.INVALID_HEADER}
"""Bytes that end a poisoned FIFO."""

MOST_HELD = 8 * MIB
"""Maximum bytes of one record that are held back until the record is whole."""


class FrameAligner:
    """Passes on the bytes of one stream in whole frames.

    A frame is a TFRecord, or one part of a RecordIO record: each part begins with a header.
    """

    def __init__(self, framing: Framing, *, at_record: bool) -> None:
        """`at_record`: whether the stream's first byte is the first of a record."""
        self._frame_size = recordio.frame_size if framing == "RecordIO" else tfrecord.frame_size
        self._header_bytes = recordio.HEADER.size if framing == "RecordIO" else tfrecord.HEADER_BYTES
        self._aligned = at_record
        """Whether the frame borders of the next bytes are certain."""
        self._lost = False
        """Whether the bytes are of another format."""
        self._held = bytearray()
        """First bytes of a frame that is not whole."""
        self._wanted = 0
        """Size of that frame in bytes; 0 until its header is whole."""
        self._passing = 0
        """Bytes still to pass of a frame that is too long to be held."""

    def __repr__(self) -> str:
        return f"<FrameAligner {'at a border' if self.at_border else 'inside'}, {len(self._held)} bytes held>"

    @property
    def at_border(self) -> bool:
        """Whether the bytes passed on so far certainly end with a whole frame."""
        return self._aligned and not self._passing

    @property
    def held(self) -> int:
        """Bytes held back."""
        return len(self._held)

    def begins(self) -> None:
        """Note that the next byte is the first of a record."""
        self._aligned = not self._lost

    def pass_on(self, data: bytes) -> bytes:
        """Return the bytes to deliver after `data` has arrived: all frames that are whole."""
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
        """Return the bytes still held at the stream's end: a last record that its object cuts off."""
        rest = bytes(self._held)
        self._held.clear()
        return rest
