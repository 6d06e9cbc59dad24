"""Sums up a shuffled order with NumPy, where it is installed, as `streamer.plan.pieces` does. Pure.

    runs ─▶ a chunk of runs, and the slices that begin in it ─▶ numbers in the index ─▶ offsets ─▶ sums

The bytes of a slice are the difference of two numbers of one column, the bytes of the order before each
slice, whatever runs the slice has. A chunk has a limited number of runs and slices, so memory is limited for
any number of records. For each chunk the index is read once, a MiB at a time. `sum_order` sums up what has
no such columns, names a piece without bytes, and does all of it without NumPy.
"""

from __future__ import annotations

import os
import threading
from array import array
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from streamer.cancellation import Cancelled, cancelled
from streamer.plan.pieces import Checkpoint, OrderSums
from streamer.plan.record_order import RecordOrder
from streamer.plan.record_table import IndexedRecords
from streamer.plan.shuffle import Permutation

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import ModuleType

    from numpy import int64
    from numpy.typing import NDArray

    from streamer.plan.mixed_order import Order
    from streamer.plan.record_order import Deal
    from streamer.plan.record_table import RecordTable

    Numbers = NDArray[int64]

MANY = 1 << 18
"""Blocks and slices from which on NumPy is worth its import, of 0.1 s and 12 MB."""
MOST_SLICES = 1 << 20
MOST_RUNS = 1 << 18
"""Slices and runs of a chunk: some 60 MB."""
_THREADS = "OPENBLAS_NUM_THREADS"
_loading = threading.Lock()
"""Held while the environment is changed: channels are summed up in several threads."""


@cache
def _load() -> ModuleType | None:
    before = os.environ.get(_THREADS)
    os.environ[_THREADS] = "1"
    try:
        import numpy as np  # not at the top: most jobs have no use for it
    except ImportError:
        return None
    finally:
        if before is None:
            del os.environ[_THREADS]
        else:
            os.environ[_THREADS] = before
    return np


def load_numpy() -> ModuleType | None:
    """Import NumPy; return None if it is not installed. It starts no threads of its own."""
    with _loading:
        return _load()


def sum_columns(
    order: Order,
    epoch: int,
    *,
    table: RecordTable,
    deal: Deal,
    every: int,
    many: int = MANY,
    most_slices: int = MOST_SLICES,
    most_runs: int = MOST_RUNS,
) -> OrderSums | None:
    """Return what `sum_order` returns, or None if it has to.

    `many`: blocks and slices of the epoch from which on it is done. `most_slices`, `most_runs`: of a chunk.
    Raises the errors of the index's source, and Cancelled.
    """
    if not isinstance(order, RecordOrder) or not isinstance(table, IndexedRecords) or deal.stride > 1:
        return None
    steps = deal.steps(order.records)
    if order.firsts is None or not steps or table.end_marks.run:
        return None
    if order.blocks_each + steps * deal.ranks < many:
        return None
    np = load_numpy()
    if np is None:
        return None
    sums, offsets, stopped = _ColumnSums(np, deal, order.records, every), _Offsets(np, table), cancelled()
    runs = _runs(np, order, order.firsts, epoch, most_runs=most_runs, most_records=most_slices * deal.slice)
    for chunk in runs:
        if stopped():
            raise Cancelled
        if not sums.add(chunk, offsets):
            return None
        if sums.step >= steps:
            break
    end = len(table.end_marks.epoch)
    totals = array("Q", [*(int(each) and int(each) + end for each in sums.totals), int(sums.totals.sum())])
    return OrderSums(totals, sums.checkpoints)


