"""Folds over the pieces of a plan: offsets of steps, records and objects in a stream; numbers of parts. Pure.

    step   ─▶ offset      where a resumed rank begins
    offset ─▶ records     what a reader of that rank has had
    epoch  ─▶ the offset of each object, or of each run of an object's records, for its key list
    epoch  ─▶ number of parts

With ranks by record a walk begins at a checkpoint (`RecordPlan.sums`), so it takes some ten milliseconds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import partial
from typing import TYPE_CHECKING

from streamer.plan.entries import framed
from streamer.plan.parts import ObjectRef, ObjectStart, cut
from streamer.plan.record_plan import RecordPlan
from streamer.plan.record_table import only_object

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from streamer.plan.entries import Entries
    from streamer.plan.pieces import Checkpoint, Piece
    from streamer.plan.plan import Plan


def offset_of(plan: RecordPlan, epoch: int, step: int) -> int:
    """Return the offset, in the epoch's stream, of the first byte of a step or a later one; or the end."""
    found = plan.sums(epoch).checkpoints
    at = found[bisect_right(found, step, key=lambda each: each.step) - 1]
    due = plan.deal.before(step)
    for records, offset, (_, entry, first, end, start, _) in _ranges(plan, epoch, at):
        if due < records + end - first:
            return offset + plan.table.border(entry, first + due - records) - start
    return plan.total_bytes(epoch)


def records_before(plan: RecordPlan, epoch: int, offset: int) -> int:
    """Return the number of whole records in the first `offset` bytes of the epoch's stream.

    Of a manifest's line, none of its records is whole before all are.
    """
    at = plan.checkpoint(epoch, offset)
    for records, begin, (_, entry, first, end, start, stop) in _ranges(plan, epoch, at):
        if offset < begin + stop - start:
            limit, ends = offset - begin + start, range(first + 1, end + 1)
            whole = records + bisect_right(ends, limit, key=partial(plan.table.border, entry))
            return whole * plan.records_each
    return plan.records(epoch)


def _ranges(plan: RecordPlan, epoch: int, at: Checkpoint) -> Iterator[tuple[int, int, Piece]]:
    """Yield the ranges of the stream from a checkpoint on, each after the records and bytes before it."""
    records, offset, mark = plan.deal.before(at.step), plan.own(at.sums), len(plan.end_marks.run)
    for each in plan.ranges(epoch, at):
        yield records, offset, each
        _, _, first, end, start, stop = each
        records += end - first
        offset += stop - start + mark


def object_starts(plan: Plan, epoch: int, first: int = 0) -> Iterator[ObjectStart | None]:
    """Yield where each object of the epoch begins in the plan's bytes, in stream order.

    These bytes are those of the stream, unless objects are inflated or joined on delivery. The first one is
    the object that has byte `first`. Objects without a byte, and the texts of attributes, count as objects.
    With ranks by record an object begins again with each run of its records, and the first one begins at the
    first record from byte `first` on. Yields None while the next one is unknown, because the plan is open.
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
    drawn, offset = 0, 0
    while True:
        grows, begin, drawn = plan.open, drawn, plan.known
        for index in plan.order(epoch, begin, drawn):
            yield from _starts_in(plan.entries, index, offset)
            offset += plan.entries.sizes[index]
        if not grows:
            return
        if drawn == plan.known and plan.open:
            yield None


def _starts_in(entries: Entries, index: int, offset: int) -> Iterator[ObjectStart]:
    """Yield where each item of an entry begins, of which the first one begins at `offset`."""
    for item in entries.items(index):
        if isinstance(item, ObjectRef):
            yield ObjectStart(offset, 0, item.key, item.bucket)
            size = item.size
        else:
            yield ObjectStart(offset, 0, "", "")
            size = len(item)
        offset += framed(size) if entries.framed_here(item) else size


def _record_starts(plan: RecordPlan, epoch: int, least: int) -> Iterator[ObjectStart]:
    border, at = plan.table.border, plan.checkpoint(epoch, least)
    for _, offset, (_, entry, first, end, start, _) in _ranges(plan, epoch, at):
        if plan.entries.wrap:
            yield from (each for each in _starts_in(plan.entries, entry, offset) if each.offset >= least)
            continue
        begin = first
        if offset < least:
            limit = least - offset + start
            begin += bisect_left(range(first, end), limit, key=partial(border, entry))
        if begin < end:
            ref = only_object(plan.entries, entry)
            yield ObjectStart(offset + border(entry, begin) - start, begin, ref.key, ref.bucket)


def number_of_parts(plan: Plan, part_size: int) -> int:
    """Return the number of parts of at most `part_size` bytes of the objects of the first epoch.

    Counted without making the parts, which would take memory for a million objects.
    """
    if not plan.entries.plain:
        return sum(1 for _ in cut(plan.segments(0), part_size=lambda: part_size, epoch=0))
    sizes: Iterable[int] = plan.entries.sizes
    if plan.shard.count > 1:
        sizes = map(plan.entries.sizes.__getitem__, plan.order(0))
    return sum(-(-size // part_size) for size in sizes)


def count_parts(plan: RecordPlan, epoch: int, part_size: int) -> list[int]:
    """Return the parts of each of the plan's FIFOs in an epoch; the last number is of their one stream.

    Takes some microseconds per block and slice.
    """
    fifos = plan.deal.fifos
    if plan.entries.wrap:
        streams = (each.segments(epoch) for each in (*plan.ranks(fifos), plan))
        return [sum(1 for _ in cut(each, part_size=lambda: part_size, epoch=epoch)) for each in streams]
    parts, held = [0] * (fifos + 1), [(-1, 0, 0)] * (fifos + 1)
    """By stream the parts of its bytes so far, and the range that goes on: object, first byte, byte after."""
    for fifo, entry, _, _, start, stop in plan.pieces(epoch):
        for stream in (fifo, -1):
            of, begin, end = held[stream]
            if (of, end) != (entry, start):
                parts[stream] += -(-(end - begin) // part_size)
                begin = start
            held[stream] = entry, begin, stop
    return [count - (begin - end) // part_size for count, (_, begin, end) in zip(parts, held, strict=True)]
