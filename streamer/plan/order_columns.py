"""Sums up a shuffled order with NumPy, where it is installed, as `streamer.plan.order_sums` does. Pure.

    steps ─▶ runs and slices of a window ─▶ numbers in the index ─ read in its order ─▶ offsets ─▶ sums

The bytes of a slice are the difference of two numbers of one column, the bytes of the order before each
slice, whatever runs the slice has. A window has a limited number of steps, so memory is limited for any
number of records. For each window the index is read once, a MiB at a time. The loop of `order_sums` sums up
what has no such columns, names a piece without bytes, and does all of it without NumPy.
"""

from __future__ import annotations

import os
import threading
from array import array
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from streamer.cancellation import Cancelled, cancelled
from streamer.plan.order_sums import OrderSums
from streamer.plan.pieces import Checkpoint
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
    from streamer.plan.record_table import OffsetColumns, RecordTable

    Numbers = NDArray[int64]

MANY = 1 << 18
"""Blocks and slices from which on NumPy is worth its import, of 0.1 s and 12 MB."""
MOST_SLICES = 1 << 20
MOST_RUNS = 1 << 18
"""Slices and runs of a window: some 60 MB."""
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

    `many`: blocks and slices of the epoch from which on it is done. `most_slices`, `most_runs`: of a window.
    Raises the errors of the index's source, and Cancelled.
    """
    if not isinstance(order, RecordOrder) or not isinstance(table, IndexedRecords):
        return None
    steps = deal.steps(order.records)
    if order.firsts is None or not steps or table.end_marks.run:
        return None
    if order.blocks_each + steps * deal.ranks < many:
        return None
    np = load_numpy()
    if np is None:
        return None
    sums = _ColumnSums(np, deal, order.records, every)
    offsets = _Offsets(np, table.columns)
    runs = _chunks(np, order, order.firsts, epoch)
    for window in _windows(np, runs, deal, steps, most_slices=most_slices, most_runs=most_runs):
        if not sums.add(window, offsets):
            return None
    end = len(table.end_marks.epoch)
    totals = array("Q", [*(int(each) + end for each in sums.totals), sums.together])
    return OrderSums(totals, sums.checkpoints)


class _Window(NamedTuple):
    """Some steps of the order."""

    step: int
    steps: int
    entries: Numbers
    firsts: Numbers
    ends: Numbers
    """The runs of these steps, the first and the last one cut at their borders."""
    number: int
    """Of the first run, in the order."""
    begin: int
    """Position in the order of the first record of the first run, before it is cut."""


def _windows(
    np: Any, chunks: Iterator[Numbers], deal: Deal, steps: int, *, most_slices: int, most_runs: int
) -> Iterator[_Window]:
    """Yield windows of whole steps, up to so many steps. `chunks`: of runs. Raises Cancelled."""
    batch, stopped = deal.global_batch, cancelled()
    most = max(1, most_slices // deal.ranks)
    held = np.zeros((3, 0), np.int64)
    """Runs that are in no window yet, in rows: entries, first and end records."""
    step = number = begin = cut = 0
    while step < steps:
        if stopped():
            raise Cancelled
        lengths = held[2] - held[1]
        have = int(lengths.sum())
        want = min(most, steps - step)
        if have < want * batch and (held.shape[1] < most_runs or have < batch):
            held = np.concatenate([held, next(chunks)], axis=1)
            continue
        count = min(want, have // batch)
        ends = np.cumsum(lengths)
        last = int(np.searchsorted(ends, count * batch))
        """The run in which the window ends."""
        over = int(ends[last]) - count * batch
        window = held[:, : last + 1].copy()
        window[2, last] -= over
        entries, firsts, stops = window
        yield _Window(step, count, entries, firsts, stops, number, begin - cut)
        step += count
        begin += count * batch
        rest = last if over else last + 1
        held = held[:, rest:].copy()
        cut = int(lengths[last]) - over + (cut if last == 0 else 0) if over else 0
        if over:
            held[1, 0] += int(lengths[last]) - over
        number += rest


def _chunks(np: Any, order: RecordOrder, of_objects: Sequence[int], epoch: int) -> Iterator[Numbers]:
    """Yield the runs of the order, over and over."""
    firsts, each, bounds = (np.array(column, np.int64) for column in (of_objects, order.each, order.bounds))
    blocks = None if order.blocks is None else np.array(order.blocks, np.int64)
    number = order.blocks_each
    permutation = None if order.seed is None else Permutation(number, seed=order.seed, epoch=epoch)
    while True:
        for first in range(0, number, 1 << 16):
            numbers = np.arange(first, min(first + (1 << 16), number))
            if permutation is not None:
                numbers = permutation.over_array(np, numbers)
            if blocks is not None:
                numbers = blocks[numbers]
            entries = np.searchsorted(firsts, numbers, "right") - 1
            starts = (numbers - firsts[entries]) * each[entries]
            yield np.stack([entries, starts, np.minimum(starts + each[entries], bounds[entries])])


class _Offsets:
    """Looks up many offsets at once."""

    def __init__(self, np: Any, columns: OffsetColumns) -> None:
        self._np = np
        self._offsets = columns.offsets
        self.firsts, self.counts, self.ends = (np.array(each, np.int64) for each in columns[1:])
        self._pieces = np.array(columns.offsets.pieces, np.int64)

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
    """Sums of the windows so far."""

    def __init__(self, np: Any, deal: Deal, records: int, every: int) -> None:
        self._np = np
        self._deal = deal
        self._records = records
        self._every = self._due = every
        self.totals: Numbers = np.zeros(deal.end - deal.first, np.int64)
        """Bytes of each rank."""
        self.checkpoints = [Checkpoint(sums=array("Q", bytes(8 * len(self.totals) + 8)))]

    @property
    def together(self) -> int:
        """Bytes of all ranks."""
        return int(self.totals.sum())

    def add(self, window: _Window, offsets: _Offsets) -> bool:
        """Add the next window; return False if a piece of it has no bytes."""
        np, deal, size = self._np, self._deal, self._deal.slice
        entries, firsts, ends = window.entries, window.firsts, window.ends
        positions = np.concatenate([[0], np.cumsum(ends - firsts)])
        """Records of the window before each run, and before its end."""
        slices = -(-positions // size)
        """Number of the first slice, in the window, that begins in the run or after it."""
        runs = np.repeat(np.arange(len(entries)), np.diff(slices))
        """Of each slice the run in which it begins."""
        numbers = offsets.firsts[entries] + firsts
        whole = ends == offsets.counts[entries]
        after_last = numbers + (ends - firsts) - whole
        cuts = np.arange(0, len(runs) * size, size)
        cuts += (numbers - positions[:-1])[runs]
        wanted = np.concatenate([numbers, after_last, cuts])
        del cuts
        found = offsets.at(wanted)
        del wanted
        starts, stops, begins = np.split(found, [len(entries), 2 * len(entries)])
        stops = np.where(whole, offsets.ends[entries], stops)
        before_runs = np.concatenate([[0], np.cumsum(stops - starts)])
        """Bytes of the window before each run, and before its end."""
        begins += (before_runs[:-1] - starts)[runs]
        before = np.append(begins, before_runs[-1])
        """The same of each slice."""
        del found, begins, runs
        lengths = np.diff(before)
        if not (
            (lengths > 0).all()
            and (stops > starts).all()
            and (before[positions[:-1] // size + 1] > before_runs[:-1]).all()
            and (before[slices[1:] - 1] < before_runs[1:]).all()
        ):
            return False
        del before
        steps = lengths.reshape(window.steps, deal.ranks)[:, deal.first : deal.end]
        self._add_steps(window, np.cumsum(steps, axis=0), positions)
        return True

    def _add_steps(self, window: _Window, sums: Numbers, positions: Numbers) -> None:
        """Add the sums of ranks up to each step's end. `positions`: of the runs."""
        np, batch, ranks = self._np, self._deal.global_batch, len(self.totals)
        steps = np.arange(window.steps)
        runs = np.searchsorted(positions, steps * batch, "right") - 1
        passed = window.number + runs + (window.step + steps) * ranks
        """Runs and slices before each step."""
        at = 0
        while (at := max(at, int(np.searchsorted(passed, self._due)))) < window.steps:
            self._due = int(passed[at]) + self._every
            step, run = window.step + at, int(runs[at])
            if step and step * batch < self._records:
                begin = window.step * batch + int(positions[run]) if run else window.begin
                before = self.totals + (sums[at - 1] if at else 0)
                found = array("Q", [*map(int, before), int(before.sum())])
                self.checkpoints.append(Checkpoint(step, window.number + run, begin, found))
            at += 1
        self.totals = self.totals + sums[-1]
