"""What parts reserve is at least what is allocated for them: buffers, pipes and the objects of a part."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from mmap import mmap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.plan import ObjectRef, Part, Segment, cut
from streamer.relay.fetch.part_fetch import PartFetch
from streamer.relay.staging.buffers import (
    BufferPool,
    BufferStage,
    BufferStages,
    buffer_bytes,
)
from streamer.relay.staging.pipes import PipePool, PipeStages
from streamer.relay.staging.stage import Stages
from streamer.relay.statistics import ChannelCounters
from streamer.retry import RetryPolicy
from streamer.s3.ranges import RangeRequest
from streamer.schedule.budget import ChannelQuota, MemoryBudget
from streamer.schedule.concurrency import ConcurrencyController
from streamer.schedule.window import Window
from streamer.units import KIB, MIB
from tests.kit.bodies import Arrived, Arriving

BUDGET = 2 * MIB
SIZES = [1, 1000, 40_000, 64 * KIB + 1, 100_000, 129 * KIB, 200_000]


def quota(members: int = 1) -> ChannelQuota:
    return MemoryBudget(BUDGET, ConcurrencyController(100_000, MIB, most=100_000), members=members).quota()


def parts(size: int, count: int, literals: int = 0) -> Iterator[Part]:
    before, length = [bytes(literals)] if literals else [], size + literals
    for number in range(count):
        yield Part.of(0, number * length, [*before, Segment(ObjectRef("b", str(number), size, "e"), 0, size)])


class Here:
    """A source whose bodies have arrived."""

    together = 0

    def __init__(self) -> None:
        self.opened = 0

    async def open(self, request: RangeRequest) -> Arrived:
        self.opened += 1
        return Arrived(bytes(request.part.size - request.first))


async def staged(stages: Stages, size: int, literals: int = 0) -> list[PartFetch]:
    """Fetch parts until the budget holds no more."""
    window = Window(parts(size, 100_000, literals), stages.quota, reserved_bytes=stages.reserved_bytes)
    window.last_epoch = 0
    counters, found = ChannelCounters(), []
    for slot in window.admit():
        stage = stages.make(slot.part, on_change=lambda: None, counters=counters)
        fetch = PartFetch(stage, Here(), policy=RetryPolicy(), counters=counters, quota=stages.quota)
        await fetch.run()
        found.append(fetch)
    return found


@pytest.mark.parametrize("size", SIZES)
async def test_buffers_and_objects_are_within_what_is_reserved(size: int) -> None:
    pool = BufferPool()
    stages = BufferStages(quota(), pool)
    tracemalloc.start()
    try:
        fetches = await staged(stages, size)
        gc.collect()
        ours = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/streamer/*")])
    finally:
        tracemalloc.stop()
    mapped = sum(
        len(chunk.memory)
        for fetch in fetches
        for chunk in fetch.stage._chunks  # noqa: SLF001 - the memory itself
        if isinstance(chunk.memory, mmap)  # which tracemalloc does not see
    )
    held = sum(each.size for each in ours.statistics("filename")) + mapped
    assert pool.allocated <= stages.quota.reserved_bytes <= BUDGET
    assert held <= 1.04 * stages.quota.reserved_bytes


@given(st.integers(1, 3 * MIB), st.lists(st.tuples(st.integers(1, 2 * MIB), st.booleans()), max_size=8))
def test_a_part_has_no_more_buffers_than_it_has_reserved(size: int, steps: list[tuple[int, bool]]) -> None:
    """However its bytes arrive and leave."""
    pool, part = BufferPool(0), next(parts(size, 1))  # which keeps no free buffer
    stage = BufferStage(part, pool, on_change=lambda: None, counters=ChannelCounters())
    body = Arriving(bytes(size))
    stage.attach(body)
    for count, leaves in [*steps, (size, False)]:
        body.arrive(min(count, size - body.arrived))
        while body.left and stage.received < body.arrived:
            body.fill()
        assert pool.allocated <= buffer_bytes(size)
        if leaves:
            stage.take(count)
    assert stage.received == size
    stage.discard()
    assert pool.allocated == 0


async def test_literals_before_a_body_are_reserved() -> None:
    """128 empty objects in an archive are 64 KiB before the next body."""
    assert len(await staged(BufferStages(quota(), BufferPool()), 1000, 64 * KIB)) <= BUDGET // (64 * KIB)
    assert len(await staged(BufferStages(quota(), BufferPool()), 100_000, 64 * KIB)) <= BUDGET // (192 * KIB)


async def test_buffers_of_another_size_replace_free_ones() -> None:
    """The pool was as large as the budget, and small parts came on top."""
    pool = BufferPool()
    stages = BufferStages(quota(), pool)
    for size in (200_000, 60_000, 200_000, 524_288, 200_000):
        for fetch in await staged(stages, size):
            assert pool.allocated <= BUDGET
            fetch.stage.discard()
            stages.quota.give(stages.reserved_bytes(fetch.stage.part))
        assert stages.quota.reserved_bytes == 0


async def test_a_part_in_a_small_pipe_reserves_its_objects_and_the_kernel_s() -> None:
    pool = PipePool(1024 * MIB, most=100_000)
    try:
        held = PipeStages(quota(), pool).reserved_bytes(next(parts(1000, 1)))
    finally:
        pool.close()
    assert 1000 + 2200 + 2500 + 2048 < held < 12_000


@pytest.mark.parametrize("size", SIZES)
def test_every_part_fits_the_floor(size: int) -> None:
    """A part of ranges of one floor never reserves more, so it can always be admitted."""
    shared = quota(members=4)
    stages = PipeStages(shared, PipePool(1024 * MIB, most=1))
    segments = (Segment(ObjectRef("b", str(number), size, "e"), 0, size) for number in range(300))
    limit = shared.floor
    found = list(cut(segments, part_size=lambda: limit, epoch=0, together=lambda: (limit, limit)))
    assert all(shared.fits(stages.reserved_bytes(part)) for part in found)
    assert sum(part.size for part in found) == 300 * size
