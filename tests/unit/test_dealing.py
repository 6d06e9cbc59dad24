"""The pieces of a stream that several ranks share add up to the ranks' own streams."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.plan import Plan
from streamer.plan.dealing import DealtEpoch, deal_stream
from streamer.plan.host_ranks import HostRanks
from streamer.plan.record_order import Deal, RecordOrder
from streamer.plan.record_plan import RecordPlan
from streamer.plan.segments import Literal, Segment
from tests.unit.test_record_order import Table, objects, plan_of, remainders, seeds


def host_of(sizes: list[list[int]], deal: Deal, seed: int | None, *, positions_every: int = 3) -> RecordPlan:
    table = Table(sizes)
    order = RecordOrder(table.counts, table.sizes, seed=seed, block=500)
    return RecordPlan(HostRanks(table.entries(), table, order, deal, positions_every=positions_every))


def content(plan: Plan, epoch: int) -> list[tuple[str, int]]:
    """Every byte of the epoch's stream, by its object and offset."""
    found = []
    for segment in plan.segments(epoch):
        assert isinstance(segment, Segment), segment
        found += [(segment.object.key, offset) for offset in range(segment.start, segment.end)]
    return found


def shares(dealt: DealtEpoch, stream: list[tuple[str, int]]) -> list[list[tuple[str, int]]]:
    """The bytes of each rank from the point on."""
    found: list[list[tuple[str, int]]] = [[] for _ in dealt.before]
    offset = dealt.offset
    for rank, size in dealt.pieces:
        found[rank] += stream[offset : offset + size]
        offset += size
    assert offset == len(stream)
    return found


@given(objects, seeds, st.integers(0, 2), st.sampled_from([2, 3, 4]), st.data())
def test_every_rank_gets_its_own_stream_from_any_point_on(
    sizes: list[list[int]], seed: int | None, epoch: int, ranks: int, data: st.DataObject
) -> None:
    """Of two hosts' ranks those of this host; the point is before the first byte that a rank lacks."""
    size = 2 * ranks * data.draw(st.integers(1, 3))
    remainder = data.draw(remainders)
    if sum(map(len, sizes)) < size:
        remainder = "repeat"
    whole = host_of(sizes, Deal(size, 2 * ranks, ranks, 2 * ranks, remainder), seed)
    streams = [content(plan, epoch) for plan in whole.ranks(ranks)]
    offsets = [data.draw(st.integers(0, len(stream))) for stream in streams]
    dealt = deal_stream(whole, epoch, offsets)
    before = list(dealt.before)
    assert all(have <= offset for have, offset in zip(before, offsets, strict=True))
    assert shares(dealt, content(whole, epoch)) == [
        stream[have:] for have, stream in zip(before, streams, strict=True)
    ]
    again = deal_stream(whole, epoch, offsets)
    first = next(again.pieces, None)
    assert first is None or before[first.rank] + first.size > offsets[first.rank], "no piece is before it"


def test_a_point_in_a_long_epoch_is_found_without_a_walk_from_its_start() -> None:
    whole = host_of([[8] * 40_000], Deal(4, 2, 0, 2), None, positions_every=1000)
    sums = whole.host_ranks.sums(0)
    walked = 0
    table = whole.host_ranks.table
    border = table.border

    def counted(entry: int, record: int) -> int:
        nonlocal walked
        walked += 1
        return border(entry, record)

    table.border = counted  # type: ignore[method-assign]
    dealt = deal_stream(whole, 0, [total - 100 for total in sums.totals])
    assert dealt.offset > sum(sums.totals) - 300
    assert walked < 5000


def test_the_one_rank_of_a_stream_gets_all_of_it() -> None:
    plan = plan_of([[10, 20], [30]], Deal(1, 1, 0, 1))
    dealt = deal_stream(plan, 0, [25])
    assert (dealt.offset, list(dealt.pieces)) == (25, [(0, 35)])
    assert list(deal_stream(plan, 0, [60]).pieces) == []


def test_pieces_are_as_long_as_slices() -> None:
    """Two records of each rank in a step: a slice over two objects is one piece."""
    dealt = deal_stream(plan_of([[1, 2, 4], [8, 16, 32, 64, 128]], Deal(4, 2, 0, 2)), 0, [0, 0])
    assert list(dealt.pieces) == [(0, 3), (1, 12), (0, 48), (1, 192)]
    assert all(one.rank != other.rank for one, other in pairwise(dealt.pieces))


def test_streams_with_bytes_of_their_own_are_not_dealt() -> None:
    with pytest.raises(ValueError, match="end marks"):
        deal_stream(plan_of([[512] * 4], Deal(2, 2, 0, 2), end_mark=b"end"), 0, [0, 0])
    with pytest.raises(ValueError, match="no stream of 3 ranks"):
        deal_stream(plan_of([[512] * 4], Deal(2, 2, 0, 2)), 0, [0, 0, 0])
    assert any(
        isinstance(each, Literal)
        for each in plan_of([[512] * 4], Deal(2, 2, 0, 2), end_mark=b"end").segments(0)
    )
