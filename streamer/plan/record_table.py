"""Where the records of a plan's objects are: by a record index, or by arithmetic.

Records of one size, and objects that are records, need no index. A table answers for any record of any object
at once. An index must have every record, not every 256th.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple, Protocol

from streamer.errors import ConfigError, CorruptObject, ErrorContext
from streamer.plan.parts import ObjectRef
from streamer.units import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from streamer.formats.record_index import RecordIndex
    from streamer.plan.entries import Entries


END_MARK = bytes(1024)
"""The end of a tar archive. Without it, two samples of one key would be read as one if they came together."""


class EndMarks(NamedTuple):
    """Bytes that the stream of one rank has besides its records; most formats have none."""

    run: bytes = b""
    """After each run of adjacent records."""
    epoch: bytes = b""
    """After the last record of an epoch."""


class RecordTable(Protocol):
    """Where the records of every object of a plan are."""

    @property
    def counts(self) -> Sequence[int]:
        """Records of every entry of the plan."""
        ...

    @property
    def record_format(self) -> str:
        """Name of the record format."""
        ...

    @property
    def end_marks(self) -> EndMarks:
        """End marks in the stream of one rank."""
        ...

    def border(self, entry: int, record: int) -> int:
        """Return the offset of a record, or that after the last one."""
        ...

    def borders(self, entry: int, first: int, end: int) -> Sequence[int]:
        """Return the offsets of the records from `first` up to `end`, and that after them."""
        ...


class FixedRecords:
    """A `RecordTable` of records of one size: their offsets need no index."""

    def __init__(self, entries: Entries, size: int) -> None:
        """Raises ConfigError for an object that is no multiple of `size` bytes."""
        self.record_format, self.end_marks = f"fixed:{size}", EndMarks()
        self._size = size
        self.counts = array("Q", [each // size for each in entries.sizes])
        for entry, each in enumerate(entries.sizes):
            if each % size:
                ref = only_object(entries, entry)
                raise ConfigError(
                    f"s3://{ref.bucket}/{ref.key} has {counted(each, 'byte')}, no multiple of the "
                    f"{size} of Records.Format; correct Format, or leave the object out by Exclude"
                )

    def border(self, entry: int, record: int) -> int:  # noqa: ARG002 - all objects are alike
        return record * self._size

    def borders(self, entry: int, first: int, end: int) -> Sequence[int]:  # noqa: ARG002 - likewise
        return range(first * self._size, (end + 1) * self._size, self._size)


class ObjectRecords:
    """A `RecordTable` of wrapped entries, each one record: the listing is their index."""

    def __init__(self, entries: Entries) -> None:
        self.record_format, self.end_marks = "objects", EndMarks()
        self.counts = array("B", [1]) * len(entries)
        self._sizes = entries.sizes

    def border(self, entry: int, record: int) -> int:
        return record * self._sizes[entry]

    def borders(self, entry: int, first: int, end: int) -> Sequence[int]:
        return [self.border(entry, record) for record in range(first, end + 1)]


class IndexedRecords:
    """A `RecordTable` of records whose offsets an index has."""

    def __init__(
        self, index: RecordIndex, entries: Entries, names: Sequence[int], *, join: bool = False
    ) -> None:
        """`names`: of the objects, by entry; the index has rows of their versions.

        `join`: an epoch of tar samples is one archive; else each run of adjacent samples is one. `border` and
        `borders` read the index's file, and raise the errors of its source. Raises CorruptObject for a row
        that ends after its object.
        """
        self.record_format = str(index.format)
        self.end_marks = EndMarks()
        if index.format.kind == "tar":
            self.end_marks = EndMarks(epoch=END_MARK) if join else EndMarks(run=END_MARK)
        self.offsets = index.offsets
        """The offsets of all rows of the index."""
        self.firsts = array("Q")
        """Number in `offsets` of the first record of each object."""
        self.counts, self.ends = array("Q"), array("Q")
        for entry, name in enumerate(names):
            first, records, end = index.extent(name)
            if records and end > entries.sizes[entry]:
                raise misplaced(entries, entry)
            self.counts.append(records)
            self.firsts.append(first)
            self.ends.append(end)

    def border(self, entry: int, record: int) -> int:
        if record == self.counts[entry]:
            return self.ends[entry]
        return self.offsets[self.firsts[entry] + record]

    def borders(self, entry: int, first: int, end: int) -> Sequence[int]:
        if end - first == 1:  # a page in memory may have both
            return self.border(entry, first), self.border(entry, end)
        base = self.firsts[entry]
        if end < self.counts[entry]:
            return self.offsets[base + first : base + end + 1]
        borders = self.offsets[base + first : base + end]
        borders.append(self.ends[entry])
        return borders


def misplaced(entries: Entries, entry: int) -> CorruptObject:
    """Return the error of an index whose offsets in an object are not those of records."""
    ref = only_object(entries, entry)
    return CorruptObject(
        "the record index has offsets that no records have; remove it and build it again",
        ErrorContext(ref.bucket, ref.key),
    )


def only_object(entries: Entries, entry: int) -> ObjectRef:
    """Return the object of an entry that has nothing else. Raises TypeError if it has."""
    (ref,) = entries.items(entry)
    if not isinstance(ref, ObjectRef):
        raise TypeError("an entry without an object")
    return ref
