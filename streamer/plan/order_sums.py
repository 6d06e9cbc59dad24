"""Sums up an epoch's pieces for the ranks of a host: bytes of each rank, and checkpoints on the way. Pure."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

from streamer.plan.pieces import Checkpoint, Walk

if TYPE_CHECKING:
    from streamer.plan.entries import Entries
    from streamer.plan.mixed_order import Order
    from streamer.plan.record_order import Deal
    from streamer.plan.record_table import RecordTable


class OrderSums(NamedTuple):
    """The sums of one epoch."""

    totals: array[int]
    """Bytes of each rank of this host, and of all their records."""
    checkpoints: list[Checkpoint]
    """Steps at which the walk of a resume can begin; the first one is the start of the epoch."""


def sum_order(
    order: Order, epoch: int, *, entries: Entries, table: RecordTable, deal: Deal, every: int
) -> OrderSums:
    """Return the sums of the ranks of `deal`. `every`: runs and slices between two checkpoints.

    Takes some microseconds for each run, and half of one for each piece. Raises as `Walk`.
    """
    ranks, mark = deal.end - deal.first, len(table.end_marks.run)
    walk = Walk(order, epoch, entries=entries, table=table, deal=deal, at_once=True)
    totals, together, step, due = [0] * ranks, 0, 0, every
    checkpoints = [Checkpoint(sums=array("Q", [*totals, 0]))]
    last: dict[int, tuple[int, int]] = {}
    """Object of the last piece of each rank, and the byte after it, if runs have end marks."""
    unseen: set[int] = set()
    """Ranks without a piece since the last checkpoint, whose last runs may go on."""
    for rank, entry, _, _, start, stop in walk:
        if walk.step != step:
            step = walk.step
            if walk.run + step * ranks >= due and walk.record < order.records:
                due = walk.run + step * ranks + every
                sums = array("Q", [*totals, together])
                checkpoints.append(Checkpoint(step, walk.run, walk.record, sums))
                unseen.update(last)
        totals[rank] += stop - start
        together += stop - start
        if mark:
            # The mark of a run is added with its first piece: the piece that ends it is not known yet.
            if last.get(rank) != (entry, start):
                totals[rank] += mark
            elif rank in unseen:
                sums[rank] -= mark
            unseen.discard(rank)
            last[rank] = entry, stop
    end = len(table.end_marks.epoch) if together else 0
    return OrderSums(array("Q", [*(total + end for total in totals), together]), checkpoints)
