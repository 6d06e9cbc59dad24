"""Finds where the records of one object begin: scanners that are fed the object's bytes, block by block.

    blocks of bytes -> BorderScanner.feed ... finish -> offset of every record, end

A scanner looks only at the bytes that decide where the next record begins:

    FrameScanner    headers of TFRecord and RecordIO; it jumps over the data between two headers
    LineScanner     line ends
    TarScanner      headers of members; a sample is a run of members with one key

A scanner copies nothing but a header that lies across two blocks. It refuses bytes that are not records of
its format (`BadRecord`), but it does not read the data between the headers: their checksums are the readers'
business. Pure.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from typing import TYPE_CHECKING

from streamer.formats import recordio, tfrecord
from streamer.formats.signatures import LOOKED_AT, foreign
from streamer.formats.tar import BLOCK, EXTENSIONS, REGULAR, ExtendedFields, padded, read_header, split_name

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


class LineScanner(BorderScanner):
    r"""Finds lines: records that end at ``\n``, the last one also at the end of the object."""

    def __init__(self) -> None:
        super().__init__()
        self._fresh = True
        """Whether the next byte is the first of a line."""
        self._head = b""
        """The object's first bytes, at most `LOOKED_AT`."""

    def feed(self, data: Block) -> None:
        if not len(data):
            return
        text, base = bytes(data), self.fed
        self.fed += len(text)
        if base < LOOKED_AT:
            self._head += text[: LOOKED_AT - base]
            if (other := foreign(self._head, "lines")) is not None:
                raise BadRecord(f"no line of text begins here: {other.refusal('lines')}", 0)
        found = self.offsets.append
        if self._fresh:
            found(base)
        # A line end that is the block's last byte begins a line only if further bytes come.
        self._fresh = text[-1:] == b"\n"
        find, at, end = text.find, 0, len(text) - 1
        while (at := find(b"\n", at, end) + 1) > 0:
            found(base + at)

    def finish(self) -> int:
        return self.fed


LONGEST_EXTENSION = 8 << 20
"""Maximum bytes of an extension header; it is held in memory."""
_ZEROS = bytes(BLOCK)


class TarScanner(HeaderScanner):
    """Finds WebDataset samples by the rules of `streamer.formats.tar`; checks the checksum of every header.

        header, data, header, data, ..., end mark     one sample: adjacent members with one key

    A sample begins at the first header that belongs to its first member: that is an extension header (pax,
    long name) if the member has one. Members without a key belong to the sample before them, or to the first
    sample if they begin the archive. The end mark (blocks of zeros) belongs to no sample, so an object of
    several archives has bytes between two samples.
    """

    what = "tar member"

    def __init__(self) -> None:
        super().__init__()
        self._wanted = BLOCK
        self._key: str | None = None
        """Key of the current sample; None until a member with a key is found."""
        self._begin = 0
        """Offset at which the next sample begins, if the next member with a key is the first one."""
        self._whole = 0
        """Offset after the last member whose header has been read."""
        self._after_last = 0
        """Offset after the last sample that an end mark has ended."""
        self._extended = ExtendedFields()

    def _read(self, data: Block, base: int) -> None:
        while self._next - base + self._wanted <= len(data):
            position = self._next - base
            self._last = self._next
            try:
                self._step(bytes(data[position : position + self._wanted]))
            except ValueError as error:
                raise BadRecord(f"no tar member begins here: {error}", self._last) from None

    def _step(self, unit: bytes) -> None:
        """Read one header: a block, and the data of an extension header. Raises ValueError."""
        if len(unit) == BLOCK and unit == _ZEROS:
            self._end_archive()
            return
        header = read_header(unit[:BLOCK])
        if header.kind in EXTENSIONS:
            if header.size > LONGEST_EXTENSION:
                raise ValueError(
                    f"an extension header of {header.size} bytes, and at most {LONGEST_EXTENSION} are read"
                )
            self._wanted = BLOCK + padded(header.size)
            if len(unit) == self._wanted:
                self._extended.add(header, unit[BLOCK : BLOCK + header.size])
                self._next += self._wanted
                self._wanted = BLOCK
            return
        header = self._extended.apply(header)
        self._extended = ExtendedFields()
        if header.kind in REGULAR and (parts := split_name(header.name)) and parts[0] != self._key:
            begin = self._begin if self._key is None else self._whole
            self._key = parts[0]
            self.offsets.append(begin)
        self._next += header.length
        self._whole = self._next

    def _end_archive(self) -> None:
        """End the current sample before a block of zeros; the next one begins after it. Raises ValueError."""
        if self._whole != self._next:
            raise ValueError("the archive ends after a header about a next member")
        if self._key is not None:
            self._after_last = self._whole
            self._key = None
        self._next += BLOCK
        self._begin = self._whole = self._next

    def finish(self) -> int:
        """See `BorderScanner.finish`."""
        super().finish()
        if self._whole != self.fed:
            raise BadRecord("the object ends after a header about a next member", self._whole)
        if self._key is not None:
            self._after_last, self._key = self._whole, None
        return self._after_last
