"""Epochs that stream while their prefix is listed: exact bytes, and no end before the listing's."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gzip
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from streamer.errors import ConfigError, Denied, Missing, SourceError
from streamer.plan import Arrangement, Entries, ObjectRef, Plan, S3Uri
from streamer.plan.digest import parse_partial
from streamer.relay.deliver import delivery
from streamer.relay.once import stream_once
from streamer.relay.statistics import ChannelCounters
from streamer.relay.transport import TransportSpec, open_transport
from streamer.retry import RetryPolicy
from streamer.s3.pages.open_plan import OpenPlan
from streamer.sink.outlet import Drainable, FileOutlet
from tests.kit.harness import EAGER, RunChannel, clients_of, fill, running_channel
from tests.kit.pipes import eventually, off_loop, read_all, read_some
from tests.kit.raw import etag
from tests.kit.stub import S3Stub
from tests.kit.trailers import published_trailer

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking")

SIZES = [120_000, 1, 0, 99_999, 50_000, 300_001]


class Listed:
    """A listing whose runs come when the test says so: a `RunSource`."""

    base = S3Uri("b", "data/")
    objects_each = 1
    strays = None

    def __init__(self, stub: S3Stub, arrangement: Arrangement | None = None) -> None:
        self.arrangement = arrangement or Arrangement()
        self.refs = [
            ObjectRef("b", name.removeprefix("b/"), len(data), etag(data))
            for name, data in sorted(stub.objects.items())
        ]
        self.open_plan = OpenPlan(self.arrangement, self)
        self._runs: asyncio.Queue[Entries | Exception | None] = asyncio.Queue()

    @property
    def plan(self) -> Plan:
        return self.open_plan.plan

    @property
    def whole(self) -> Plan:
        """The plan of a listing that has ended."""
        return Plan.of(self.refs, self.arrangement)

    def names(self, first: int, end: int | None = None) -> None:
        """The listing names the objects from number `first` up to `end`."""
        run = self.arrangement.entries()
        for ref in self.refs[first:end]:
            run.add(ref)
        self._runs.put_nowait(run)

    def ends(self, error: Exception | None = None) -> None:
        self._runs.put_nowait(error)

    async def runs(
        self, policy: RetryPolicy, on_wait: Callable[[SourceError], None] | None = None
    ) -> AsyncGenerator[Entries, None]:
        assert (policy, on_wait) == (EAGER, None)
        while (run := await self._runs.get()) is not None:
            if isinstance(run, Exception):
                raise run
            yield run


@contextlib.asynccontextmanager
async def streaming(
    run: RunChannel, stub: S3Stub, directory: Path, listed: Listed, **options: Any
) -> AsyncIterator[Any]:
    """A channel of the open plan."""

    async def first(_: object) -> Plan:
        await listed.open_plan.first()
        return options.pop("plan", None) or listed.plan

    async with asyncio.TaskGroup() as group:
        task = group.create_task(listed.open_plan.list(EAGER))
        try:
            async with run(stub, directory, make_plan=first, **options) as running:
                yield running
        finally:
            task.cancel()


class ClosingOutlet(FileOutlet):
    """A file; the listing ends in the turn of the loop after the one in which its last byte is delivered."""

    def __init__(self, fd: int, listed: Listed) -> None:
        super().__init__(fd)
        self._growth, self._left = listed.open_plan.growth, sum(ref.size for ref in listed.refs)

    def push(self, source: Drainable) -> int:
        count = super().push(source)
        self._left -= count
        if not self._left:
            asyncio.get_running_loop().call_soon(self._growth.close)
        return count


@pytest.mark.parametrize("size", [5_000, 300_000])
async def test_a_listing_that_ends_while_delivery_lets_others_run(
    stub: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Its end was missed once: the epoch waited for ever after its last byte."""
    monkeypatch.setattr(delivery, "TURN", 1)
    truth = fill(stub, [size])
    listed = Listed(stub)
    for _ in listed.open_plan.growth.add(listed.whole.entries):
        pass
    with open(tmp_path / "stream", "wb") as file:
        async with clients_of(stub) as clients:
            spec = TransportSpec(buckets={"b"}, channels=[None], budget=1 << 26, to_pipes=False)
            async with open_transport(clients, spec) as transport:
                await stream_once(
                    listed.plan,
                    transport.source,
                    transport.stages(),
                    policy=EAGER,
                    counters=ChannelCounters(),
                    open_outlet=lambda _: ClosingOutlet(file.fileno(), listed),
                )
    assert (tmp_path / "stream").read_bytes() == truth


