"""Makes the plans of all channels.

`JobPlanner` lists all channels concurrently, waits while storage is unavailable, and logs its progress and
every plan. `channel_source` finds the objects of one channel.

A Pipe channel whose order is that of the listing, or of the manifest, gets an open plan
(`streamer.plan.growth`) as soon as its first objects are known: a task of `Listings`, which outlives
`plan_all`, finds the rest. Its event `planned` comes when the listing has ended.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from sidecar.index.objects import Access
from sidecar.job.planned import Planned
from sidecar.job.planning_log import PlanningLog
from sidecar.job.rehearsal import disk
from sidecar.process.logs import log
from sidecar.records.ranks import deal_of, find_index, load_index, plan_by_record
from streamer.aio import in_thread
from streamer.formats.header_skipper import SKIP
from streamer.plan import Arrangement, Shard
from streamer.retry import RetryPolicy, retry_while_unavailable
from streamer.s3.manifests.manifest import Manifest
from streamer.s3.manifests.object_finder import ObjectClients
from streamer.s3.pages.open_plan import OpenPlan
from streamer.s3.pages.sources import Sources
from streamer.s3.pages.validation import PlanMemory

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from sidecar.config.hosts import Hosts
    from sidecar.config.job import Job
    from sidecar.config.request import ChannelConfig
    from sidecar.job.layout import Layout
    from sidecar.job.listings import Listings
    from sidecar.observe.state import JobState
    from streamer.errors import SourceError
    from streamer.plan import Plan
    from streamer.s3.client.session import Clients


class JobPlanner:
    """Makes the plans of the channels of one job, each in its own task. Call `plan_all` once."""

    def __init__(
        self,
        state: JobState,
        clients: Clients,
        listings: Listings,
        *,
        give_up_after: float = 0,
        layout: Layout | None = None,
        early: bool = False,
        epochs: Mapping[str, int] | None = None,
    ) -> None:
        """`give_up_after`: seconds to wait while storage is unavailable. `layout`: of the File channels.

        `early`: the channels are streamed while `listings` is open, so a plan may be open, and the rows that
        a record index lacks are made. `epochs`: by channel the epoch that comes first, if it is not 0.
        """
        self._plans: dict[str, Planned] = {}
        """Plans by channel."""
        self._state = state
        self._clients = clients
        self._listings = listings
        self._policy = RetryPolicy(give_up_after=give_up_after)
        self._layout = layout
        self._early = early
        self._epochs = epochs or {}
        self._memory = PlanMemory(state.memory_limit // 2)
        self._one_index = asyncio.Lock()
        """Held while an index is copied, or compared with its objects: this takes a transport's memory."""
        self._files = {channel.channel_name for channel in state.job.channels("File")}

    async def plan_all(self) -> dict[str, Planned]:
        """Plan every channel, in the order of the job file. Raises the first SourceError.

        Raises SinkError as soon as the plans of File channels need more space than is free.
        """
        channels = self._state.job.input_data_config
        async with asyncio.TaskGroup() as group:
            for channel in channels:
                early = self._early and _may_stream_early(self._state, channel)
                group.create_task(self._begin(channel) if early else self._plan(channel))
        return {channel.channel_name: self._plans[channel.channel_name] for channel in channels}

    async def _begin(self, channel: ChannelConfig) -> None:
        """Make an open plan: list the channel's first objects now, and the others in a task of `Listings`."""
        name, notes = channel.channel_name, PlanningLog(self._state, channel)
        arrangement = _entry_arrangement(self._state.job, channel, self._state.hosts)
        open_plan = OpenPlan(arrangement, self._source(channel, notes.progress))

        async def listing() -> None:
            with notes:
                await open_plan.list(self._policy, on_wait=notes.waiting)
            if open_plan.growth.complete:
                notes.planned(open_plan.plan)
                await notes.line_ends(open_plan.plan, self._clients)
            elif open_plan.growth.known:
                notes.listing_failed(open_plan.growth)

        self._listings.begin(name, open_plan, listing())
        await open_plan.first()
        job = self._state.job
        planned = self._plans[name] = Planned.dealt(
            open_plan.plan, job.fifos(channel), channel, epochs=job.penstock.epochs
        )
        if planned.whole.open:
            notes.listing(planned.whole)
        notes.end_marks(planned.whole)

    async def _plan(self, channel: ChannelConfig) -> None:
        """Make the whole plan of a channel."""
        job, name, notes = self._state.job, channel.channel_name, PlanningLog(self._state, channel)
        deal, index, epoch = None, None, self._epochs.get(name, 0)
        access = Access(job, self._clients)
        if (ranks := channel.penstock.by_record) is not None:
            deal = deal_of(ranks, _arrangement(job, channel, self._state.hosts).shard)
            load = find_index if self._early else load_index
            if not channel.record_format.size:
                async with self._one_index:
                    index = await load(channel, self._memory, access)

        def plan(progressed: Callable[[], None]) -> Awaitable[Plan]:
            def note(entries: int) -> None:
                progressed()
                notes.progress(entries)

            return self._source(channel, note).plan()

        with notes:
            whole = await retry_while_unavailable(plan, self._policy, on_wait=notes.waiting)
            if deal is not None:
                notes.record_index()
                async with self._one_index:
                    whole = await plan_by_record(
                        whole,
                        channel,
                        deal,
                        index,
                        access,
                        memory=self._memory,
                        epoch=epoch,
                        build=self._early,
                    )
            planned = self._plans[name] = Planned.dealt(
                whole, job.fifos(channel), channel, epochs=job.penstock.epochs
            )
            notes.digest()
            await in_thread(_sum_up, planned, epoch)  # takes seconds for a million entries
        if self._layout is not None and name in self._files:
            planned_files = {each: self._plans[each].whole for each in self._files & self._plans.keys()}
            await asyncio.to_thread(disk, self._layout, planned_files)
        notes.planned(whole, epoch)
        if job.mode(channel) == "Pipe":
            notes.end_marks(whole)
            if self._early:
                self._listings.attend(name, notes.line_ends(whole, self._clients))

    def _source(self, channel: ChannelConfig, progress: Callable[[int], None]) -> Sources | Manifest:
        job, hosts = self._state.job, self._state.hosts
        return channel_source(
            self._clients,
            job,
            channel,
            hosts,
            listings=self._listings,
            progress=progress,
            memory=self._memory,
        )


