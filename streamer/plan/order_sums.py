"""Sums up an epoch's order for the ranks of a host: bytes of each rank, positions on the way, parts. Pure.

    runs of the order ─ offsets of each, read at once ─▶ pieces: what one rank gets of one run in one step

An epoch of 100 million records has millions of pieces. A walk by steps, as streams make it
(`streamer.plan.record_order.Walk`), looks up two offsets for each. Here the offsets of a run are read at
once, and one loop cuts the run, which takes half of the time.
"""

from __future__ import annotations

from array import array
from itertools import chain, repeat
from typing import TYPE_CHECKING, NamedTuple

from streamer.cancellation import Cancelled, cancelled
from streamer.plan.record_order import WalkPosition
from streamer.plan.record_table import misplaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from streamer.plan.entries import Entries
    from streamer.plan.record_order import Deal, Order, Run
    from streamer.plan.record_table import RecordTable

    OnPiece = Callable[[int, int, int, int], None]
    """Called with each piece of an epoch, in order: rank (0: this host's first), object, start, stop."""

AT_ONCE = 1 << 16
"""Records whose offsets are in memory at once: a run may be an object of many millions."""

LOOKS_EVERY = 1 << 10
"""Runs between two looks whether the sums are cancelled: some milliseconds."""


class StepPosition(NamedTuple):
    """Start of a step, at which a walk over the order may start."""

    step: int
    walk: WalkPosition
    sums: array[int]
    """Bytes of each rank of this host before the step, without the end mark of a run that goes on in it; at
    last those of all their records, which are the stream of several ranks."""


class OrderSums(NamedTuple):
    """The sums of one epoch."""

    totals: array[int]
    """Bytes of each rank of this host, and of all their records."""
    positions: list[StepPosition]
    """Steps at which the walk of a resume may start."""


class _RunMarks:
    """Adds the end mark of each run of adjacent bytes to the sums."""

    def __init__(self, size: int, totals: list[int], positions: list[StepPosition]) -> None:
        self._size, self._totals, self._positions = size, totals, positions
        self._last: dict[int, tuple[int, int]] = {}
        """Object of the last piece of each rank, and the byte after it."""
        self._unseen: set[int] = set()
        """Ranks without a piece since the last position."""
        self._seen = 0
        """Number of positions."""

    def add(self, rank: int, entry: int, start: int, stop: int) -> None:
        """Add a piece, as `OnPiece`."""
        if len(self._positions) > self._seen:
            self._seen = len(self._positions)
            self._unseen.update(self._last)
        if self._last.get(rank) != (entry, start):
            self._totals[rank] += self._size
        elif rank in self._unseen:
            self._positions[-1].sums[rank] -= self._size
        self._unseen.discard(rank)
        self._last[rank] = entry, stop


def sum_order(
    order: Order,
    epoch: int,
    *,
    entries: Entries,
    table: RecordTable,
    deal: Deal,
    positions_every: int,
    on_piece: OnPiece | None = None,
) -> OrderSums:
    """Return the sums of the ranks of `deal`. `positions_every`: runs and slices between two positions.

    Takes some microseconds for each run, and a third of one for each piece. Raises CorruptObject for a piece
    without bytes, and Cancelled (`streamer.cancellation`).
    """
    size, ranks, steps, records = deal.slice, deal.end - deal.first, deal.steps(order.records), order.records
    totals, together, positions = [0] * ranks, 0, list[StepPosition]()
    observers = [] if on_piece is None else [on_piece]
    if table.end_marks.run:
        observers.append(_RunMarks(len(table.end_marks.run), totals, positions).add)
    others = deal.global_batch - ranks * size
    """Records of other hosts between two steps of this one; theirs is the rank after this host's last one."""
    step, rank, left = (-1, ranks, deal.first * size) if deal.first else (0, 0, size)
    due = positions_every
    for number, at, (entry, first, end) in _portions(order, epoch, steps * deal.global_batch):
        count = end - first
        if rank == ranks and left > count:
            left -= count
            continue
        borders = table.borders(entry, first, end)
        done, start = 0, borders[0]
        while done < count:
            until = min(done + left, count)
            stop = borders[until]
            if stop <= start:
                raise misplaced(entries, entry)
            if rank < ranks:
                totals[rank] += stop - start
                together += stop - start
                for each in observers:
                    each(rank, entry, start, stop)
            left -= until - done
            done, start = until, stop
            if left:
                break
            rank, left = rank + 1, size
            if rank == ranks and others:
                left = others
            elif rank >= ranks:
                rank, step = 0, step + 1
                if number + step * ranks >= due and at < records and step < steps:
                    due = number + step * ranks + positions_every
                    positions.append(
                        StepPosition(step, WalkPosition(number, at), array("Q", [*totals, together]))
                    )
    end = len(table.end_marks.epoch) if steps else 0
    return OrderSums(array("Q", [*(total + end for total in totals), together]), positions)


def _portions(order: Order, epoch: int, records: int) -> Iterator[tuple[int, int, Run]]:
    """Yield the runs of the order, over and over, up to so many records: number, position, and the records.

    Of a long run come several portions, with the number and the position of the run. Raises Cancelled.
    """
    at, stopped = 0, cancelled()
    for number, run in enumerate(chain.from_iterable(order.runs(epoch) for _ in repeat(None, records))):
        first = run.first
        end = min(run.end, first + records - at)
        if not number % LOOKS_EVERY and stopped():
            raise Cancelled
        while end - first > AT_ONCE:
            if stopped():
                raise Cancelled
            yield number, at, run._replace(first=first, end=first + AT_ONCE)
            first += AT_ONCE
        yield number, at, run if end - first == run.end - run.first else run._replace(first=first, end=end)
        at += run.end - run.first
        if at >= records:
            return
