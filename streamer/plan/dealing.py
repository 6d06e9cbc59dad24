"""Divides the stream of several ranks, in which each byte comes once, over the ranks. Pure.

    epoch's stream of these ranks   ── step 0 ──────────────┬── step 1 ─────────…
    pieces                          rank 0 │ rank 1 │ rank 2 │ rank 0 │ …
    pieces of tar samples           rank 0, mark │ rank 1, mark, more, mark │ …

The pieces are the rank of each run of bytes and its length, in stream order. The end mark of a run of tar
samples is a piece that is not in the stream: it follows the run at once, so that its last sample is whole
before the stream goes on with another rank. Joined samples (`Join`) have no stream of several ranks: a
sample would be whole when the rank's next one begins, after the other ranks' slices. Pieces are computed
while the stream is delivered: in O(√B) memory, as its segments are (`streamer.plan.record_order`); for end
marks also the runs of one step.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING, NamedTuple

from streamer.plan.record_order import START, Run, Walk
from streamer.plan.record_plan import RecordPlan

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from streamer.plan.plan import Plan

_NO_RUN = Run(0, 0, 0)
"""Follows the last run of a rank; no run ends at its begin."""


class Piece(NamedTuple):
    """Consecutive bytes of a stream that one rank gets, or the end mark after them."""

    rank: int
    """Number of the rank among those of the stream."""
    size: int
    mark: bool = False
    """Whether this is an end mark: zeros that the stream has not."""


@dataclass(frozen=True, slots=True)
class DealtEpoch:
    """The pieces of one epoch from some point of its stream on."""

    offset: int
    """Offset of that point in the stream."""
    before: list[int]
    """Bytes of each rank before that point, end marks included."""
    pieces: Iterator[Piece]


def deal_stream(plan: Plan, epoch: int, offsets: Sequence[int]) -> DealtEpoch:
    """Return the pieces of the epoch from the first byte that any rank lacks.

    `offsets`: bytes that each rank has already; with one of them, the whole stream is of one rank. Takes some
    ten milliseconds for offsets after 0, once the plan knows the epoch's length. Raises ValueError for other
    ranks than those of the plan.
    """
    if len(offsets) == 1:
        left = plan.total_bytes(epoch) - offsets[0]
        return DealtEpoch(offsets[0], [offsets[0]], iter([Piece(0, left)] if left else []))
    if not isinstance(plan, RecordPlan) or len(offsets) != plan.deal.end - plan.deal.first:
        raise ValueError(f"no stream of {len(offsets)} ranks: {plan!r}")
    step, start, offset, before = 0, START, 0, [0] * len(offsets)
    if any(offsets):
        positions = plan.host_ranks.sums(epoch).positions
        after = bisect_left(
            positions, 1, key=lambda at: any(done > due for done, due in zip(at.sums, offsets, strict=False))
        )
        if after:
            step, start, sums = positions[after - 1]
            *before, offset = sums
    pieces = _marked_pieces if plan.host_ranks.table.end_marks.run else _pieces
    return _after(offset, before, pieces(plan, Walk(plan.host_ranks.order, epoch, start), step), offsets)


def _after(offset: int, before: list[int], pieces: Iterator[Piece], offsets: Sequence[int]) -> DealtEpoch:
    """Return the pieces from the first byte that any rank lacks.

    `offset`, `before`: bytes of the stream, and of each rank, before `pieces`.
    """
    for piece in pieces:
        if before[piece.rank] + piece.size > offsets[piece.rank]:
            return DealtEpoch(offset, before, chain([piece], pieces))
        before[piece.rank] += piece.size
        offset += 0 if piece.mark else piece.size
    return DealtEpoch(offset, before, iter(()))


def _pieces(plan: RecordPlan, walk: Walk, step: int) -> Iterator[Piece]:
    """Yield the pieces of the plan's ranks from a step on: one for each rank and step."""
    border, ranks = plan.host_ranks.table.border, plan.deal.end - plan.deal.first
    rank, left, size = 0, plan.deal.slice, 0
    for entry, first, end in plan.deal.together(walk, step):
        record, start = first, border(entry, first)
        while record < end:
            last = min(record + left, end)
            stop = border(entry, last)
            size += stop - start
            left -= last - record
            record, start = last, stop
            if not left:
                yield Piece(rank, size)
                rank, left, size = (rank + 1) % ranks, plan.deal.slice, 0


def _marked_pieces(plan: RecordPlan, walk: Walk, step: int) -> Iterator[Piece]:
    """Yield the same for records with end marks: a piece for each run of a step, and its end mark.

    A run that goes on in the rank's next slice has no end mark, so the runs of one step are held.
    """
    deal, table = plan.deal, plan.host_ranks.table
    border, mark_bytes, steps = table.border, len(table.end_marks.run), deal.steps(walk.records)
    held: list[tuple[int, Run]] = []
    for number in range(step, steps + 1):
        runs = list(deal.step(walk, number)) if number < steps else []
        firsts = dict(reversed(runs))
        for (rank, (entry, first, end)), (other, other_run) in pairwise([*held, (-1, _NO_RUN)]):
            following = other_run if other == rank else firsts.get(rank, _NO_RUN)
            yield Piece(rank - deal.first, border(entry, end) - border(entry, first))
            if (following.entry, following.first) != (entry, end):
                yield Piece(rank - deal.first, mark_bytes, mark=True)
        held = runs