async def test_a_trailer_covers_every_byte_that_was_read(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    """Its partial digest is over the first entries, and it is there before their bytes are."""
    fill(stub, SIZES)
    listed = Listed(stub)
    listed.names(0, 1)
    async with streaming(run, stub, tmp_path, listed) as running:
        with await off_loop(lambda: open(running.fifo(0), "rb", buffering=0)) as file:
            for count in range(1, len(SIZES)):
                if SIZES[count - 1]:
                    await off_loop(file.read, 1)
                covered = parse_partial(published_trailer(tmp_path, "train", 0).digest)
                assert covered is not None
                assert covered[0] >= count - (not SIZES[count - 1])
                assert covered[1] == Plan.of(listed.refs[: covered[0]]).digest
                listed.names(count, count + 1)
            listed.ends()
            await eventually(lambda: published_trailer(tmp_path, "train", 0).digest == listed.whole.digest)
            assert published_trailer(tmp_path, "train", 0).bytes_total == sum(SIZES)
            assert published_trailer(tmp_path, "train", 1).digest == listed.whole.digest


async def test_the_reader_waits_at_the_last_listed_byte(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    """It sees no end there, and the waiting time is the listing's."""
    truth = fill(stub, [1000, 1000])
    listed = Listed(stub)
    listed.names(0, 1)
    async with streaming(run, stub, tmp_path, listed) as running:
        reading = asyncio.ensure_future(off_loop(read_all, running.fifo(0)))
        await eventually(lambda: running.channel.statistics().starved["listing"] > 0)
        assert not reading.done()
        assert published_trailer(tmp_path, "train", 0).state == "open"
        listed.names(1)
        listed.ends()
        assert await reading == truth


async def test_an_object_that_no_record_holds_fails_the_epoch_by_name(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    fill(stub, SIZES)
    listed = Listed(stub)
    listed.names(0, 1)
    async with streaming(run, stub, tmp_path, listed) as running:
        listed.ends(ConfigError("the plan has 2 objects so far; narrow S3Uri"))
        reading = asyncio.ensure_future(off_loop(read_some, running.fifo(0), SIZES[0]))
        await eventually(lambda: running.channel.error)
        assert "after 1 object: the plan has 2 objects so far" in str(running.channel.error)
        assert running.channel.error.kind == "refused"
        await reading


async def test_a_reader_that_leaves_early_finds_the_next_epoch_whole(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    truth = fill(stub, SIZES)
    listed = Listed(stub)
    listed.names(0, 2)
    async with streaming(run, stub, tmp_path, listed) as running:
        assert await off_loop(read_some, running.fifo(0), 1000) == truth[:1000]
        await eventually(lambda: running.states)
        assert (running.states[0].state, running.states[0].bytes_total) == ("abandoned", None)
        reading = asyncio.ensure_future(off_loop(read_all, running.fifo(1)))
        listed.names(2, 4)
        listed.names(4)
        listed.ends()
        assert await reading == truth
        assert [trailer.state for trailer in running.states] == ["abandoned", "complete"]


async def test_a_reader_that_leaves_while_the_listing_is_silent_is_noticed(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    truth = fill(stub, [1000, 1000])
    listed = Listed(stub)
    listed.names(0, 1)
    async with streaming(run, stub, tmp_path, listed) as running:
        assert await off_loop(read_some, running.fifo(0), 1000) == truth[:1000]
        await eventually(lambda: running.states)
        assert running.states[0].state == "abandoned"


async def test_a_drain_lets_the_epoch_end_with_the_listing(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    truth = fill(stub, SIZES)
    listed = Listed(stub)
    listed.names(0, 1)
    async with streaming(run, stub, tmp_path, listed) as running:
        reading = asyncio.ensure_future(off_loop(read_all, running.fifo(0)))
        await eventually(lambda: running.channel.statistics().state == "streaming")
        running.channel.drain()
        listed.names(1)
        listed.ends()
        assert await reading == truth
        await running.task
    assert published_trailer(tmp_path, "train", 0).state == "complete"


async def test_a_drain_without_a_reader_waits_for_no_listing(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    fill(stub, SIZES)
    listed = Listed(stub)
    listed.names(0, 1)
    async with streaming(run, stub, tmp_path, listed) as running:
        running.channel.drain()
        await running.task
        listed.names(1)
        listed.ends()
        await listed.open_plan.ended()
        assert os.listdir(tmp_path) == []  # no trailer comes again


async def test_empty_objects_alone_are_a_complete_epoch(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    fill(stub, [0, 0])
    listed = Listed(stub)
    listed.names(0, 1)
    async with streaming(run, stub, tmp_path, listed) as running:
        reading = asyncio.ensure_future(off_loop(read_all, running.fifo(0)))
        await eventually(lambda: running.channel.statistics().starved["listing"] > 0)
        listed.names(1)
        listed.ends()
        assert await reading == b""
        assert published_trailer(tmp_path, "train", 0).state == "complete"


async def test_compressed_objects(stub: S3Stub, tmp_path: Path) -> None:
    run = functools.partial(running_channel, transport="buffered")
    contents = [os.urandom(70_000), b"", b"x" * 500_000, os.urandom(10)]
    stub.objects |= {f"b/data/{number}": gzip.compress(data) for number, data in enumerate(contents)}
    listed = Listed(stub, Arrangement(inflate=True))
    listed.names(0, 2)
    async with streaming(run, stub, tmp_path, listed, inflate=True) as running:
        reading = asyncio.ensure_future(off_loop(read_all, running.fifo(0)))
        await eventually(lambda: running.channel.statistics().starved["listing"] > 0)
        listed.names(2)
        listed.ends()
        assert await reading == b"".join(contents)


@pytest.mark.parametrize("error", [Missing("no such bucket"), Denied("no")])
async def test_a_listing_without_objects_raises_before_the_channel_begins(
    stub: S3Stub, error: SourceError
) -> None:
    listed = Listed(stub)
    listed.ends(error)
    await listed.open_plan.list(EAGER)
    with pytest.raises(type(error)) as raised:
        await listed.open_plan.first()
    assert raised.value is error
    assert listed.plan.open


async def test_a_listing_of_one_run_is_whole_at_once(stub: S3Stub) -> None:
    """So a small prefix begins as ever: with its digest and length."""
    fill(stub, SIZES)
    listed = Listed(stub)
    listed.names(0)
    listed.ends()
    async with asyncio.TaskGroup() as group:
        group.create_task(listed.open_plan.list(EAGER))
        await listed.open_plan.first()
        assert not listed.plan.open
        assert listed.plan.digest == listed.whole.digest
