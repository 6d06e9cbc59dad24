"""The listings of a job: what finds the objects of its channels, and the tasks that go on while these stream.

    JobPlanner ─ begin ─▶ task: pages ─▶ runs ─▶ OpenPlan.list ─▶ Growth ─▶ channels
    supervisor: `ended` for a FIFO that resumes, `check` before the first FIFO is offered

A listing that fails keeps its error in its plan. Before the FIFOs are offered it ends the job; after that it
fails the epochs of its channel (`streamer.s3.pages.open_plan`).
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from sidecar.process.logs import log
from sidecar.process.resources import memory_limit
from streamer.aio import TaskGroup, task_group
from streamer.formats.transform import SKIP
from streamer.plan import Arrangement, Shard
from streamer.s3.manifests.manifest import Manifest
from streamer.s3.manifests.object_finder import ObjectClients
from streamer.s3.pages.object_get import ControlClient
from streamer.s3.pages.object_info import ObjectInspector
from streamer.s3.pages.open_plan import OpenPlan
from streamer.s3.pages.pages import PageSource
from streamer.s3.pages.sources import Sources
from streamer.s3.pages.validation import PlanMemory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from sidecar.config.hosts import Hosts
    from sidecar.config.job import Job
    from sidecar.config.request import ChannelConfig
    from streamer.errors import SourceError
    from streamer.s3.client.session import Clients


class Listings:
    """What finds the objects of a job's channels on this host, and the tasks that list open plans."""

    def __init__(
        self, job: Job, hosts: Hosts, clients: Clients, control: ControlClient, tasks: TaskGroup
    ) -> None:
        self.clients = clients
        self.memory = PlanMemory(memory_limit() // 2)
        """Limits the memory of all plans together."""
        self.by_channel: dict[str, OpenPlan] = {}
        """Open plans, by channel."""
        self._job = job
        self._hosts = hosts
        self._pages = PageSource(control)
        self._inspector = ObjectInspector(control, give_up_after=job.penstock.give_up_after)
        """Finds the objects that manifests name, where pages do not."""
        self._tasks = tasks
        self._running: list[asyncio.Task[None]] = []

    def source(self, channel: ChannelConfig, progress: Callable[[int], None]) -> Sources | Manifest:
        """Return the prefixes or the manifest of a channel, whose `plan` is that of this host.

        `progress`: called often with the number of entries so far.
        """
        arrangement = self._entry_arrangement(channel)
        kind, selection = channel.source.s3_data_type, self._job.selection(channel)
        if kind == "S3Prefix":
            return Sources(
                self._pages, channel.sources, arrangement, selection, progress=progress, memory=self.memory
            )

        def note(bucket: str, error: SourceError) -> None:
            log.warning(
                "HEADs instead of a listing", channel=channel.channel_name, bucket=bucket, error=str(error)
            )

        return Manifest(
            self.clients,
            channel.source.uri,
            arrangement,
            channel.source.attribute_names if kind == "AugmentedManifestFile" else None,
            selection=selection,
            object_clients=ObjectClients(self._inspector, self._pages, note),
            progress=progress,
            memory=self.memory,
        )

    def open_plan(self, channel: ChannelConfig, progress: Callable[[int], None]) -> OpenPlan:
        """Return the open plan of a channel. `progress`: as for `source`."""
        return OpenPlan(self._entry_arrangement(channel), self.source(channel, progress))

    def may_stream_early(self, channel: ChannelConfig) -> bool:
        """Return whether the channel can stream its first objects before the others are known."""
        arrangement, limit = self._arrangement(channel), channel.penstock.selection.limit
        ranks_by_bytes = arrangement.shard.by == "bytes" and channel.channel_name in self._job.ranks
        in_order = arrangement.may_grow and not ranks_by_bytes and (limit is None or limit.seed is None)
        return in_order and channel.penstock.by_record is None and self._job.mode(channel) == "Pipe"

    def _arrangement(self, channel: ChannelConfig) -> Arrangement:
        extras = channel.penstock
        by: Literal["bytes", "count"] = "bytes" if self._job.penstock.shard_by == "bytes" else "count"
        return Arrangement(
            wrap=channel.record_wrapper_type == "RecordIO",
            inflate=channel.compression_type == "Gzip",
            join=extras.join if extras.skip_bytes is None else f"{SKIP}{extras.skip_bytes}",
            seed=None if channel.shuffle_config is None else channel.shuffle_config.seed,
            shard=replace(self._hosts.shard(channel.source) or Shard(), by=by),
        )

    def _entry_arrangement(self, channel: ChannelConfig) -> Arrangement:
        """Return the arrangement of a channel's plan, which has this host's rows of a manifest alone.

        A shuffle, a balance by bytes, a limit of bytes and an order of records need all rows.
        """
        arrangement, extras = self._arrangement(channel), channel.penstock
        limit, shard = extras.selection.limit, arrangement.shard
        needs_all = not arrangement.may_grow or extras.by_record is not None or (limit and limit.bytes)
        if channel.source.s3_data_type == "S3Prefix" or needs_all:
            return arrangement
        return replace(arrangement, rows=shard, shard=replace(shard, index=0, count=1))

    def begin(self, channel: str, plan: OpenPlan, listing: Coroutine[Any, Any, None]) -> None:
        """Run `listing`, which lists `plan`."""
        self.by_channel[channel] = plan
        self.attend(channel, listing)

    def attend(self, channel: str, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, for which no channel waits."""
        self._running.append(self._tasks.create_task(work, name=f"listing of {channel}"))

    async def ended(self, channel: str) -> None:
        """Wait until the channel's listing has ended. Raises its error."""
        if (plan := self.by_channel.get(channel)) is not None:
            await plan.ended()

    def check(self) -> None:
        """Raise the error of a listing that has failed."""
        for plan in self.by_channel.values():
            if plan.growth.error is not None:
                raise plan.growth.error

    def cancel(self) -> None:
        """End the listings and looks that go on."""
        for task in self._running:
            task.cancel()


@contextlib.asynccontextmanager
async def open_listings(job: Job, hosts: Hosts, clients: Clients) -> AsyncIterator[Listings]:
    """Open the listings of a job on this host; those that go on at the end of the block are cancelled."""
    with contextlib.closing(ControlClient(clients)) as control:
        async with task_group() as tasks:
            listings = Listings(job, hosts, clients, control, tasks)
            try:
                yield listings
            finally:
                listings.cancel()
