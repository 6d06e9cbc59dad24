"""When a second request is worth its bytes."""

from __future__ import annotations

import asyncio
import os
import random

import pytest

from streamer.errors import InvalidResponse, Truncated
from streamer.plan import ObjectRef, Part, Segment
from streamer.relay.fetch.part_fetch import PartFetch
from streamer.relay.fetch.successor import Successor
from streamer.relay.staging.buffers import BufferPool, BufferStage
from streamer.relay.staging.pipes import PipePool, PipeStages
from streamer.relay.statistics import ChannelCounters
from streamer.s3.ranges import RangeRequest
from streamer.schedule.budget import MemoryBudget
from streamer.schedule.concurrency import ConcurrencyController
from streamer.schedule.hedging import CREDIT, LEAST_PATIENCE, MOST_PATIENCE, HeadSample, Hedging
from streamer.units import MIB
from tests.kit.bodies import Arrived, Arriving
from tests.kit.harness import EAGER
from tests.kit.pipes import eventually

PART = 4 * MIB


def learnt(
    *, first_byte: float = 0.025, rate: float = 90e6, part: float = 0.05, landings: int = 100
) -> Hedging:
    hedging = Hedging(part)
    for _ in range(landings):
        hedging.landed(received=PART, first_byte=first_byte, seconds=first_byte + PART / rate)
    return hedging


def looks(*, seconds: float, came: int, starved: float = 1.0) -> tuple[HeadSample, HeadSample]:
    before = HeadSample(10.0, MIB, 3.0)
    return before, HeadSample(10.0 + seconds, MIB + came, 3.0 + starved * seconds)


def test_patience_is_learned_from_first_bytes() -> None:
    assert learnt(first_byte=0.001).patience == LEAST_PATIENCE
    assert learnt(first_byte=0.2).patience == pytest.approx(0.2, rel=0.01)
    assert learnt(first_byte=60).patience == MOST_PATIENCE
    jumpy = Hedging(0.05)
    chance = random.Random(1)
    for _ in range(200):
        jumpy.landed(received=PART, first_byte=chance.expovariate(1 / 0.1), seconds=1)
    assert 0.2 < jumpy.patience < 1.5


def test_a_silent_part_is_hedged() -> None:
    assert learnt().worth(*looks(seconds=0.1, came=0), 3 * MIB)


def test_a_part_far_below_its_siblings_is_hedged_and_one_near_them_is_not() -> None:
    """3 MiB are 60 ms away by a new request; at 10 MB/s they take 300, at 30 MB/s 100."""
    assert learnt().worth(*looks(seconds=0.1, came=1_000_000), 3 * MIB)
    assert not learnt().worth(*looks(seconds=0.1, came=3_000_000), 3 * MIB)


def test_the_last_bytes_of_a_slow_part_are_not_worth_a_request() -> None:
    assert not learnt().worth(*looks(seconds=0.1, came=1_000_000), 100_000)


def test_a_slow_reader_is_not_a_late_part() -> None:
    assert not learnt().worth(*looks(seconds=1, came=100_000, starved=0.5), 3 * MIB)


def test_nothing_is_hedged_before_anything_is_known() -> None:
    assert not Hedging(0.05).worth(*looks(seconds=1, came=0), MIB)


def test_none_at_all() -> None:
    hedging = learnt(part=0)
    assert not hedging.enabled
    assert not hedging.worth(*looks(seconds=1, came=0), 1)


def test_hedged_bytes_are_bounded() -> None:
    """A store that is slow as a whole is not asked for everything twice."""
    hedging = learnt(part=0.05, landings=1)
    hedged = 0
    for _ in range(1000):
        hedging.landed(received=PART, first_byte=0.025, seconds=0.07)
        hedged += PART * hedging.worth(*looks(seconds=1, came=0), PART)
    assert CREDIT <= hedged <= CREDIT + 0.05 * 1001 * PART


def test_a_long_good_time_does_not_save_up_for_a_bad_one() -> None:
    hedging = learnt(landings=10_000)
    hedged = 0
    while hedging.worth(*looks(seconds=1, came=0), PART):
        hedged += PART
    assert hedged <= 2 * CREDIT


DATA = b"0123456789"


@pytest.mark.parametrize("pieces", [(3, 4, 3), (10,), (1,) * 10, (6, 4)])
def test_what_both_requests_bring_comes_once(pieces: tuple[int, ...]) -> None:
    """The first has brought six bytes since the second was sent: those of the second are thrown away."""
    won, counters = [], ChannelCounters()
    part = Part.of(0, 0, [Segment(ObjectRef("b", "k", 10, "e"), 0, 10)])
    stage = BufferStage(part, BufferPool(), on_change=lambda: None, counters=counters)
    first, second = Arriving(DATA), Arriving(DATA)
    stage.attach(first)
    first.arrive(6)
    race = Successor(second, stage, 0, on_won=lambda: won.append(stage.received))
    race.advance()
    for size in pieces:
        second.arrive(size)
    first.arrive(4)
    assert b"".join(iter(lambda: stage.take(100), b"")) == DATA
    assert (second.left, race.thrown_away, won) == (0, 6, [6])
    assert counters.received_bytes == 10


