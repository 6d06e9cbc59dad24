"""Who waits for whom, by the channel's own clocks: each cause made by the stub, none by chance."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from streamer.relay.transport import Wish
from tests.kit.harness import MORE_THAN_A_FIFO, Running, fill, running_channel
from tests.kit.pipes import eventually, off_loop, read_all
from tests.kit.stub import S3Stub, cut_after, fails, stalls

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking")

TRANSPORTS = pytest.mark.parametrize("transport", ["splice", "buffered", "aiobotocore"])


def starved(running: Running) -> dict[str, float]:
    return running.channel.statistics().starved


@TRANSPORTS
async def test_the_first_byte_then_the_body(stub: S3Stub, tmp_path: Path, transport: Wish) -> None:
    truth = fill(stub, [100_000])
    stub.script(stalls(stub, after=0))
    async with running_channel(stub, tmp_path, part_size=100_000, transport=transport) as running:
        await eventually(lambda: stub.seen)  # so that it is the first epoch's request that stalls
        reading = asyncio.create_task(off_loop(read_all, running.fifo(0)))
        await eventually(lambda: starved(running)["first_byte"] + starved(running)["body"] > 0.05)
        stub.release()
        assert await reading == truth
        found = running.channel.statistics()
        assert found.seconds["starved"] == pytest.approx(sum(found.starved.values()))
        assert sum(found.head_wait.counts) >= 1
        assert found.head_wait.sum <= found.seconds["starved"] + 1e-3


@TRANSPORTS
async def test_the_body(stub: S3Stub, tmp_path: Path, transport: Wish) -> None:
    """Half of it comes at once, and the rest when it is let go."""
    truth = fill(stub, [100_000])
    stub.script(stalls(stub, after=50_000))
    async with running_channel(stub, tmp_path, part_size=100_000, transport=transport) as running:
        await eventually(lambda: stub.seen)  # so that it is the first epoch's request that stalls
        reading = asyncio.create_task(off_loop(read_all, running.fifo(0)))
        await eventually(lambda: starved(running)["body"] > 0.05)
        before = starved(running)
        stub.release()
        assert await reading == truth
        assert before["throttled"] == before["retry"] == before["inflate"] == 0


@pytest.mark.parametrize(
    ("fault", "cause", "kind"),
    [((503, "SlowDown"), "throttled", "throttled"), ((500, "InternalError"), "retry", "transient")],
)
async def test_waiting_to_ask_again(
    stub: S3Stub, tmp_path: Path, fault: tuple[int, str], cause: str, kind: str
) -> None:
    truth = fill(stub, [100_000])
    headers: dict[str, Any] = {"Retry-After": "1"}
    stub.script(fails(*fault, **headers))
    async with running_channel(stub, tmp_path, part_size=100_000, transport="buffered") as running:
        await eventually(lambda: stub.seen)
        assert await off_loop(read_all, running.fifo(0)) == truth
        found = running.channel.statistics()
        assert found.starved[cause] > 0
        assert found.starved[{"throttled": "retry", "retry": "throttled"}[cause]] == 0
        assert [note.kind for note in found.errors] == [kind]
        assert fault[1] in found.errors[0].text


async def test_connecting(stub: S3Stub, tmp_path: Path) -> None:
    """The rest of a broken body needs a new connection."""
    truth = fill(stub, [100_000])
    stub.script(cut_after(50_000, once=stub.released))
    async with running_channel(stub, tmp_path, part_size=100_000, transport="buffered") as running:
        reading = asyncio.create_task(off_loop(read_all, running.fifo(0)))
        await eventually(lambda: starved(running)["body"] > 0)
        stub.release()
        assert await reading == truth
        assert starved(running)["connect"] > 0


@TRANSPORTS
async def test_a_reader_that_leaves(stub: S3Stub, tmp_path: Path, transport: Wish) -> None:
    """It is counted; what had been fetched for it is wasted, and counted too."""
    fill(stub, [MORE_THAN_A_FIFO])
    async with running_channel(stub, tmp_path, part_size=1_000_000, parts=8, transport=transport) as running:
        now = running.channel.statistics
        fd = os.open(running.fifo(0), os.O_RDONLY | os.O_NONBLOCK)
        try:
            await eventually(lambda: now().fifo_bytes and now().received_bytes > now().written_bytes)
        finally:
            os.close(fd)
        await eventually(lambda: running.states)
        found = running.channel.statistics()
        assert (found.readers_come, found.readers_gone) == (1, 1)
        assert found.counts["epochs"] == {"abandoned": 1}
        assert 0 < found.wasted_bytes < MORE_THAN_A_FIFO


async def test_what_the_fifo_holds(stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, [MORE_THAN_A_FIFO])
    async with running_channel(stub, tmp_path, part_size=1_000_000) as running:
        assert running.channel.statistics().fifo_bytes == 0
        fd = os.open(running.fifo(0), os.O_RDONLY | os.O_NONBLOCK)
        try:
            await eventually(lambda: running.channel.statistics().fifo_bytes > 0)
            assert os.read(fd, 20_000)
        finally:
            os.close(fd)


@TRANSPORTS
async def test_a_limit_of_bandwidth_holds_and_is_lifted(
    stub: S3Stub, tmp_path: Path, transport: Wish
) -> None:
    """Set in mid-stream, also where bytes go straight from the socket."""
    truth = fill(stub, [MORE_THAN_A_FIFO])
    async with running_channel(stub, tmp_path, part_size=1_000_000, parts=8, transport=transport) as running:
        limit = running.quota.bandwidth
        limit.change(1, 0.0)
        reading = asyncio.create_task(off_loop(read_all, running.fifo(0)))
        await eventually(lambda: running.channel.statistics().seconds["limited"] > 0.05)
        held = running.channel.statistics()
        assert held.written_bytes < MORE_THAN_A_FIFO
        limit.change(None, 0.0)
        assert await reading == truth
