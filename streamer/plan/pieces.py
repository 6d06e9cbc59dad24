"""The walk over the records of an epoch: the pieces that some ranks get, in the order of their stream. Pure.

    order ─ runs of records ─┐
    deal  ─ slices of ranks ─┼─▶ pieces ─▶ folds: sums, segments, offsets, the deal of a stream, parts
    table ─ offsets ─────────┘

A piece is what one FIFO gets of one run in one step: a row `(fifo, entry, first, end, start, stop)`, with the
number of the FIFO among those of the deal, the object's number in the plan, its records and its bytes. The
walk can begin at any `Checkpoint`, of which the sums of an epoch keep one every few thousand runs and slices.

`Walk` is the one place that cuts runs into slices and asks for offsets. The first fold is here: the sums of
an epoch, for which the offsets of a run are read at once, as each is needed once. Those of a large epoch are
computed in columns instead (`streamer.plan.order_columns`).
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

from streamer.cancellation import Cancelled, cancelled
from streamer.plan.record_table import misplaced

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from streamer.plan.entries import Entries
    from streamer.plan.mixed_order import Order
    from streamer.plan.record_order import Deal, Run
    from streamer.plan.record_table import RecordTable

Piece = tuple[int, int, int, int, int, int]
"""FIFO, object, first record and the one after the last, first byte and the one after the last."""

AT_ONCE = 1 << 16
"""Records whose offsets are in memory at once: a run may be an object of many millions."""


class Checkpoint(NamedTuple):
    """Start of a step of worker 0, at which a walk can begin: every FIFO has a piece between two of them."""

    step: int = 0
    run: int = 0
    """Number, in the order, of a run at or before the step's first record of these ranks."""
    record: int = 0
    """Number, in the order, of that run's first record."""
    sums: Sequence[int] = ()
    """Bytes of each FIFO of this host before the step, without the end mark of a run that goes on after it.
    The last number is the bytes of all their records, which are the stream of several FIFOs."""


START = Checkpoint()
"""Start of an epoch, for a walk."""


class Walk:
    """One walk over the pieces of an epoch, from a checkpoint on."""

    def __init__(
        self,
        order: Order,
        epoch: int,
        *,
        entries: Entries,
        table: RecordTable,
        deal: Deal,
        at: Checkpoint = START,
        together: bool = False,
        at_once: bool = False,
    ) -> None:
        """`deal`: of the FIFOs. `together`: pieces are of FIFO 0, and are not cut between these FIFOs.

        `at_once`: the offsets of a run are read at once, and no page of an index is kept for a later look.
        """
        self._stride = deal.stride
        self.run, self.record = at.run, at.record
        self.step = at.step + ((deal.worker or 0) - at.step) % self._stride
        """Step of the last piece, and its run, as a checkpoint has them."""
        self._order, self._epoch = order, epoch
        self._entries, self._table, self._at_once = entries, table, at_once
        size, ranks, batch = deal.slice, deal.end - deal.first, deal.global_batch
        self._steps = deal.steps(order.records)
        self._others = self._stride * batch - size * ranks
        """Records of others between two steps; without any, the steps follow each other in the order."""
        self._own = self.step * batch + deal.first * size
        """Position in the order of the next record of these ranks."""
        self._stretch = size * ranks if self._others else (self._steps - at.step) * batch
        """Records of these ranks that follow each other in the order."""
        self._size, self._ranks, self._fifos = (
            (self._stretch, 1, 1) if together else (size, ranks, deal.fifos)
        )

    def __iter__(self) -> Iterator[Piece]:
        """Yield the pieces. Raises CorruptObject for a piece without bytes, and Cancelled."""
        if self.step >= self._steps:
            return
        size, ranks, own, begin, stopped = self._size, self._ranks, self._own, self.record, cancelled()
        border, behind = self._table.border, own + self._stretch
        fifo, left = self.step * ranks % self._fifos, size
        end_of_step = fifo + ranks
        for number, (entry, first, end) in enumerate(self._runs(), self.run):
            after = begin + end - first
            self.run, self.record = number, begin
            while own < after:
                if stopped():
                    raise Cancelled
                record = first + own - begin
                until = min(end, first + behind - begin, record + max(left, AT_ONCE))
                own = begin + until - first
                if until - record <= left and not self._at_once:
                    cuts, start, stops = (until,), border(entry, record), [border(entry, until)]
                else:
                    cuts = (*range(record + left, until, size), until)
                    start, stops = self._borders(entry, record, cuts)
                for cut, stop in zip(cuts, stops, strict=True):
                    if stop <= start:
                        raise misplaced(self._entries, entry)
                    yield fifo, entry, record, cut, start, stop
                    left -= cut - record
                    record, start = cut, stop
                    if not left:
                        fifo, left = fifo + 1, size
                        if fifo == end_of_step:
                            self.step += self._stride
                            fifo = self.step * ranks % self._fifos
                            end_of_step = fifo + ranks
                if own == behind:
                    if not self._others or self.step >= self._steps:
                        return
                    own += self._others
                    behind = own + self._stretch
            begin = after

    def _borders(self, entry: int, first: int, cuts: Sequence[int]) -> tuple[int, list[int]]:
        """Return the offset of record `first`, and those of the records at the cuts after it."""
        if self._at_once:
            offsets = self._table.borders(entry, first, cuts[-1])
            return offsets[0], [offsets[cut - first] for cut in cuts]
        border = self._table.border
        return border(entry, first), [border(entry, cut) for cut in cuts]

    def _runs(self) -> Iterator[Run]:
        """Yield the runs of the order from the checkpoint on; after the last one it starts again."""
        yield from self._order.runs(self._epoch, self.run)
        while True:
            yield from self._order.runs(self._epoch)


