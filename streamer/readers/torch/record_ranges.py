"""The records that one worker reads: which ones are left of an epoch, and which ones make an element. Pure.

    block of a reader ─▶ RemainingRecords: without those received before ─▶ RecordGrouper: whole units

A unit is the records of one element.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from streamer.readers.core.position import ReaderPosition, StartPosition
from streamer.readers.core.shuffle import NumberedRecords
from streamer.readers.core.skipping import SkippedRecord

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from streamer.readers.core.epoch_skips import EpochSkips


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


@dataclass(slots=True)
class RemainingRecords:
    """The records of an epoch that are left to deliver: all from `start` on except the ranges `ahead`."""

    start: StartPosition
    ahead: Sequence[RecordRange] = ()
    rows: Mapping[int, int] = field(default_factory=dict)
    """Of tables that were returned in part, by record number: how many of their rows."""

    def select(
        self, batch: list[Any], first: int, offset: int, number: int | None = None
    ) -> Iterator[NumberedRecords]:
        """Yield the remaining records of a batch that begins with record number `first`, at byte `offset`.

        `number`: as in `NumberedRecords`.
        """
        whole = NumberedRecords(batch, first, offset, 0, number)
        begin, count = max(0, self.start.position.records - first), len(batch)
        for records in self.ahead:
            stop = min(count, records.first - first)
            if stop > begin:
                yield whole.part(begin, stop)
            begin = max(begin, records.end - first)
        if begin < count:
            yield whole.part(begin, count) if begin else whole


Unit = tuple[list[Any], RecordRange]
"""The records of one element, and their range."""


def admitted_blocks(blocks: list[NumberedRecords], skips: EpochSkips) -> list[NumberedRecords]:
    """Return the blocks up to the first record over the budget, which `skips.check_refused` then raises."""
    admitted: list[NumberedRecords] = []
    for block in blocks:
        if (stop := skips.admit(block.records)) < len(block.records):
            return [*admitted, block.part(0, stop)] if stop else admitted
        admitted.append(block)
    return admitted


def remaining_records(saved: RemainingRecords | None, channel: str, epoch: int) -> RemainingRecords:
    """Return `saved` if it is of this epoch, else all records of the epoch."""
    if saved is not None and saved.start.position.epoch == epoch:
        return saved
    return RemainingRecords(StartPosition(ReaderPosition(channel, epoch)))


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
    """Return the indices of the records that were not skipped; None if none was skipped."""
    good = [index for index, record in enumerate(records) if type(record) is not SkippedRecord]
    return None if len(good) == len(records) else good
