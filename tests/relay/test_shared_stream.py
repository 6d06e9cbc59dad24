"""Ranks that are one stream, on real FIFOs: each has its own bytes, whenever readers read, leave or stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from streamer.plan import S3Uri, Segment
from streamer.plan.record_order import Deal, RecordOrder
from streamer.plan.record_plan import RecordPlan
from streamer.plan.record_table import FixedRecords
from streamer.relay.channel import Channel
from streamer.relay.channel_spec import ChannelSpec, StartPosition
from streamer.relay.shared_stream import SharedStream
from streamer.relay.transport import Transport, Wish
from streamer.units import KIB, MIB
from tests.kit.harness import EAGER, fill, transport_of
from tests.kit.pipes import eventually, off_loop, read_all
from tests.kit.planning import plan_prefix
from tests.kit.stub import S3Stub

pytestmark = pytest.mark.usefixtures("no_leaks")

RECORD, BATCH = 1000, 50
MUCH = 20_000_000
"""Bytes of a rank's epoch; a FIFO may hold 16 MiB of large network fragments."""


@dataclass
class Job:
    """A stream of several ranks, which runs, and what each FIFO must have in an epoch."""

    directory: Path
    channels: dict[str, Channel]
    due: dict[str, bytes]
    transport: Transport
    running: asyncio.Task[None]

    def fifo(self, name: str, epoch: int = 0) -> Path:
        return self.directory / f"{name}_{epoch}"

    async def all_of(self, epoch: int) -> dict[str, bytes]:
        """Read an epoch of all FIFOs at the same time."""
        names = [*self.channels]
        read = await asyncio.gather(*(off_loop(read_all, self.fifo(name, epoch)) for name in names))
        return dict(zip(names, read, strict=True))


@contextlib.asynccontextmanager
async def ranks(
    stub: S3Stub,
    directory: Path,
    *,
    count: int = 4,
    copies: int = 1,
    each: int = 2_000_000,
    transport: Wish = "splice",
    seed: int | None = None,
) -> AsyncIterator[Job]:
    """A job whose ranks have about `each` bytes an epoch."""
    fill(stub, [each * count // 2 // RECORD * RECORD] * 2)
    async with contextlib.AsyncExitStack() as stack:
        clients, chosen = await stack.enter_async_context(
            transport_of(
                stub, transport, fifos=count * copies, budget=4 * count * MIB, part_size=512 * KIB, hedge=0
            )
        )
        listed = await plan_prefix(clients, S3Uri("b", "data/"))
        table = FixedRecords(listed.entries, RECORD)
        order = RecordOrder(table.counts, listed.entries.sizes, seed=seed, block=100_000)
        deal = Deal(BATCH * count, count, 0, count, "drop")
        whole = RecordPlan(listed.entries, table, order, deal)
        plans = whole.ranks(count)
        by_rank = [
            {f"train-{rank * copies + copy}": plan for copy in range(copies)}
            for rank, plan in enumerate(plans)
        ]
        starts = {name: StartPosition() for fifos in by_rank for name in fifos}
        stages = chosen.stages()
        stream = SharedStream(
            whole,
            by_rank,
            starts,
            source=chosen.source,
            stages=stages,
            retry=EAGER,
        )
        channels = {}
        for fifo in stream.fifos:
            spec = ChannelSpec(
                name=fifo.name,
                plan=fifo.plan,
                directory=str(directory),
                retry=EAGER,
                when_failed="close",
            )
            channel = channels[fifo.name] = Channel(spec, chosen.source, stages, shared=fifo)
            channel.prepare()
            stack.callback(channel.close)

        async def run() -> None:
            async with asyncio.TaskGroup() as tasks:
                for channel in channels.values():
                    tasks.create_task(channel.run())
                tasks.create_task(stream.run())

        running = asyncio.create_task(run())
        due = {
            name: b"".join(
                stub.objects[f"b/{part.object.key}"][part.start : part.end]
                for part in plan.segments(0)
                if isinstance(part, Segment)
            )
            for fifos in by_rank
            for name, plan in fifos.items()
        }
        try:
            yield Job(directory, channels, due, chosen, running)
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


@pytest.mark.parametrize("transport", ["splice", "buffered"])
@pytest.mark.parametrize(("copies", "seed"), [(1, None), (1, 3), (2, 3)])
async def test_ranks_that_are_read_at_the_same_time(
    stub: S3Stub, tmp_path: Path, transport: Wish, copies: int, seed: int | None
) -> None:
    async with ranks(stub, tmp_path, count=2, copies=copies, transport=transport, seed=seed) as job:
        assert await job.all_of(0) == job.due
        assert (await job.all_of(1) == job.due) == (seed is None)
        counted = [each.statistics() for each in job.channels.values()]
        assert sum(each.reserved_bytes for each in counted) <= job.transport.memory_budget.budget
        assert {each.counts["epochs"]["complete"] for each in counted} == {2}
        assert [each.requests_in_flight_limit > 0 for each in counted] == [True] + [False] * (
            len(counted) - 1
        )


@pytest.mark.parametrize("copies", [1, 2])
async def test_readers_that_leave_in_mid_epoch(stub: S3Stub, tmp_path: Path, copies: int) -> None:
    """The other rank reads on, and all read the next epoch."""
    async with ranks(stub, tmp_path, count=2, copies=copies, each=MUCH) as job:
        names = [*job.channels]
        leaving = await asyncio.gather(
            *(off_loop(os.open, job.fifo(name), os.O_RDONLY) for name in names[:copies])
        )
        others = [asyncio.create_task(off_loop(read_all, job.fifo(name))) for name in names[copies:]]
        for each in leaving:
            assert await off_loop(os.read, each, 1)
            os.close(each)
        assert await asyncio.gather(*others) == [job.due[name] for name in names[copies:]]
        assert await job.all_of(1) == job.due
        epochs = [each.statistics().counts["epochs"] for each in job.channels.values()]
        assert epochs == [{"abandoned": 1, "complete": 1}] * copies + [{"complete": 2}] * copies


async def test_a_stop_in_mid_epoch(stub: S3Stub, tmp_path: Path) -> None:
    """Nothing is left: neither a FIFO, nor a descriptor, nor a task."""
    async with ranks(stub, tmp_path, count=2, each=MUCH) as job:
        readers = await asyncio.gather(
            *(off_loop(os.open, job.fifo(name), os.O_RDONLY) for name in job.channels)
        )
        begun = [await off_loop(os.read, reader, 10_000) for reader in readers]
        assert [due.startswith(data) for due, data in zip(job.due.values(), begun, strict=True)] == [True] * 2
        job.running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await job.running
        for reader in readers:
            os.close(reader)


async def test_a_failure_of_storage(stub: S3Stub, tmp_path: Path) -> None:
    """Each FIFO has every byte before its own first missing one, and fails."""
    async with ranks(stub, tmp_path, each=6_000_000) as job:
        stub.objects["b/data/0001"] = bytes(len(stub.objects["b/data/0001"]))
        found = await job.all_of(0)
        for name, due in job.due.items():
            assert due.startswith(found[name])
            assert len(found[name]) < len(due)
            await eventually(lambda channel=job.channels[name]: channel.error)
            assert "b/data/0001" in str(job.channels[name].error)
