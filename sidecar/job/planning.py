"""Makes the plans of all channels.

`plan_job` lists all channels concurrently, waits while storage is unavailable, and logs its progress and
every plan. `plan_channel` makes the plan of one channel.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from sidecar.job.endmarks import JOIN_ADVICE, unjoined
from sidecar.job.rehearsal import disk
from sidecar.job.strays import channel_advice, warn_of_strays
from sidecar.process.logs import log
from streamer.plan import Arrangement, Shard
from streamer.retry import RetryPolicy, retry_while_unavailable
from streamer.s3.catalog.manifests import plan_augmented, plan_manifest
from streamer.s3.catalog.object_info import open_inspector
from streamer.s3.catalog.pages import open_pages
from streamer.s3.catalog.sources import plan_sources
from streamer.s3.catalog.validation import PlanMemory

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from sidecar.config.hosts import Hosts
    from sidecar.config.job import Job
    from sidecar.config.request import ChannelConfig
    from sidecar.job.layout import Layout
    from sidecar.observe.state import JobState
    from streamer.errors import SourceError
    from streamer.plan import Plan
    from streamer.s3.catalog.object_info import ObjectInspector
    from streamer.s3.catalog.pages import PageSource
    from streamer.s3.client.session import Clients

PROGRESS_EVERY = 10.0
"""Seconds between log lines while a plan is made."""


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan of a channel on this host, and the plans of its FIFOs."""

    whole: Plan
    fifos: dict[str, Plan]
    """Plans by FIFO name; `whole` alone, unless the channel has several rank FIFOs."""

    @classmethod
    def dealt(cls, whole: Plan, names: tuple[str, ...]) -> Planned:
        """Divide `whole` over the FIFOs of these names."""
        plans = (whole,) if len(names) == 1 else whole.ranks(len(names))
        return cls(whole, dict(zip(names, plans, strict=True)))


