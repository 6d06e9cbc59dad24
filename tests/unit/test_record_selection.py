"""Splits by block and limits by record, against the reference."""

from __future__ import annotations

import hashlib
import tracemalloc
from array import array
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.errors import ConfigError
from streamer.plan import ObjectRef, Plan
from streamer.plan.record_order import Deal, RecordOrder, records_per_block
from streamer.plan.record_plan import RecordPlan
from streamer.plan.record_selection import RecordLimit, RecordSelection, select_records
from streamer.plan.selection import Draw
from streamer.plan.split import Split
from tests.unit import reference
from tests.unit.reference import Record
from tests.unit.test_record_order import Table, dealt, objects, records, seeds

BLOCK = 300
splits = st.integers(2, 6).flatmap(
    lambda of: st.builds(
        lambda folds, seed: Split(of, tuple(range(fold, fold + 1) for fold in sorted(folds)), seed),
        st.sets(st.integers(0, of - 1), min_size=1),
        st.integers(-(2**63), 2**63 - 1),
    )
)
limits = st.builds(RecordLimit, st.integers(1, 150), st.none() | st.integers(-(2**63), 2**63 - 1))


def order_of(
    sizes: list[list[int]], selection: RecordSelection, *, seed: int | None = None, block: int = BLOCK
) -> RecordOrder:
    table = Table(sizes)
    found = select_records(table.entries(), table.counts, table.sizes, selection, block=block)
    return RecordOrder(table.counts, table.sizes, seed=seed, block=block, selected=found)


def selected(sizes: list[list[int]], selection: RecordSelection) -> list[Record]:
    """What the page says is selected, in plan order."""
    table = Table(sizes)
    keys = [f"k{entry:02}" for entry in range(len(sizes))]
    found = [(entry, number) for entry, count in enumerate(table.counts) for number in range(count)]
    if (split := selection.split) is not None:
        each = [records_per_block(*both, BLOCK) for both in zip(table.counts, table.sizes, strict=True)]
        take = {fold for folds in split.take for fold in folds}
        found = reference.split_records(table.counts, each, keys, of=split.of, take=take, seed=split.seed)
    if (limit := selection.limit) is not None:
        if limit.seed is not None:
            key = limit.seed.to_bytes(8, "little", signed=True)
            drawn = [hashlib.blake2b(f"b/{name}".encode(), digest_size=8, key=key).digest() for name in keys]
            found.sort(key=lambda record: (drawn[record[0]], record))
        found = sorted(found[: limit.records])
    return found


