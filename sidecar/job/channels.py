"""Builds the channels of a job from its configuration: S3 clients, transport, one `Channel` for each FIFO."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sidecar.config.transport import retry_policy, transport_spec
from sidecar.job.channel_log import EpochLog
from sidecar.process.logs import log
from streamer.errors import SinkError
from streamer.relay.channel import Channel
from streamer.relay.channel_spec import ChannelSpec
from streamer.relay.shared_stream import SharedStream
from streamer.relay.transport import Transport, open_transport, why_read
from streamer.s3.client.session import open_clients
from streamer.schedule.concurrency import MOST_REQUESTS
from streamer.sink.fifo_names import NameWatch
from streamer.sink.write_ends import KeeperWriteEnds

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping

    from sidecar.config.job import Job
    from sidecar.config.request import ChannelConfig
    from sidecar.index.learning import IndexLearner
    from sidecar.job.planning import Planned
    from sidecar.observe.state import JobState
    from sidecar.process.resources import Footprint
    from streamer.errors import SourceError
    from streamer.helpers.keeper_client import KeeperClient
    from streamer.plan import Plan
    from streamer.relay.channel_spec import StartPosition
    from streamer.relay.deliver.shared_fifo import SharedFifo
    from streamer.relay.staging.stage import Stages
    from streamer.s3.checksums import StoredChecksums
    from streamer.s3.client.session import Clients


@dataclass(frozen=True, slots=True)
class Fifo:
    """One FIFO of the job: its channel and the plan that it streams."""

    name: str
    channel: ChannelConfig
    plan: Plan

    @property
    def why_read(self) -> str | None:
        """See `streamer.relay.transport.why_read`."""
        return why_read(self.plan, check=self.channel.penstock.integrity == "checksum")


def fifos(job: Job, plans: Mapping[str, Planned]) -> list[Fifo]:
    """Return every FIFO of the job, in the order of the job file."""
    return [
        Fifo(name, channel, plan)
        for channel in job.channels("Pipe")
        for name, plan in plans[channel.channel_name].fifos.items()
    ]


def job_clients(
    job: Job,
    on_wait: Callable[[SourceError], None] | None = None,
    ask: Callable[[str], Awaitable[str]] | None = None,
) -> contextlib.AbstractAsyncContextManager[Clients]:
    """Open the process's S3 clients, sized for this job.

    `on_wait`: wait for credentials that may come later, and call it with each failure; None: do not wait.
    `ask`: see `open_clients`.
    """
    penstock = job.penstock
    return open_clients(
        penstock.endpoint.resolved(),
        connections=penstock.requests_in_flight or MOST_REQUESTS,
        stall_timeout=penstock.longest_silence,
        by_aiobotocore=penstock.transport == "aiobotocore",
        give_up_after=0.0 if on_wait is None else penstock.give_up_after,
        on_wait=on_wait,
        ask=ask,
    )


def fetched(streams: list[Fifo], plans: Mapping[str, Planned]) -> list[Fifo]:
    """Return the FIFOs that are fetched apart from others: of a shared stream the first alone."""
    rest = {name for planned in plans.values() for each in planned.shared for name in each.names[1:]}
    return [fifo for fifo in streams if fifo.name not in rest]


def _pipes(streams: list[Fifo], plans: Mapping[str, Planned]) -> int:
    """Return the FIFOs of the job, and the pipes of shared streams."""
    return len(streams) + sum(len(planned.shared) for planned in plans.values())


@contextlib.asynccontextmanager
async def job_transport(
    state: JobState, clients: Clients, streams: list[Fifo], plans: Mapping[str, Planned]
) -> AsyncIterator[Transport]:
    """Open the transport of all channels and note it in `state`.

    Raises ConfigError if the job file names a transport that this job cannot use.
    """
    job = state.job
    buckets = set().union(*(fifo.plan.entries.buckets for fifo in streams))
    entering = open_transport(
        clients,
        transport_spec(
            job,
            buckets,
            [fifo.why_read for fifo in fetched(streams, plans)] or [None],
            fifos=_pipes(streams, plans),
        ),
    )
    async with contextlib.AsyncExitStack() as stack:
        try:
            transport = await stack.enter_async_context(entering)
        except OSError as error:
            raise SinkError(
                f"cannot set up the transport: {error.strerror or error}; raise `ulimit -n`, or the "
                "memory limit"
            ) from error
        state.note_transport(transport)
        log.info("transport", transport=transport.name, reason=transport.reason)
        read = {fifo.channel.channel_name: why for fifo in streams if (why := fifo.why_read)}
        if transport.pipes is not None and read:
            log.info("bytes are read, not spliced", channels=read)
        if transport.few_files:
            log.warning("few open files", limits=transport.few_files)
        yield transport


def footprint(job: Job, transport: Transport, streams: list[Fifo], *, keeper: bool = False) -> Footprint:
    """Return what the memory of a job depends on whose transport is chosen."""
    read = transport.name == "splice" and any(fifo.why_read for fifo in streams)
    return job.footprint("buffered" if read else transport.name, keeper=keeper)


@contextlib.contextmanager
def watched_names(directory: str) -> Iterator[NameWatch | None]:
    """Watch the names of `directory` if the kernel allows it; otherwise log that they are not watched."""
    try:
        names = NameWatch(directory)
    except OSError as error:
        log.warning("names of FIFOs are not watched", directory=directory, error=error.strerror)
        yield None
        return
    try:
        yield names
    finally:
        names.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelMaker:
    """Makes the channels of a job, from what they share."""

    state: JobState
    transport: Transport
    stored_checksums: StoredChecksums | None
    keeper: KeeperClient | None
    directory: str
    """Directory of the FIFOs."""
    names: NameWatch | None
    """Watches `directory`."""
    learners: Mapping[str, IndexLearner]
    """By channel, what learns its record index."""

    def make(
        self, streams: list[Fifo], plans: Mapping[str, Planned], starts: Mapping[str, StartPosition]
    ) -> list[SharedStream]:
        """Put the channels of all FIFOs into `state`; return the streams that several of them share."""
        by_name = {fifo.name: fifo for fifo in streams}
        delivered: dict[str, tuple[Stages, SharedFifo]] = {}
        """By FIFO of a shared stream, what delivers its bytes."""
        found = []
        for shared in (each for planned in plans.values() for each in planned.shared):
            stages = self._stages(by_name[shared.names[0]])
            stream = SharedStream(
                shared.plan,
                shared.ranks,
                starts,
                source=self.transport.source,
                stages=stages,
                retry=retry_policy(self.state.job),
            )
            delivered |= {each.name: (stages, each) for each in stream.fifos}
            found.append(stream)
        self.state.channels = {
            fifo.name: self._channel(fifo, starts[fifo.name], delivered.get(fifo.name)) for fifo in streams
        }
        return found

    def _stages(self, fifo: Fifo) -> Stages:
        name = fifo.channel.channel_name
        stages = self.transport.stages(fifo.why_read)
        stages.quota.bandwidth = self.state.bandwidth[name]
        if name not in self.learners:
            return stages
        tap = self.learners[name].tap()
        self.state.learnt[fifo.name] = tap.outcomes
        return self.transport.tapped(stages, tap)

    def _channel(self, fifo: Fifo, start: StartPosition, shared: tuple[Stages, SharedFifo] | None) -> Channel:
        """Return the channel of one FIFO. `shared`: what delivers its bytes; None: itself."""
        penstock, config, keeper = self.state.job.penstock, fifo.channel, self.keeper
        stages, part = shared or (self._stages(fifo), None)
        spec = ChannelSpec(
            name=fifo.name,
            plan=fifo.plan,
            directory=self.directory,
            fifo_mode=penstock.fifo_mode,
            retry=retry_policy(self.state.job),
            start=start,
            when_failed=config.penstock.when_failed,
            stored_checksums=self.stored_checksums if config.penstock.integrity == "checksum" else None,
            lists_keys=config.penstock.record_keys,
        )
        return Channel(
            spec,
            self.transport.source,
            stages,
            events=EpochLog(self.state, fifo.name, self.learners.get(config.channel_name)),
            write_ends=None
            if keeper is None
            else KeeperWriteEnds(keeper, fifo.name, digest=lambda: fifo.plan.digest),
            names=self.names,
            shared=part,
        )
