"""A job from its file to its end: list, offer, stream, stop.

    start    try what this machine must allow (`sidecar.rehearsal`); open the admin port, not ready yet
             resolve credentials, list every channel (all at once)   any error here ends the process
             lock and lay out the directory, write config files,     before a FIFO is offered
             download every File channel, one after the other        (storage that is away is waited for)
             make every Pipe channel's first FIFO
    ready    channels run side by side, independent of each other; one that fails holds its FIFO open,
             readiness goes false, the others go on
             with a keeper, channels begin where the last sidecar's ended (`sidecar.resume`)
    end      `Stop` raised in the task group by a signal (after a drain) or by the trainer's exit

Every channel is a task in one TaskGroup; ending is an exception that travels through it. `serve`
returns the exit code: 0, or that of the first channel failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from sidecar.admin import serve_admin
from sidecar.download import DownloadLimits, download
from sidecar.endmarks import JOIN_ADVICE, unjoined
from sidecar.environment import write_environment_file
from sidecar.exits import Exit, exit_code
from sidecar.failures import advice, fate, place, remind
from sidecar.logs import log
from sidecar.memory import memory_limit
from sidecar.planning import Planned, patiently, plan_channel
from sidecar.pulse import Pulse
from sidecar.rehearsal import disk, local
from sidecar.resume import BEGIN, Begin, Saved, begins
from sidecar.runtime import Layout, keep_loaded, set_reader_state, write_config_files
from sidecar.verdict import Moment, judge
from streamer.errors import SinkError
from streamer.relay.bandwidth import Bandwidth
from streamer.relay.changes import Change, Changes
from streamer.relay.channel import Channel
from streamer.relay.pace import MOST_LANES
from streamer.relay.transport import Transport, open_transport, why_read
from streamer.sink.ends import KeptEnds
from streamer.sink.kept import FLUSH_WITHIN, KeeperClient, connected, started
from streamer.source.aiobotocore_source import AiobotocoreSource
from streamer.source.described import PlanMemory
from streamer.source.heads import Heads, open_heads
from streamer.source.integrity import Sums
from streamer.source.retry import RetryPolicy
from streamer.source.session import open_clients
from streamer.units import MIB, human_bytes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from sidecar.config import Job
    from sidecar.identity import Hosts
    from sidecar.request import ChannelConfig
    from streamer.errors import SourceError
    from streamer.plan import Join, ObjectRef, Plan
    from streamer.relay.allotment import Allotment
    from streamer.relay.statistics import ChannelStatistics
    from streamer.source.session import Clients
    from streamer.trailer import Trailer


DOWNLOAD_WORKERS = 32
"""Parts of File channels that are fetched at once, as far as the budget goes."""
DOWNLOAD_PART = 8 * MIB
"""Bytes of such a part, if nothing else is asked for."""


PROGRESS_EVERY = 10.0
"""Seconds between log lines while a plan is being made."""


class Stop(Exception):
    """Ends the job from inside its task group."""


class Supervisor:
    """Runs one job. Use `serve` once."""

    def __init__(
        self,
        job: Job,
        layout: Layout,
        hosts: Hosts,
        *,
        default_admin_port: int,
        keep_proof: bool = True,
        keeper: str | None = None,
        saved: Mapping[str, Saved] | None = None,
        resume_anyway: bool = False,
    ) -> None:
        """`job`: with the channels of this host only.

        `keeper`: the socket of one, or `auto` to start one if there is none. `saved`: where channels begin.

        `default_admin_port`: for a job that names none; 0 for any free one.

        `keep_proof`: leave the trailers behind for readers that are still at work.
        """
        self.job = job
        self.layout = layout
        self.hosts = hosts
        self._default_admin_port = default_admin_port
        self._keep_proof = keep_proof
        self._keeper_path = keeper
        self._keeper: KeeperClient | None = None
        self._saved = saved or {}
        self._resume_anyway = resume_anyway
        self.transport = "none"
        """Which transport runs."""
        self.failed = asyncio.Event()
        """Set when the first channel has failed for good."""
        self.reason = ""
        """Why that one."""
        self.pulse = Pulse(self.statistics)
        self.planning_seconds = 0.0
        self.unjoined: dict[str, Join] = {}
        """By FIFO, the format of objects that carry end marks and are not joined."""
        self.memory_limit = memory_limit()
        """Bytes that this process may take."""
        self.sources = {
            name: str(channel.source.uri) for channel in job.channels("Pipe") for name in job.fifos(channel)
        }
        """Of each FIFO's channel, where its objects are."""
        self.allotment: Allotment | None = None
        """What the channels share, once there is a transport."""
        self.asked: Counter[str] = Counter()
        """Requests beside those for parts, by operation."""
        self.bandwidth: dict[str, Bandwidth] = {
            channel.channel_name: Bandwidth(channel.penstock.bandwidth) for channel in job.channels("Pipe")
        }
        """Of each channel; its lanes share it."""
        self.channels: dict[str, Channel] = {}
        self._waiting_for = ""
        """What the start waits for, if storage is away."""
        self._told: dict[str, float] = {}
        """When the log was last told so, by channel."""
        self._ended: dict[str, Moment] = {}
        """Of each channel, the end of the epoch before."""
        self._offered = False
        self._cut_off: list[str] = []
        """Channels whose reader had not read to the end when draining was over."""
        self._leaving = False
        """Whether another sidecar is to go on, so that the keeper must get everything."""
        self.started = False
        """Whether every FIFO has been offered; stays true to the end."""

    @property
    def ready(self) -> bool:
        return self._offered and not any(channel.error for channel in self.channels.values())

    def why_not_ready(self) -> str:
        """One line for a probe; meaningful only when not ready."""
        failed = [f"{name}: {channel.error}" for name, channel in self.channels.items() if channel.error]
        return "; ".join(failed) or self._waiting_for or "the FIFOs are not offered yet, or no more"

    def statistics(self) -> dict[str, ChannelStatistics]:
        """A snapshot of every channel, by name."""
        return {name: channel.statistics() for name, channel in self.channels.items()}

    async def serve(self, until: Callable[[Supervisor], Awaitable[None]]) -> Exit:
        """Run the job until `until(self)` returns; it is started once every FIFO is offered.

        Raises PenstockError for whatever prevents the start.
        """
        log.info("host", name=self.hosts.current, index=self.hosts.index, of=len(self.hosts.names))
        async with contextlib.AsyncExitStack() as stack:
            await local(self.job, self.layout, fresh=self._keeper_path is None and not self._saved)
            admin = self.job.penstock.admin
            admin_port = await stack.enter_async_context(
                serve_admin(
                    self,
                    host=admin.host,
                    port=self._default_admin_port if admin.port is None else admin.port,
                )
            )
            admin_url = f"http://{admin.host}:{admin_port}/"
            log.info("starting", admin=admin_url)
            clients = await stack.enter_async_context(self.clients())
            self.asked = clients.asked
            began = time.monotonic()
            plans = await self.plans(clients, give_up_after=self.job.penstock.give_up_after, check_disk=True)
            self._waiting_for = ""
            self.planning_seconds = time.monotonic() - began
            transport = await stack.enter_async_context(self.open_transport(clients, plans))
            heads = await stack.enter_async_context(self._heads(clients))
            sums = Sums(clients.control, clients.credentials) if self.job.checks else None
            self.layout.create()
            for exposed in self.layout.exposure():
                log.warning("directory exposed", why=exposed)
            stack.enter_context(self.layout.locked())
            write_config_files(self.layout, self.job, self.hosts)
            write_environment_file(self.layout, self.job, self.hosts)
            stack.push_async_callback(self._part_from_keeper)
            await self._reach_keeper()
            piped = {
                name: (channel, plan)
                for channel in self.job.channels("Pipe")
                for name, plan in plans[channel.channel_name].fifos.items()
            }
            places = await asyncio.to_thread(self._begins, {name: plan for name, (_, plan) in piped.items()})
            set_reader_state(
                self.layout,
                {
                    name: place.position.epoch
                    for name, place in places.items()
                    if self._keeper is None or name not in self._keeper.held
                },
            )
            await self._download(plans, clients)
            self.channels = {
                name: self._channel(name, channel, plan, transport, places[name], heads=heads, sums=sums)
                for name, (channel, plan) in piped.items()
            }
            for channel in self.channels.values():
                stack.callback(channel.close, forget=not self._keep_proof)
                channel.prepare()
            self._offered = self.started = True
            log.info("ready", directory=self.layout.data, admin=admin_url)
            keep_loaded()
            await self._run(until)
            left = [channel for channel in self.channels.values() if channel.outlives]  # the keeper is known
        for channel in left:
            if channel.error is not None:
                log.warning(
                    "left to the keeper, which holds the FIFO until its reader leaves",
                    channel=channel.name,
                    do=advice(channel.error, mendable=channel.mendable),
                )
        failure = self.failure
        return Exit.OK if failure is None else exit_code(failure[1])

    @property
    def failure(self) -> tuple[str, SourceError | SinkError] | None:
        """The first channel of the job that has failed, and why."""
        failed = ((name, channel.error) for name, channel in self.channels.items())
        return next(((name, error) for name, error in failed if error is not None), None)

    async def _reach_keeper(self) -> None:
        """Connect to the keeper, if one is wanted. Raises SinkError."""
        if self._keeper_path is None:
            return
        if self._keeper_path == "auto":
            client = await started(self.layout.keeper)
        else:
            client = await connected(self._keeper_path)
        self._keeper = client
        log.info("keeper", pid=client.pid, holds=sorted(client.held))

    async def _part_from_keeper(self) -> None:
        """Close the connection once the keeper has what it must know, which a slow one may not have yet."""
        if self._keeper is None:
            return
        try:
            async with asyncio.timeout(None if self._leaving else FLUSH_WITHIN):
                await self._keeper.flush()
        except TimeoutError:
            log.warning("the keeper does not answer, and may hold FIFOs that are over", pid=self._keeper.pid)
        except SinkError as error:
            log.error("the keeper is lost", error=str(error))
        finally:
            self._keeper.close()

    def _begins(self, plans: dict[str, Plan]) -> dict[str, Begin]:
        """Where every channel begins; takes a while for a large plan. Raises ConfigError."""
        held = self._keeper.held if self._keeper else {}
        places = begins(plans, held, self._saved, anyway=self._resume_anyway)
        for name, begin in places.items():
            if begin.position != BEGIN:
                log.info("resuming", channel=name, epoch=begin.position.epoch, offset=begin.position.offset)
        return places

    async def _download(self, plans: dict[str, Planned], clients: Clients) -> None:
        """Bring every File channel's objects. Raises SourceError, SinkError, ConfigError."""
        penstock = self.job.penstock
        part_size = int(penstock.part_size or DOWNLOAD_PART)
        limits = DownloadLimits(
            part_size=part_size,
            workers=min(penstock.connections or DOWNLOAD_WORKERS, max(1, self.job.budget // part_size)),
            policy=RetryPolicy(give_up_after=penstock.give_up_after),
        )
        for channel in self.job.channels("File"):
            name, plan = channel.channel_name, plans[channel.channel_name].whole
            size = {"objects": plan.objects(0), "bytes": plan.total_bytes(0)}
            log.info("downloading", channel=name, **size)
            fetched = await download(
                plan,
                AiobotocoreSource(clients.data, clients.credentials),
                directory=self.layout.data,
                channel=name,
                limits=limits,
            )
            log.info("downloaded" if fetched else "downloaded before", channel=name, **size)

    async def _run(self, until: Callable[[Supervisor], Awaitable[None]]) -> None:
        async def stop_when_told() -> None:
            await until(self)
            raise Stop

        try:
            async with asyncio.TaskGroup() as group:
                for name, channel in self.channels.items():
                    group.create_task(channel.run(), name=f"channel {name}")
                group.create_task(stop_when_told(), name="stop")
                group.create_task(self.pulse.run(), name="pulse")
                group.create_task(remind(self.channels), name="reminder")
        except* Stop:
            self._offered = False
            self._tell_cut_off()

    async def drain(self) -> None:
        """Begin no further epoch and wait until none is read, for at most `DrainFor` seconds."""
        self._offered = False
        for channel in self.channels.values():
            channel.drain()
        try:
            async with asyncio.timeout(self.job.penstock.drain_for):
                for channel in self.channels.values():
                    await channel.done.wait()
        except TimeoutError:
            found = self.statistics()
            self._cut_off = [name for name, statistics in found.items() if statistics.state == "streaming"]

    def _tell_cut_off(self) -> None:
        """Once no byte moves any more, or it would not be what is missing."""
        found = self.statistics()
        for name in self._cut_off:
            statistics = found[name]
            missing = statistics.bytes_total - statistics.bytes_consumed
            log.warning("cut off", channel=name, epoch=statistics.epoch, missing_bytes=missing)

    async def leave(self) -> None:
        """Have every channel end without a word, for another sidecar to go on; `until` returns next.

        Without a keeper one is started now, for them to leave their FIFOs to. Raises SinkError.
        """
        if self._keeper is None:
            keeper = await started(self.layout.keeper)
            if taken := sorted(keeper.held.keys() & self.channels.keys()):
                keeper.close()
                raise SinkError(
                    f"the keeper at {self.layout.keeper} (process {keeper.pid}) still holds a FIFO of "
                    f"{taken[0]} from another run; end it when no trainer reads that"
                )
            self._keeper = keeper
        self._leaving = True
        self._offered = False
        for channel in self.channels.values():
            channel.leave(self._keeper)

    @contextlib.asynccontextmanager
    async def open_transport(self, clients: Clients, plans: dict[str, Planned]) -> AsyncIterator[Transport]:
        """The transport of all channels. Raises ConfigError if the one asked for cannot be."""
        piped = [
            (channel, plan)
            for channel in self.job.channels("Pipe")
            for plan in plans[channel.channel_name].fifos.values()
        ]
        entering = open_transport(
            clients,
            wish=self.job.penstock.transport,
            buckets=set().union(*(plan.buckets() for _, plan in piped)),
            channels=[_why_read(plan, channel) for channel, plan in piped] or [None],
            budget=self.job.budget,
            connections=self.job.penstock.connections,
            part_size=self.job.penstock.part_size,
            hedge=self.job.penstock.hedge_budget,
        )
        async with contextlib.AsyncExitStack() as stack:
            try:
                transport = await stack.enter_async_context(entering)
            except OSError as error:
                raise SinkError(
                    f"cannot set up the transport: {error.strerror or error}; raise `ulimit -n`, or the "
                    "limit of memory"
                ) from error
            self.transport, self.reason = transport.name, transport.reason
            self.allotment = transport.allotment
            limit = self.job.penstock.bandwidth
            transport.allotment.bandwidth.change(limit, time.monotonic())
            log.info("transport", transport=transport.name, reason=transport.reason)
            if transport.pipes is not None and (read := _read_channels(piped)):
                log.info("bytes are read, not spliced", channels=read)
            if transport.few_files:
                log.warning("few open files", limits=transport.few_files)
            yield transport

    @contextlib.asynccontextmanager
    async def clients(self) -> AsyncIterator[Clients]:
        """The process's S3 clients, sized for this job."""
        penstock = self.job.penstock
        endpoint = penstock.endpoint.resolved()
        async with open_clients(
            endpoint,
            connections=penstock.connections or MOST_LANES,
            stall_timeout=penstock.longest_silence,
        ) as clients:
            yield clients

    async def plans(
        self, clients: Clients, *, give_up_after: float = 0, check_disk: bool = False
    ) -> dict[str, Planned]:
        """Every channel's plan, listed side by side. Raises SourceError, the first one met.

        `give_up_after`: seconds to wait for storage that is away. `check_disk`: raise SinkError as soon as
        the File channels are known to need more than there is.
        """
        plans: dict[str, Planned] = {}
        memory = PlanMemory(self.memory_limit // 2)
        files = {channel.channel_name for channel in self.job.channels("File")}

        async def make(channel: ChannelConfig) -> None:
            name = channel.channel_name

            tell = _Progress(name)

            def plan(progressed: Callable[[], None]) -> Awaitable[Plan]:
                def progress(count: int) -> None:
                    progressed()
                    tell(count)

                return plan_channel(
                    clients.control,
                    channel,
                    self.hosts,
                    shard_by=self.job.penstock.shard_by,
                    heads=heads,
                    progress=progress,
                    memory=memory,
                )

            whole = await patiently(
                plan, RetryPolicy(give_up_after=give_up_after), on_wait=partial(self._note_waiting, name)
            )
            found = plans[name] = Planned.dealt(whole, self.job.fifos(channel))
            # Some seconds for a million entries.
            await asyncio.to_thread(_sum_up, found)
            if check_disk and name in files:
                known = {each: plans[each].whole for each in files & plans.keys()}
                await asyncio.to_thread(disk, self.layout, known)
            log.info(
                "planned",
                channel=name,
                source=str(channel.source.uri),
                objects=whole.objects(0),
                bytes=whole.total_bytes(0),
                digest=whole.digest[:16],
                **({"lanes": len(found.fifos)} if name in self.job.lanes else {}),
            )
            self._note_end_marks(channel, found)

        async with (
            self._heads(clients) as heads,
            asyncio.TaskGroup() as group,
        ):
            for channel in self.job.input_data_config:
                group.create_task(make(channel))
        return {channel.channel_name: plans[channel.channel_name] for channel in self.job.input_data_config}

    def _note_end_marks(self, channel: ChannelConfig, planned: Planned) -> None:
        """Warn of objects after whose end mark a program may stop reading."""
        if self.job.mode(channel) != "Pipe" or (found := unjoined(channel, planned.whole)) is None:
            return
        self.unjoined |= dict.fromkeys(planned.fifos, found)
        name = channel.channel_name
        log.warning("objects carry end marks", channel=name, format=found, do=JOIN_ADVICE.format(found))

    def _note_waiting(self, channel: str, error: SourceError) -> None:
        self._waiting_for = f"{channel}: waiting for storage: {error}"
        now = time.monotonic()
        if now - self._told.get(channel, float("-inf")) >= PROGRESS_EVERY:
            self._told[channel] = now
            log.warning("waiting for storage", channel=channel, error=str(error))

    def _heads(self, clients: Clients) -> contextlib.AbstractAsyncContextManager[Heads]:
        penstock = self.job.penstock
        portable = penstock.transport == "portable"
        return open_heads(clients, give_up_after=penstock.give_up_after, portable=portable)

    def _channel(
        self,
        name: str,
        config: ChannelConfig,
        plan: Plan,
        transport: Transport,
        begin: Begin,
        *,
        heads: Heads,
        sums: Sums | None,
    ) -> Channel:
        """The channel `name`: `config`'s own, or one of its lanes."""
        penstock = self.job.penstock
        stages = transport.stages(_why_read(plan, config))
        stages.share.bandwidth = self.bandwidth[config.channel_name]

        def note_change(change: Change) -> None:
            log.warning("object changed", channel=name, epoch=change.epoch, change=str(change))

        def note_unverifiable(ref: ObjectRef) -> None:
            log.warning(
                "not compared: S3 keeps no checksum of the whole object, or the epoch was continued within "
                "it; this is said once",
                channel=name,
                object=f"s3://{ref.bucket}/{ref.key}",
            )

        def note_shortage(error: SinkError) -> None:
            log.warning("waiting for this machine", channel=name, error=str(error))

        def note_end_believed(epoch: int, offset: int) -> None:
            log.warning(
                "the reader left at the end of an object, with more to come: programs stop so at an end mark",
                channel=name,
                epoch=epoch,
                offset=offset,
                do="if it reads tar or Arrow, add Penstock: {Join: tar} or {Join: arrow} to the channel",
            )

        return Channel(
            name,
            plan,
            transport.source,
            stages,
            directory=self.layout.data,
            fifo_mode=penstock.fifo_mode,
            policy=RetryPolicy(give_up_after=penstock.give_up_after),
            on_verdict=self._note_verdict,
            changes=Changes(config.penstock.when_changed, heads.find, note_change),
            sums=sums if config.penstock.integrity == "checksum" else None,
            on_unverifiable=note_unverifiable,
            on_shortage=note_shortage,
            on_end_believed=note_end_believed,
            start=begin.position,
            ends=None if self._keeper is None else KeptEnds(self._keeper, name, digest=plan.digest),
            held=begin.held,
            refused=begin.refused,
            when_failed=config.penstock.when_failed,
            framing=config.poison,
        )

    def _figures(self, channel: str) -> dict[str, Any]:
        """What mattered in the epoch that has ended now: since the one before it, without time idle."""
        now = Moment.of(self.channels[channel].statistics(), time.monotonic())
        before, self._ended[channel] = self._ended.get(channel), now
        if before is None:
            before = Moment.beginning(now.at - sum(now.seconds.values()))
        spent = {state: now.seconds[state] - before.seconds[state] for state in now.seconds}
        seconds = sum(spent.values()) - spent["idle"]
        written = now.written - before.written
        return {
            "seconds": round(seconds, 1),
            "mb_per_second": round(written / seconds / 1e6, 1) if seconds > 0 else 0.0,
            "waited_for_storage": round(spent["starved"], 1),
            "waited_for_trainer": round(spent["blocked"], 1),
            "requests": now.ok + now.failures - before.ok - before.failures,
            "retries": now.failures - before.failures,
            "summary": judge(before, now, when="the epoch").text,
        }

    def _note_verdict(self, trailer: Trailer) -> None:
        speak = log.error if trailer.verdict == "failed" else log.info
        speak(
            f"epoch {trailer.verdict}",
            channel=trailer.channel,
            epoch=trailer.epoch,
            delivered=human_bytes(trailer.bytes_delivered),
            **({} if trailer.bytes_total is None else {"of": human_bytes(trailer.bytes_total)}),
            **self._figures(trailer.channel),
            **({"changed": trailer.changed} if trailer.changed else {}),
            **({"error": trailer.error} if trailer.error else {}),
            **self._failure_of(trailer),
        )
        if trailer.verdict == "failed":
            self.failed.set()

    def _failure_of(self, trailer: Trailer) -> dict[str, Any]:
        """What else is told of an epoch that has failed."""
        channel = self.channels[trailer.channel]
        if trailer.verdict != "failed" or channel.error is None:
            return {}
        return place(channel.error) | {
            "fifo": fate(channel),
            "do": advice(channel.error, mendable=channel.mendable),
        }


class _Progress:
    """Logs how far the plan of one channel is, if it takes long."""

    def __init__(self, channel: str) -> None:
        self._channel = channel
        self._told = time.monotonic()

    def __call__(self, count: int) -> None:
        now = time.monotonic()
        if now - self._told >= PROGRESS_EVERY:
            self._told = now
            log.info("planning", channel=self._channel, entries=count)


def _sum_up(planned: Planned) -> None:
    """Have the plans add up their first epoch and make their digests; they remember them."""
    for plan in (planned.whole, *planned.fifos.values()):
        plan.total_bytes(0)
        _ = plan.digest


def _why_read(plan: Plan, channel: ChannelConfig) -> str | None:
    """As `why_read`, for a FIFO of the channel."""
    return why_read(plan, check=channel.penstock.integrity == "checksum", frame=channel.poison is not None)


def _read_channels(piped: list[tuple[ChannelConfig, Plan]]) -> dict[str, str]:
    """The channels whose bytes must be read, and why."""
    whys = {channel.channel_name: _why_read(plan, channel) for channel, plan in piped}
    return {name: why for name, why in whys.items() if why}
