"""Places of records in the stream of some ranks: a step's first byte, and the records before a byte.

    step   ─ places of runs ─▶ offset      where a resumed rank begins
    offset ─ places of runs ─▶ records     what a reader of that rank has had

A walk begins at a stored position of the order (`HostRanks.sums`), so it takes some ten milliseconds.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple, Protocol

from streamer.plan.record_order import START, Run, Walk

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterator

    from streamer.plan.host_ranks import HostRanks
    from streamer.plan.order_sums import StepPosition
    from streamer.plan.record_order import Deal
    from streamer.plan.record_table import EndMarks

_NO_RUN = Run(0, 0, 0)


class RankPlan(Protocol):
    """The plan of some ranks of a host."""

    host_ranks: HostRanks
    deal: Deal

    @property
    def end_marks(self) -> EndMarks:
        """End marks in the stream of these ranks."""
        ...

    def own(self, sums: array[int]) -> int:
        """Return the bytes of their stream. `sums`: of each rank of this host, and of all of them."""
        ...


class Place(NamedTuple):
    """Place of a run in the stream."""

    records: int
    """Records before the run."""
    offset: int
    """Bytes before the run."""
    run: Run


def offset_of(plan: RankPlan, epoch: int, step: int) -> int:
    """Return the offset of a step's first byte in the epoch's stream; of the step after the last, its end."""
    positions = plan.host_ranks.sums(epoch).positions
    after = bisect_right(positions, step, key=lambda position: position.step)
    records = step * _records_of_step(plan)
    found = places(plan, epoch, positions[after - 1] if after else None)
    return next(place.offset for place in found if place.records >= records)


def records_before(plan: RankPlan, epoch: int, offset: int) -> int:
    """Return the number of whole records in the first `offset` bytes of the epoch's stream."""
    positions = plan.host_ranks.sums(epoch).positions
    after = bisect_right(positions, offset, key=lambda position: plan.own(position.sums))
    place = Place(0, 0, _NO_RUN)
    for following in places(plan, epoch, positions[after - 1] if after else None):
        if following.offset > offset:
            break
        place = following
    records, start, (entry, first, end) = place
    border = plan.host_ranks.table.border
    if first == end:
        return records
    limit = offset - start + border(entry, first)
    return records + bisect_right(range(first + 1, end + 1), limit, key=lambda number: border(entry, number))


def _records_of_step(plan: RankPlan) -> int:
    """Return the records of the plan's ranks in one step."""
    return plan.deal.slice * (plan.deal.end - plan.deal.first)


def places(plan: RankPlan, epoch: int, start: StepPosition | None) -> Iterator[Place]:
    """Yield the place of each run from `start` on, or from the first step; at last that of the end."""
    host_ranks = plan.host_ranks
    border, (run_mark, epoch_mark) = host_ranks.table.border, plan.end_marks
    step, position, offset = 0, START, 0
    if start is not None:
        step, position, offset = start.step, start.walk, plan.own(start.sums)
    records = step * _records_of_step(plan)
    last: tuple[int, int] | None = None
    """Entry and end of the run before, which may go on; its end mark is not in `offset` yet."""
    for _, run in plan.deal.deal(Walk(host_ranks.order, epoch, position), step):
        entry, first, end = run
        if last is not None and last != (entry, first):
            offset += len(run_mark)
        yield Place(records, offset, run)
        records += end - first
        offset += border(entry, end) - border(entry, first)
        last = entry, end
    if last is not None:
        offset += len(run_mark) + len(epoch_mark)
    yield Place(records, offset, _NO_RUN)