def test_a_hedge_of_bytes_that_were_dropped_is_dropped_too() -> None:
    """It read on and on, to catch up with a stage that had fewer bytes than the hedge."""
    won, counters = [], ChannelCounters()
    part = Part.of(0, 0, [Segment(ObjectRef("b", "k", 10, "e"), 0, 10)])
    stage = BufferStage(part, BufferPool(), on_change=lambda: None, counters=counters)
    first, second = Arriving(b"0123x56789"), Arriving(DATA)
    stage.attach(first)
    first.arrive(5)
    race = Successor(second, stage, 0, on_won=lambda: won.append(stage.received))
    second.arrived = 5
    race.advance()
    stage.detach(first)
    assert stage.drop_doubted(b"01234")
    second.arrive(5)
    assert (second.left, race.thrown_away, won) == (5, 5, [])
    assert (stage.received, counters.wasted_bytes) == (0, 5)


class Mixed(Arrived):
    """A body whose count was met by foreign bytes: they are in the pipe before that is found."""

    spliceable = True

    def splice_into(self, pipe_fd: int, most: int, *, revocable: bool = False) -> int:  # noqa: ARG002
        os.write(pipe_fd, self._data)
        raise InvalidResponse("more bytes follow")


class Spliced(Arrived):
    spliceable = True

    def splice_into(self, pipe_fd: int, most: int, *, revocable: bool = False) -> int:  # noqa: ARG002
        self.left -= (count := os.write(pipe_fd, self._data))
        return count


def test_a_hedge_begins_after_no_foreign_byte() -> None:
    """Its body is attached before the task of the first one has found that the first one failed."""
    part = Part.of(0, 0, [Segment(ObjectRef("b", "k", 10, "e"), 0, 10)])
    quota = MemoryBudget(64 << 20, ConcurrencyController(4, 4 << 20)).quota()
    stages = PipeStages(quota, PipePool(64 << 20, most=16))
    stage = stages.make(part, on_change=lambda: None, counters=ChannelCounters())
    stage.attach(Mixed(b"foreign..."))
    second = Spliced(DATA)
    Successor(second, stage, 0, on_won=lambda: None).advance()
    fd = os.memfd_create("sink")
    while stage.ready:
        stage.drain_into(fd)
    assert os.pread(fd, 100, 0) == DATA
    os.close(fd)
    stage.discard()


class Breaking(Arriving):
    """A body whose response ends early when a test says so."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.ends = asyncio.Event()

    async def taken(self) -> None:
        await self.ends.wait()
        raise Truncated("the body ended early")


class Sending:
    """A `RangeSource` whose responses have these bodies."""

    together = 0

    def __init__(self, *bodies: Breaking) -> None:
        self._bodies = list(bodies)
        self.opened = 0

    async def open(self, request: RangeRequest) -> Breaking:  # noqa: ARG002
        self.opened += 1
        return self._bodies[self.opened - 1]


async def test_a_request_that_lost_takes_nothing_over() -> None:
    """It repeats bytes in doubt when the second one takes over, and its task has been cancelled and not run.

    The body that it replaced would never be read to its end, and the part's request never end.
    """
    part = Part.of(0, 0, [Segment(ObjectRef("b", "k", 10, "e"), 0, 10)])
    counters, quota = ChannelCounters(), MemoryBudget(64 << 20, ConcurrencyController(4, 4 << 20)).quota()
    stage = BufferStage(part, BufferPool(), on_change=lambda: None, counters=counters)
    broken, repeated, hedge = Breaking(DATA), Breaking(DATA), Breaking(DATA)
    source = Sending(broken, repeated)
    fetch = PartFetch(stage, source, policy=EAGER, counters=counters, quota=quota, requests=1)
    task = asyncio.create_task(fetch.run())
    await eventually(lambda: source.opened == 1)
    broken.arrive(6)
    broken.ends.set()
    await eventually(lambda: source.opened == 2 and fetch.phase == "body")
    second = RangeRequest(part, 0, attempt=2)
    hedge.arrive(7)
    Successor(hedge, stage, 0, on_won=lambda: setattr(fetch, "request", second)).advance()
    assert stage.received == 7
    repeated.arrive(10)
    hedge.arrive(3)
    assert (stage.received, hedge.left) == (10, 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
