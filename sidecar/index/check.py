"""Compares a record index with the objects: a spot check of record headers, or a scan of all bytes.

    objects of the plan ─▶ rows of their versions          an object without one is an error by name
    indexed records, a sample, and last records ─▶ ranges of a few bytes ─▶ relay ─▶ RecordFormat.fault
    all objects ─▶ ObjectScans ─▶ rows, compared with those of the index

The index is never trusted over the bytes: a record that is not where the index has it is an error with
bucket, key and offset.
"""

from __future__ import annotations

import random
from array import array
from bisect import bisect_right
from itertools import accumulate, islice
from typing import TYPE_CHECKING, NamedTuple

from sidecar.index.build import in_two
from sidecar.index.objects import read_plan
from sidecar.index.scans import ObjectScans
from streamer.aio import in_thread
from streamer.errors import CorruptObject, ErrorContext, SourceChanged
from streamer.plan import Entries, Plan, Segment
from streamer.plan.record_order import Deal, RecordOrder
from streamer.plan.record_plan import RecordPlan
from streamer.plan.record_table import EndMarks
from streamer.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from sidecar.index.build import Findings
    from sidecar.index.objects import Access, ChannelObjects
    from streamer.formats.record_format import RecordFormat
    from streamer.formats.record_index import IndexedObject, RecordIndex
    from streamer.plan import ObjectRef


AT_ONCE = 1 << 15
"""Most borders that are looked at by one plan, because a plan is in memory."""


class Border(NamedTuple):
    """A record of an object, up to the next or to the end of the last one; without bytes: a line's end."""

    ref: ObjectRef
    begin: int
    end: int


def check_rows(index: RecordIndex, objects: ChannelObjects) -> None:
    """Raise SourceChanged unless the index has a row of this version of every object."""
    missing = objects.without_row(index)
    if not missing:
        return
    first = objects[missing[0]]
    what = (
        "is not in the record index"
        if index.get(objects.names[missing[0]]) is None
        else "has another size, ETag or version than when it was indexed"
    )
    others = f", as {counted(len(missing) - 1, 'more object')}" if len(missing) > 1 else ""
    raise SourceChanged(
        f"the object {what}{others}; build the record index again",
        ErrorContext(first.bucket, first.key),
    )


def sample_borders(
    index: RecordIndex, objects: ChannelObjects, most: int, lasts: Iterable[int]
) -> Iterator[Border]:
    """Yield at most `most` indexed records, at random, and the last ones of some objects, in plan order.

    `lasts`: numbers of these objects. Raises KeyError for an object without a row.
    """
    ends = array("Q", accumulate(index.extent(name)[1] for name in objects.names))
    total = ends[-1] if ends else 0
    chosen = set(range(total) if total <= most else random.sample(range(total), most))
    chosen.update(ends[number] - 1 for number in lasts if ends[number])
    for each in sorted(chosen):
        number = bisect_right(ends, each)
        name = objects.names[number]
        place = each - ends[number]  # from the end of the object's offsets
        first, count, end = index.extent(name)
        at = first + count + place
        following = end if place == -1 else index.offsets[at + 1]
        yield Border(objects[number], index.offsets[at], following)


async def check_borders(
    record_format: RecordFormat,
    borders: Iterable[Border],
    access: Access,
    *,
    on_bad: Callable[[CorruptObject], None],
) -> int:
    """Compare some bytes at every border with the format; return their number. Raises SourceError."""
    rest, looked = iter(borders), 0
    while part := await in_thread(lambda: list(islice(rest, AT_ONCE))):
        looked += len(part)
        await _look(record_format, part, access, on_bad)
    return looked


async def _look(
    record_format: RecordFormat,
    borders: Sequence[Border],
    access: Access,
    on_bad: Callable[[CorruptObject], None],
) -> None:
    looks: list[tuple[Border, Segment]] = []
    for border in borders:
        ref = border.ref
        first, end = record_format.evidence(border.begin, border.end)
        if not 0 <= first <= end <= ref.size:
            on_bad(_misplaced(border, "the object ends before it"))
        elif first < end:
            looks.append((border, Segment(ref, first, end)))
        elif fault := record_format.fault(b"", border.begin, border.end):
            on_bad(_misplaced(border, fault))
    at, evidence = 0, bytearray()

    def look(_: Segment, data: memoryview) -> None:
        nonlocal at
        border, segment = looks[at]
        evidence.extend(data)
        if len(evidence) == len(segment):
            if fault := record_format.fault(bytes(evidence), border.begin, border.end):
                on_bad(_misplaced(border, fault))
            at += 1
            evidence.clear()

    plan = await in_thread(_plan_of, [segment for _, segment in looks])
    await read_plan(plan, look, access)


class _Looks:
    """A `RecordTable` of the bytes that are looked at: the one record of an entry each."""

    record_format, end_marks = "", EndMarks()

    def __init__(self, looks: Sequence[Segment]) -> None:
        self.counts = array("Q", [1]) * len(looks)
        self._looks = looks

    def border(self, entry: int, record: int) -> int:
        look = self._looks[entry]
        return look.end if record else look.start

    def borders(self, entry: int, first: int, end: int) -> Sequence[int]:
        return self.border(entry, first), self.border(entry, end)


def _plan_of(looks: Sequence[Segment]) -> RecordPlan:
    """Return the plan of these bytes, in this order; it has its length already."""
    entries, table = Entries(), _Looks(looks)
    for look in looks:
        entries.add(look.object)
    plan = RecordPlan(entries, table, RecordOrder(table.counts, entries.sizes), Deal(1, 1, 0, 1))
    plan.total_bytes(0)
    return plan


async def check_all(
    index: RecordIndex,
    objects: ChannelObjects,
    access: Access,
    findings: Findings,
) -> None:
    """Scan every object and compare the result with its row. Raises SourceError."""

    def compare(ref: ObjectRef, row: IndexedObject) -> None:
        if (indexed := index.get(row.name)) != row:
            findings.note(_differs(ref, row, indexed))

    scans = ObjectScans(index.format, on_row=compare, on_bad=findings.refuse)
    to_read, empty = in_two(objects, range(len(objects)))
    await in_thread(scans.measure, map(objects.__getitem__, empty))
    plan = await in_thread(Plan.of, map(objects.__getitem__, to_read))
    await read_plan(plan, scans.see, access)


def _misplaced(border: Border, why: str) -> CorruptObject:
    return CorruptObject(
        f"no record is where the index has one: {why}",
        ErrorContext(border.ref.bucket, border.ref.key, border.begin),
    )


def _differs(ref: ObjectRef, row: IndexedObject, indexed: IndexedObject | None) -> CorruptObject:
    """Return the error of an object whose records are not where its row has them."""
    if indexed is None:
        return CorruptObject("the object has no row in the index", ErrorContext(ref.bucket, ref.key))
    pairs = zip(row.offsets, indexed.offsets, strict=False)
    offset = next((have for have, listed in pairs if have != listed), min(row.end, indexed.end))
    return CorruptObject(
        f"the records are not where the index has them: {counted(row.records, 'record')} up to byte "
        f"{row.end}, and {indexed.records} up to {indexed.end} in the index",
        ErrorContext(ref.bucket, ref.key, offset),
    )
