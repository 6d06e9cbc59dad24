"""Several channels on one allotment: room and requests are shared, and a sleeping reader harms nobody."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import os
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from streamer.plan import Arrangement, S3Uri
from streamer.plan.parts import RANGE_COST
from streamer.relay.channel import Channel
from streamer.relay.channel_spec import ChannelSpec
from streamer.relay.staging.buffers import BufferStages
from streamer.relay.staging.pipes import PIPE_COST, PipeStages
from streamer.relay.staging.stage import LEAST, TURN
from streamer.relay.transport import Transport, TransportSpec, Wish, open_transport, why_read
from streamer.schedule.budget import ChannelQuota
from streamer.units import MIB
from tests.kit.harness import EAGER, MORE_THAN_A_FIFO, clients_of, fill, running_channel, transport_of
from tests.kit.pipes import eventually, off_loop, read_all
from tests.kit.planning import plan_prefix
from tests.kit.stub import S3Stub

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking")


@dataclass
class Shared:
    """Channels `c0`, `c1`, … over one transport."""

    transport: Transport
    channels: list[Channel]
    shares: list[ChannelQuota]
    directory: Path

    def fifo(self, channel: int, epoch: int) -> Path:
        return self.directory / f"c{channel}_{epoch}"


@contextlib.asynccontextmanager
async def sharing(
    stub: S3Stub,
    directory: Path,
    prefixes: list[str],
    *,
    transport: Wish,
    budget: int,
    requests_in_flight: int,
) -> AsyncIterator[Shared]:
    async with contextlib.AsyncExitStack() as stack:
        memory = {"budget": budget, "requests_in_flight": requests_in_flight, "part_size": MIB}
        clients, chosen = await stack.enter_async_context(
            transport_of(stub, transport, channels=[None] * len(prefixes), **memory)
        )
        shared = Shared(chosen, [], [], directory)
        for number, prefix in enumerate(prefixes):
            stages = chosen.stages()
            plan = await plan_prefix(clients, S3Uri("b", prefix))
            spec = ChannelSpec(name=f"c{number}", plan=plan, directory=str(directory), retry=EAGER)
            channel = Channel(spec, chosen.source, stages)
            channel.prepare()
            stack.callback(channel.close)
            shared.channels.append(channel)
            shared.shares.append(stages.quota)
        tasks = [asyncio.create_task(channel.run()) for channel in shared.channels]
        try:
            yield shared
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture(params=["aiobotocore", "buffered", "splice"])
def transport(request: pytest.FixtureRequest) -> Wish:
    wish: Wish = request.param
    return wish


async def test_a_reader_that_sleeps_stops_nobody(stub: S3Stub, tmp_path: Path, transport: Wish) -> None:
    truths = [
        fill(stub, [MORE_THAN_A_FIFO], prefix="b/sleepy/", seed=1),
        fill(stub, [3_000_000, 10, 2_000_000], prefix="b/one/", seed=2),
        fill(stub, [70_000] * 40, prefix="b/two/", seed=3),
    ]
    async with sharing(
        stub,
        tmp_path,
        ["sleepy/", "one/", "two/"],
        transport=transport,
        budget=12 * MIB,
        requests_in_flight=6,
    ) as shared:
        with open(await off_loop(os.open, shared.fifo(0, 0), os.O_RDONLY), "rb", buffering=0) as sleeper:
            got = await off_loop(sleeper.read, 10)
            for epoch in range(3):
                others = await asyncio.gather(
                    off_loop(read_all, shared.fifo(1, epoch)), off_loop(read_all, shared.fifo(2, epoch))
                )
                assert [*others] == truths[1:]
                assert shared.shares[0].reserved_bytes <= shared.shares[0].byte_limit
                assert (
                    sum(quota.reserved_bytes for quota in shared.shares)
                    <= shared.transport.memory_budget.budget
                )
            assert got + await off_loop(sleeper.readall) == truths[0]


async def test_a_channel_that_is_read_costs_no_other_its_splice(stub: S3Stub, tmp_path: Path) -> None:
    """Compressed objects beside plain ones: each channel's bytes go their own way."""
    content = random.Random(1).randbytes(3_000_000)
    plain = fill(stub, [MORE_THAN_A_FIFO], prefix="b/plain/", seed=1)
    stub.objects["b/packed/0"] = gzip.compress(content)
    async with contextlib.AsyncExitStack() as stack:
        clients = await stack.enter_async_context(clients_of(stub))
        plans = [
            await plan_prefix(clients, S3Uri("b", "plain/")),
            await plan_prefix(clients, S3Uri("b", "packed/"), Arrangement(inflate=True)),
        ]
        whys = [why_read(plan) for plan in plans]
        chosen = await stack.enter_async_context(
            open_transport(clients, TransportSpec(wish="auto", buckets={"b"}, channels=whys, budget=64 * MIB))
        )
        channels = []
        for name, plan, why in zip(("plain", "packed"), plans, whys, strict=True):
            stages = chosen.stages(why)
            assert isinstance(stages, BufferStages if name == "packed" else PipeStages)
            spec = ChannelSpec(name=name, plan=plan, directory=str(tmp_path), retry=EAGER)
            channel = Channel(spec, chosen.source, stages)
            channel.prepare()
            stack.callback(channel.close)
            channels.append(channel)
        tasks = [asyncio.create_task(channel.run()) for channel in channels]
        got = await asyncio.gather(
            off_loop(read_all, tmp_path / "plain_0"), off_loop(read_all, tmp_path / "packed_0")
        )
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert [*got] == [plain, content]


