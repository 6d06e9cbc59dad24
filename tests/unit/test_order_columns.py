"""Sums of an order by columns, against those of the loop over its pieces."""

from __future__ import annotations

import subprocess
import sys
from array import array
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, islice
from pathlib import Path

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from sidecar.index.stored import open_stored
from streamer.errors import ConfigError, SinkError
from streamer.formats.record_format import RecordFormat
from streamer.formats.record_index import IndexedObject, block, header
from streamer.plan import Entries, ObjectRef
from streamer.plan.order_columns import sum_columns
from streamer.plan.pieces import Checkpoint, OrderSums, sum_order
from streamer.plan.record_order import Deal, RecordOrder
from streamer.plan.record_plan import RecordPlan
from streamer.plan.record_selection import RecordSelection, select_records
from streamer.plan.record_table import EndMarks, IndexedRecords
from tests.kit.index import index_of
from tests.unit.test_record_order import dealt, objects, remainders
from tests.unit.test_record_selection import limits, splits

FORMAT = RecordFormat.parse("TFRecord")


def entries_of(sizes: Sequence[Sequence[int]]) -> Entries:
    entries = Entries()
    for number, each in enumerate(sizes):
        entries.add(ObjectRef("b", f"k{number:02}", sum(each), "e"))
    return entries


def rows_of(sizes: Sequence[Sequence[int]]) -> list[IndexedObject]:
    """Rows of the index, in another order than that of the plan."""
    rows = []
    for name, each in enumerate(sizes):
        offsets = array("Q", accumulate(each, initial=0))
        end = offsets.pop()
        rows.append(IndexedObject(name, 0, end, len(each), end, offsets))
    return rows[1::2] + rows[::2]


def table_of(sizes: Sequence[Sequence[int]]) -> IndexedRecords:
    index = index_of("TFRecord", rows_of(sizes))
    return IndexedRecords(index, entries_of(sizes), range(len(sizes)))


def loop(order: RecordOrder, epoch: int, table: IndexedRecords, entries: Entries, deal: Deal) -> OrderSums:
    """The sums of the loop, with every checkpoint that it can have."""
    return sum_order(order, epoch, entries=entries, table=table, deal=deal, every=1)


@st.composite
def deals(draw: st.DrawFn) -> Deal:
    ranks = draw(st.integers(1, 4))
    first = draw(st.integers(0, ranks - 1))
    end = draw(st.integers(first + 1, ranks))
    workers = draw(st.integers(1, 4))
    return Deal(ranks * draw(st.integers(1, 5)), ranks, first, end, draw(remainders), workers)


@given(
    objects.filter(any),
    st.tuples(st.integers(0, 1 << 40), st.integers(1, 800)),
    deals(),
    st.none() | st.builds(RecordSelection, st.none() | splits, st.none() | limits),
    st.tuples(st.integers(1, 9), st.integers(1, 40), st.integers(1, 30)),
)
def test_columns_have_the_sums_of_the_loop(
    sizes: list[list[int]],
    shuffle: tuple[int, int],
    deal: Deal,
    selection: RecordSelection | None,
    limits: tuple[int, int, int],
) -> None:
    """Checkpoints too: each begins a step, with its sums, and a walk from there has the step's records."""
    seed, block = shuffle
    entries, table = entries_of(sizes), table_of(sizes)
    selected = None
    if selection is not None and selection != RecordSelection():
        try:
            selected = select_records(entries, table.counts, entries.sizes, selection, block=block)
        except ConfigError:  # no record is selected
            reject()
    order = RecordOrder(table.counts, entries.sizes, seed=seed, block=block, selected=selected)
    every, most_slices, most_runs = limits
    for epoch in (0, 3):
        found = sum_columns(
            order, epoch, table=table, deal=deal, every=every,
            many=0, most_slices=most_slices, most_runs=most_runs,
        )  # fmt: skip
        if not deal.steps(order.records):
            assert found is None
            continue
        assert found is not None
        due = loop(order, epoch, table, entries, deal)
        assert found.totals == due.totals
        before = {each.step: each.sums for each in due.checkpoints}
        assert [each.step for each in found.checkpoints] == sorted({each.step for each in found.checkpoints})
        for at in found.checkpoints:
            if at.step in before:
                assert at.sums == before[at.step]
            from_there, whole = dealt(order, deal, epoch, at), dealt(order, deal, epoch, Checkpoint(at.step))
            assert list(islice(from_there, 9)) == list(islice(whole, 9))


