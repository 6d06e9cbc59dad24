"""The responses of `test_doubt`, to the fetch of a part and its stage: in memory, in pipes, and parked."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.errors import InvalidResponse, SourceError, Truncated
from streamer.plan import ObjectRef, Part, Segment
from streamer.relay.fetch.part_fetch import PartFetch
from streamer.relay.staging.buffers import BufferPool, BufferStage, BufferStages
from streamer.relay.staging.pipes import PipePool, PipeStages
from streamer.relay.statistics import ChannelCounters
from streamer.retry import RetryPolicy
from streamer.s3.client.doubt import DOUBTED, NothingArrived
from streamer.s3.http.body import OneCall
from streamer.s3.ranges import RangeRequest
from streamer.schedule.budget import MemoryBudget
from streamer.schedule.concurrency import ConcurrencyController
from streamer.units import MIB
from tests.unit.test_doubt import Response, at_byte, object_of, responses, text_of, whole

POLICY = RetryPolicy(first_wait=0, longest_wait=0)
WAYS = ["memory", "take", "pipes", "parked"]
LITERALS = b"a header", b"pad"


class Sent(OneCall):
    """A `Body` whose bytes arrive in pieces, one a turn of the loop; then the connection is closed.

    Literals before and after them are there.
    """

    def __init__(
        self, data: bytes, length: int, piece: int, *, around: list[bytes], spliceable: bool
    ) -> None:
        self._before, self._after = around
        self.left = len(self._before) + length + len(self._after)
        self.spliceable = spliceable
        self._data = data
        self._length = length
        self._whole = self.left
        self._piece = piece
        self._arrived = 0
        self._stayed = b""
        self._loop = asyncio.get_running_loop()
        self._taken: asyncio.Future[None] = self._loop.create_future()
        self._loop.call_soon(self._arrive)

    def _arrive(self) -> None:
        self._arrived += self._piece
        if self.left and not self._taken.done():
            self._loop.call_soon(self._arrive)
            self._fire()

    def _here(self, keep: int) -> bytes:
        """The next bytes that may be taken. Raises NothingArrived, Truncated."""
        at = self._whole - self.left - len(self._before)
        if at < 0:
            return self._before[at:]
        if at >= self._length:
            return self._after[at - self._length :]
        here = self._data[at : self._arrived]
        free = here if len(here) == self._length - at else here[: max(0, len(here) - keep)]
        if free:
            return free
        if self._arrived < len(self._data) + self._piece:
            raise NothingArrived
        self._stayed = here
        error = Truncated("broken")
        if not self._taken.done():
            self._taken.set_exception(error)
        raise error

    def _took(self, count: int) -> int:
        self.left -= count
        if not self.left:
            self._taken.set_result(None)
        return count

    def splice_into(self, pipe_fd: int, most: int, *, revocable: bool = False) -> int:
        return self._took(os.write(pipe_fd, self._here(0 if revocable else DOUBTED)[:most]))

    def read_into(self, memory: memoryview) -> int:
        data = self._here(0)[: len(memory)]
        memory[: len(data)] = data
        return self._took(len(data))

    def probe(self) -> None:
        self._here(0)

    def doubted(self) -> tuple[int, bytes]:
        taken = self._whole - self.left - len(self._before)
        return taken if 0 < taken < self._length else 0, self._stayed

    def notify(self, call: Any) -> None:
        self._call = call

    park = notify

    async def taken(self) -> None:
        await self._taken

    def close(self) -> None:
        self.hush()
        if not self._taken.done():
            self._taken.cancel()


async def fetched(way: str, data: bytes, drawn: list[Response], piece: int) -> tuple[bytes, Exception | None]:
    """What is delivered of a part, and why it ended."""
    budget = MemoryBudget(64 * MIB, ConcurrencyController(4, 4 * MIB))
    pooled = BufferStages(budget.quota(), BufferPool()) if way in {"memory", "take"} else None
    stages = pooled or PipeStages(budget.quota(), PipePool(64 * MIB, most=16))
    before, after = LITERALS
    part = Part.of(0, 0, [before, Segment(ObjectRef("b", "k", len(data), "e"), 0, len(data)), after])
    changed = asyncio.Event()
    stage = stages.make(part, on_change=changed.set, counters=ChannelCounters())
    if way == "parked":
        stage._parks = True  # noqa: SLF001 - parts of a mebibyte would take long
    answers = iter(drawn)

    class Source:
        together = 0

        async def open(self, request: RangeRequest) -> Sent:
            around = [b"", b""]
            first, length = 0, 0
            for item in part.rest(request.first):
                if isinstance(item, bytes):
                    around[length > 0] = item
                else:
                    first, length = item.start, len(item)
            sent = next(answers, whole)(data, first) if length else b""
            return Sent(sent, length, piece, around=around, spliceable=way in {"pipes", "parked"})

    fetch = PartFetch(
        stage,
        Source(),
        policy=POLICY,
        counters=ChannelCounters(),
        quota=stages.quota,
    )
    fetching = asyncio.ensure_future(fetch.run())
    fetching.add_done_callback(lambda _: changed.set())
    sink = os.memfd_create("sink")
    length = 0
    while True:
        while stage.ready:
            if isinstance(stage, BufferStage) and way == "take":
                count = os.write(sink, stage.take(7_000))
            else:
                count = stage.drain_into(sink, 7_000)
            length += count
            if not count:
                break
        if fetching.done():
            break
        changed.clear()
        stage.awaited = True
        if not stage.ready:
            await changed.wait()
        else:
            await asyncio.sleep(0)
    delivered = os.pread(sink, length, 0)
    os.close(sink)
    stage.discard()
    error = fetching.exception()
    assert error is None or isinstance(error, SourceError)
    return delivered, error


def check(way: str, data: bytes, drawn: list[Response], piece: int) -> Exception | None:
    delivered, error = asyncio.run(asyncio.wait_for(fetched(way, data, drawn, piece), 20))
    truth = LITERALS[0] + data + LITERALS[1]
    assert truth.startswith(delivered), "foreign bytes are delivered"
    assert error is not None or delivered == truth
    return error


@pytest.mark.parametrize("way", WAYS)
@given(
    size=st.integers(1, 70_000),
    drawn=st.lists(responses, max_size=6),
    piece=st.sampled_from([1_000, 5_000, 1 << 20]),
)
def test_no_foreign_byte_is_delivered(way: str, size: int, drawn: list[Response], piece: int) -> None:
    error = check(way, object_of(size), drawn, piece)
    assert error is None or isinstance(error, InvalidResponse)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("text", [1, 64, 500])
@pytest.mark.parametrize("offset", [0, 100, DOUBTED, DOUBTED + 1, 50_000])
@pytest.mark.parametrize("piece", [1_000, 1 << 20])
def test_a_text_that_grows_is_not_delivered(way: str, offset: int, text: int, piece: int) -> None:
    drawn = [at_byte(offset, text_of(length, 1)) for length in range(text, text + 3)]
    assert check(way, object_of(100_000), drawn, piece) is None


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [128, 900, DOUBTED, DOUBTED + 1, 40_000])
def test_a_server_that_cuts_each_response_is_read_to_the_end(way: str, count: int) -> None:
    assert check(way, object_of(12 * count), [cut_at(count)] * 150, 1 << 20) is None


def cut_at(count: int) -> Response:
    return lambda data, first: data[first:][:count]
