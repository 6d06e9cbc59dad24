"""One object inflated by a real thread; `emit` is a FIFO that accepts everything, when the test lets it."""

from __future__ import annotations

import asyncio
import gzip
import random
import threading
from collections.abc import AsyncIterator
from functools import partial

import pytest

from streamer.aio import WorkerThread
from streamer.errors import CorruptObject
from streamer.inflate import Inflater
from streamer.plan import ObjectRef
from streamer.relay.deliver.byte_queue import ByteQueue
from streamer.relay.deliver.inflation import MOST_QUEUED, Inflation
from streamer.relay.deliver.object_errors import not_inflatable
from streamer.relay.statistics import StateTimer
from streamer.units import KIB

FEED = 128 * KIB
REF = ObjectRef("b", "k", 10_000_000, '"e"')
CONTENT = random.Random(0).randbytes(8 * FEED)
FEEDS = [
    packed[at : at + FEED] for packed in [gzip.compress(CONTENT, 1)] for at in range(0, len(packed), FEED)
]
"""Bytes of content that does not compress: a feed inflates to as many bytes."""


class Sink:
    """What the thread has written; `gate` lets it write one piece for each release."""

    def __init__(self) -> None:
        self.content = bytearray()
        self.counted = 0
        self.gate = threading.Semaphore(0)
        self.waiting = threading.Event()

    def emit(self, pieces: list[bytes]) -> ByteQueue:
        if pieces:
            self.waiting.set()
            assert self.gate.acquire(timeout=60)
            self.content += b"".join(pieces)
        return ByteQueue([])

    def count(self) -> None:
        self.counted = len(self.content)


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture
async def inflation(sink: Sink) -> AsyncIterator[Inflation]:
    thread = WorkerThread("inflate")
    make = partial(Inflater, partial(not_inflatable, REF))
    yield Inflation(
        REF,
        make,
        thread=thread,
        emit=sink.emit,
        write=lambda _: None,
        count=sink.count,
        timer=StateTimer(),
    )
    sink.gate.release(1000)
    thread.close()


def feed(inflation: Inflation, data: bytes) -> None:
    """Feed bytes whose turn has come."""
    inflation.feed(data)
    inflation.pass_on(len(data))


async def waits(sink: Sink) -> None:
    """Wait until the thread is in `emit`."""
    assert await asyncio.to_thread(sink.waiting.wait, 60)


async def test_a_turn_goes_on_to_bytes_that_were_fed_during_it(sink: Sink, inflation: Inflation) -> None:
    """The thread does not wait for the loop between two feeds; the object's end waits for them all."""
    feed(inflation, FEEDS[0])
    assert await inflation.advance(MOST_QUEUED, in_memory=True) is None
    await waits(sink)
    for data in FEEDS[1:4]:
        feed(inflation, data)
        assert await inflation.advance(MOST_QUEUED, in_memory=True) is None
    assert inflation.busy
    sink.gate.release(1000)
    turns = 0
    while await inflation.advance(0, in_memory=True) is not None:
        turns += 1
    assert turns == 1
    assert not inflation.busy
    assert CONTENT.startswith(sink.content)
    assert sink.counted == len(sink.content) > 3 * FEED


async def test_a_full_queue_waits_for_the_thread_until_half_of_it_is_taken(
    sink: Sink, inflation: Inflation
) -> None:
    feed(inflation, FEEDS[0])
    assert await inflation.advance(MOST_QUEUED, in_memory=True) is None
    await waits(sink)
    for data in FEEDS[1:6]:
        feed(inflation, data)
    advancing = asyncio.create_task(inflation.advance(MOST_QUEUED, in_memory=True))
    await asyncio.sleep(0)
    assert not advancing.done()
    while not advancing.done():
        sink.waiting.clear()
        sink.gate.release()
        await asyncio.wait([advancing, asyncio.create_task(waits(sink))], return_when="FIRST_COMPLETED")
    assert advancing.result() is None
    assert inflation.busy
    assert f"{MOST_QUEUED // 2} bytes queued" in repr(inflation)
    sink.gate.release(1000)
    while await inflation.advance(0, in_memory=True) is not None:
        pass
    await inflation.close()


async def test_the_bytes_before_a_damage_are_written_and_counted_first(
    sink: Sink, inflation: Inflation
) -> None:
    """The damage is in bytes that were queued while the thread inflated those before them."""
    sink.gate.release(1000)
    for data in (*FEEDS, b"no member"):
        feed(inflation, data)
    with pytest.raises(CorruptObject, match="bytes after member 1"):
        while await inflation.advance(0, in_memory=True) is not None:
            pass
    assert sink.counted == len(CONTENT)
    assert sink.content == CONTENT


async def test_closing_waits_for_the_thread_and_counts_what_it_has_written(
    sink: Sink, inflation: Inflation
) -> None:
    """However often the task is cancelled: the FIFO's descriptor is closed next."""
    for data in FEEDS[:3]:
        feed(inflation, data)
    assert await inflation.advance(MOST_QUEUED, in_memory=True) is None
    await waits(sink)
    closing = asyncio.create_task(inflation.close())
    for _ in range(3):
        for _ in range(5):  # the cancellation reaches the task, and the task its next wait
            await asyncio.sleep(0)
        assert not closing.done()
        closing.cancel()
    sink.gate.release(1000)
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert 0 < sink.counted == len(sink.content) < 2 * FEED, "the turn ends after its piece"
