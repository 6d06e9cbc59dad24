"""Weights of a mix that change at steps (`Mix.Then`): orders, batches, digests."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, count, pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.errors import ConfigError
from streamer.plan.dealing import deal_stream
from streamer.plan.folds import offset_of
from streamer.plan.mix import Mix, MixBy, MixChange, Until, lowest_terms
from streamer.plan.record_order import Deal
from streamer.plan.record_plan import RecordPlan
from streamer.plan.record_table import only_object
from streamer.step_state import order_difference
from tests.unit import reference
from tests.unit.reference import Record
from tests.unit.test_mix import BLOCK, bytes_of, mixes, order_of, untils, ways
from tests.unit.test_record_order import Table, records

BATCH = 4
Sources = list[list[list[int]]]
SOURCES: Sources = [[[40, 70] * 15, [60] * 10], [[50] * 22]]
two_weights = st.lists(st.integers(1, 9), min_size=2, max_size=2).map(lowest_terms)


def due_order(sources: Sources, mix: Mix, *, seed: int | None, epoch: int) -> list[tuple[int, Record]]:
    """Source and record at each position of an epoch, as the page says."""
    tables = [Table(source) for source in sources]
    have = [sum(table.counts) for table in tables]
    counts = reference.mixed_counts(have, mix.weights, mix.until)
    length = sum(counts)
    firsts = [0, *accumulate(len(source) for source in sources)]

    def blocks(source: int, most: int) -> list[list[Record]]:
        passes, found = -(-counts[source] // have[source]), list[list[Record]]()
        for turn in count():
            number = epoch * passes + turn if turn < passes else (turn - passes + 1) * 2**32 + epoch
            found += [
                [(firsts[source] + entry, record) for entry, record in block]
                for block in reference.record_blocks(
                    tables[source].counts, tables[source].sizes, seed=seed, epoch=number, block=BLOCK
                )
            ]
            if sum(map(len, found)) >= most:
                break
        return found

    begin = [change for change in mix.then if (change.epoch, change.step) <= (epoch, 0)]
    inside = [change for change in mix.then if change.epoch == epoch and change.step]
    weights = begin[-1].weights if begin else mix.weights
    phases = [(0, weights), *((each.step * BATCH, each.weights) for each in inside)]
    order: list[tuple[int, Record]] = []
    for (start, terms), end in zip(phases, [*(at for at, _ in phases[1:]), length], strict=True):
        taken = [sum(source == each for each, _ in order) for source in range(len(sources))]
        due = reference.picked(terms, length - start)
        units = []
        for source, (gone, further) in enumerate(zip(taken, due, strict=True)):
            every = blocks(source, gone + further)
            flat = [record for block in every for record in block][: gone + further]
            borders = [*accumulate(map(len, every), initial=0)]
            cuts = [gone, *(at for at in borders if gone < at < gone + further), gone + further]
            unit_of = [flat[first:last] for first, last in pairwise(cuts) if first < last]
            units.append([[each] for unit in unit_of for each in unit] if mix.by == "record" else unit_of)
        mixed = [(source, each) for source, unit in reference.mixed(units, terms) for each in unit]
        order += mixed[: end - start]
    return order


@given(mixes, untils, ways, st.none() | st.integers(0, 9), st.data())
def test_the_order_is_that_of_the_specification(
    mixed: tuple[tuple[int, ...], Sources],
    until: Until,
    by: MixBy,
    seed: int | None,
    data: st.DataObject,
) -> None:
    """Before a step it is as without the change; after it each prefix has its shares by the new weights."""
    epoch = data.draw(st.integers(0, 2))
    terms, sources = mixed
    new = st.lists(st.integers(1, 9), min_size=len(terms), max_size=len(terms)).map(lowest_terms)
    steps = -(-order_of(sources, Mix(terms, until, by))[0].records // BATCH)
    places = st.tuples(st.integers(0, 2), st.integers(0, min(12, steps - 1))).filter(any)
    starts = sorted(data.draw(st.sets(places, min_size=1, max_size=3)))
    changes = tuple(MixChange(*start, data.draw(new)) for start in starts)
    mix = Mix(terms, until, by, changes)
    order, _, _ = order_of(sources, mix, seed=seed, batch=BATCH)
    due = due_order(sources, mix, seed=seed, epoch=epoch)
    runs = list(order.runs(epoch))
    found = records(runs)
    assert found == [record for _, record in due]
    assert len(found) == order.records
    for first in (1, len(runs) // 2, len(runs)):
        assert list(order.runs(epoch, first)) == runs[first:]

    last = changes[-1]
    without = order_of(sources, replace(mix, then=changes[:-1]), seed=seed, batch=BATCH)[0]
    before = records([*without.runs(epoch)])
    at = min(len(found), 0 if last.epoch < epoch else len(found) if last.epoch > epoch else last.step * BATCH)
    assert found[:at] == before[:at]
    if (last.epoch, last.step) > (epoch, 0) or last.epoch < epoch:
        most = max((run.end - run.first for run in runs), default=0) if by == "block" else 1
        taken = [0] * len(terms)
        weights = last.weights if last.epoch <= epoch else changes[0].weights
        for position, (source, _) in enumerate(due[at:], 1):
            taken[source] += 1
            for have, weight in zip(taken, weights, strict=True):
                assert abs(have - Fraction(position * weight, sum(weights))) <= most


@given(two_weights, two_weights, untils, ways, st.integers(0, 2**32))
def test_streams_have_the_order_of_the_schedule(
    terms: tuple[int, ...], new: tuple[int, ...], until: Until, by: MixBy, dice: int
) -> None:
    """At any number of ranks, from any step of each."""
    draw = Random(dice)
    seed, epoch = draw.choice([None, 7]), draw.randrange(2)
    plain = Mix(terms, until, by)
    steps = order_of(SOURCES, plain)[0].records // BATCH
    step = draw.randrange(1, steps)
    mix = replace(plain, then=(MixChange(epoch, step, new),))
    due = [record for _, record in due_order(SOURCES, mix, seed=seed, epoch=epoch)]
    order, table, entries = order_of(SOURCES, mix, seed=seed, batch=BATCH)
    for ranks in (1, 2, 4):
        host = RecordPlan(entries, table, order, Deal(BATCH, ranks, 0, ranks, "drop"), every=9)
        plans = host.ranks(ranks)
        for rank, plan in enumerate(plans):
            width = BATCH // ranks
            firsts = [number * BATCH + rank * width for number in range(steps)]
            own = [record for first in firsts for record in due[first : first + width]]
            whole = bytes_of(plan.segments(epoch))
            assert whole == [
                (only_object(entries, entry).key, offset)
                for entry, record in own
                for offset in range(table.border(entry, record), table.border(entry, record + 1))
            ]
            assert plan.total_bytes(epoch) == len(whole)
            for number in (0, step, steps - 1):
                offset = offset_of(plan, epoch, number)
                near, segments = plan.segments_near(epoch, offset)
                assert bytes_of(segments)[offset - near :] == whole[offset:]
        by_rank = [0] * ranks
        for turn in deal_stream(host, epoch, [0] * ranks).turns:
            by_rank[turn.rank] += turn.size
        assert by_rank == [plan.total_bytes(epoch) for plan in plans]


def test_the_schedule_is_a_part_of_the_digest() -> None:
    change, later = MixChange(1, 5, (3, 1)), MixChange(2, 0, (1, 2))
    described = []
    for then in ((), (change,), (change, later)):
        order, table, entries = order_of(SOURCES, Mix((1, 1), "all", then=then), seed=1, batch=BATCH)
        described.append(RecordPlan(entries, table, order, Deal(BATCH, 2, 0, 2)).record_order)
    assert len({order["digest"] for order in described}) == 3
    assert [order["mix"].get("then") for order in described] == [
        None,
        [[1, 5, [3, 1]]],
        [[1, 5, [3, 1]], [2, 0, [1, 2]]],
    ]
    assert "Mix was" in (order_difference(described[1], described[2]) or "")
    assert order_difference(described[2], described[2]) is None


def test_a_change_at_a_step_that_no_epoch_has_is_refused() -> None:
    steps = -(-order_of(SOURCES, Mix((1, 1)))[0].records // BATCH)
    order_of(SOURCES, Mix((1, 1), then=(MixChange(3, steps - 1, (2, 1)),)), batch=BATCH)
    error = f"a change at step {steps} of epoch 3, and an epoch has {steps} steps; write a step of the epoch"
    with pytest.raises(ConfigError, match=error):
        order_of(SOURCES, Mix((1, 1), then=(MixChange(3, steps, (2, 1)),)), batch=BATCH)