@given(objects, st.builds(RecordSelection, st.none() | splits, st.none() | limits), seeds, st.integers(0, 3))
def test_an_order_has_what_is_selected_and_its_own_blocks(
    sizes: list[list[int]], selection: RecordSelection, seed: int | None, epoch: int
) -> None:
    due = selected(sizes, selection)
    if not due and any(sizes):
        with pytest.raises(ConfigError, match="Split leaves out every record"):
            order_of(sizes, selection, seed=seed)
        return
    table, order = Table(sizes), order_of(sizes, selection, seed=seed)
    assert order.records == len(due)
    runs = list(order.runs(epoch))
    assert all(run.first < run.end for run in runs)
    assert records(runs) == reference.record_order(
        table.counts, table.sizes, seed=seed, epoch=epoch, block=BLOCK, selected={*due}
    )
    for first in (0, 1, len(runs) // 2, len(runs)):
        assert list(order.runs(epoch, first)) == runs[first:]


@given(objects, st.integers(2, 6), st.data(), st.integers(-(2**63), 2**63 - 1))
def test_complementary_folds_of_blocks_are_disjoint_and_together_whole(
    sizes: list[list[int]], of: int, data: st.DataObject, seed: int
) -> None:
    """Whatever the shuffle of each: blocks of folds depend on objects, seed and number alone."""
    taken = data.draw(st.sets(st.integers(0, of - 1)))
    found: list[Record] = []
    for folds, shuffle in ((taken, None), ({*range(of)} - taken, 7)):
        split = Split(of, tuple(range(fold, fold + 1) for fold in sorted(folds)), seed)
        try:
            order = order_of(sizes, RecordSelection(split), seed=shuffle)
        except ConfigError:
            continue
        found += records([*order.runs(1)])
    assert Counter(found) == Counter((entry, n) for entry, each in enumerate(sizes) for n in range(len(each)))


@given(objects.filter(lambda sizes: len(sizes) > 1), splits)
def test_blocks_keep_their_folds_when_objects_are_added(sizes: list[list[int]], split: Split) -> None:
    one = selected(sizes[:-1], RecordSelection(split))
    assert one == [record for record in selected(sizes, RecordSelection(split)) if record[0] < len(sizes) - 1]


@given(objects.filter(any), st.integers(1, 200), seeds, st.integers(0, 3))
def test_a_limit_is_exact_in_every_epoch(
    sizes: list[list[int]], most: int, seed: int | None, epoch: int
) -> None:
    """The first records in plan order; a shuffle orders these, and takes no others."""
    order = order_of(sizes, RecordSelection(limit=RecordLimit(most)), seed=seed)
    every = [(entry, number) for entry, each in enumerate(sizes) for number in range(len(each))]
    assert sorted(records([*order.runs(epoch)])) == every[:most]
    walked = [run for _, run in dealt(order, Deal(1, 1, 0, 1), epoch)]
    assert len(records(walked)) == min(most, len(every))


def test_a_sample_of_many_objects_takes_little_memory() -> None:
    """It is the same as of a list that is sorted at once, which takes 100 bytes an object."""
    number = 30_000
    entries = Plan.of(ObjectRef("b", f"k{each}", 10, "e") for each in range(number)).entries
    counts = array("Q", [1]) * number
    tracemalloc.start()
    try:
        found = select_records(entries, counts, counts, RecordSelection(limit=RecordLimit(number // 2, 7)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    drawn = list(map(Draw(7), entries))
    first = sorted(range(number), key=drawn.__getitem__)[: number // 2]
    assert [entry for entry, bound in enumerate(found.bounds) if bound] == sorted(first)
    assert peak < 60 * number + 100 * 8192


def test_the_digest_covers_what_is_selected() -> None:
    sizes = [[5] * 40, [8] * 60]

    def digest(selection: RecordSelection | None = None, block: int = 50) -> str:
        table = Table(sizes)
        order = RecordOrder(table.counts, table.sizes, seed=1, block=block)
        if selection is not None:
            order = order_of(sizes, selection, seed=1, block=block)
        return RecordPlan(table.entries(), table, order, Deal(4, 2, 0, 2)).order_digest

    def split(take: Sequence[range], of: int = 4, seed: int = 0) -> RecordSelection:
        return RecordSelection(Split(of, tuple(take), seed))

    limits = [RecordSelection(limit=RecordLimit(*each)) for each in [(50,), (51,), (41, 1), (41, 2)]]
    found = [digest(), *map(digest, limits)]
    found += map(
        digest, [split([range(3)]), split([range(1, 4)]), split([range(3)], 5), split([range(3)], 4, 1)]
    )
    found.append(digest(RecordSelection(Split(4, (range(3),)), RecordLimit(40))))
    assert len({*found}) == len(found)
    assert digest(RecordSelection(limit=RecordLimit(100))) == digest(), "a limit that leaves nothing out"


def test_a_split_leaves_large_runs() -> None:
    """An order of one fold of ten has no more runs than it has blocks."""
    order = order_of([[1000] * 2000] * 4, RecordSelection(Split(10, (range(1),))), block=50_000)
    runs = [*order.runs(0)]
    assert {run.end - run.first for run in runs} == {50}
    assert 5 < len(runs) < 30
