"""Ranks of one stream that are separated because they are not read at one pace, on real FIFOs.

A grace of no time separates ranks as soon as one waits for another, at a byte that the readers' timing draws:
in mid-record, in mid-slice, at an epoch's border. Whenever that is, each FIFO has exactly its own bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path

import pytest

from streamer.plan import S3Uri, Segment
from streamer.plan.host_ranks import HostRanks
from streamer.plan.record_order import Deal, RecordOrder
from streamer.plan.record_plan import RecordPlan
from streamer.plan.record_table import FixedRecords
from streamer.relay.channel import Channel
from streamer.relay.channel_spec import ChannelSpec, StartPosition
from streamer.relay.deliver.held_back import HeldBack
from streamer.relay.shared_stream import Separation, SharedStream
from streamer.relay.transport import Transport, TransportSpec, Wish, open_transport
from streamer.units import KIB, MIB
from tests.kit.harness import EAGER, clients_of, fill
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
    separated: list[HeldBack]
    transport: Transport
    running: asyncio.Task[None]

    def fifo(self, name: str, epoch: int = 0) -> Path:
        return self.directory / f"{name}_{epoch}"

    @property
    def together(self) -> set[bool]:
        return {each.statistics().fetched_together for each in self.channels.values()}

    async def both(self, epoch: int) -> dict[str, bytes]:
        """Read an epoch of all FIFOs at the same time."""
        names = [*self.channels]
        read = await asyncio.gather(*(off_loop(read_all, self.fifo(name, epoch)) for name in names))
        return dict(zip(names, read, strict=True))


@contextlib.asynccontextmanager
async def ranks(  # noqa: PLR0913 - a test names only what it is about
    stub: S3Stub,
    directory: Path,
    *,
    count: int = 4,
    copies: int = 1,
    each: int = 2_000_000,
    grace: float = 0,
    transport: Wish = "splice",
    seed: int | None = None,
    at_separation: Callable[[], object] = bool,
) -> AsyncIterator[Job]:
    """A job whose ranks have about `each` bytes an epoch. `at_separation`: called when they are separated."""
    fill(stub, [each * count // 2 // RECORD * RECORD] * 2)
    async with contextlib.AsyncExitStack() as stack:
        clients = await stack.enter_async_context(clients_of(stub))
        chosen = await stack.enter_async_context(
            open_transport(
                clients,
                TransportSpec(
                    wish=transport,
                    buckets={"b"},
                    channels=[None] * count,
                    fifos=count * copies,
                    budget=4 * count * MIB,
                    part_size=512 * KIB,
                    hedge=0,
                ),
            )
        )
        listed = await plan_prefix(clients, S3Uri("b", "data/"))
        table = FixedRecords(listed.entries, RECORD)
        order = RecordOrder(table.counts, listed.entries.sizes, seed=seed, block=100_000)
        deal = Deal(BATCH * count, count, 0, count, "drop")
        whole = RecordPlan(HostRanks(listed.entries, table, order, deal))
        plans = whole.ranks(count)
        by_rank = [
            {f"train-{rank * copies + copy}": plan for copy in range(copies)}
            for rank, plan in enumerate(plans)
        ]
        starts = {name: StartPosition() for fifos in by_rank for name in fifos}
        separated: list[HeldBack] = []

        def on_separated(held_back: HeldBack) -> None:
            separated.append(held_back)
            at_separation()

        stages = chosen.stages(channels=count)
        stream = SharedStream(
            whole,
            by_rank,
            starts,
            source=chosen.source,
            stages=stages,
            retry=EAGER,
            separation=Separation(partial(chosen.separated, stages), on_separated, grace),
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
            yield Job(directory, channels, due, separated, chosen, running)
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


def opened(path: Path) -> FileIO:
    """A FIFO's reader."""
    return FileIO(path)


WAYS = pytest.mark.parametrize("transport", ["splice", "buffered"])


