"""The record index of a channel: for every object version the offset of every record.

    name, version ─▶ row ─▶ size, records, end, offsets[0], offsets[1], ...

A row is found by hashes of the object's address and of its version (ETag, size, version id), so that a
replaced object has no row. The index holds no keys: whoever asks has the objects of a plan. Columns are
arrays of 64-bit numbers, in memory and in the file; the offsets stay in the file (`stored_offsets`).

The file (docs/reference/record-index.md) is a header, and blocks of rows that are only ever appended. Each
block has a checksum, so a file whose writer was killed is valid up to its last whole block. Of two rows of
one name the later one counts. Pure.
"""

from __future__ import annotations

import struct
import sys
from array import array
from hashlib import blake2b
from itertools import accumulate
from operator import eq, le
from typing import TYPE_CHECKING, NamedTuple

from streamer.formats.crc32 import crc32
from streamer.formats.record_format import RecordFormat
from streamer.formats.stored_offsets import NUMBER, PAGE, PIECE, StoredOffsets, numbers_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from streamer.formats.stored_offsets import IndexSource

MAGIC = b"PENSTIDX"
VERSION = 1
_HEADER = struct.Struct("<8sII16sI")
"""Magic, version, 1, name of the format, padded with zeros; and the CRC-32 of these."""
HEADER_BYTES = _HEADER.size
"""Bytes of a file before its first block."""
_BLOCK = struct.Struct("<4sIQ")
"""Mark of a block, number of rows, bytes of the columns after it."""
_MARK = b"ROWS"
_CRC = struct.Struct("<I")
_COLUMNS = 5
"""Columns with one number a row."""
_ROW_MEMORY = 300
"""Bytes of memory of a row and of what is kept of its object."""


class Damaged(ValueError):
    """The bytes are no record index, or one that this version does not read."""


def object_name(bucket: str, key: str) -> int:
    """Return the 64-bit hash of an object's address."""
    return _hash(bucket, key)


def object_version(bucket: str, key: str, *, size: int, etag: str, version: str | None) -> int:
    """Return the 64-bit hash of one version of an object. `version`: the version id, if there is one."""
    return _hash(bucket, str(size), etag, version or "", key)


def _hash(*fields: str) -> int:
    text = "\n".join(fields).encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(text, digest_size=NUMBER).digest(), "little")


class IndexedObject(NamedTuple):
    """One row of an index: one version of an object."""

    name: int
    version: int
    size: int
    """Bytes of the object."""
    records: int
    end: int
    """Offset after the last record; less than `size` if an end mark follows."""
    offsets: array[int]
    """Offset of each record, in bytes."""


class RecordIndex:
    """Rows of one channel's objects, which are all of one record format; the offsets stay in the file."""

    def __init__(self, source: IndexSource) -> None:
        """Read the rows of all whole blocks of `source`. Raises Damaged if it does not begin as an index."""
        self.format = read_header(source)
        self.end = HEADER_BYTES
        """Bytes of the file up to the end of the last whole block."""
        self.offsets = StoredOffsets(source)
        """Offsets of all rows; `extent` has those of one row."""
        self._source = source
        self._rows: dict[int, int] = {}
        """Row number by name."""
        self._columns = tuple(array("Q") for _ in range(_COLUMNS))
        self._names, self._versions, self._sizes, self._records, self._ends = self._columns
        self._first = array("Q", [0])
        """For each row, the index of its first offset; and one for the next row."""
        self.read_on()

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[IndexedObject]:
        """Yield the rows that count, in the order in which their names were added first."""
        return map(self.row, self._rows)

    def __repr__(self) -> str:
        return f"<RecordIndex of {len(self)} objects, {self.format}>"

    @property
    def replaced(self) -> int:
        """Number of rows that later ones have replaced."""
        return len(self._names) - len(self._rows)

    @property
    def records(self) -> int:
        """Records of all rows that count."""
        return sum(self._records[row] for row in self._rows.values())

    @property
    def bytes(self) -> int:
        """Bytes of the objects of all rows that count."""
        return sum(self._sizes[row] for row in self._rows.values())

    def names(self) -> list[int]:
        """Return the names of all objects, in the order in which they were added first."""
        return list(self._rows)

    def get(self, name: int) -> IndexedObject | None:
        """Return the row of this object, of whatever version; None if there is none."""
        return self.row(name) if name in self._rows else None

    def row(self, name: int) -> IndexedObject:
        """Return the row of this object, of whatever version. Raises KeyError."""
        row = self._rows[name]
        offsets = self.offsets[self._first[row] : self._first[row + 1]]
        name, version, size, records, end = (column[row] for column in self._columns)
        return IndexedObject(name, version, size, records, end, offsets)

    def extent(self, name: int) -> tuple[int, int, int]:
        """Return the number in `offsets` of a row's first one, its records, and its end. Raises KeyError."""
        row = self._rows[name]
        return self._first[row], self._records[row], self._ends[row]

    def has(self, name: int, version: int) -> bool:
        """Return whether the index has this version of the object."""
        row = self._rows.get(name)
        return row is not None and self._versions[row] == version

    def read_on(self) -> None:
        """Add the rows of the whole blocks from `end` on."""
        while (end := self._add_block(self.end)) is not None:
            self.end = end

    def _add_block(self, at: int) -> int | None:
        """Add the rows of the block at `at`; return its end, or None if there is no whole, undamaged one."""
        source = self._source
        if (sizes := _block_sizes(source, at)) is None:
            return None
        count, middle, end = sizes
        head = source.read(at, middle - at)
        numbers = numbers_of(memoryview(head)[_BLOCK.size :])
        columns = [numbers[column * count : (column + 1) * count] for column in range(_COLUMNS)]
        names, _, object_sizes, records, ends = columns
        first = list(accumulate(records, initial=0))
        fits = le if self.format.kind == "tar" else eq  # an end mark follows the last sample
        if first[-1] * NUMBER != end - middle or not all(map(fits, ends, object_sizes)):
            return None
        checksum, sums = crc32(head), array("I")
        for start in range(middle, end, PIECE * NUMBER):
            data = memoryview(source.read(start, min(PIECE * NUMBER, end - start)))
            checksum = crc32(data, checksum)
            pages = range(0, len(data), PAGE * NUMBER)
            sums.extend(crc32(data[page : page + PAGE * NUMBER]) for page in pages)
        if checksum != _CRC.unpack(source.read(end, _CRC.size))[0]:
            return None
        base, before = len(self.offsets), len(self._names)
        for column, more in zip(self._columns, columns, strict=True):
            column.extend(more)
        self.offsets.add(middle, first[-1], sums)
        self._first.extend(base + each for each in first[1:])
        self._rows.update(zip(names, range(before, before + count), strict=True))
        return end + _CRC.size


