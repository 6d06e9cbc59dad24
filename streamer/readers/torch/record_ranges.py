"""Which records make an element. Pure.

blocks of `ReadLoop` ─▶ RecordGrouper ─▶ units: the records of one element, and their range
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from streamer.readers.core.skipping import SkippedRecord

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from streamer.readers.core.shuffle import NumberedRecords


class RecordRange(NamedTuple):
    """Consecutive records of an epoch, by number."""

    first: int
    end: int
    """Number of the record after the last one."""
    offset: int
    skip: int
    """Number of records between byte `offset` and record `end`."""
    number: int | None = None
    """Number in its object of the record at `offset`, if records are read with their keys; else None."""
    window: int | None = None
    """Number in the epoch of the first record of the window of the last one, if records are shuffled."""


Unit = tuple[list[Any], RecordRange]
"""The records of one element, and their range."""


class RecordGrouper:
    """Groups numbered records, in their order, into units of a fixed number of records.

    A record that was skipped belongs to the unit of the next good record and does not count in it, unless
    ranks share records. So a unit ends with a good record, wherever lists of records and turns end.
    """

    def __init__(self, size: int, *, short: bool = True) -> None:
        """`short`: whether the last unit before a gap may be short.

        It is short if the state with the gap was saved without `skip`, and a record in the gap is skipped.
        """
        self._size = size
        self._short = short
        self._left: list[Any] = []
        self._left_range = RecordRange(0, 0, 0, 0)

    def add(self, block: NumberedRecords, *, skips: bool = False) -> Iterator[Unit]:
        """Yield the units that `block` completes, each with its range.

        `skips`: records that were skipped do not count.
        """
        if self._left and self._left_range.end != block.first:
            if self._short and (last := self.finish(skips=skips)) is not None:
                yield last
            self._left = []
        size, before = self._size, len(self._left)
        records = self._left + block.records if before else block.records
        first, offset, skip = block.first - before, block.offset, block.skip - before
        number, window = block.number, block.window
        ends: Sequence[int] = range(size, len(records) + 1, size)
        if skips and (good := good_places(records)) is not None:
            ends = [place + 1 for place in good[size - 1 :: size]]
        whole = 0
        for end in ends:
            at, whole = whole, end
            yield records[at:end], RecordRange(first + at, first + end, offset, skip + end, number, window)
        self._left, count = records[whole:], len(records)
        self._left_range = RecordRange(first + whole, first + count, offset, skip + count, number, window)

    def finish(self, *, skips: bool = False) -> Unit | None:
        """Return the incomplete unit at the end of the epoch; None if there is none. `skips`: as in `add`."""
        if not self._left or (skips and good_places(self._left) == []):
            return None
        return self._left, self._left_range


def good_places(records: Sequence[Any]) -> list[int] | None:
    """Return the indices of the records that were not skipped; None if no record was skipped."""
    good = [index for index, record in enumerate(records) if type(record) is not SkippedRecord]
    return None if len(good) == len(records) else good
