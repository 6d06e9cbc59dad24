"""Weights of a mix that change at a step: orders, batches of streams under way, digests, states."""

from __future__ import annotations

import os
from fractions import Fraction
from functools import partial
from itertools import accumulate, count, pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.job.resume import start_positions, take_changes, with_published_digests
from streamer.helpers.keeper_client import Held
from streamer.key_list import key_list_path
from streamer.plan.dealing import deal_stream
from streamer.plan.host_ranks import HostRanks
from streamer.plan.mix import Mix, MixBy, MixChange, Until, changed, lowest_terms, parse_changes
from streamer.plan.mixed_order import MixedOrder
from streamer.plan.object_starts import object_starts
from streamer.plan.position import Position
from streamer.plan.record_order import Deal
from streamer.plan.record_places import offset_of
from streamer.plan.record_plan import RecordPlan
from streamer.sink.key_list import KeyListWriter, last_offset
from streamer.step_state import StepState, order_difference
from streamer.trailer import Trailer, trailer_path, write_trailer
from tests.unit import reference
from tests.unit.reference import Record
from tests.unit.test_mix import BLOCK, bytes_of, mixes, order_of, untils, ways
from tests.unit.test_record_order import Table, records

BATCH = 4
Sources = list[list[list[int]]]
SOURCES: Sources = [[[40, 70] * 15, [60] * 10], [[50] * 22]]
two_weights = st.lists(st.integers(1, 9), min_size=2, max_size=2).map(lowest_terms)


def order_with(
    sources: Sources, mix: Mix, changes: tuple[MixChange, ...], *, seed: int | None
) -> tuple[MixedOrder, Table]:
    order, table, _ = order_of(sources, mix, seed=seed, batch=BATCH)
    return order.changed(changes), table


