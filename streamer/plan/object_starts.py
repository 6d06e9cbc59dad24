"""Where each object begins in the bytes of a plan, for the key list of an epoch. Pure.

    entries of a plan       offset of each object, record 0
    runs of a RecordPlan    offset of each run, the number of its first record

Bytes of the plan are those of the stream, unless objects are inflated, replaced or skipped on delivery.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

from streamer.plan.entries import framed
from streamer.plan.record_places import places
from streamer.plan.record_plan import RecordPlan
from streamer.plan.record_table import only_object
from streamer.plan.segments import ObjectRef, ObjectStart

if TYPE_CHECKING:
    from collections.abc import Iterator

    from streamer.plan.plan import Plan


def object_starts(plan: Plan, epoch: int, first: int = 0) -> Iterator[ObjectStart | None]:
    """Yield where each object of the epoch begins in the plan's bytes, in stream order.

    The first one is the object that has byte `first`. Objects without a byte, and the texts of attributes,
    count as objects. With ranks by record an object begins again with each run of its records, and the first
    one begins at the first record from byte `first` on. Yields None while the next one is unknown, because
    the plan is open.
    """
    if isinstance(plan, RecordPlan):
        yield from _record_starts(plan, epoch, first)
        return
    before: ObjectStart | None = None
    for start in _entry_starts(plan, epoch):
        if start is not None and start.offset <= first:
            before = start
            continue
        if before is not None:
            yield before
            before = None
        yield start
    if before is not None:
        yield before


def _entry_starts(plan: Plan, epoch: int) -> Iterator[ObjectStart | None]:
    entries, drawn, offset = plan.entries, 0, 0
    while True:
        grows, begin, drawn = plan.open, drawn, plan.known
        for index in plan.order(epoch, begin, drawn):
            for item in entries.items(index):
                if isinstance(item, ObjectRef):
                    yield ObjectStart(offset, 0, item.key, item.bucket)
                    size = item.size
                else:
                    yield ObjectStart(offset, 0, "", "")
                    size = len(item)
                offset += framed(size) if entries.framed_here(item) else size
        if not grows:
            return
        if drawn == plan.known and plan.open:
            yield None


def _record_starts(plan: RecordPlan, epoch: int, first: int) -> Iterator[ObjectStart]:
    """Yield where each run of one object's records begins in the epoch's stream, as `Plan.object_starts`.

    The first one begins at byte `first`, or at the next record.
    """
    positions = plan.host_ranks.sums(epoch).positions
    after = bisect_right(positions, first, key=lambda position: plan.own(position.sums))
    border = plan.host_ranks.table.border
    last: tuple[int, int] | None = None
    """Entry and end of the run before."""
    begin_at = positions[after - 1] if after else None
    for _, offset, (entry, start, end) in places(plan, epoch, begin_at):
        begin = start
        if offset < first:
            limit = first - offset + border(entry, start)
            begin += bisect_left(range(start, end), limit, key=lambda number: border(entry, number))
        if begin < end and last != (entry, start):
            ref = only_object(plan.host_ranks.entries, entry)
            at = offset + border(entry, begin) - border(entry, start)
            yield ObjectStart(at, begin, ref.key, ref.bucket)
        last = (entry, end) if begin < end else None