def memory_of(source: IndexSource) -> int:
    """Return the memory, in bytes, that a `RecordIndex` takes, by the sizes of the blocks alone."""
    rows, sums, at, read = 0, 0, HEADER_BYTES, 0
    while (sizes := _block_sizes(source, at)) is not None:
        count, middle, end = sizes
        rows, sums, read = rows + count, sums + (end - middle) // PAGE, max(read, middle - at)
        at = end + _CRC.size
    return rows * _ROW_MEMORY + sums + 2 * read


def _block_sizes(source: IndexSource, at: int) -> tuple[int, int, int] | None:
    """Return rows of the block at `at`, and where its offsets begin and end; None unless it is whole."""
    start = at + _BLOCK.size
    if start > source.size:
        return None
    mark, count, size = _BLOCK.unpack(source.read(at, _BLOCK.size))
    middle, end = start + NUMBER * _COLUMNS * count, start + size
    if mark != _MARK or size % NUMBER or middle > end or end + _CRC.size > source.size:
        return None
    return count, middle, end


def header(record_format: RecordFormat) -> bytes:
    """Return the first bytes of an index's file."""
    text = _HEADER.pack(MAGIC, VERSION, 1, str(record_format).encode(), 0)[: -_CRC.size]
    return text + _CRC.pack(crc32(text))


def read_header(source: IndexSource) -> RecordFormat:
    """Return the format of an index's file. Raises Damaged."""
    data = bytes(source.read(0, min(source.size, HEADER_BYTES)))
    if len(data) < HEADER_BYTES or not data.startswith(MAGIC):
        raise Damaged("it does not begin as a record index does")
    _, version, stride, name, checksum = _HEADER.unpack(data)
    if version != VERSION:
        raise Damaged(f"it has version {version}, and this Penstock reads version {VERSION}")
    if crc32(data[: -_CRC.size]) != checksum:
        raise Damaged("its header is damaged")
    if stride != 1:  # an earlier Penstock could leave records out
        raise Damaged(f"it has 1 record of {stride}, and this Penstock needs every one")
    try:
        found = RecordFormat.parse(name.rstrip(b"\0").decode("ascii", "replace"))
    except ValueError as error:
        raise Damaged(str(error)) from None
    if found.kind == "fixed":
        raise Damaged(f"it is of {found}, whose records need no index")
    return found


def block(rows: Iterable[IndexedObject]) -> bytes:
    """Return the block of these rows, to be appended to a file."""
    rows = list(rows)
    numbers = array("Q")
    for column in zip(*(row[:_COLUMNS] for row in rows), strict=True):
        numbers.extend(column)
    for row in rows:
        numbers.extend(row.offsets)
    if sys.byteorder == "big":
        numbers.byteswap()
    columns = numbers.tobytes()
    text = _BLOCK.pack(_MARK, len(rows), len(columns)) + columns
    return text + _CRC.pack(crc32(text))
