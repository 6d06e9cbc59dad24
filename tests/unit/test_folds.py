"""Where a step begins in a rank's stream, and jobs that are killed and go on at other numbers of ranks."""

from __future__ import annotations

import random
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.plan import Segment
from streamer.plan.folds import offset_of, records_before
from streamer.plan.record_order import Deal, RecordOrder, Remainder
from streamer.plan.record_plan import RecordPlan
from streamer.plan.record_table import EndMarks
from streamer.readers.core.position import RankSteps, ReaderPosition
from streamer.readers.core.state_file import joint_states
from tests.unit import reference
from tests.unit.reference import Record
from tests.unit.test_record_order import Table, contents, marked, remainders, seeds, small_objects

DIVISORS = [number for number in range(1, 65) if 192 % number == 0]


@given(
    small_objects,
    seeds,
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.integers(1, 3),
    st.tuples(remainders, marked),
)
def test_a_step_begins_where_its_first_record_does(
    sizes: list[list[int]],
    seed: int | None,
    shape: tuple[int, int],
    every: int,
    form: tuple[Remainder, EndMarks],
) -> None:
    """At every step, with and without end marks; and every byte is after the records that precede it."""
    table, (ranks, workers) = Table(sizes, form[1]), shape
    order = RecordOrder(table.counts, table.sizes, seed=seed, block=20)
    deal = Deal(2 * ranks, ranks, 0, ranks, "repeat" if order.records < 2 * ranks else form[0], workers)
    host = RecordPlan(table.entries(), table, order, deal, every=every)
    batches = reference.global_batches(
        reference.record_order(table.counts, table.sizes, seed=seed, epoch=1, block=20),
        deal.global_batch,
        deal.remainder,
    )
    for fifo, plan in enumerate(host.ranks(ranks * workers)):
        worker, rank = divmod(fifo, ranks)
        due = [record for batch in batches[worker::workers] for record in batch[2 * rank : 2 * rank + 2]]
        whole = contents(plan.segments(1))
        ends = list(accumulate(table.border(e, n + 1) - table.border(e, n) for e, n in due))
        bodies = [number for number, (key, _) in enumerate(whole) if key]
        for step in range(len(batches)):
            offset, before = offset_of(plan, 1, step), 2 * len(range(worker, step, workers))
            at_end = before == len(due)
            assert offset == (len(whole) if at_end else bodies[ends[before - 1]] if before else 0)
            assert records_before(plan, 1, offset) == before
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
        each, workers = ranks // hosts, draw.choice([1, 1, 2, 3, 5])
        every = draw.randint(1, 100)
        hosted = [
            RecordPlan(
                table.entries(),
                table,
                order,
                Deal(192, ranks, first, first + each, remainder, workers),
                every=every,
            ).ranks(each * workers)
            for first in range(0, ranks, each)
        ]
        plans = [plan for of_host in hosted for plan in of_host]
        steps = plans[0].steps
        size = 192 // ranks
        end = draw.randint(step, steps) if kills < 6 else steps
        shares = {plan.digest: share(plan, table, epoch, step) for plan in plans}
        for number in range(step, end):
            batch: list[Record] = []
            for of_host in hosted:
                for plan in of_host[number % workers * each :][:each]:  # the workers whose turn it is
                    own = shares[plan.digest]
                    batch += own[:size]
                    del own[:size]
            assert (epoch, number) not in taken, "a global batch was taken twice"
            taken[epoch, number] = batch
        state = saved(plans[::each][:workers], epoch, end, 0 if end == steps else draw.randrange(size))
        epoch, step, kills = state["epoch"], state["step"], kills + 1
    for number in range(epochs):
        due = reference.global_batches(
            reference.record_order(table.counts, table.sizes, seed=shuffle, epoch=number, block=block),
            192,
            remainder,
        )
        assert [taken[number, step] for step in range(len(due))] == due
        assert (number, len(due)) not in taken


def saved(plans: list[RecordPlan], epoch: int, end: int, ahead: int) -> dict[str, Any]:
    """The state of the workers of a rank after a step, and after some records of the next one."""
    positions = []
    for worker, plan in enumerate(plans):
        records = plan.deal.before(end) + (ahead if end % len(plans) == worker else 0)
        assert plan.steps is not None
        steps, order = plan.steps, {"digest": "d"}
        rank = RankSteps("train", steps, plan.deal.slice, 0, order, 0, len(plans), worker)
        positions.append(ReaderPosition(f"train-{worker}", epoch, records=records, rank=rank))
    (state,) = joint_states(positions)
    return state


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


@pytest.mark.parametrize("seed", range(25))
def test_a_job_that_is_killed_and_resized_takes_each_global_batch_once(seed: int) -> None:
    resized(seed)
