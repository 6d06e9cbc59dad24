"""Counts the requests of all ranks of a host, by one walk over the epoch's order. Pure.

The plan of each rank can be cut into parts by itself (`streamer.plan.parts`), but this walks over all blocks
of the order for each rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from streamer.plan.record_order import Run

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamer.plan.record_plan import RecordPlan


class RankParts(NamedTuple):
    """Numbers of parts of one epoch."""

    together: int
    """If the ranks are fetched as one stream."""
    by_rank: list[int]
    """If each rank is fetched by itself."""


class _Counter:
    """Counts the parts of a stream, which comes as runs of records."""

    def __init__(self, border: Callable[[int, int], int], part_size: int) -> None:
        self.parts = 0
        self._border = border
        self._part_size = part_size
        self._run = Run(0, 0, 0)

    def add(self, run: Run) -> None:
        """Add the next records."""
        entry, first, end = self._run
        if run.entry == entry and run.first == end:
            self._run = Run(entry, first, run.end)
        else:
            self.finish()
            self._run = run

    def finish(self) -> None:
        """Count the parts of the last records."""
        entry, first, end = self._run
        if first < end:
            size = self._border(entry, end) - self._border(entry, first)
            self.parts += -(-size // self._part_size)


def count_parts(plan: RecordPlan, epoch: int, part_size: int) -> RankParts:
    """Return the parts of the plan's ranks in an epoch. Takes some microseconds per block and slice."""
    deal, border = plan.deal, plan.host_ranks.table.border
    together = _Counter(border, part_size)
    ranks = [_Counter(border, part_size) for _ in range(deal.first, deal.end)]
    for rank, run in deal.deal(plan.host_ranks.walk(epoch)):
        together.add(run)
        ranks[rank - deal.first].add(run)
    for each in (together, *ranks):
        each.finish()
    return RankParts(together.parts, [each.parts for each in ranks])