def due_order(
    sources: Sources, mix: Mix, changes: tuple[MixChange, ...], *, seed: int | None, epoch: int
) -> list[tuple[int, Record]]:
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

    begin = [change for change in changes if (change.epoch, change.step) <= (epoch, 0)]
    inside = [change for change in changes if change.epoch == epoch and change.step]
    weights = begin[-1].weights if begin else mix.weights
    phases = [(0, weights), *((each.step * BATCH, each.weights) for each in inside)]
    phases = [phase for phase in phases if phase[0] < length]
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
    places = st.tuples(st.integers(0, 2), st.integers(0, 12)).filter(any)
    starts = sorted(data.draw(st.sets(places, min_size=1, max_size=3)))
    changes = tuple(MixChange(*start, data.draw(new)) for start in starts)
    mix = Mix(terms, until, by)
    order, _ = order_with(sources, mix, changes, seed=seed)
    due = due_order(sources, mix, changes, seed=seed, epoch=epoch)
    runs = list(order.runs(epoch))
    found = records(runs)
    assert found == [record for _, record in due]
    assert len(found) == order.records
    for first in (1, len(runs) // 2, len(runs)):
        assert list(order.runs(epoch, first)) == runs[first:]

    last = changes[-1]
    before = records([*order_with(sources, mix, changes[:-1], seed=seed)[0].runs(epoch)])
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
def test_streams_under_way_go_on_in_the_new_order(
    terms: tuple[int, ...], new: tuple[int, ...], until: Until, by: MixBy, dice: int
) -> None:
    """At any number of ranks, from any place of each."""
    draw = Random(dice)
    seed, epoch = draw.choice([None, 7]), draw.randrange(2)
    mix = Mix(terms, until, by)
    for ranks in (1, 2, 4):
        order, table, entries = order_of(SOURCES, mix, seed=seed, batch=BATCH)
        host_ranks = HostRanks(entries, table, order, Deal(BATCH, ranks, 0, ranks, "drop"), positions_every=9)
        plans = RecordPlan(host_ranks).ranks(ranks)
        steps = plans[0].steps(epoch)
        streams = [plan.segments(epoch) for plan in plans]
        pieces = deal_stream(RecordPlan(host_ranks), epoch, [0] * ranks).pieces
        begun = [
            [segment for _, segment in zip(range(draw.randrange(9)), each, strict=False)] for each in streams
        ]
        dealt = [piece for _, piece in zip(range(draw.randrange(9)), pieces, strict=False)]
        for number in range(ranks):  # totals that are known before the change
            plans[number].total_bytes(epoch)
        start, step = max(host_ranks.following, (epoch, draw.randrange(1, steps)))
        change = MixChange(start, step, new)
        changes = changed(mix.weights, (), change)
        assert host_ranks.change(order.changed(changes), (start, step), lambda: None)

        same, _, _ = order_of(SOURCES, mix, seed=seed, batch=BATCH)
        fresh = HostRanks(entries, table, same.changed(changes), Deal(BATCH, ranks, 0, ranks, "drop"))
        due_plans = RecordPlan(fresh).ranks(ranks)
        for plan, first, rest, due in zip(plans, begun, streams, due_plans, strict=True):
            whole = bytes_of([*first, *rest])
            assert whole == bytes_of(due.segments(epoch))
            assert plan.total_bytes(epoch) == len(whole)
            for number in (step, steps - 1):
                offset = offset_of(plan, epoch, number)
                near, segments = plan.segments_near(epoch, offset)
                assert bytes_of(segments)[offset - near :] == whole[offset:]
        by_rank = [0] * ranks
        for piece in [*dealt, *pieces]:
            by_rank[piece.rank] += piece.size
        assert by_rank == [plan.total_bytes(epoch) for plan in due_plans]
        assert host_ranks.change(order, (start, step), lambda: None) == (start > epoch)


def host_ranks_with(changes: tuple[MixChange, ...], weights: tuple[int, ...] = (1, 1)) -> HostRanks:
    order, table, entries = order_of(SOURCES, Mix(weights, "all"), seed=1, batch=BATCH)
    return HostRanks(entries, table, order.changed(changes), Deal(BATCH, 2, 0, 2))


def test_a_state_has_the_changes_that_its_batches_depend_on() -> None:
    change, later = MixChange(1, 5, (3, 1)), MixChange(2, 0, (1, 2))
    orders = [host_ranks_with(each).described_order for each in ((), (change,), (change, later))]
    assert len({order["digest"] for order in orders}) == 3
    for epoch, step, lacks_change, lacks_later in (
        (0, 9, False, False),
        (1, 5, False, False),
        (1, 6, True, False),
        (2, 0, True, False),
        (2, 1, True, True),
    ):
        for number, (order, differs) in enumerate(
            zip(orders, (lacks_change, lacks_later, False), strict=True)
        ):
            state = StepState.of(StepState("train", epoch, step, order).document())
            difference = order_difference(state, orders[2])
            assert (difference is not None) == differs, (number, epoch, step)
            if difference is not None:
                assert "the changes of its weights was" in difference
    other = host_ranks_with((), (1, 2)).described_order
    assert "Mix was" in (order_difference(StepState("train", 0, 0, other), orders[2]) or "")


@pytest.mark.parametrize("present", [(), (MixChange(0, 8, (1, 3)),)], ids=str)
def test_the_trailers_of_held_fifos_have_the_changes_and_not_an_older_state(
    tmp_path: Path, present: tuple[MixChange, ...]
) -> None:
    """The state was saved with a change that was cancelled, or replaced, before the sidecar ended.

    Another sidecar ended before it had published this in all trailers; the latest one holds.
    """
    older = host_ranks_with((MixChange(0, 9, (3, 1)),))
    latest = host_ranks_with(present)
    held, plans = {}, {}
    for rank, ranks in enumerate((older, latest)):
        name = f"train-{rank}"
        digest = RecordPlan(ranks).ranks(2)[rank].digest
        order = ranks.described_order
        trailer = Trailer(channel=name, epoch=0, state="open", bytes_total=None, order=order, digest=digest)
        write_trailer(str(tmp_path), trailer)
        os.utime(trailer_path(str(tmp_path), name, 0), ns=(rank, rank))
        held[name] = Held(0, "open", 0, "as it was when the epoch began", 0, None)
        assert with_published_digests(held, str(tmp_path))[name].digest == digest
    resumed = host_ranks_with(())
    plans = dict(zip(held, RecordPlan(resumed).ranks(2), strict=True))
    state = StepState("train", 0, 2, older.described_order)
    found = take_changes({"train": plans}, {"train": state}, held, str(tmp_path))
    assert resumed.changes == latest.changes
    assert found.get("train", []) == latest.changes


def test_a_plan_covers_bytes_before_a_change_only() -> None:
    """A keeper's digest may be older than the change, and its position after it."""
    change = MixChange(1, 5, (3, 1))
    before, after = (RecordPlan(host_ranks_with(each)).ranks(2)[1] for each in ((), (change,)))
    offset = offset_of(after, 1, 5)
    for position, covered in (
        (Position(0, 10), True),
        (Position(1, offset), True),
        (Position(1, offset + 1), False),
        (Position(2, 0), False),
    ):
        assert after.covers(before.digest, position) is covered
        assert after.covers(after.digest, position)
        assert not before.covers(after.digest, position)


def test_a_change_replaces_those_that_are_pending() -> None:
    first, second = MixChange(0, 5, (3, 1)), MixChange(1, 0, (1, 2))
    assert changed((1, 1), (first,), second) == (first, second)
    assert changed((1, 1), (first, second), MixChange(0, 9, (1, 2))) == (first, MixChange(0, 9, (1, 2)))
    assert changed((1, 1), (first, second), MixChange(0, 5, (1, 1))) == ()
    assert changed((1, 1), (first,), MixChange(0, 7, (3, 1))) == (first,)


def test_a_change_whose_digest_cannot_be_published_is_not_made() -> None:
    host_ranks = host_ranks_with(())
    order = host_ranks.order
    assert isinstance(order, MixedOrder)

    def publish() -> None:
        assert host_ranks.order is not order
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        host_ranks.change(order.changed((MixChange(0, 3, (3, 1)),)), (0, 3), publish)
    assert host_ranks.order is order


@pytest.mark.parametrize(
    "value",
    [
        {},
        [[0, 1]],
        [[0, 1, [1]]],
        [[0, 0, [1, 2]]],
        [[0, 1, [1, 0]]],
        [[0, -1, [1, 2]]],
        [[0, True, [1, 2]]],
        [[0, 1, [1, 100_000]]],
        [[1, 0, [1, 2]], [0, 5, [1, 1]]],
        [[0, 1, "12"]],
        [[0, step, [1, 1 + step % 2]] for step in range(1, 102)],
    ],
)
def test_changes_of_another_form_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="no changes of"):
        parse_changes(value, 2)


