"""The turns of the ranks that share a stream add up to the ranks' own streams."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.plan.dealing import DealtEpoch, Turn, deal_stream
from streamer.plan.record_order import Deal, RecordOrder
from streamer.plan.record_plan import RecordPlan
from streamer.plan.record_table import EndMarks
from tests.unit.test_record_order import (
    UNMARKED,
    Table,
    contents,
    objects,
    plan_of,
    remainders,
    seeds,
)


def host_of(
    sizes: list[list[int]],
    deal: Deal,
    seed: int | None,
    *,
    every: int = 3,
    end_marks: EndMarks = UNMARKED,
) -> RecordPlan:
    table = Table(sizes, end_marks)
    order = RecordOrder(table.counts, table.sizes, seed=seed, block=500)
    return RecordPlan(table.entries(), table, order, deal, every=every)


def shares(
    dealt: DealtEpoch, stream: list[tuple[str, int]], end_marks: EndMarks
) -> list[list[tuple[str, int]]]:
    """The bytes of each rank from the point on."""
    found: list[list[tuple[str, int]]] = [[] for _ in dealt.before]
    offset = dealt.offset
    for rank, size, mark in dealt.turns:
        if mark:
            end_mark = end_marks.run
            assert size == len(end_mark)
            found[rank] += [("", byte) for byte in end_mark]
            continue
        found[rank] += stream[offset : offset + size]
        offset += size
    assert offset == len(stream)
    return found


@given(
    objects,
    seeds,
    st.integers(0, 2),
    st.tuples(
        st.sampled_from([(1, 2), (2, 1), (2, 3), (3, 2), (4, 1)]),
        st.sampled_from([UNMARKED, EndMarks(run=b"end")]),
    ),
    st.data(),
)
def test_every_rank_gets_its_own_stream_from_any_point_on(
    sizes: list[list[int]],
    seed: int | None,
    epoch: int,
    form: tuple[tuple[int, int], EndMarks],
    data: st.DataObject,
) -> None:
    """This host's ranks of two hosts'; the point is before the first byte that a FIFO lacks.

    `form`: ranks of a host and workers of each, and what ends each run of adjacent records.
    """
    (ranks, workers), end_marks = form
    size = 2 * ranks * data.draw(st.integers(1, 3))
    remainder = data.draw(remainders)
    if sum(map(len, sizes)) < size:
        remainder = "repeat"
    deal = Deal(size, 2 * ranks, ranks, 2 * ranks, remainder, workers)
    whole = host_of(sizes, deal, seed, end_marks=end_marks)
    streams = [contents(plan.segments(epoch)) for plan in whole.ranks(ranks * workers)]
    common = contents(whole.segments(epoch))
    assert whole.total_bytes(epoch) == len(common) == sum(1 for stream in streams for key, _ in stream if key)
    offsets = [data.draw(st.integers(0, len(stream))) for stream in streams]
    dealt = deal_stream(whole, epoch, offsets)
    before = list(dealt.before)
    assert all(have <= offset for have, offset in zip(before, offsets, strict=True))
    assert shares(dealt, common, end_marks) == [
        stream[have:] for have, stream in zip(before, streams, strict=True)
    ]
    again = deal_stream(whole, epoch, offsets)
    first = next(again.turns, None)
    assert first is None or before[first.rank] + first.size > offsets[first.rank], "no turn is before it"


def test_a_point_in_a_long_epoch_is_found_without_a_walk_from_its_start() -> None:
    whole = host_of([[8] * 40_000], Deal(4, 2, 0, 2), None, every=1000)
    sums = whole.sums(0)
    walked = 0
    table = whole.table
    border = table.border

    def counted(entry: int, record: int) -> int:
        nonlocal walked
        walked += 1
        return border(entry, record)

    table.border = counted  # type: ignore[method-assign]
    dealt = deal_stream(whole, 0, [total - 100 for total in sums.totals[:2]])
    assert dealt.offset > sums.totals[-1] - 300
    assert walked < 5000


def test_the_one_rank_of_a_stream_gets_all_of_it() -> None:
    plan = plan_of([[10, 20], [30]], Deal(1, 1, 0, 1))
    dealt = deal_stream(plan, 0, [25])
    assert (dealt.offset, list(dealt.turns)) == (25, [Turn(0, 35)])
    assert list(deal_stream(plan, 0, [60]).turns) == []


def test_turns_are_as_long_as_slices() -> None:
    """Two records of each rank in a step: a slice over two objects is one turn."""
    dealt = deal_stream(plan_of([[1, 2, 4], [8, 16, 32, 64, 128]], Deal(4, 2, 0, 2)), 0, [0, 0])
    turns = list(dealt.turns)
    assert turns == [Turn(0, 3), Turn(1, 12), Turn(0, 48), Turn(1, 192)]
    assert all(one.rank != other.rank for one, other in pairwise(turns))
    two = plan_of([[1, 2, 4], [8, 16, 32, 64, 128, 256]], Deal(3, 1, 0, 1, workers=2))
    assert list(deal_stream(two, 0, [0, 0]).turns) == [Turn(0, 7), Turn(1, 56), Turn(0, 448)]


def test_an_end_mark_follows_each_run_at_once() -> None:
    """The reader of a rank has its last sample before the others get theirs."""
    whole = plan_of([[1, 2, 4], [8, 16, 32, 64, 128]], Deal(4, 2, 0, 2), end_marks=EndMarks(run=b"end"))
    first, end, second = Turn(0, 3), Turn(0, 3, mark=True), Turn(1, 3, mark=True)
    assert list(deal_stream(whole, 0, [0, 0]).turns) == [
        *(first, end, Turn(1, 4), second, Turn(1, 8), second),
        *(Turn(0, 48), end, Turn(1, 192), second),
    ]


def test_a_run_that_goes_on_in_the_next_slice_of_its_rank_has_no_end_mark() -> None:
    """Blocks of two records, as slices are: after some, the rank's next block is the following one."""
    end_marks, going_on = EndMarks(run=b"end"), 0
    for seed in range(20):
        whole = host_of([[250] * 40], Deal(4, 2, 0, 2), seed, end_marks=end_marks)
        streams = [contents(plan.segments(0)) for plan in whole.ranks(2)]
        turns = list(deal_stream(whole, 0, [0, 0]).turns)
        going_on += sum(not turn.mark for turn in turns) - sum(turn.mark for turn in turns)
        assert shares(DealtEpoch(0, [0, 0], iter(turns)), contents(whole.segments(0)), end_marks) == streams
    assert going_on > 5


def test_other_ranks_than_those_of_the_stream_are_refused() -> None:
    with pytest.raises(ValueError, match="no stream of 3 ranks"):
        deal_stream(plan_of([[512] * 4], Deal(2, 2, 0, 2)), 0, [0, 0, 0])
