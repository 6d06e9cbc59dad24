"""Mixing by weights: shares in every prefix, ends of epochs, and orders, against the reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import accumulate, islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.errors import ConfigError
from streamer.plan import Entries, ObjectRef, S3Uri, Segment
from streamer.plan.folds import offset_of, records_before
from streamer.plan.mix import LARGEST_SUM, Mix, MixBy, Picks, Until, lowest_terms, next_source
from streamer.plan.mixed_order import MixedOrder
from streamer.plan.record_order import Deal
from streamer.plan.record_plan import RecordPlan
from streamer.plan.split import Split
from tests.unit import reference
from tests.unit.reference import Record
from tests.unit.test_record_order import Table, dealt, records, seeds

BLOCK = 300
weights = st.lists(st.integers(1, 40), min_size=1, max_size=6).map(lowest_terms)
object_sizes = st.lists(st.lists(st.integers(1, 300), max_size=12), min_size=1, max_size=4).filter(any)
mixes = st.integers(1, 4).flatmap(
    lambda count: st.tuples(
        st.lists(st.integers(1, 9), min_size=count, max_size=count).map(lowest_terms),
        st.lists(object_sizes, min_size=count, max_size=count),
    )
)
"""Weights, and for each source the sizes of the records of its objects."""
untils: st.SearchStrategy[Until] = st.sampled_from(["first", "all"])
ways: st.SearchStrategy[MixBy] = st.sampled_from(["block", "record"])


def order_of(
    sources: Sequence[list[list[int]]],
    mix: Mix,
    *,
    seed: int | None = None,
    split: Split | None = None,
    batch: int = 0,
) -> tuple[MixedOrder, Table, Entries]:
    table = Table([each for source in sources for each in source])
    entries, uris = Entries(), []
    for number, source in enumerate(sources):
        uris.append(S3Uri(f"b{number % 2}", f"s{number}/"))
        for each, size in enumerate(source):
            entries.add(ObjectRef(f"b{number % 2}", f"s{number}/{each:02}", sum(size), "e"))
    order = MixedOrder(entries, table.counts, uris, mix, seed=seed, block=BLOCK, split=split, batch=batch)
    return order, table, entries


def due_order(
    sources: Sequence[list[list[int]]], mix: Mix, *, seed: int | None, epoch: int
) -> list[tuple[int, list[Record]]]:
    """The units of an epoch, each with its source, as the page says."""
    tables = [Table(source) for source in sources]
    due = reference.mixed_counts([sum(table.counts) for table in tables], mix.weights, mix.until)
    first, found = 0, []
    for table, count in zip(tables, due, strict=True):
        passes = -(-count // sum(table.counts))
        units: list[list[Record]] = []
        for turn in range(passes):
            blocks = reference.record_blocks(
                table.counts, table.sizes, seed=seed, epoch=epoch * passes + turn, block=BLOCK
            )
            units += [[(first + entry, number) for entry, number in block] for block in blocks]
        flat = [record for unit in units for record in unit][:count]
        if mix.by == "record":
            units = [[record] for record in flat]
        else:
            ends = list(accumulate(map(len, units), initial=0))
            units = [unit for start, end in pairwise(ends) if (unit := flat[start:end])]
        found.append(units)
        first += len(table.counts)
    return reference.mixed(found, mix.weights)


@given(weights, st.integers(1, 400))
def test_by_record_every_prefix_has_its_shares_to_one_record(terms: tuple[int, ...], most: int) -> None:
    """And after a sum of weights the picks repeat."""
    taken = [0] * len(terms)
    ones = [1] * len(terms)
    for position in range(1, min(most, 2 * sum(terms)) + 1):
        taken[next_source(taken, ones, terms, sum(terms))] += 1
        shares = [Fraction(position * weight, sum(terms)) for weight in terms]
        assert all(abs(have - share) < 1 for have, share in zip(taken, shares, strict=True))


@given(mixes, untils, ways, st.none() | st.integers(0, 9), st.integers(0, 2))
def test_the_order_is_that_of_the_specification(
    mixed: tuple[tuple[int, ...], list[list[list[int]]]],
    until: Until,
    by: MixBy,
    seed: int | None,
    epoch: int,
) -> None:
    terms, sources = mixed
    mix = Mix(terms, until, by)
    order, _, _ = order_of(sources, mix, seed=seed)
    due = due_order(sources, mix, seed=seed, epoch=epoch)
    runs = list(order.runs(epoch))
    assert records(runs) == [record for _, unit in due for record in unit]
    assert order.records == sum(len(unit) for _, unit in due)
    assert all(run.first < run.end for run in runs)
    for first in (0, 1, len(runs) // 2, len(runs)):
        assert list(order.runs(epoch, first)) == runs[first:]


@given(mixes, untils, ways, seeds)
def test_every_prefix_has_its_shares_to_one_block(
    mixed: tuple[tuple[int, ...], list[list[list[int]]]], until: Until, by: MixBy, seed: int | None
) -> None:
    """The largest block of all sources; by record, one record. Prefixes may end within a block."""
    terms, sources = mixed
    order, _, _ = order_of(sources, Mix(terms, until, by), seed=seed)
    source_of = [number for number, source in enumerate(sources) for _ in source]
    most = max(run.end - run.first for run in order.runs(0)) if by == "block" else 1
    taken = [0] * len(terms)
    for position, (entry, _) in enumerate(records([*order.runs(0)]), 1):
        taken[source_of[entry]] += 1
        for have, weight in zip(taken, terms, strict=True):
            assert abs(have - Fraction(position * weight, sum(terms))) <= most


@given(mixes, ways, seeds, st.integers(0, 3))
def test_until_first_repeats_nothing_and_until_all_leaves_nothing_out(
    mixed: tuple[tuple[int, ...], list[list[list[int]]]], by: MixBy, seed: int | None, epoch: int
) -> None:
    terms, sources = mixed
    every = {
        (entry, n)
        for entry, each in enumerate(s for source in sources for s in source)
        for n in range(len(each))
    }
    first = Counter(records([*order_of(sources, Mix(terms, "first", by), seed=seed)[0].runs(epoch)]))
    assert set(first.values()) <= {1}
    whole = order_of(sources, Mix(terms, "all", by), seed=seed)[0]
    found = Counter(records([*whole.runs(epoch)]))
    assert found.keys() == every
    firsts = [source.first for source in whole.sources]
    for start, end in pairwise(
        [*firsts, sum(map(len, sources))]
    ):  # no record is taken twice more than another
        mine = [count for (entry, _), count in found.items() if start <= entry < end]
        assert max(mine) - min(mine) <= 1


@given(mixes, untils, seeds)
def test_any_number_of_ranks_reads_the_same_mixed_batches(
    mixed: tuple[tuple[int, ...], list[list[list[int]]]], until: Until, seed: int | None
) -> None:
    terms, sources = mixed
    order, table, entries = order_of(sources, Mix(terms, until), seed=seed)
    due = reference.global_batches(records([*order.runs(1)]), 12, "repeat")
    for ranks in (1, 3, 4):
        plan = RecordPlan(entries, table, order, Deal(12, ranks, 0, ranks, "repeat"))
        assert plan.steps == len(due)
        found: dict[int, list[Record]] = {rank: [] for rank in range(ranks)}
        for rank, run in dealt(order, plan.deal, 1):
            found[rank] += records([run])
        size = 12 // ranks
        assert [
            [record for rank in range(ranks) for record in found[rank][step * size : step * size + size]]
            for step in range(len(due))
        ] == due
        assert plan.total_bytes(1) == sum(len(each) for each in plan.segments(1))


def test_a_walk_may_start_in_the_middle_of_a_long_order() -> None:
    """States are kept on the way, so that this passes over few runs."""
    sources = [[[100] * 5000], [[100] * 3000], [[100] * 999] * 3]
    for by in ("block", "record"):
        order, _, _ = order_of(sources, Mix((7, 2, 1), "all", by), seed=3)
        runs = list(order.runs(2))
        assert len(runs) > 10_000 or by == "block"
        for first in (1, 4095, 4096, 4097, 8200, len(runs) - 1):
            assert list(islice(order.runs(2, first), 5)) == runs[first : first + 5]


def test_passes_of_a_small_source_have_other_orders() -> None:
    order, _, _ = order_of([[[100] * 300], [[100] * 30]], Mix((1, 1), "all"), seed=3)
    small = [run for run in order.runs(0) if run.entry == 1]
    passes = [tuple(run.first for run in small[start : start + 10]) for start in range(0, 100, 10)]
    again = [run for run in order.runs(1) if run.entry == 1]
    passes += [tuple(run.first for run in again[start : start + 10]) for start in range(0, 100, 10)]
    assert {tuple(sorted(each)) for each in passes} == {tuple(range(0, 30, 3))}
    assert len(set(passes)) == 20


def test_folds_of_blocks_are_of_every_source() -> None:
    sources = [[[10] * 900], [[10] * 600]]
    whole = {*records([*order_of(sources, Mix((1, 1), "all"))[0].runs(0)])}
    train, held = (
        {*records([*order_of(sources, Mix((1, 1), "all"), split=Split(4, folds))[0].runs(0)])}
        for folds in ((range(3),), (range(3, 4),))
    )
    assert train & held == set()
    assert train | held == whole
    assert {entry for entry, _ in held} == {0, 1}


def test_the_digest_covers_the_mix() -> None:
    def digest(mix: Mix, *, cut: int = 1, seed: int | None = 1) -> str:
        objects = [[10] * 90, [10] * 60, [10] * 60]
        order, table, _ = order_of([objects[:cut], objects[cut:]], mix, seed=seed)
        return RecordPlan(Table(objects).entries(), table, order, Deal(4, 2, 0, 2)).order_digest

    found = [digest(Mix((1, 2))), digest(Mix((1, 2)), seed=None), digest(Mix((1, 2)), cut=2)]
    found += [digest(Mix((2, 1))), digest(Mix((1, 2), "all")), digest(Mix((1, 2), "first", "record"))]
    assert len({*found}) == len(found)


@pytest.mark.parametrize(
    ("given_weights", "terms"),
    [
        ([7, 2, 1], (7, 2, 1)),
        ([70, 20, 10], (7, 2, 1)),
        ([0.7, 0.2, 0.1], (7, 2, 1)),
        ([0.5, 1], (1, 2)),
        ([3], (1,)),
        ([0.6745, 0.3255], (1349, 651)),
        ([1e-3, 1], (1, 1000)),
    ],
)
def test_weights_count_as_they_are_written(given_weights: list[float], terms: tuple[int, ...]) -> None:
    assert lowest_terms(given_weights) == terms


def test_weights_that_are_too_fine_are_refused() -> None:
    with pytest.raises(ConfigError, match="round them"):
        lowest_terms([1 / 3, 1])
    assert sum(lowest_terms([LARGEST_SUM - 1, 1])) == LARGEST_SUM


def test_a_source_without_a_record_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="no record to take from s3://b1/s1/; .* objects by Include"):
        order_of([[[1, 2]], [[]]], Mix((1, 1)))


def test_an_epoch_that_repeats_too_much_is_refused_by_name() -> None:
    sources = [[[1] * 1000], [[1] * 10]]
    with pytest.raises(ConfigError, match="s3://b0/s0/ is read last; raise its weight"):
        order_of(sources, Mix((1, 1000), "all"))
    assert order_of(sources, Mix((1, 1000)))[0].records == 11
    assert 50_000 < order_of(sources, Mix((1, 50), "all"))[0].records < 51_000


def test_picks_of_large_weights_are_those_of_their_period() -> None:
    picks = Picks((5, 3, 1))
    sequence = [
        source
        for source, (start, end) in zip(picks.sources, pairwise([*picks.starts, 9]), strict=True)
        for _ in range(start, end)
    ]
    assert Counter(sequence) == {0: 5, 1: 3, 2: 1}
    for source in range(3):
        places = [at for at in range(27) if sequence[at % 9] == source]
        assert [picks.place(source, number) for number in range(len(places))] == places
        assert [picks.before(source, at) for at in range(27)] == [
            sum(place < at for place in places) for at in range(27)
        ]


def test_a_resume_at_any_number_of_ranks_begins_at_its_step() -> None:
    """In the third epoch, near the stored positions of the walk and between them."""
    sources = [[[100, 50] * 400], [[30] * 300, [70] * 41]]
    for by in ("block", "record"):
        order, table, entries = order_of(sources, Mix((2, 1), "all", by), seed=3)
        for ranks in (1, 2, 4):
            whole = RecordPlan(entries, table, order, Deal(8, ranks, 0, ranks), every=50)
            for plan in whole.ranks(ranks):
                stream = bytes_of(plan.segments(2))
                for step in (0, 1, 60, plan.steps - 1):
                    offset = offset_of(plan, 2, step)
                    assert records_before(plan, 2, offset) == step * 8 // ranks
                    start, rest = plan.segments_near(2, offset)
                    assert bytes_of(rest)[offset - start :] == stream[offset:]


def bytes_of(segments: Iterable[Segment | bytes]) -> list[tuple[str, int]]:
    """Key and offset of every byte."""
    return [
        (each.object.key, offset)
        for each in segments
        if isinstance(each, Segment)
        for offset in range(each.start, each.end)
    ]
