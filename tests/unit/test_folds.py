"""Where a step begins in a rank's stream, and jobs that are killed and go on at other numbers of ranks."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.plan import Segment
from streamer.plan.folds import offset_of, records_before
from streamer.plan.record_order import Deal, RecordOrder, Remainder
from streamer.plan.record_plan import RecordPlan
from streamer.plan.record_table import EndMarks
from streamer.readers.core.rank_steps import RankSteps
from tests.unit import reference
from tests.unit.reference import Record
from tests.unit.test_record_order import Table, contents, marked, remainders, seeds, small_objects

DIVISORS = [number for number in range(1, 65) if 192 % number == 0]


@given(small_objects, seeds, st.integers(1, 3), st.integers(1, 3), st.tuples(remainders, marked))
def test_a_step_begins_where_its_first_record_does(
    sizes: list[list[int]],
    seed: int | None,
    ranks: int,
    every: int,
    form: tuple[Remainder, EndMarks],
) -> None:
    """At every step, with and without end marks; and every byte is after the records that precede it."""
    table = Table(sizes, form[1])
    order = RecordOrder(table.counts, table.sizes, seed=seed, block=20)
    deal = Deal(2 * ranks, ranks, 0, ranks, "repeat" if order.records < 2 * ranks else form[0])
    host = RecordPlan(table.entries(), table, order, deal, every=every)
    batches = reference.global_batches(
        reference.record_order(table.counts, table.sizes, seed=seed, epoch=1, block=20),
        deal.global_batch,
        deal.remainder,
    )
    for rank, plan in enumerate(host.ranks(ranks)):
        due = [record for batch in batches for record in batch[2 * rank : 2 * rank + 2]]
        whole = contents(plan.segments(1))
        ends = list(accumulate(table.border(e, n + 1) - table.border(e, n) for e, n in due))
        bodies = [number for number, (key, _) in enumerate(whole) if key]
        for step in range(len(batches)):
            offset = offset_of(plan, 1, step)
            assert offset == (bodies[ends[2 * step - 1]] if step else 0)
            assert records_before(plan, 1, offset) == 2 * step
        assert offset_of(plan, 1, len(batches)) == len(whole)
        for offset in range(len(whole) + 1):
            had = sum(1 for number in bodies if number < offset)
            assert records_before(plan, 1, offset) == sum(1 for end in ends if end <= had)


def resized(seed: int) -> None:
    """One job of some epochs, killed and gone on with until its end."""
    draw = random.Random(seed)
    sizes = [[draw.randint(1, 9) for _ in range(draw.randint(0, 400))] for _ in range(draw.randint(1, 6))]
    sizes.append([3] * draw.randint(1, 500))
    table = Table(sizes, draw.choice([EndMarks(), EndMarks(run=b"end"), EndMarks(epoch=b"end")]))
    shuffle, block = draw.choice([None, draw.randrange(1 << 40)]), draw.randint(1, 300)
    order = RecordOrder(table.counts, table.sizes, seed=shuffle, block=block)
    remainder: Remainder = "repeat" if order.records < 192 else draw.choice(["drop", "repeat"])
    epochs, epoch, step, kills = draw.randint(1, 3), 0, 0, 0
    taken: dict[tuple[int, int], list[Record]] = {}
    while epoch < epochs:
        ranks = draw.choice(DIVISORS)
        hosts = draw.choice([number for number in (1, 2, 3, 4) if ranks % number == 0])
        each = ranks // hosts
        plans = [
            plan
            for first in range(0, ranks, each)
            for plan in RecordPlan(
                table.entries(),
                table,
                order,
                Deal(192, ranks, first, first + each, remainder),
                every=draw.randint(1, 100),
            ).ranks(each)
        ]
        steps = plans[0].steps
        size = 192 // ranks
        end = draw.randint(step, steps) if kills < 6 else steps
        shares = [share(plan, table, epoch, step) for plan in plans]
        for number in range(end - step):
            batch = [record for each in shares for record in each[size * number : size * number + size]]
            assert (epoch, step + number) not in taken, "a global batch was taken twice"
            taken[epoch, step + number] = batch
        # Any rank has the state; some have already returned a part of the next step.
        ahead = 0 if end == steps else draw.randrange(size)
        state = RankSteps("train", steps, size, 0, {"digest": "d"}).state(epoch, end * size + ahead)
        epoch, step, kills = state.epoch, state.step, kills + 1
    for number in range(epochs):
        due = reference.global_batches(
            reference.record_order(table.counts, table.sizes, seed=shuffle, epoch=number, block=block),
            192,
            remainder,
        )
        assert [taken[number, step] for step in range(len(due))] == due
        assert (number, len(due)) not in taken


def share(plan: RecordPlan, table: Table, epoch: int, step: int) -> list[Record]:
    """The records of a rank's stream from a step on, by the byte at which the sidecar resumes."""
    offset = offset_of(plan, epoch, step)
    near, segments = plan.segments_near(epoch, offset)
    found: list[Record] = []
    for each in segments:
        if isinstance(each, Segment):
            entry = int(each.object.key[1:])
            numbers = range(table.counts[entry])
            for number in (n for n in numbers if each.start <= table.border(entry, n) < each.end):
                if near >= offset:
                    found.append((entry, number))
                near += table.border(entry, number + 1) - table.border(entry, number)
        else:
            near += len(each)
    return found


@pytest.mark.parametrize("seed", range(50))
def test_a_job_that_is_killed_and_resized_takes_each_global_batch_once(seed: int) -> None:
    resized(seed)
