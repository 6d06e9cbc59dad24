"""Divides the stream of several ranks, in which each byte comes once, over the ranks. Pure.

    epoch's stream of these ranks   ── step 0 ──────────────┬── step 1 ─────────…
    pieces                          rank 0 │ rank 1 │ rank 2 │ rank 0 │ …

The pieces are the rank of each run of bytes and its length, in stream order. They are computed while the
stream is delivered: in O(√B) memory, as its segments are (`streamer.plan.record_order`).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from streamer.plan.record_order import START
from streamer.plan.record_plan import RecordPlan

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from streamer.plan.plan import Plan
    from streamer.plan.record_order import Walk


class Piece(NamedTuple):
    """Consecutive bytes of a stream that one rank gets."""

    rank: int
    """Number of the rank among those of the stream."""
    size: int


@dataclass(frozen=True, slots=True)
class DealtEpoch:
    """The pieces of one epoch from some point of its stream on."""

    before: list[int]
    """Bytes of each rank before that point; together they are its offset in the stream."""
    pieces: Iterator[Piece]

    @property
    def offset(self) -> int:
        """Offset of the point in the stream."""
        return sum(self.before)


def deal_stream(plan: Plan, epoch: int, offsets: Sequence[int]) -> DealtEpoch:
    """Return the pieces of the epoch from the first byte that any rank lacks.

    `offsets`: bytes that each rank has already; with one of them, the whole stream is of one rank. Takes some
    ten milliseconds for offsets after 0, once the plan knows the epoch's length. Raises ValueError for other
    ranks than those of the plan, or if their streams have bytes that this stream has not (end marks).
    """
    if len(offsets) == 1 and isinstance(plan, RecordPlan) and plan.host_ranks.may_change:
        near, segments = plan.segments_near(epoch, offsets[0])
        return _after([near], (Piece(0, len(segment)) for segment in segments), offsets)
    if len(offsets) == 1:
        left = plan.total_bytes(epoch) - offsets[0]
        return DealtEpoch([offsets[0]], iter([Piece(0, left)] if left else []))
    if not isinstance(plan, RecordPlan) or len(offsets) != plan.deal.end - plan.deal.first:
        raise ValueError(f"no stream of {len(offsets)} ranks: {plan!r}")
    if plan.host_ranks.table.end_mark:
        raise ValueError("the streams of ranks have end marks, which their common stream has not")
    step, start, before = 0, START, [0] * len(offsets)
    if any(offsets):
        positions = plan.host_ranks.sums(epoch).positions
        after = bisect_left(
            positions, 1, key=lambda at: any(done > due for done, due in zip(at.sums, offsets, strict=True))
        )
        if after:
            step, start, sums = positions[after - 1]
            before = list(sums)
    return _after(before, _pieces(plan, plan.host_ranks.walk(epoch, start), step), offsets)


def _after(before: list[int], pieces: Iterator[Piece], offsets: Sequence[int]) -> DealtEpoch:
    """Return the pieces from the first byte that any rank lacks. `before`: bytes of each before `pieces`."""
    for piece in pieces:
        if before[piece.rank] + piece.size > offsets[piece.rank]:
            return DealtEpoch(before, chain([piece], pieces))
        before[piece.rank] += piece.size
    return DealtEpoch(before, iter(()))


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
