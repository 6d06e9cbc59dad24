"""Finds the samples of a tar archive by the rules of `streamer.formats.tar`, without reading the members.

    header, data, header, data, ..., end mark     one sample: adjacent members with one key

A sample begins at the first header that belongs to its first member: that is an extension header (pax, long
name) if the member has one. Members without a key belong to the sample before them, or to the first sample if
they begin the archive. The end mark (blocks of zeros) belongs to no sample, so an object of
several archives has bytes between two samples. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamer.formats.borders import BadRecord, HeaderScanner
from streamer.formats.tar import BLOCK, EXTENSIONS, REGULAR, ExtendedFields, padded, read_header, split_name

if TYPE_CHECKING:
    from streamer.formats.borders import Block

LONGEST_EXTENSION = 8 << 20
"""Maximum bytes of an extension header; it is held in memory."""
_ZEROS = bytes(BLOCK)


class TarScanner(HeaderScanner):
    """Finds WebDataset samples; checks the checksum of every header."""

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