def joined(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield the pieces of one stream, with those joined that follow each other in one object."""
    held: Piece | None = None
    for piece in pieces:
        if held is not None and held[1] == piece[1] and held[3] == piece[2]:
            rank, entry, first, _, start, _ = held
            held = rank, entry, first, piece[3], start, piece[5]
            continue
        if held is not None:
            yield held
        held = piece
    if held is not None:
        yield held


class OrderSums(NamedTuple):
    """The sums of one epoch."""

    totals: array[int]
    """Bytes of each FIFO of this host, and of all their records."""
    checkpoints: list[Checkpoint]
    """Steps at which the walk of a resume can begin; the first one is the start of the epoch."""


def sum_order(
    order: Order, epoch: int, *, entries: Entries, table: RecordTable, deal: Deal, every: int
) -> OrderSums:
    """Return the sums of the FIFOs of `deal`. `every`: runs and slices between two checkpoints.

    Takes some microseconds for each run, and half of one for each piece. Raises as `Walk`.
    """
    ranks, mark = deal.end - deal.first, len(table.end_marks.run)
    walk = Walk(order, epoch, entries=entries, table=table, deal=deal, at_once=True)
    totals, together, step, due = [0] * deal.fifos, 0, 0, every
    checkpoints = [Checkpoint(sums=array("Q", [*totals, 0]))]
    last: dict[int, tuple[int, int]] = {}
    """Object of the last piece of each FIFO, and the byte after it, if runs have end marks."""
    unseen: set[int] = set()
    """FIFOs without a piece since the last checkpoint, whose last runs may go on."""
    for fifo, entry, _, _, start, stop in walk:
        if walk.step != step:
            step = walk.step
            if not step % deal.workers and walk.run + step * ranks >= due and walk.record < order.records:
                due = walk.run + step * ranks + every
                sums = array("Q", [*totals, together])
                checkpoints.append(Checkpoint(step, walk.run, walk.record, sums))
                unseen.update(last)
        totals[fifo] += stop - start
        together += stop - start
        if mark:
            # The mark of a run is added with its first piece: the piece that ends it is not known yet.
            if last.get(fifo) != (entry, start):
                totals[fifo] += mark
            elif fifo in unseen:
                sums[fifo] -= mark
            unseen.discard(fifo)
            last[fifo] = entry, stop
    end = len(table.end_marks.epoch)
    return OrderSums(array("Q", [*(total and total + end for total in totals), together]), checkpoints)
