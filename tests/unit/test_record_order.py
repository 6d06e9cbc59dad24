"""The global order of records, its division over ranks, and the plans of ranks, against the reference."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.errors import ConfigError, CorruptObject
from streamer.plan import Entries, ObjectRef, Part, Position, S3Uri, Segment, cut
from streamer.plan.folds import count_parts
from streamer.plan.mix import Mix, MixBy, Until
from streamer.plan.mixed_order import MixedOrder, Order
from streamer.plan.pieces import START, Checkpoint, Walk, joined
from streamer.plan.record_order import Deal, RecordOrder, Remainder, Run
from streamer.plan.record_plan import RecordPlan
from streamer.plan.record_selection import RecordLimit, RecordSelection, select_records, taken_blocks
from streamer.plan.record_table import EndMarks, FixedRecords, ObjectRecords
from streamer.plan.split import Split
from tests.unit import reference
from tests.unit.reference import Record

seeds = st.none() | st.integers(-(2**63), 2**63 - 1)
remainders: st.SearchStrategy[Remainder] = st.sampled_from(["drop", "repeat", "pad"])
UNMARKED = EndMarks()
marked = st.sampled_from([UNMARKED, EndMarks(run=b"end"), EndMarks(epoch=b"end")])
objects = st.lists(st.lists(st.integers(1, 300), max_size=30), max_size=8)
"""The sizes of the records of some objects."""
small_objects = st.lists(st.lists(st.integers(1, 5), max_size=12), min_size=1, max_size=4).filter(any)
"""Such sizes in few bytes, so that a test can look at each byte."""


class Table:
    """Records of known sizes."""

    record_format = "TFRecord"

    def __init__(self, sizes: list[list[int]], end_marks: EndMarks = UNMARKED) -> None:
        self.end_marks = end_marks
        self.counts = array("Q", map(len, sizes))
        self.sizes = array("Q", map(sum, sizes))
        self.borders_of = [list(accumulate(each, initial=0)) for each in sizes]

    def border(self, entry: int, record: int) -> int:
        return self.borders_of[entry][record]

    def borders(self, entry: int, first: int, end: int) -> list[int]:
        return self.borders_of[entry][first : end + 1]

    def entries(self) -> Entries:
        entries = Entries()
        for number, size in enumerate(self.sizes):
            entries.add(ObjectRef("b", f"k{number:02}", size, "e"))
        return entries


class Counts:
    """Records of a byte each."""

    record_format = "TFRecord"
    end_marks = UNMARKED

    def __init__(self, counts: Sequence[int] = ()) -> None:
        self.counts = counts

    def border(self, entry: int, record: int) -> int:  # noqa: ARG002 - all objects are alike
        return record

    def borders(self, entry: int, first: int, end: int) -> range:  # noqa: ARG002 - likewise
        return range(first, end + 1)


def dealt(order: Order, deal: Deal, epoch: int, at: Checkpoint = START) -> Iterator[tuple[int, Run]]:
    """The runs of the deal's FIFOs, each with its FIFO: with one worker the rank."""
    for rank, entry, first, end, _, _ in Walk(
        order, epoch, entries=Entries(), table=Counts(), deal=deal, at=at
    ):
        yield deal.first + rank, Run(entry, first, end)


def records(runs: list[Run]) -> list[Record]:
    return [(run.entry, number) for run in runs for number in range(run.first, run.end)]


def plan_of(
    sizes: list[list[int]],
    deal: Deal,
    *,
    seed: int | None = None,
    block: int = 500,
    end_marks: EndMarks = UNMARKED,
) -> RecordPlan:
    table = Table(sizes, end_marks)
    order = RecordOrder(table.counts, table.sizes, seed=seed, block=block)
    return RecordPlan(table.entries(), table, order, deal)


@given(objects, seeds, st.integers(0, 3), st.integers(1, 5000))
def test_the_order_is_that_of_the_specification(
    sizes: list[list[int]], seed: int | None, epoch: int, block: int
) -> None:
    table = Table(sizes)
    runs = list(RecordOrder(table.counts, table.sizes, seed=seed, block=block).runs(epoch))
    due = reference.record_order(table.counts, table.sizes, seed=seed, epoch=epoch, block=block)
    assert records(runs) == due
    assert all(run.first < run.end for run in runs)
    assert Counter(due) == Counter((entry, n) for entry, each in enumerate(sizes) for n in range(len(each)))