async def plan_job(
    state: JobState, clients: Clients, *, give_up_after: float = 0, layout: Layout | None = None
) -> dict[str, Planned]:
    """Plan every channel, in the order of the job file. Raises the first SourceError.

    `give_up_after`: seconds to wait while storage is unavailable. `layout`: directory of the File channels;
    raises SinkError as soon as their plans need more space than is free.
    """
    job = state.job
    plans: dict[str, Planned] = {}
    policy, memory = RetryPolicy(give_up_after=give_up_after), PlanMemory(state.memory_limit // 2)
    files = {channel.channel_name for channel in job.channels("File")}

    async def make(channel: ChannelConfig, inspector: ObjectInspector) -> None:
        name = channel.channel_name
        progress = _Progress(name)

        def plan(progressed: Callable[[], None]) -> Awaitable[Plan]:
            def note(entries: int) -> None:
                progressed()
                progress(entries)

            return plan_channel(
                clients.control,
                job,
                channel,
                state.hosts,
                pages=pages,
                inspector=inspector,
                progress=note,
                memory=memory,
            )

        whole = await retry_while_unavailable(plan, policy, on_wait=partial(_note_waiting, state, progress))
        planned = plans[name] = Planned.dealt(whole, job.fifos(channel))
        await asyncio.to_thread(_sum_up, planned)  # takes seconds for a million entries
        if layout is not None and name in files:
            planned_files = {each: plans[each].whole for each in files & plans.keys()}
            await asyncio.to_thread(disk, layout, planned_files)
        log.info(
            "planned",
            channel=name,
            source=", ".join(map(str, channel.sources)),
            objects=whole.objects(0),
            bytes=whole.total_bytes(0),
            digest=whole.digest[:16],
            **({"ranks": len(planned.fifos)} if name in job.ranks else {}),
        )
        warn_of_strays(whole.strays, advice=channel_advice, channel=name)
        if job.mode(channel) == "Pipe":
            _note_end_marks(state, channel, planned)

    with job_pages(job, clients) as pages:
        async with job_inspector(job, clients) as inspector, asyncio.TaskGroup() as group:
            for channel in job.input_data_config:
                group.create_task(make(channel, inspector))
    return {channel.channel_name: plans[channel.channel_name] for channel in job.input_data_config}


def job_inspector(job: Job, clients: Clients) -> contextlib.AbstractAsyncContextManager[ObjectInspector]:
    """Open the client that finds size and ETag of single objects for this job."""
    penstock = job.penstock
    by_aiobotocore = penstock.transport == "aiobotocore"
    return open_inspector(clients, give_up_after=penstock.give_up_after, by_aiobotocore=by_aiobotocore)


def job_pages(job: Job, clients: Clients) -> contextlib.AbstractContextManager[PageSource]:
    """Open the source of the pages of listings for this job."""
    return open_pages(clients, by_aiobotocore=job.penstock.transport == "aiobotocore")


class _Progress:
    """Logs the progress of one channel's plan, at most every `PROGRESS_EVERY` seconds."""

    def __init__(self, channel: str) -> None:
        self.channel = channel
        self._logged = time.monotonic()
        self._waited = float("-inf")

    def __call__(self, entries: int) -> None:
        now = time.monotonic()
        if now - self._logged >= PROGRESS_EVERY:
            self._logged = now
            log.info("planning", channel=self.channel, entries=entries)

    def waiting(self, error: SourceError) -> None:
        """Log that storage is unavailable."""
        now = time.monotonic()
        if now - self._waited >= PROGRESS_EVERY:
            self._waited = now
            log.warning("waiting for storage", channel=self.channel, error=str(error))


def _note_waiting(state: JobState, progress: _Progress, error: SourceError) -> None:
    state.waiting_for = f"{progress.channel}: waiting for storage: {error}"
    progress.waiting(error)


def _note_end_marks(state: JobState, channel: ChannelConfig, planned: Planned) -> None:
    """Warn of objects with end marks, after which a program may stop reading."""
    if (join := unjoined(channel, planned.whole)) is None:
        return
    state.unjoined |= dict.fromkeys(planned.fifos, join)
    name = channel.channel_name
    log.warning("objects carry end marks", channel=name, format=join, do=JOIN_ADVICE.format(join))


def _sum_up(planned: Planned) -> None:
    """Compute size and digest of the plans, which cache both."""
    for plan in (planned.whole, *planned.fifos.values()):
        plan.total_bytes(0)
        _ = plan.digest


async def plan_channel(
    client: Any,
    job: Job,
    channel: ChannelConfig,
    hosts: Hosts,
    *,
    pages: PageSource,
    inspector: ObjectInspector,
    progress: Callable[[int], None],
    memory: PlanMemory,
) -> Plan:
    """List the channel's source now and return its plan on this host. Raises SourceError, ConfigError.

    `progress`: called often with the number of entries so far. `memory`: memory limit of all plans.
    """
    source = channel.source
    by: Literal["bytes", "count"] = "bytes" if job.penstock.shard_by == "bytes" else "count"
    arrangement = Arrangement(
        wrap=channel.record_wrapper_type == "RecordIO",
        inflate=channel.compression_type == "Gzip",
        join=channel.penstock.join,
        seed=None if channel.shuffle_config is None else channel.shuffle_config.seed,
        shard=replace(hosts.shard(source) or Shard(), by=by),
    )
    match source.s3_data_type:
        case "S3Prefix":
            selection = channel.penstock.selection
            return await plan_sources(
                pages, channel.sources, arrangement, selection, progress=progress, memory=memory
            )
        case "ManifestFile":
            return await plan_manifest(
                client, source.uri, arrangement, inspector=inspector, progress=progress, memory=memory
            )
        case "AugmentedManifestFile":
            return await plan_augmented(
                client,
                source.uri,
                source.attribute_names,
                arrangement,
                inspector=inspector,
                progress=progress,
                memory=memory,
            )
