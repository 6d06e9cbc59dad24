"""A channel on a stub: what most relay tests start from."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from streamer.errors import SinkError, SourceError
from streamer.linux import PIPE_SIZE
from streamer.plan import START, Arrangement, Part, Plan, Position, ResumePoint, S3Uri
from streamer.relay.channel import Channel
from streamer.relay.channel_spec import ChannelEvents, ChannelSpec, StartPosition, WhenFailed
from streamer.relay.staging.buffers import BUFFER_SIZE
from streamer.relay.staging.stage import Stage, Stages
from streamer.relay.statistics import ChannelCounters, EpochRequests
from streamer.relay.transport import Transport, TransportSpec, Wish, open_transport
from streamer.retry import RetryPolicy
from streamer.s3.checksums import StoredChecksums
from streamer.s3.client.endpoint import STALL_TIMEOUT, Endpoint
from streamer.s3.client.session import Clients, open_clients
from streamer.s3.pages.pages import PageSource
from streamer.s3.ranges import RangeSource
from streamer.schedule.budget import ChannelQuota
from streamer.sink.fifo_names import NameWatch
from streamer.sink.write_ends import LocalWriteEnds
from streamer.trailer import Trailer, withdrawn_path
from tests.kit.pipes import eventually, off_loop
from tests.kit.planning import plan_prefix
from tests.kit.stub import S3Stub

MORE_THAN_A_FIFO = 40_000_000
"""Spliced pages may be large ones, so a FIFO of 256 slots can take several times its nominal 1 MiB."""

EAGER = RetryPolicy(give_up_after=30, first_wait=0.001, longest_wait=0.01)


@functools.lru_cache(maxsize=8)
def _contents(sizes: tuple[int, ...], seed: int) -> list[bytes]:
    """Objects of these sizes; of 40 MB their bytes and ETags take 0.2 s of CPU, and many tests have them."""
    source = random.Random(seed)
    return [source.randbytes(size) for size in sizes]


def fill(stub: S3Stub, sizes: list[int], *, prefix: str = "b/data/", seed: int = 1) -> bytes:
    """Put objects of these sizes; return what an epoch of them must be."""
    contents = _contents(tuple(sizes), seed)
    stub.objects |= {f"{prefix}{i:04d}": data for i, data in enumerate(contents)}
    return b"".join(contents)


class Server(Protocol):
    """An S3 server of a test, such as `S3Stub` and `RawServer`."""

    @property
    def url(self) -> str: ...


@contextlib.asynccontextmanager
async def clients_of(
    stub: Server, *, stall_timeout: float = STALL_TIMEOUT, by_aiobotocore: bool = False, **endpoint: Any
) -> AsyncIterator[Clients]:
    """`endpoint`: fields of `Endpoint` besides the stub's own. The others are as of `open_clients`."""
    context = Endpoint(url=stub.url, path_style=True, **endpoint)
    async with open_clients(
        context, connections=8, stall_timeout=stall_timeout, by_aiobotocore=by_aiobotocore
    ) as clients:
        yield clients


@contextlib.asynccontextmanager
async def transport_of(
    stub: Server, wish: Wish, *, channels: Sequence[str | None] = (None,), **spec: Any
) -> AsyncIterator[tuple[Clients, Transport]]:
    """Open clients of a server and their transport for bucket `b`. `spec`: fields of `TransportSpec`."""
    chosen = TransportSpec(wish=wish, buckets={"b"}, channels=channels, **spec)
    async with clients_of(stub) as clients, open_transport(clients, chosen) as transport:
        yield clients, transport