@given(objects, seeds, st.integers(0, 2), st.integers(1, 3), remainders)
def test_any_number_of_ranks_and_workers_gives_the_same_global_batches(
    sizes: list[list[int]], seed: int | None, epoch: int, hosts: int, remainder: Remainder
) -> None:
    """Batches of 12 records, over 1, 2, 3, 4, 6 and 12 ranks; each host walks its own ranks alone.

    A loader takes a slice of each of its workers in turn, so a rank's slices are then in order.
    """
    table = Table(sizes)
    order = RecordOrder(table.counts, table.sizes, seed=seed, block=700)
    batches = reference.global_batches(
        reference.record_order(table.counts, table.sizes, seed=seed, epoch=epoch, block=700), 12, remainder
    )
    for ranks, workers in ((1, 1), (1, 3), (2, 1), (2, 2), (3, 2), (4, 1), (6, 5), (12, 1), (12, 2)):
        each, size = -(-ranks // hosts), 12 // ranks
        slices: list[list[list[Record]]] = [[] for _ in range(ranks)]
        for first in range(0, ranks, each):
            share = Deal(12, ranks, first, min(first + each, ranks), remainder, workers)
            assert share.steps(order.records) == len(batches)
            found: list[list[Record]] = [[] for _ in range(share.fifos)]
            for fifo, run in dealt(order, share, epoch):
                found[fifo - first] += records([run])
            assert share.records(order.records) == sum(map(len, found))
            here = share.end - first
            for step in range(len(batches)):
                for rank in range(here):
                    own = found[step % workers * here + rank]
                    slices[first + rank].append(own[:size])
                    del own[:size]
            assert not any(found)
        assert [[record for each in step for record in each] for step in zip(*slices, strict=True)] == batches


@given(
    objects,
    seeds,
    st.integers(0, 2),
    st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 3)),
    st.tuples(remainders, marked),
)
def test_the_plans_of_ranks_stream_the_bytes_of_their_records(
    sizes: list[list[int]],
    seed: int | None,
    epoch: int,
    shape: tuple[int, int],
    form: tuple[Remainder, EndMarks],
) -> None:
    """`form`: remainder, and what ends each run of adjacent records, or the epoch."""
    (ranks, workers), (remainder, end_marks) = shape, form
    number = sum(map(len, sizes))
    size = ranks * max(1, number // (3 * ranks))
    if number < size:
        remainder = "repeat"
    whole = plan_of(sizes, Deal(size, ranks, 0, ranks, remainder, workers), seed=seed, end_marks=end_marks)
    fifos = ranks * workers
    table = Table(sizes)
    order = reference.record_order(table.counts, table.sizes, seed=seed, epoch=epoch, block=500)
    batches = reference.global_batches(order, size, remainder)
    width, counted = size // ranks, count_parts(whole, epoch, 64)
    after_run, after_epoch = ([mark] if mark else [] for mark in end_marks)
    for fifo, plan in enumerate(whole.ranks(fifos)):
        worker, rank = divmod(fifo, ranks)
        own = batches[worker::workers]
        due = [record for batch in own for record in batch[rank * width : (rank + 1) * width]]
        segments = list(plan.segments(epoch))
        bodies = [each for each in segments if isinstance(each, Segment)]
        found = ranges(bodies)
        assert segments == [each for body in bodies for each in (body, *after_run)] + after_epoch * bool(due)
        assert merged(found) == merged(
            [(each, table.border(each, n), table.border(each, n + 1)) for each, n in due]
        )
        assert found == merged(found), "ranges that follow each other are one segment"
        total = sum(map(len, segments))
        assert plan.total_bytes(epoch) == plan.known_bytes(epoch) == total
        assert (plan.records(epoch), plan.steps) == (len(due), len(batches))
        assert plan.streams == bool(due)
        parts = list(cut(plan.segments(epoch), part_size=lambda: 64, epoch=epoch))
        assert sum(part.size for part in parts) == total
        assert counted[plan.number] == len(parts), "counted by one walk for all FIFOs"
    in_one = cut(whole.segments(epoch), part_size=lambda: 64, epoch=epoch)
    assert counted[-1] == sum(1 for _ in in_one)
    together = list(whole.segments(epoch))
    assert whole.total_bytes(epoch) == sum(map(len, together))
    assert fifos == 1 or all(isinstance(each, Segment) for each in together), "end marks are of one FIFO"
    assert whole.records(epoch) == sum(plan.records(epoch) or 0 for plan in whole.ranks(fifos))


def test_offsets_that_do_not_rise_are_an_error_by_name() -> None:
    sizes = [[10] * 8, [10] * 8]
    table = Table(sizes)
    table.borders_of[1][4] = 60
    order = RecordOrder(table.counts, table.sizes)
    plan = RecordPlan(table.entries(), table, order, Deal(4, 2, 0, 2))
    for look in (lambda: plan.total_bytes(0), lambda: list(plan.ranks(2)[0].segments(0))):
        with pytest.raises(CorruptObject, match="offsets that no records have; .*s3://b/k01"):
            look()


@pytest.mark.parametrize("deal", [Deal(1000, 4, 1, 3), Deal(1000, 4, 2, 4, "repeat"), Deal(300_000, 2, 0, 2)])
def test_a_run_of_very_many_records_is_summed_up_in_portions(deal: Deal) -> None:
    entries = Entries()
    for number, records in enumerate((200_003, 70_000, 131_073)):
        entries.add(ObjectRef("b", f"k{number}", 3 * records, "e"))
    table = FixedRecords(entries, 3)
    order = RecordOrder(table.counts, entries.sizes)
    plan = RecordPlan(entries, table, order, deal, every=400)
    assert plan.total_bytes(0) == 3 * deal.records(401_076) > 0
    each = 3 * deal.steps(401_076) * deal.slice
    assert list(plan.sums(0).totals) == [each, each, 2 * each]
    assert (len(plan.sums(0).checkpoints) > 1) == (plan.steps > 1)
    for at in plan.sums(0).checkpoints:
        assert list(at.sums) == [3 * at.step * deal.slice] * 2 + [6 * at.step * deal.slice]
        assert next(dealt(order, deal, 0, at)) == next(dealt(order, deal, 0, Checkpoint(at.step)))


@given(
    objects, seeds, st.sampled_from([(1, 1), (1, 3), (2, 2), (4, 1), (12, 2)]), st.integers(1, 40), remainders
)
def test_without_the_padding_the_ranks_have_every_record_once(
    sizes: list[list[int]], seed: int | None, shape: tuple[int, int], width: int, remainder: Remainder
) -> None:
    """The padding ends a rank's epoch. A global batch may have more records than there are."""
    ranks, workers = shape
    if sum(map(len, sizes)) < ranks * width:
        remainder = "pad"
    whole = plan_of(sizes, Deal(ranks * width, ranks, 0, ranks, remainder, workers), seed=seed)
    found, padding = list[Record](), 0
    for plan in whole.ranks(ranks * workers):
        own = records([run for _, run in dealt(plan.global_order, plan.deal, 0)])
        assert plan.steps == whole.steps
        assert 0 <= plan.padding <= min(width, len(own))
        found += own[: len(own) - plan.padding]
        padding += plan.padding
    every = [(entry, number) for entry, each in enumerate(sizes) for number in range(len(each))]
    if remainder == "pad":
        assert sorted(found) == every
    assert whole.padding == padding == (whole.records(0) - len(every) if remainder == "pad" else 0)


def ranges(segments: Iterable[Segment | bytes]) -> list[tuple[int, int, int]]:
    found = []
    for segment in segments:
        assert isinstance(segment, Segment)
        assert len(segment)
        found.append((int(segment.object.key[1:]), segment.start, segment.end))
    return found


def merged(found: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    result: list[tuple[int, int, int]] = []
    for entry, start, end in found:
        if result and result[-1][0] == entry and result[-1][2] == start:
            result[-1] = entry, result[-1][1], end
        else:
            result.append((entry, start, end))
    return result


def test_one_rank_without_a_seed_streams_whole_objects() -> None:
    plan = plan_of([[10] * 8, [], [20] * 4], Deal(3, 1, 0, 1))
    assert ranges(plan.segments(0)) == [(0, 0, 80), (2, 0, 80)]


def test_runs_of_one_object_are_joined_if_they_follow_each_other() -> None:
    pieces = [
        (0, *each) for each in ((0, 0, 2, 0, 9), (0, 2, 3, 9, 12), (0, 4, 5, 13, 14), (1, 5, 6, 14, 15))
    ]
    assert list(joined(pieces)) == [(0, 0, 0, 3, 0, 12), *pieces[2:]]


def test_ranks_that_do_not_divide_a_global_batch_are_refused() -> None:
    with pytest.raises(ConfigError, match="12 records cannot be divided over 5 ranks"):
        Deal(12, 5, 0, 5)


def test_too_few_records_for_one_step_are_refused() -> None:
    with pytest.raises(ConfigError, match="has 3 records, fewer than one global batch of 4"):
        plan_of([[1, 1, 1]], Deal(4, 2, 0, 2))
    assert plan_of([[1, 1, 1]], Deal(4, 2, 0, 2, "repeat")).steps == 1
    assert not plan_of([[], []], Deal(4, 2, 0, 2)).streams


@pytest.mark.parametrize(("records", "most"), [(3, 100_003), (150_000, 300_000)])
@pytest.mark.parametrize("remainder", ["repeat", "pad"])
def test_a_batch_that_repeats_the_order_very_often_is_refused(
    records: int, most: int, remainder: Remainder
) -> None:
    """A global batch of 64 Mi records over 3 would be walked for minutes, and every stream of it is wrong."""
    entries = Entries()
    entries.add(ObjectRef("b", "k", 4 * records, "e"))
    table = FixedRecords(entries, 4)
    order = RecordOrder(table.counts, entries.sizes)
    for size in (most + 1, 1 << 26):
        with pytest.raises(ConfigError, match=f"would fill a global batch of {size} with {size - records} "):
            RecordPlan(entries, table, order, Deal(size, 1, 0, 1, remainder))
    plan = RecordPlan(entries, table, order, Deal(most, 1, 0, 1, remainder))
    assert (plan.steps, plan.total_bytes(0)) == (1, 4 * most)


def test_records_of_one_size_need_whole_records() -> None:
    entries = Entries()
    entries.add(ObjectRef("b", "even", 12, "e"))
    assert list(FixedRecords(entries, 4).counts) == [3]
    entries.add(ObjectRef("b", "odd", 13, "e"))
    with pytest.raises(ConfigError, match="s3://b/odd has 13 bytes, no multiple of the 4 of Records.Format"):
        FixedRecords(entries, 4)


def test_the_digest_covers_the_order_and_the_rank() -> None:
    sizes = [[5, 6, 7], [8] * 9]
    shuffled = plan_of(sizes, Deal(4, 2, 0, 2), seed=1)
    others = [
        plan_of(sizes, Deal(4, 2, 0, 2)),
        plan_of(sizes, Deal(4, 2, 0, 2), seed=2),
        plan_of(sizes, Deal(4, 2, 0, 2), seed=1, block=20),
        plan_of(sizes, Deal(2, 2, 0, 2), seed=1),
        plan_of(sizes, Deal(4, 2, 0, 2, "repeat"), seed=1),
        plan_of([[5, 6, 7], [8] * 8 + [4, 4]], Deal(4, 2, 0, 2), seed=1),
        plan_of([[5, 6, 7], [8] * 9, [1]], Deal(4, 2, 0, 2), seed=1),
    ]
    orders = [plan.order_digest for plan in (shuffled, *others)]
    assert len(set(orders)) == len(orders)
    same = [
        plan_of(sizes, Deal(4, 1, 0, 1), seed=1),
        plan_of(sizes, Deal(4, 4, 2, 4), seed=1),
        plan_of(sizes, Deal(4, 2, 0, 2), seed=1, end_marks=EndMarks(epoch=b"end")),
        *plan_of(sizes, Deal(4, 2, 0, 2, workers=2), seed=1).ranks(4),
    ]
    assert {plan.order_digest for plan in same} == {orders[0]}
    plans = [shuffled, *others, *same, *shuffled.ranks(2)]
    assert len({plan.digest for plan in plans}) == len(plans)
    assert shuffled.covers(plan_of(sizes, Deal(4, 2, 0, 2), seed=1).digest, Position(3, 7))
    assert not shuffled.covers(others[0].digest, Position())


@given(
    objects.filter(any),
    seeds,
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.integers(0, 20_000),
    remainders,
)
def test_a_resume_begins_near_its_offset(
    sizes: list[list[int]], seed: int | None, form: tuple[int, int], offset: int, remainder: Remainder
) -> None:
    """The bytes from the offset on are those of the whole walk, and few are walked over."""
    table, (every, workers) = Table(sizes), form
    order = RecordOrder(table.counts, table.sizes, seed=seed, block=200)
    deal = Deal(2, 2, 0, 2, "repeat" if order.records < 2 else remainder, workers)
    host = RecordPlan(table.entries(), table, order, deal, every=every)
    for plan in (host, *host.ranks(2 * workers)):
        near, segments = plan.segments_near(1, offset)
        assert near <= offset
        rest = [
            list(cut(each, part_size=lambda: 50, epoch=1, skip=offset - base, base=base))
            for base, each in ((near, segments), (0, plan.segments(1)))
        ]
        assert places(rest[0]) == places(rest[1])


@given(
    small_objects,
    seeds,
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.integers(1, 3),
    st.tuples(remainders, marked),
)
def test_a_resume_of_archives_begins_near_its_offset(
    sizes: list[list[int]],
    seed: int | None,
    shape: tuple[int, int],
    every: int,
    form: tuple[Remainder, EndMarks],
) -> None:
    """With end marks, also where a run goes on in the step at which a resume begins."""
    (ranks, workers), (remainder, end_marks) = shape, form
    table = Table(sizes, end_marks)
    order = RecordOrder(table.counts, table.sizes, seed=seed, block=20)
    deal = Deal(2 * ranks, ranks, 0, ranks, "repeat" if order.records < 2 * ranks else remainder, workers)
    host = RecordPlan(table.entries(), table, order, deal, every=every)
    for plan in host.ranks(ranks * workers):
        whole = contents(plan.segments(1))
        for offset in range(0, len(whole), 7):
            near, segments = plan.segments_near(1, offset)
            assert near <= offset
            assert contents(segments) == whole[near:]


def contents(segments: Iterable[Segment | bytes]) -> list[tuple[str, int]]:
    """Every byte of the segments, by object and offset."""
    return [
        (each.object.key, offset) if isinstance(each, Segment) else ("", each[offset])
        for each in segments
        for offset in (range(each.start, each.end) if isinstance(each, Segment) else range(len(each)))
    ]


@pytest.mark.parametrize("end_marks", [UNMARKED, EndMarks(run=b"end")])
@pytest.mark.parametrize("seed", [None, 3])
def test_a_resume_in_one_large_object_walks_over_few_slices(seed: int | None, end_marks: EndMarks) -> None:
    table = Table([[1] * 3000], end_marks)
    order = RecordOrder(table.counts, table.sizes, seed=seed, block=10)
    host = RecordPlan(table.entries(), table, order, Deal(6, 2, 0, 2), every=20)
    for plan in host.ranks(2):
        total = plan.total_bytes(0)
        near, _ = plan.segments_near(0, total)
        assert near > total * 0.9


def places(parts: list[Part]) -> list[tuple[int, str, int]]:
    """Offset in the stream, object, and offset in the object, of every byte."""
    return [
        (part.offset + number, item.object.key, item.start + place)
        for part in parts
        for number in range(part.size)
        for item, place in [part.item_at(number)]
        if isinstance(item, Segment)
    ]


def test_a_resume_skips_bytes_of_the_rank_s_stream() -> None:
    plan = plan_of([[7] * 20, [5] * 30], Deal(10, 2, 1, 2), seed=3)
    whole, rest = (
        [
            (item.object.key, item.start, item.end)
            for part in cut(plan.segments(1), part_size=lambda: 1000, epoch=1, skip=skip)
            for item in part.items
            if isinstance(item, Segment)
        ]
        for skip in (0, 35)
    )
    assert sum(end - start for _, start, end in rest) == plan.total_bytes(1) - 35
    assert rest[1:] == whole[-len(rest) + 1 :]


def test_the_order_has_no_part_of_the_entries() -> None:
    plan = plan_of([[1], [1]], Deal(1, 1, 0, 1))
    with pytest.raises(ValueError, match="no order of entries"):
        list(plan.segments(0, 1))


PAGE = Path(__file__).parents[2] / "docs/explanation/record-order.md"


def test_the_example_of_the_documentation() -> None:
    """Every line of the page's examples, computed."""
    counts, sizes = [5, 3, 4], [50, 60, 40]
    order = RecordOrder(counts, sizes, seed=7, block=25)
    blocks = [run for number in range(8) for run in order.runs(0) if numbered(order, run) == number]
    lines = ["blocks           " + " | ".join(map(shown, blocks))]
    for epoch in (0, 1):
        numbers = " ".join(str(numbered(order, run)) for run in order.runs(epoch))
        lines.append(f"epoch {epoch}, blocks  {numbers}")
        lines.append(f"epoch {epoch}, order   {' '.join(map(shown, order.runs(epoch)))}")
    for rank, ranks in ((0, 1), (0, 2), (1, 2)):
        deal = Deal(4, ranks, rank, rank + 1)
        lines.append(f"epoch 0, rank {rank} of {ranks}  {slices(order, deal)}")
    of_workers = [Deal(4, 2, 1, 2, workers=2, worker=worker) for worker in range(2)]
    lines += [f"its worker {deal.worker} of 2     {slices(order, deal)}" for deal in of_workers]

    entries = Entries()
    for name, size in zip("abc", sizes, strict=True):
        entries.add(ObjectRef("bucket", name, size, f"e{name}"))
    plan = RecordPlan(entries, Counts(counts), order, Deal(4, 2, 1, 2))
    digests = [f"order        {plan.order_digest}", f"rank 1 of 2  {plan.digest}"]
    digests.append(f"its worker 1 of 2  {RecordPlan(entries, Counts(counts), order, of_workers[1]).digest}")

    split = Split(3, (range(2),))
    taken = [
        [next(fold for fold in range(3) if block in taken_blocks(Split(3, (range(fold, fold + 1),)), key, 3))
         for block in range(blocks)]
        for key, blocks in (("a", 3), ("b", 3), ("c", 2))
    ]  # fmt: skip
    selections = ["folds            " + " | ".join(" ".join(map(str, folds)) for folds in taken)]
    for name, limit in (("split", None), ("limit", RecordLimit(7))):
        selected = select_records(entries, counts, sizes, RecordSelection(split, limit), block=25)
        cut, order = (
            RecordOrder(counts, sizes, seed=seed, block=25, selected=selected) for seed in (None, 7)
        )
        selections.append(f"{name}, blocks    {' | '.join(map(shown, cut.runs(0)))}")
        selections.append(f"{name}, epoch 0   {' '.join(map(shown, order.runs(0)))}")
        plan = RecordPlan(entries, Counts(counts), order, Deal(4, 2, 1, 2))
        digests.append(f"{name} order  {plan.order_digest}")

    keyed = Entries()
    for key, size in zip(("1/a", "1/b", "2/c"), sizes, strict=True):
        keyed.add(ObjectRef("bucket", key, size, f"e{key[-1]}"))
    mixes: list[str] = []
    ways: list[tuple[MixBy, Until]] = [
        ("block", "first"), ("block", "all"), ("record", "first"), ("record", "all")
    ]  # fmt: skip
    for by, until in ways:
        uris = [S3Uri("bucket", "1/"), S3Uri("bucket", "2/")]
        mixed = MixedOrder(keyed, counts, uris, Mix((1, 1), until, by), seed=7, block=25)
        mixes.append(f"{f'by {by}, {until}':<16}  {' '.join(map(shown, mixed.runs(0)))}")
        if (by, until) == ways[0]:
            plan = RecordPlan(entries, Counts(counts), mixed, Deal(4, 2, 1, 2))
            digests.append(f"mixed order  {plan.order_digest}")

    wrapped = Entries(wrap=True)
    for name, size in zip("abc", sizes, strict=True):
        wrapped.add(ObjectRef("bucket", name, size, f"e{name}"))
    table = ObjectRecords(wrapped)
    order = RecordOrder(table.counts, wrapped.sizes, seed=7)
    plan = RecordPlan(wrapped, table, order, Deal(2, 2, 0, 2, "repeat"))
    digests.append(f"objects      {plan.order_digest}")
    orders = [f"epoch {epoch}  {' '.join('abc'[run.entry] for run in order.runs(epoch))}" for epoch in (0, 1)]
    for rank, each in enumerate(plan.ranks(2)):
        keys = " | ".join(part.object.key for part in each.segments(0) if isinstance(part, Segment))
        orders.append(f"epoch 0, rank {rank} of 2  {keys}")
    page = PAGE.read_text()
    for block in (lines, selections, mixes, orders, digests):
        assert "```text\n" + "\n".join(block) + "\n```\n" in page


def slices(order: RecordOrder, deal: Deal) -> str:
    """The records of one FIFO, by global batch."""
    found = [
        shown(Run(entry, number, number + 1))
        for entry, number in records([r for _, r in dealt(order, deal, 0)])
    ]
    return " | ".join(
        " ".join(found[first : first + deal.slice]) for first in range(0, len(found), deal.slice)
    )


def shown(run: Run) -> str:
    return " ".join(f"{'abc'[run.entry]}{number}" for number in range(run.first, run.end))


def numbered(order: RecordOrder, run: Run) -> int:
    """The number of a block in the example: its position among all, sorted."""
    return sorted(order.runs(0)).index(run)
