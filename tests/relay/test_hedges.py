"""A head of line that is late is asked for again, on every transport; each byte is still delivered once."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web

from streamer.s3.aiobotocore_source import AiobotocoreSource
from streamer.schedule.hedging import CREDIT
from tests.kit.faults import drips, silent_for
from tests.kit.harness import RunChannel, Running, fill
from tests.kit.pipes import eventually, off_loop, read_all
from tests.kit.stub import Answer, S3Stub, cut_after, fails, stalls

PART = 400_000
LEARNT = 6
"""Parts that come first, so that something is known."""
SIZES = [PART] * (LEARNT + 1)
LAST = "b/data/0006"
"""Object of the part that is late. On a busy machine others may be late too, and are hedged."""


def ended_hedges(running: Running) -> int:
    hedges = running.channel.statistics().counts["hedges"]
    return hedges.get("won", 0) + hedges.get("lost", 0)


async def right(answer: Answer) -> web.StreamResponse:
    return web.Response(status=answer.status, body=answer.body, headers=answer.headers)


@pytest.mark.parametrize(
    "fault",
    [silent_for(60.0), silent_for(60.0, after=1000), drips(400, 0.05, most=60)],
    ids=["no first byte", "silent", "slow"],
)
async def test_a_late_part_is_asked_for_again(
    run: RunChannel, stub: S3Stub, tmp_path: Path, fault: Callable[[Answer], Awaitable[web.StreamResponse]]
) -> None:
    truth = fill(stub, SIZES)
    stub.script(fault, key=LAST)
    async with run(stub, tmp_path, hedge=0.05, part_size=PART, parts=12, requests_in_flight=2) as running:
        assert await off_loop(read_all, running.fifo(0)) == truth
        assert running.channel.statistics().counts["hedges"]["won"] >= 1


async def test_what_the_first_brought_meanwhile_comes_once(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    """The second is answered late; what the first has dripped until then is thrown away of the second."""
    truth = fill(stub, SIZES)
    slow = drips(400, 0.02, most=60)

    async def late(answer: Answer) -> web.StreamResponse:
        await asyncio.sleep(0.3)
        return await right(answer)

    stub.script(slow, late, key=LAST)
    async with run(stub, tmp_path, hedge=0.05, part_size=PART, parts=12, requests_in_flight=1) as running:
        assert await off_loop(read_all, running.fifo(0)) == truth
        statistics = running.channel.statistics()
        assert statistics.counts["hedges"]["won"] >= 1
        assert statistics.wasted_bytes < PART * statistics.counts["hedges"]["issued"]
        if statistics.wasted_bytes == 0:  # little bytes wait in the socket for more of them
            assert not isinstance(running.source, AiobotocoreSource)


async def test_the_first_may_be_the_first_after_all(run: RunChannel, stub: S3Stub, tmp_path: Path) -> None:
    truth = fill(stub, SIZES)
    stub.script(stalls(stub), silent_for(60.0), key=LAST)
    async with run(stub, tmp_path, hedge=0.05, part_size=PART, parts=12, requests_in_flight=1) as running:
        reading = asyncio.create_task(off_loop(read_all, running.fifo(0)))
        await eventually(lambda: sum(seen.key == LAST.removeprefix("b/") for seen in stub.seen) == 2)
        stub.release()
        assert await reading == truth
        assert running.channel.statistics().counts["hedges"]["lost"] >= 1
        assert await off_loop(read_all, running.fifo(1)) == truth


async def test_a_second_request_that_fails_in_its_body_is_retried_like_any(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    truth = fill(stub, SIZES)
    stub.script(silent_for(60.0), cut_after(1000), key=LAST)
    async with run(stub, tmp_path, hedge=0.05, part_size=PART, parts=12, requests_in_flight=1) as running:
        assert await off_loop(read_all, running.fifo(0)) == truth
        statistics = running.channel.statistics()
        assert statistics.counts["hedges"]["won"] >= 1
        assert statistics.counts["requests"]["truncated"] == 1


async def test_a_second_request_that_is_refused_leaves_the_first_alone(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    truth = fill(stub, SIZES)
    stub.script(stalls(stub), fails(500, "InternalError"), key=LAST)
    async with run(stub, tmp_path, hedge=0.05, part_size=PART, parts=12, requests_in_flight=1) as running:
        reading = asyncio.create_task(off_loop(read_all, running.fifo(0)))
        await eventually(lambda: running.channel.statistics().counts["hedges"].get("lost"))
        stub.release()
        assert await reading == truth
        statistics = running.channel.statistics()
        assert statistics.counts["hedges"]["lost"] >= 1  # a third may win
        assert not statistics.counts["retries"]
        assert [note.kind for note in statistics.errors] == ["transient"]


async def test_a_reader_that_goes_ends_both(run: RunChannel, stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, SIZES)
    stub.script(silent_for(60.0), silent_for(60.0), key=LAST)
    async with run(stub, tmp_path, hedge=0.05, part_size=PART, parts=12, requests_in_flight=1) as running:
        reader = await off_loop(open, running.fifo(0), "rb")
        got = await off_loop(reader.read, LEARNT * PART)
        assert len(got) == LEARNT * PART
        await eventually(lambda: running.channel.statistics().counts["hedges"].get("issued"))
        reader.close()
        await eventually(lambda: running.states)
        assert running.states[0].state == "abandoned"
        await eventually(
            lambda: ended_hedges(running) == running.channel.statistics().counts["hedges"]["issued"]
        )


async def test_a_slow_reader_is_not_hedged(run: RunChannel, stub: S3Stub, tmp_path: Path) -> None:
    """While the FIFO is full, the part that comes slowly is the reader's doing."""
    size = CREDIT - LEARNT * PART  # more than a FIFO, and as much as a hedge may fetch
    fill(stub, [*[PART] * LEARNT, size])
    async with run(stub, tmp_path, hedge=0.05, part_size=size, requests_in_flight=2) as running:
        now = running.channel.statistics
        reader = await off_loop(os.open, running.fifo(0), os.O_RDONLY)
        try:
            await eventually(lambda: now().seconds["blocked"] > 0.5)
            before = now()
            assert before.received_bytes > LEARNT * PART
            await eventually(lambda: now().seconds["blocked"] > before.seconds["blocked"] + 0.5)
            assert now().counts["hedges"] == before.counts["hedges"]
        finally:
            os.close(reader)


async def test_what_is_waited_for_is_the_second_once_it_has_won(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    """The first request waits for its headers; from its end on the second's bytes are waited for."""
    truth = fill(stub, SIZES)

    async def silent(answer: Answer) -> web.StreamResponse:
        await asyncio.sleep(60.0)  # not `silent_for`: its headers may come before delivery begins to wait
        return await right(answer)

    more = [stalls(stub, after=1000)] * 4  # a third request may be sent before the second is released
    stub.script(silent, *more, key=LAST)
    async with run(stub, tmp_path, hedge=0.05, part_size=PART, parts=12, requests_in_flight=1) as running:
        reading = asyncio.create_task(off_loop(read_all, running.fifo(0)))
        now = running.channel.statistics
        await eventually(lambda: now().starved["first_byte"] > 0)
        await eventually(lambda: now().starved["body"] > 0)
        stub.release()
        assert await reading == truth
        found = now()
        assert found.counts["hedges"]["won"] >= 1
        assert found.seconds["starved"] == pytest.approx(sum(found.starved.values()))