def _runs(
    np: Any, order: RecordOrder, of_objects: Sequence[int], epoch: int, *, most_runs: int, most_records: int
) -> Iterator[Numbers]:
    """Yield the runs of the order, over and over, in chunks of three rows: entries, first and end records.

    `of_objects`: as `RecordOrder.firsts`. A chunk is as large as it can be, for it reads the whole index.
    """
    firsts, each, bounds = (np.array(column, np.int64) for column in (of_objects, order.each, order.bounds))
    blocks = None if order.blocks is None else np.array(order.blocks, np.int64)
    permutation = None
    if order.seed is not None:
        permutation = Permutation(order.blocks_each, seed=order.seed, epoch=epoch)

    def cut(first: int, end: int) -> Numbers:
        """Return the runs with these numbers; a function, so that its columns are freed with it."""
        numbers = np.arange(first, end)
        if permutation is not None:
            numbers = permutation.over_array(np, numbers)
        if blocks is not None:
            numbers = blocks[numbers]
        entries = np.searchsorted(firsts, numbers, "right") - 1
        starts = (numbers - firsts[entries]) * each[entries]
        return cast(
            "Numbers", np.stack([entries, starts, np.minimum(starts + each[entries], bounds[entries])])
        )

    held: list[Numbers] = []
    largest, records = int(each.max()), 0
    at_once = max(1, min(most_runs, most_records // largest))
    while True:
        for first in range(0, order.blocks_each, at_once):
            end = min(first + at_once, order.blocks_each)
            held.append(cut(first, end))
            records += int((held[-1][2] - held[-1][1]).sum())
            more, runs = records + at_once * largest, at_once * (len(held) + 1)
            if more > most_records or runs > most_runs or end == order.blocks_each:
                chunk = held[0] if len(held) == 1 else np.concatenate(held, axis=1)
                held, records = [], 0
                yield chunk


class _Offsets:
    """Looks up many offsets at once."""

    def __init__(self, np: Any, table: IndexedRecords) -> None:
        self._np = np
        self._offsets = table.offsets
        self.firsts, self.counts, self.ends = (
            np.array(each, np.int64) for each in (table.firsts, table.counts, table.ends)
        )
        self._pieces = np.array(table.offsets.pieces, np.int64)

    def at(self, numbers: Numbers) -> Numbers:
        """Return the offsets with these numbers. Raises the errors of the index's source, and Cancelled."""
        np, stopped = self._np, cancelled()
        kind = np.uint16 if len(self._pieces) <= 1 << 16 else np.int64  # 16 bits are sorted by their digits
        pieces = (np.searchsorted(self._pieces, numbers, "right") - 1).astype(kind)
        order = np.argsort(pieces, kind="stable")
        ends = np.cumsum(np.bincount(pieces, minlength=len(self._pieces)))
        del pieces
        found: Numbers = np.empty(len(numbers), np.int64)
        start = 0
        for end in ends.tolist():
            if end > start:
                if stopped():
                    raise Cancelled
                here = order[start:end]
                wanted = numbers[here]
                low = int(wanted.min())
                found[here] = self._view(low, int(wanted.max()) + 1)[wanted - low]
            start = end
        return found

    def _view(self, start: int, stop: int) -> Numbers:
        return cast("Numbers", self._np.frombuffer(self._offsets.view(start, stop), self._np.int64))


class _ColumnSums:
    """Sums of the chunks so far."""

    def __init__(self, np: Any, deal: Deal, records: int, every: int) -> None:
        self._np = np
        self._deal = deal
        self._records = records
        self._every = self._due = every
        self.step = 0
        """Number of the first step that is not added yet: the first one of a round."""
        self.totals: Numbers = np.zeros(deal.fifos, np.int64)
        """Bytes of each FIFO before this step."""
        self.checkpoints = [Checkpoint(sums=array("Q", bytes(8 * len(self.totals) + 8)))]
        self._runs = self._position = self._bytes = 0
        """Runs of the chunks so far, their records and their bytes."""
        self._begins: Numbers = np.zeros(0, np.int64)
        """Bytes of the order before each slice that has begun, of this round."""
        self._starts: Numbers = np.zeros((2, 0), np.int64)
        """Number of the run in which the round begins, and position of that run's first record."""

    def add(self, chunk: Numbers, offsets: _Offsets) -> bool:
        """Add the next chunk; return False if a piece of it has no bytes."""
        np, size, deal = self._np, self._deal.slice, self._deal
        round_ = deal.ranks * deal.workers
        """Slices of a round: as many steps as there are workers, so one slice of each FIFO."""
        last = deal.steps(self._records) * deal.ranks
        """Number of the slice after the last one."""
        positions = self._position + np.concatenate([[0], np.cumsum(chunk[2] - chunk[1])])
        """Position in the order of each run, and of the end of the last one."""
        count = int(np.searchsorted(positions[:-1], last * size))
        (entries, firsts, ends), positions = chunk[:, :count], positions[: count + 1]
        slices = np.minimum(-(-positions // size), last + 1)
        """Number of the first slice that begins in the run or after it."""
        runs = np.repeat(np.arange(count), np.diff(slices))
        """Of each slice the run in which it begins."""
        cuts = np.arange(slices[0], slices[-1]) * size - positions[runs]
        numbers = offsets.firsts[entries] + firsts
        whole = ends == offsets.counts[entries]
        cuts += numbers[runs]
        wanted = np.concatenate([numbers, numbers + (ends - firsts) - whole, cuts])
        del cuts
        starts, stops, begins = np.split(offsets.at(wanted), [count, 2 * count])
        del wanted
        stops = np.where(whole, offsets.ends[entries], stops)
        cut = np.flatnonzero(np.diff(slices))
        """The runs in which a slice begins."""
        first_cuts, last_cuts = slices[cut] - slices[0], slices[cut + 1] - slices[0] - 1
        if not (
            (stops > starts).all()
            and (begins[last_cuts] < stops[cut]).all()
            and ((begins[first_cuts] > starts[cut]) | (positions[cut] % size == 0)).all()
        ):
            return False
        before = self._bytes + np.concatenate([[0], np.cumsum(stops - starts)])
        """Bytes of the order before each run, and before the end of the last one."""
        begins += (before[:-1] - starts)[runs]
        begins = np.concatenate([self._begins, begins])
        if positions[-1] == last * size:
            begins = np.append(begins, before[-1])
        if not (np.diff(begins) > 0).all():
            return False
        if positions[-1] >= last * size:  # the last round may have fewer steps
            begins = np.append(begins, np.repeat(begins[-1:], -last % round_))
        firsts_of_rounds = runs[np.arange(-slices[0] % round_, len(runs), round_)]
        found = np.stack([self._runs + firsts_of_rounds, positions[firsts_of_rounds]])
        starts_of_rounds = np.concatenate([self._starts, found], axis=1)
        del runs
        rounds = max(0, len(begins) - 1) // round_
        lengths = np.diff(begins[: rounds * round_ + 1]).reshape(rounds, deal.workers, deal.ranks)
        lengths = lengths[:, :, deal.first : deal.end].reshape(rounds, len(self.totals))
        self._add_rounds(np.cumsum(lengths, axis=0), starts_of_rounds)
        self._begins, self._starts = begins[rounds * round_ :].copy(), starts_of_rounds[:, rounds:].copy()
        self._runs, self._position, self._bytes = self._runs + count, int(positions[-1]), int(before[-1])
        return True

    def _add_rounds(self, sums: Numbers, starts: Numbers) -> None:
        """Add the next rounds. `sums`: of FIFOs, up to each round's end. `starts`: of each, as `_starts`."""
        np, rounds, workers = self._np, len(sums), self._deal.workers
        passed = starts[0, :rounds] + (self.step // workers + np.arange(rounds)) * len(self.totals)
        """Runs and slices before each round."""
        at = 0
        while (at := max(at, int(np.searchsorted(passed, self._due)))) < rounds:
            self._due = int(passed[at]) + self._every
            step = self.step + at * workers
            if step and step * self._deal.global_batch < self._records:
                before = self.totals + (sums[at - 1] if at else 0)
                found = array("Q", [*map(int, before), int(before.sum())])
                run, record = map(int, starts[:, at])
                self.checkpoints.append(Checkpoint(step, run, record, found))
            at += 1
        if rounds:
            self.totals = self.totals + sums[-1]
            self.step += rounds * workers