@WAYS
@pytest.mark.parametrize("copies", [1, 2])
async def test_fifos_that_are_read_one_after_the_other(
    stub: S3Stub, tmp_path: Path, transport: Wish, copies: int
) -> None:
    """Copies of a rank are read at the same time, as ever."""
    async with ranks(stub, tmp_path, copies=copies, transport=transport) as job:
        names = [*job.channels]
        for epoch in range(2):
            for first in range(0, len(names), copies):
                rank = names[first : first + copies]
                read = await asyncio.gather(*(off_loop(read_all, job.fifo(name, epoch)) for name in rank))
                assert read == [job.due[name] for name in rank]
        assert [set(each.by) <= {*names[copies:]} for each in job.separated] == [True]
        assert job.together == {False}
        counted = [each.statistics() for each in job.channels.values()]
        assert sum(each.reserved_bytes for each in counted) <= job.transport.memory_budget.budget
        assert {each.epochs["complete"] for each in counted} == {2}


@WAYS
async def test_a_rank_that_pauses_in_mid_slice(stub: S3Stub, tmp_path: Path, transport: Wish) -> None:
    """The grace lets both readers come first, unless this machine is very slow."""
    async with ranks(stub, tmp_path, count=2, each=MUCH, grace=0.2, transport=transport, seed=1) as job:
        paused, other = await asyncio.gather(*(off_loop(opened, job.fifo(name)) for name in job.channels))
        with paused, other:
            begun = await off_loop(paused.read, 12_345)
            assert await off_loop(other.readall) == job.due["train-1"]
            assert len(job.separated) == 1
            assert begun + await off_loop(paused.readall) == job.due["train-0"]


async def test_ranks_that_are_read_at_one_pace_stay_together(stub: S3Stub, tmp_path: Path) -> None:
    async with ranks(stub, tmp_path, grace=3600, seed=3) as job:
        assert await job.both(0) == job.due
        assert job.together == {True}
        await job.both(1)
        assert (job.together, job.separated) == ({True}, [])


@pytest.mark.parametrize("copies", [1, 2])
async def test_readers_that_leave_as_the_ranks_are_separated(
    stub: S3Stub, tmp_path: Path, copies: int
) -> None:
    """They are at the next epoch's FIFO then, and the last rank reads on."""
    leaving: list[int] = []

    def leave() -> None:
        for each in leaving:
            os.close(each)

    async with ranks(
        stub, tmp_path, count=3, copies=copies, each=MUCH, grace=0.2, at_separation=leave
    ) as job:
        names = [*job.channels]
        opened = await asyncio.gather(
            *(off_loop(os.open, job.fifo(name), os.O_RDONLY) for name in names[: 2 * copies])
        )
        others = [asyncio.create_task(off_loop(read_all, job.fifo(name))) for name in names[2 * copies :]]
        leaving += opened
        if job.separated:  # this machine is slow
            leave()
        assert await asyncio.gather(*others) == [job.due[name] for name in names[2 * copies :]]
        assert len(job.separated) == 1
        assert await job.both(1) == job.due
        epochs = [each.statistics().epochs for each in job.channels.values()]
        assert epochs == [{"abandoned": 1, "complete": 1}] * 2 * copies + [{"complete": 2}] * copies


async def test_a_stop_as_the_ranks_are_separated(stub: S3Stub, tmp_path: Path) -> None:
    """Nothing is left: neither a FIFO, nor a descriptor, nor a task."""
    stopped: list[Job] = []

    def stop() -> None:
        stopped[0].running.cancel()

    async with ranks(stub, tmp_path, at_separation=stop) as job:
        stopped.append(job)
        read = await off_loop(read_all, job.fifo("train-2"))
        assert job.due["train-2"].startswith(read)
        with contextlib.suppress(asyncio.CancelledError):
            await job.running
        assert len(job.separated) == 1


@pytest.mark.parametrize("late", [False, True], ids=["before", "at separation"])
async def test_a_failure_of_storage_about_the_separation(stub: S3Stub, tmp_path: Path, late: bool) -> None:
    """Each FIFO has every byte before its own first missing one, and fails."""

    def change() -> None:
        stub.objects["b/data/0001"] = bytes(len(stub.objects["b/data/0001"]))

    async with ranks(stub, tmp_path, each=6_000_000, at_separation=change if late else bool) as job:
        if not late:
            change()
        for name, due in job.due.items():
            read = await off_loop(read_all, job.fifo(name))
            assert due.startswith(read)
            assert len(read) < len(due)
            await eventually(lambda channel=job.channels[name]: channel.error)
            assert "b/data/0001" in str(job.channels[name].error)
