"""Counts the requests of all ranks of a host, by one walk over the epoch's order. Pure.

The plan of each rank can be cut into parts by itself (`streamer.plan.parts`), but this walks over all blocks
of the order for each rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from streamer.plan.order_sums import PartCounter

if TYPE_CHECKING:
    from streamer.plan.record_plan import RecordPlan


class RankParts(NamedTuple):
    """Numbers of parts of one epoch."""

    together: int
    """If the ranks are fetched as one stream."""
    by_rank: list[int]
    """If each rank is fetched by itself."""


class _Counters:
    """Counts the parts of each rank; a `PieceObserver`."""

    def __init__(self, ranks: int, part_size: int) -> None:
        self.together = PartCounter(part_size)
        self.by_rank = [PartCounter(part_size) for _ in range(ranks)]

    def add(self, rank: int, entry: int, start: int, stop: int) -> None:
        """See `PieceObserver.add`."""
        self.by_rank[rank].add(rank, entry, start, stop)


def count_parts(plan: RecordPlan, epoch: int, part_size: int) -> RankParts:
    """Return the parts of the plan's ranks in an epoch. Takes some microseconds per block and slice."""
    counters = _Counters(plan.deal.end - plan.deal.first, part_size)
    plan.host_ranks.sum_up(plan.host_ranks.order, epoch, plan.deal, [counters, counters.together])
    return RankParts(counters.together.parts, [each.parts for each in counters.by_rank])