def _budget(parts: int, part_size: int, transport: Wish) -> int:
    """Bytes for `parts` parts."""
    if transport == "splice":
        return max(parts * part_size, 2 * PIPE_SIZE)
    return parts * -(-part_size // BUFFER_SIZE) * BUFFER_SIZE


class KeptStages:
    """Makes the stages of a channel as `stages` does, and keeps them."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._made: list[Stage] = []
        self.part_size = stages.part_size
        self.reserved_bytes = stages.reserved_bytes

    @property
    def quota(self) -> ChannelQuota:
        return self._stages.quota

    def make(self, part: Part, *, on_change: Callable[[], None], counters: ChannelCounters) -> Stage:
        stage = self._stages.make(part, on_change=on_change, counters=counters)
        self._made.append(stage)
        return stage

    @property
    def undelivered(self) -> list[Stage]:
        """Stages of the parts that are not delivered to the last byte, in the order of the stream."""
        return [stage for stage in self._made if stage.staged or stage.received < stage.part.body]


class KeptMarks(LocalWriteEnds):
    """Write ends that keep the resume points that they are given."""

    def __init__(self, channel: str) -> None:
        super().__init__(channel)
        self.marks: list[ResumePoint] = []

    def mark(self, mark: ResumePoint) -> None:
        self.marks.append(mark)
        super().mark(mark)


@dataclass
class Running:
    """A channel that runs, what it has reported, and where its FIFOs are."""

    channel: Channel
    plan: Plan
    states: list[Trailer]
    directory: Path
    task: asyncio.Task[None]
    quota: ChannelQuota
    """The channel's part of the memory, the connections and the bandwidth."""
    source: RangeSource
    stages: KeptStages
    marks: list[ResumePoint]
    """The resume points that the channel has stored."""
    replaced: list[str]
    """Paths of FIFOs that the channel has offered again."""
    names: NameWatch

    def fifo(self, epoch: int) -> Path:
        return self.directory / f"train_{epoch}"

    def withdrawn(self, epoch: int) -> Path:
        """Where the FIFO is once its reader has come."""
        return Path(withdrawn_path(str(self.directory), "train", epoch))


PagesFrom = Callable[..., AbstractAsyncContextManager[PageSource]]
"""Opens the pages of a server's listings."""

RunChannel = Callable[..., AbstractAsyncContextManager[Running]]
"""`running_channel`, some of whose arguments are given."""


class _Report(ChannelEvents):
    """Keeps the trailers of ended epochs."""

    def __init__(
        self,
        states: list[Trailer],
        replaced: list[str],
        on_end_believed: Callable[[int, int], None] | None,
    ) -> None:
        self._states = states
        self._replaced = replaced
        self._on_end_believed = on_end_believed

    def epoch_ended(self, trailer: Trailer, _: EpochRequests) -> None:
        self._states.append(trailer)

    def fifo_replaced(self, path: str) -> None:
        self._replaced.append(path)

    def end_believed(self, epoch: int, offset: int) -> None:
        if self._on_end_believed is not None:
            self._on_end_believed(epoch, offset)


@contextlib.asynccontextmanager
async def running_channel(  # noqa: PLR0913 - a test names only what it is about
    stub: Server,
    directory: Path,
    *,
    prefix: str = "b/data/",
    parts: int = 8,
    part_size: int = 50_000,
    requests_in_flight: int = 4,
    policy: RetryPolicy = EAGER,
    transport: Wish = "aiobotocore",
    arrangement: Arrangement | None = None,
    make_plan: Callable[[Clients], Awaitable[Plan]] | None = None,
    inflate: bool = False,
    ahead: int = 0,
    join: bool = False,
    hedge: float = 0.0,
    check: bool = False,
    when_failed: WhenFailed = "hold",
    lists_keys: bool = False,
    start: Position = START,
    on_end_believed: Callable[[int, int], None] | None = None,
    **endpoint: Any,
) -> AsyncIterator[Running]:
    """List the prefix, prepare and run a channel `train`; cancel it at the end.

    `arrangement`: of the objects under the prefix.
    `parts`: how many parts the budget has room for. `make_plan`: from clients, instead of the prefix.
    `inflate`, `join`: whether that plan does. `ahead`: bytes in which it inflates ahead of delivery.
    `hedge`: as of `open_transport`; none, as faults are scripted.
    `endpoint`: as of `clients_of`.
    """
    looked_at = inflate or join
    why = "checksums are computed in memory" if check else "a test looks at bytes" if looked_at else None
    async with (
        clients_of(stub, by_aiobotocore=transport == "aiobotocore", **endpoint) as clients,
        open_transport(
            clients,
            TransportSpec(
                wish=transport,
                buckets={"b"},
                channels=[why],
                budget=_budget(parts, part_size, transport),
                requests_in_flight=requests_in_flight,
                part_size=part_size,
                hedge=hedge,
            ),
        ) as chosen,
    ):
        bucket, _, key = prefix.partition("/")
        if make_plan is None:
            plan = await plan_prefix(clients, S3Uri(bucket, key), arrangement)
        else:
            plan = await make_plan(clients)
        states: list[Trailer] = []
        chosen.memory_budget.ahead = ahead
        stages = KeptStages(chosen.stages(why))
        spec = ChannelSpec(
            name="train",
            plan=plan,
            directory=str(directory),
            retry=policy,
            stored_checksums=StoredChecksums(clients.control, clients.credentials) if check else None,
            when_failed=when_failed,
            start=StartPosition(start),
            lists_keys=lists_keys,
        )
        write_ends = KeptMarks(spec.name)
        replaced: list[str] = []
        names = NameWatch(str(directory))
        channel = Channel(
            spec,
            chosen.source,
            stages,
            events=_Report(states, replaced, on_end_believed),
            write_ends=write_ends,
            names=names,
        )
        try:
            channel.prepare()
        except BaseException:
            channel.close()
            names.close()
            raise
        task = asyncio.create_task(channel.run())
        try:
            yield Running(
                channel,
                plan,
                states,
                directory,
                task,
                stages.quota,
                chosen.source,
                stages,
                write_ends.marks,
                replaced,
                names,
            )
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            channel.close()
            names.close()


async def failure(running: Running) -> SourceError | SinkError:
    """Read until the channel fails; return its error."""
    reader = await off_loop(os.open, running.fifo(0), os.O_RDONLY)
    try:
        await eventually(lambda: running.channel.error)
        running.channel.drain()
        await running.task
    finally:
        os.close(reader)
    assert running.channel.error is not None
    return running.channel.error
