"""Ranks that share wrapped objects by record: each object, or line of a manifest, is one record."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.formats import recordio
from streamer.plan import Entries, ObjectRef, Segment, cut
from streamer.plan.dealing import deal_stream
from streamer.plan.folds import count_parts, object_starts, offset_of, records_before
from streamer.plan.record_order import Deal, RecordOrder, Remainder
from streamer.plan.record_plan import RecordPlan
from streamer.plan.record_table import ObjectRecords
from tests.unit import reference
from tests.unit.test_record_order import remainders, seeds

sizes_of = st.lists(st.integers(0, 9), min_size=1, max_size=12)
texts = st.sampled_from([None, b"", b"cat"])
"""Text beside each object, as the second attribute of a manifest's line; None: there is none."""


def body(key: str, size: int) -> bytes:
    return (key.encode() * size)[:size]


def planned(
    sizes: list[int], deal: Deal, *, seed: int | None = None, text: bytes | None = None, every: int = 1
) -> RecordPlan:
    entries = Entries(wrap=True)
    for number, size in enumerate(sizes):
        ref = ObjectRef("b", f"k{number:02}", size, "e")
        entries.add(*([ref] if text is None else [ref, text]))
    table = ObjectRecords(entries)
    return RecordPlan(entries, table, RecordOrder(table.counts, entries.sizes, seed=seed), deal, every=every)


def stream(segments: list[Segment | bytes]) -> bytes:
    return b"".join(
        body(each.object.key, each.object.size)[each.start : each.end] if isinstance(each, Segment) else each
        for each in segments
    )


@given(sizes_of, seeds, st.integers(1, 3), st.tuples(remainders, texts, st.integers(1, 3)))
def test_each_rank_streams_the_frames_of_its_objects(
    sizes: list[int], seed: int | None, ranks: int, form: tuple[Remainder, bytes | None, int]
) -> None:
    remainder, text, every = form
    size = 2 * ranks
    if len(sizes) < size:
        remainder = "pad"
    whole = planned(sizes, Deal(size, ranks, 0, ranks, remainder), seed=seed, text=text, every=every)
    framed = [
        [recordio.encode(each) for each in (body(f"k{n:02}", size), text) if each is not None]
        for n, size in enumerate(sizes)
    ]
    lengths = [sum(map(len, each)) for each in framed]
    order = reference.record_order([1] * len(sizes), lengths, seed=seed, epoch=1, block=1 << 20)
    batches = reference.global_batches(order, size, remainder)
    each, parts = (1 if text is None else 2), count_parts(whole, 1, 4)
    plans = whole.ranks(ranks)
    for rank, plan in enumerate(plans):
        due = [entry for batch in batches for entry, _ in batch[2 * rank : 2 * rank + 2]]
        segments = list(plan.segments(1))
        assert stream(segments) == b"".join(record for entry in due for record in framed[entry])
        assert (plan.steps, plan.records(1)) == (len(batches), each * len(due))
        assert plan.total_bytes(1) == sum(lengths[entry] for entry in due)
        assert parts[rank] == sum(1 for _ in cut(segments, part_size=lambda: 4, epoch=1))
        ends = list(accumulate((lengths[entry] for entry in due), initial=0))
        for step in range(len(batches) + 1):
            assert offset_of(plan, 1, step) == ends[2 * step]
            assert records_before(plan, 1, ends[2 * step]) == 2 * step * each
            near, rest = plan.segments_near(1, ends[2 * step])
            assert stream(list(rest)) == stream(segments)[near:]
        for first in {*ends[:-1], 1}:
            starts = [start for start in object_starts(plan, 1, first) if start is not None]
            keys = [(start.offset, start.key) for start in starts if start.key]
            objects = zip(ends, due, strict=False)
            assert keys == [(offset, f"k{entry:02}") for offset, entry in objects if offset >= first]
            assert sum(not start.key for start in starts) >= (each - 1) * len(keys)
    padding = size * len(batches) - len(sizes) if remainder == "pad" else 0
    assert sum(plan.padding for plan in plans) == whole.padding == padding * each
    assert parts[-1] == sum(1 for _ in cut(whole.segments(1), part_size=lambda: 4, epoch=1))
    dealt = [b""] * ranks
    together = stream(list(whole.segments(1)))
    for turn in deal_stream(whole, 1, [0] * ranks).turns if ranks > 1 else ():
        dealt[turn.rank] += together[: turn.size]
        together = together[turn.size :]
    assert ranks == 1 or dealt == [stream(list(plan.segments(1))) for plan in plans]


@pytest.mark.parametrize("sizes", [[], [3]])
def test_a_channel_of_few_objects(sizes: list[int]) -> None:
    """Without any object there is no step; one fills a batch of its own copies."""
    plan = planned(sizes, Deal(4, 2, 0, 2, "repeat"))
    assert (plan.steps, plan.records(0), plan.streams) == (len(sizes), 4 * len(sizes), bool(sizes))
    assert stream(list(plan.segments(0))) == recordio.encode(b"k00") * 4 * len(sizes)