async def test_a_channel_that_is_read_alone_has_most_of_the_room(
    stub: S3Stub, tmp_path: Path, transport: Wish
) -> None:
    truths = [
        fill(stub, [MORE_THAN_A_FIFO], prefix="b/one/", seed=1),
        fill(stub, [9_000_000], prefix="b/two/", seed=2),
    ]
    async with sharing(
        stub, tmp_path, ["one/", "two/"], transport=transport, budget=16 * MIB, requests_in_flight=32
    ) as shared:
        read, unread = shared.shares
        with open(await off_loop(os.open, shared.fifo(0, 0), os.O_RDONLY), "rb", buffering=0) as reader:
            got = await off_loop(reader.read, 10)
            await eventually(lambda: read.reserved_bytes > shared.transport.memory_budget.budget // 2)
            assert unread.reserved_bytes <= unread.floor == 4 * MIB
            # The other's reader comes, while the first sleeps with nearly everything in its hands.
            assert await off_loop(read_all, shared.fifo(1, 0)) == truths[1]
            assert got + await off_loop(reader.readall) == truths[0]


async def test_requests_are_shared(stub: S3Stub, tmp_path: Path) -> None:
    """While all are read, no channel needs a connection that another has not opened before."""
    truths = [fill(stub, [30_000] * 200, prefix=f"b/c{number}/", seed=number) for number in range(3)]
    async with sharing(
        stub, tmp_path, ["c0/", "c1/", "c2/"], transport="buffered", budget=6 * MIB, requests_in_flight=6
    ) as shared, contextlib.AsyncExitStack() as stack:  # fmt: skip
        assert [quota.requests_limit for quota in shared.shares] == [2, 2, 2]
        fds = [await off_loop(os.open, shared.fifo(number, 0), os.O_RDONLY) for number in range(3)]
        readers = [stack.enter_context(open(fd, "rb")) for fd in fds]  # noqa: SIM115
        whole = shared.transport.memory_budget
        await eventually(
            lambda: whole.active == 3 and not any(each.requests_in_flight for each in shared.shares)
        )
        assert [quota.requests_limit for quota in shared.shares] == [2, 2, 2]
        before = stub.connections
        # What is left is more than a FIFO takes: a channel that has put all into it has no reader any more,
        # and leaves the others its requests while it still uses some.
        starts = [
            off_loop(reader.read, len(truth) - 2 * MIB) for reader, truth in zip(readers, truths, strict=True)
        ]
        got = await asyncio.gather(*starts)
        assert stub.connections <= max(6, before)
        rests = await asyncio.gather(*[off_loop(reader.read) for reader in readers])
        assert [start + rest for start, rest in zip(got, rests, strict=True)] == truths


async def test_small_objects_take_their_own_length(stub: S3Stub, tmp_path: Path) -> None:
    """Room for two parts of 1 MiB is room for a hundred small objects, a few of them in a small pipe."""
    truth = fill(stub, [10_000] * 100)
    async with running_channel(stub, tmp_path, transport="splice", parts=2) as running:
        await eventually(lambda: running.channel.statistics().received_bytes == len(truth))
        await eventually(lambda: not running.quota.requests_in_flight)
        staged = [stage.staged for stage in running.stages.undelivered]
        assert sum(staged) == len(truth)
        assert max(staged) <= 50_000
        assert running.quota.reserved_bytes == 100 * (10_000 + RANGE_COST) + len(staged) * PIPE_COST
        assert await off_loop(read_all, running.fifo(0)) == truth


async def test_tiny_objects_leave_others_their_turn(stub: S3Stub, tmp_path: Path) -> None:
    """A turn of delivery is short in objects, too, not only in bytes."""
    truth = fill(stub, [20] * 400)
    loop, steps, reading = asyncio.get_running_loop(), [0], True

    def turn() -> None:
        steps.append(running.channel.statistics().objects_completed)
        if reading:
            loop.call_soon(turn)

    async with running_channel(stub, tmp_path, part_size=MIB, parts=64, transport="aiobotocore") as running:
        await eventually(lambda: running.channel.statistics().received_bytes >= len(truth))
        loop.call_soon(turn)
        assert await off_loop(read_all, running.fifo(0)) == truth
        reading = False
    assert 1 < max(after - before for before, after in itertools.pairwise(steps)) <= TURN // LEAST