def _may_stream_early(state: JobState, channel: ChannelConfig) -> bool:
    """Return whether the channel can stream its first objects before the others are known."""
    job, arrangement = state.job, _arrangement(state.job, channel, state.hosts)
    ranks_by_bytes = arrangement.shard.by == "bytes" and channel.channel_name in job.ranks
    limit = channel.penstock.selection.limit
    in_order = arrangement.may_grow and not ranks_by_bytes and (limit is None or limit.seed is None)
    return in_order and channel.penstock.by_record is None and job.mode(channel) == "Pipe"


def _sum_up(planned: Planned, epoch: int) -> None:
    """Compute size and digest of the plans, which cache both."""
    for plan in (planned.whole, *planned.fifos.values()):
        plan.total_bytes(epoch)
        _ = plan.digest


def _arrangement(job: Job, channel: ChannelConfig, hosts: Hosts) -> Arrangement:
    extras = channel.penstock
    by: Literal["bytes", "count"] = "bytes" if job.penstock.shard_by == "bytes" else "count"
    return Arrangement(
        wrap=channel.record_wrapper_type == "RecordIO",
        inflate=channel.compression_type == "Gzip",
        join=extras.join if extras.skip_bytes is None else f"{SKIP}{extras.skip_bytes}",
        seed=None if channel.shuffle_config is None else channel.shuffle_config.seed,
        shard=replace(hosts.shard(channel.source) or Shard(), by=by),
    )


def _entry_arrangement(job: Job, channel: ChannelConfig, hosts: Hosts) -> Arrangement:
    """Return the arrangement of a channel's plan, which has this host's rows of a manifest alone.

    A shuffle, a balance by bytes, a limit of bytes and an order of records need all rows.
    """
    arrangement, extras = _arrangement(job, channel, hosts), channel.penstock
    limit, shard = extras.selection.limit, arrangement.shard
    needs_all = not arrangement.may_grow or extras.by_record is not None or (limit and limit.bytes)
    if channel.source.s3_data_type == "S3Prefix" or needs_all:
        return arrangement
    return replace(arrangement, rows=shard, shard=replace(shard, index=0, count=1))


def channel_source(
    clients: Clients,
    job: Job,
    channel: ChannelConfig,
    hosts: Hosts,
    *,
    listings: Listings,
    progress: Callable[[int], None],
    memory: PlanMemory,
) -> Sources | Manifest:
    """Return the prefixes or the manifest of a channel, whose `plan` is that of this host.

    `progress`: called often with the number of entries so far. `memory`: memory limit of all plans.
    """
    arrangement = _entry_arrangement(job, channel, hosts)
    kind, selection = channel.source.s3_data_type, job.selection(channel)
    if kind == "S3Prefix":
        return Sources(
            listings.pages, channel.sources, arrangement, selection, progress=progress, memory=memory
        )

    def note(bucket: str, error: SourceError) -> None:
        log.warning(
            "HEADs instead of a listing", channel=channel.channel_name, bucket=bucket, error=str(error)
        )

    return Manifest(
        clients,
        channel.source.uri,
        arrangement,
        channel.source.attribute_names if kind == "AugmentedManifestFile" else None,
        selection=selection,
        object_clients=ObjectClients(listings.inspector, listings.pages, note),
        progress=progress,
        memory=memory,
    )