def test_no_step_changes_whose_objects_a_key_list_has(tmp_path: Path) -> None:
    """The list of a sidecar that was killed has lines after the position; a reader may have read them."""
    directory, path = str(tmp_path), key_list_path(str(tmp_path), "train-0", 0)

    def write(host_ranks: HostRanks, *, held: bool) -> list[bytes]:
        plan = RecordPlan(host_ranks).ranks(2)[0]
        starts = partial(object_starts, plan, 0)
        writer = KeyListWriter(path, "r", starts, first=0, consumed=10, ahead=True, held=held)
        writer.reach(10, plan.total_bytes(0) - 10, 10)
        writer.close()
        return Path(path).read_bytes().splitlines(keepends=True)

    lines = write(host_ranks_with(()), held=False)
    Path(path).write_bytes(b"".join(lines[:12]) + b"[7")
    host_ranks = host_ranks_with(())
    plan = RecordPlan(host_ranks).ranks(2)[0]
    held = {"train-0": Held(0, "open", 10, plan.digest, 0, None)}
    start_positions({"train-0": plan}, held, {}, anyway=False, directory=directory)
    step = host_ranks.following
    assert offset_of(plan, *step) > last_offset(directory, "train-0", 0) > 10
    change = MixChange(*step, (9, 1))
    order = host_ranks.order
    assert isinstance(order, MixedOrder)
    assert host_ranks.change(order.changed((change,)), step, lambda: None)
    assert write(host_ranks, held=True) == write(host_ranks_with((change,)), held=False) != lines
