"""One object inflated by a real thread, into a transform that takes each piece when the test lets it."""

from __future__ import annotations

import asyncio
import gzip
import random
import threading
from collections.abc import AsyncIterator

import pytest

from streamer.errors import CorruptObject
from streamer.formats.transform import Transform
from streamer.plan import ObjectRef, Segment
from streamer.relay.deliver.epoch_writer import EpochWriter
from streamer.relay.deliver.transform_runner import MOST_QUEUED, TransformRunner
from streamer.relay.statistics import StateTimer
from streamer.sink.outlet import FileOutlet
from streamer.units import KIB

FEED = 128 * KIB
REF = ObjectRef("b", "k", 10_000_000, '"e"')
CONTENT = random.Random(0).randbytes(8 * FEED)
FEEDS = [
    packed[at : at + FEED] for packed in [gzip.compress(CONTENT, 1)] for at in range(0, len(packed), FEED)
]
"""Bytes of content that does not compress: a feed inflates to as many bytes."""


class Sink(Transform):
    """What the thread has inflated; `gate` lets it take one piece for each release."""

    def __init__(self) -> None:
        self.content = bytearray()
        self.counted = 0
        self.turns = 0
        """How often bytes were counted: after each turn, and when the loop goes on during one."""
        self.gate = threading.Semaphore(0)
        self.waiting = threading.Event()

    def feed(self, data: bytes | bytearray) -> list[bytes]:
        self.waiting.set()
        assert self.gate.acquire(timeout=60)
        self.content += data
        return []

    def count(self, _: int) -> None:
        self.counted = len(self.content)
        self.turns += 1


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture
async def runner(sink: Sink) -> AsyncIterator[TransformRunner]:
    writer = EpochWriter(FileOutlet(-1), timer=StateTimer(), account=sink.count)
    runner = TransformRunner(writer, sink, inflate=True)
    yield runner
    sink.gate.release(1000)
    await runner.aclose()


RANGE = Segment(REF, 0, REF.size)


async def pass_on(runner: TransformRunner, first: int, after: int) -> None:
    """Feed bytes whose turn has come: these feeds, one after the other."""
    for number in range(first, after):
        runner.feed(RANGE, number * FEED, FEEDS[number])
        await runner.pass_on(RANGE, number * FEED, FEEDS[number])


async def waits(sink: Sink) -> None:
    """Wait until the thread is in `feed`."""
    assert await asyncio.to_thread(sink.waiting.wait, 60)


async def test_a_turn_goes_on_to_bytes_that_were_fed_during_it(sink: Sink, runner: TransformRunner) -> None:
    """The thread does not wait for the loop between two feeds; the object's end waits for them all."""
    await pass_on(runner, 0, 1)
    await waits(sink)
    await pass_on(runner, 1, 4)
    assert runner.busy
    sink.gate.release(1000)
    before = sink.turns
    await runner.settle()
    assert sink.turns - before == 1
    assert not runner.busy
    assert CONTENT.startswith(sink.content)
    assert sink.counted == len(sink.content) > 3 * FEED


async def test_a_full_queue_waits_for_the_thread_until_half_of_it_is_taken(
    sink: Sink, runner: TransformRunner
) -> None:
    await pass_on(runner, 0, 1)
    await waits(sink)
    await pass_on(runner, 1, 5)
    advancing = asyncio.create_task(pass_on(runner, 5, 6))
    await asyncio.sleep(0)
    assert not advancing.done()
    while not advancing.done():
        sink.waiting.clear()
        sink.gate.release()
        await asyncio.wait([advancing, asyncio.create_task(waits(sink))], return_when="FIRST_COMPLETED")
    advancing.result()
    assert runner.busy
    assert f"{MOST_QUEUED // 2} bytes queued" in repr(runner)
    sink.gate.release(1000)
    await runner.settle()


async def test_the_bytes_before_a_damage_are_written_and_counted_first(
    sink: Sink, runner: TransformRunner
) -> None:
    """The damage is in bytes that were queued while the thread inflated those before them."""
    sink.gate.release(1000)
    feeds = [*FEEDS, b"no member"]
    for number, data in enumerate(feeds):
        runner.feed(RANGE, number * FEED, data)
    with pytest.raises(CorruptObject, match="bytes after member 1"):
        for number, data in enumerate(feeds):
            await runner.pass_on(RANGE, number * FEED, data)
        await runner.settle()
    assert sink.counted == len(CONTENT)
    assert sink.content == CONTENT


async def test_closing_waits_for_the_thread_and_counts_what_it_has_written(
    sink: Sink, runner: TransformRunner
) -> None:
    """However often the task is cancelled: the FIFO's descriptor is closed next."""
    await pass_on(runner, 0, 3)
    await waits(sink)
    closing = asyncio.create_task(runner.aclose())
    for _ in range(3):
        for _ in range(5):  # the cancellation reaches the task, and the task its next wait
            await asyncio.sleep(0)
        assert not closing.done()
        closing.cancel()
    sink.gate.release(1000)
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert 0 < sink.counted == len(sink.content) < 2 * FEED, "the turn ends after its piece"
