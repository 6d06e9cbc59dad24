"""Finds where the records of one object begin: scanners that are fed the object's bytes, block by block.

    blocks of bytes -> BorderScanner.feed ... finish -> offset of every record, end

A scanner looks only at the bytes that decide where the next record begins:

    FrameScanner    headers of TFRecord and RecordIO; it jumps over the data between two headers
    LineScanner     (`line_borders`) line ends
    TarScanner      (`tar_borders`) headers of members; a sample is a run of members with one key

A scanner copies nothing but a header that lies across two blocks. It refuses bytes that are not records of
its format (`BadRecord`), but it does not read the data between the headers: their checksums are the readers'
business. Pure.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from typing import TYPE_CHECKING

from streamer.formats import recordio, tfrecord

if TYPE_CHECKING:
    Block = bytes | bytearray | memoryview


class BadRecord(ValueError):
    """The object is no sequence of whole records of the format."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.offset = offset
        """Offset of the fault in the object."""


class BorderScanner(ABC):
    """Scans one object, once. Call `feed` for all bytes in order, then `finish`.

    After BadRecord the scanner must not be used any more.
    """

    def __init__(self) -> None:
        self.offsets = array("Q")
        """Offsets of the records whose first byte has been found, in bytes."""
        self.fed = 0
        """Number of bytes fed."""
        self.inside = False
        """Whether further parts of the last record follow."""

    @property
    def reached(self) -> int:
        """Offset after the last record, or part of one, whose header was read."""
        return self.fed

    @abstractmethod
    def feed(self, data: Block) -> None:
        """Scan the object's next bytes. Raises BadRecord."""

    @abstractmethod
    def finish(self) -> int:
        """Return the offset after the last record, once all bytes are fed. Raises BadRecord."""


class HeaderScanner(BorderScanner):
    """Base of scanners that jump from header to header."""

    what = ""
    """Name of what a header begins, in error texts."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0
        """Offset of the next header."""
        self._wanted = 0
        """Bytes from there on that `_read` needs; set by the subclass."""
        self._held = bytearray()
        """Start of a header that has not arrived completely."""
        self._last = 0
        """Offset of the last header that begins a record, or of a member."""

    @property
    def reached(self) -> int:
        """See `BorderScanner.reached`."""
        return self._next

    def feed(self, data: Block) -> None:
        base, size, first = self.fed, len(data), 0
        self.fed += size
        if self._held:
            first = self._complete(data, base)
            if self._held:
                return
        self._read(data, base)
        if (position := self._next - base) < size:
            self._held += data[max(position, first) :]

    def _complete(self, data: Block, base: int) -> int:
        """Add bytes to the held header until it is read or `data` is used up; return how many were added."""
        taken, header = 0, base - len(self._held)
        while self._next == header:
            step = min(self._wanted - len(self._held), len(data) - taken)
            self._held += data[taken : taken + step]
            taken += step
            if len(self._held) < self._wanted:
                return taken
            self._read(bytes(self._held), header)
        self._held.clear()
        return taken

    @abstractmethod
    def _read(self, data: Block, base: int) -> None:
        """Read every header that is whole in `data`, from `_next` on. `base`: offset of the first byte.

        Either `_next` moves on by `_wanted` bytes or more, or `_wanted` grows. Raises BadRecord.
        """

    def finish(self) -> int:
        if self._next != self.fed:
            border = self._last if self._next > self.fed else self._next
            raise BadRecord(f"the object ends inside a {self.what}, at byte {self.fed}", border)
        return self._next


class TFRecordScanner(HeaderScanner):
    """Finds TFRecord frames; checks the CRC of every length."""

    what = "TFRecord"

    def __init__(self) -> None:
        super().__init__()
        self._wanted = tfrecord.HEADER_BYTES
        self._known = tfrecord.KnownLengths()

    def _read(self, data: Block, base: int) -> None:
        unpack, known, found = tfrecord.HEADER.unpack_from, self._known, self.offsets.append
        position, frame = self._next - base, tfrecord.FRAME_BYTES
        last, here = len(data) - tfrecord.HEADER_BYTES, -1
        while position <= last:
            here = position
            length, stored = unpack(data, here)
            if known.get(length) != stored and not known.holds(length, stored):
                raise BadRecord("no TFRecord begins here: the CRC of its length is wrong", base + here)
            found(base + here)
            position += length + frame
        if here >= 0:
            self._next, self._last = base + position, base + here


class RecordIOScanner(HeaderScanner):
    """Finds RecordIO records; a record of several parts is one record."""

    what = "RecordIO record"

    def __init__(self) -> None:
        super().__init__()
        self._wanted = recordio.HEADER.size

    def _read(self, data: Block, base: int) -> None:
        unpack, magic, most = recordio.HEADER.unpack_from, recordio.MAGIC, recordio.MAX_PAYLOAD
        position, inside, here = self._next - base, self.inside, -1
        last, header = len(data) - recordio.HEADER.size, recordio.HEADER.size
        while position <= last:
            found, word = unpack(data, position)
            if found != magic:
                raise BadRecord(
                    f"no RecordIO record begins here: its magic number is {found:#010x}", base + position
                )
            flag = word >> 29
            if flag > 3 or inside != (flag > 1):
                where = "between the parts of a record" if inside else "where a record begins"
                raise BadRecord(f"no RecordIO record begins here: part flag {flag} {where}", base + position)
            if not inside:
                here = position
                self.offsets.append(base + here)
            inside = flag in (1, 2)
            position += header + ((word & most) + 3 & ~3)
        self._next, self.inside = base + position, inside
        if here >= 0:
            self._last = base + here

    def finish(self) -> int:
        """See `BorderScanner.finish`."""
        if self.inside:
            raise BadRecord("the object ends between the parts of a RecordIO record", self._last)
        return super().finish()