@given(st.data())
def test_a_piece_without_bytes_is_left_to_the_loop_which_names_it(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=9), min_size=1, max_size=4))
    bad = data.draw(st.integers(0, len(sizes) - 1))
    at = data.draw(st.integers(0, len(sizes[bad]) - 1))
    sizes[bad][at] = 0
    entries, table = entries_of(sizes), table_of(sizes)
    order = RecordOrder(table.counts, entries.sizes, seed=data.draw(st.integers(0, 9)), block=1)
    deal = Deal(1, 1, 0, 1)
    assert sum_columns(order, 0, table=table, deal=deal, every=5, many=0) is None


def test_orders_without_columns_are_left_to_the_loop() -> None:
    sizes = [[5] * 40, [7] * 20]
    entries, table = entries_of(sizes), table_of(sizes)
    shuffled = RecordOrder(table.counts, entries.sizes, seed=1, block=20)
    summed = partial(sum_columns, epoch=0, table=table, deal=Deal(4, 2, 0, 2), every=5)
    assert summed(shuffled, many=0) is not None
    assert summed(shuffled) is None  # too few to be worth the import
    assert summed(RecordOrder(table.counts, entries.sizes), many=0) is None
    table.end_marks = EndMarks(run=b"end")
    assert summed(shuffled, many=0) is None


def test_an_index_that_is_overwritten_is_an_error_by_name(tmp_path: Path) -> None:
    """The sums are of the file's pages, compared with their checksums, across the blocks of the file."""
    sizes = [[8 + number % 5 for number in range(700)] for _ in range(6)]
    entries, rows = entries_of(sizes), rows_of(sizes)
    path = tmp_path / "train.index"
    path.write_bytes(header(FORMAT) + block(rows[:4]) + block(rows[4:]))
    stored = open_stored(str(path))
    assert stored is not None
    table = IndexedRecords(stored.index(), entries, range(len(sizes)))
    order, deal = RecordOrder(table.counts, entries.sizes, seed=1, block=60), Deal(8, 2, 0, 2)

    def summed() -> OrderSums | None:
        return sum_columns(order, 0, table=table, deal=deal, every=100, many=0)

    found = summed()
    assert found is not None
    assert found.totals == loop(order, 0, table_of(sizes), entries, deal).totals
    with path.open("r+b") as file:
        file.seek(-100, 2)
        file.write(bytes(8))
    with pytest.raises(SinkError, match="was overwritten while it was in use"):
        summed()


def test_sums_of_a_large_order_leave_the_environment_as_it_was() -> None:
    """NumPy starts no threads of its own for them, and a trainer that is started later has them."""
    code = (
        "import os, threading; from streamer.plan.order_columns import load_numpy;"
        "before = dict(os.environ); numpy = load_numpy(); assert numpy.arange(3).sum() == 3;"
        "assert dict(os.environ) == before; print(len(os.listdir('/proc/self/task')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_a_plan_has_the_same_sums_by_columns() -> None:
    """An order of so many slices that columns sum it up."""
    sizes = [[1 + number % 3 for number in range(140_000)], [2] * 140_000]
    entries, table = entries_of(sizes), table_of(sizes)
    order, deal = RecordOrder(table.counts, entries.sizes, seed=5, block=100), Deal(2, 2, 0, 2)
    plan = RecordPlan(entries, table, order, deal)
    assert sum_columns(order, 0, table=table, deal=deal, every=1 << 13) is not None
    found, due = plan.sums(0), loop(order, 0, table, entries, deal)
    assert found.totals == due.totals
    assert found.totals[2] == sum(map(sum, sizes))
    assert len(found.checkpoints) > 10
