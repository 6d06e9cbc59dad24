"""Makes the plans of all channels.

`JobPlanner` lists all channels concurrently, waits while storage is unavailable, and logs its progress and
every plan. `Planned` has the plans of one channel: of this host, and of each of its FIFOs.

A Pipe channel whose order is that of the listing, or of the manifest, gets an open plan
(`streamer.plan.growth`) as soon as its first objects are known: a task of `Listings`, which outlives
`plan_all`, finds the rest. Its event `planned` comes when the listing has ended.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sidecar.index.objects import Access
from sidecar.job.planning_log import PlanningLog
from sidecar.job.rehearsal import disk
from sidecar.records.ranks import deal_of, find_index, load_index, plan_by_record
from streamer.aio import TaskGroup, in_thread
from streamer.linux import PIPE_SIZE
from streamer.plan import Shard
from streamer.plan.record_plan import RecordPlan
from streamer.retry import RetryPolicy, retry_while_unavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from sidecar.config.request import ChannelConfig
    from sidecar.job.layout import Layout
    from sidecar.job.listings import Listings
    from sidecar.observe.state import JobState
    from streamer.plan import Plan

LARGEST_SLICE = PIPE_SIZE
"""Mean bytes of a rank's slice of a global batch up to which `Fetch: auto` fetches the ranks together. A FIFO
holds such a slice, so each rank reads its own while the others read theirs. With larger slices readers take
turns, and requests for each rank are large enough."""


@dataclass(frozen=True, slots=True)
class SharedPlan:
    """A stream that is fetched once for several FIFOs."""

    plan: Plan
    ranks: tuple[dict[str, Plan], ...]
    """Plans of each rank by FIFO name: one for each copy."""

    @property
    def names(self) -> list[str]:
        """Names of its FIFOs."""
        return [name for fifos in self.ranks for name in fifos]


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan of a channel on this host, and the plans of its FIFOs."""

    whole: Plan
    fifos: dict[str, Plan]
    """Plans by FIFO name; `whole` alone, unless the channel has several rank FIFOs."""
    shared: tuple[SharedPlan, ...] = ()
    """Streams that several of the FIFOs share; no FIFO has two."""

    def fetched(self, name: str) -> Plan | None:
        """Return the plan that is fetched for a FIFO; None if it comes with that of another FIFO."""
        for shared in self.shared:
            if name in shared.names:
                return shared.plan if name == shared.names[0] else None
        return self.fifos[name]

    @classmethod
    def dealt(
        cls, whole: Plan, names: tuple[str, ...], channel: ChannelConfig, *, epochs: int | None
    ) -> Planned:
        """Divide `whole` over the FIFOs of these names: the copies of rank 0, then those of rank 1, …

        `epochs`: number of epochs of each plan; None: no limit.
        """
        ranks = channel.penstock.by_record
        copies = 1 if ranks is None else ranks.copies
        count = len(names) // copies
        plans = (whole,) if count == 1 else whole.ranks(count)
        for plan in (whole, *plans):
            plan.epochs = epochs
        by_rank = tuple(
            dict.fromkeys(names[rank * copies : (rank + 1) * copies], plan) for rank, plan in enumerate(plans)
        )
        fifos = {name: plan for each in by_rank for name, plan in each.items()}
        if (
            ranks is not None
            and channel.may_fetch_together
            and (ranks.fetch == "together" or _slice_bytes(whole) <= LARGEST_SLICE)
        ):
            return cls(whole, fifos, (SharedPlan(whole, by_rank),))
        if copies > 1:
            shared = (SharedPlan(plan, (each,)) for plan, each in zip(plans, by_rank, strict=True))
            return cls(whole, fifos, tuple(shared))
        return cls(whole, fifos)


def _slice_bytes(plan: Plan) -> float:
    """Return the mean bytes of a rank's slice of a global batch."""
    if not isinstance(plan, RecordPlan):
        raise TypeError(f"no slices: {plan!r}")
    return plan.deal.slice * sum(plan.entries.sizes) / max(1, sum(plan.table.counts))


class JobPlanner:
    """Makes the plans of the channels of one job, each in its own task. Call `plan_all` once."""

    def __init__(
        self,
        state: JobState,
        listings: Listings,
        *,
        layout: Layout | None = None,
        epochs: Mapping[str, int] | None = None,
    ) -> None:
        """`layout`: directories of a job that runs; None if its plans are looked at alone.

        The channels of such a job are streamed while `listings` is open, so a plan may be open. The rows that
        a record index lacks are made, and storage that is unavailable is waited for. `epochs`: by channel the
        epoch that comes first, if it is not 0.
        """
        self._plans: dict[str, Planned] = {}
        """Plans by channel."""
        self._state = state
        self._listings = listings
        self._clients = listings.clients
        self._layout = layout
        self._runs = layout is not None
        self._policy = RetryPolicy(give_up_after=state.job.penstock.give_up_after if self._runs else 0)
        self._epochs = epochs or {}
        self._one_index = asyncio.Lock()
        """Held while an index is copied, or compared with its objects: this takes a transport's memory."""
        self._files = {channel.channel_name for channel in state.job.channels("File")}

    async def plan_all(self) -> dict[str, Planned]:
        """Plan every channel, in the order of the job file. Raises the first SourceError.

        Raises SinkError as soon as the plans of File channels need more space than is free.
        """
        channels = self._state.job.input_data_config
        async with TaskGroup() as group:
            for channel in channels:
                early = self._runs and self._listings.may_stream_early(channel)
                group.create_task(self._begin(channel) if early else self._plan(channel))
        return {channel.channel_name: self._plans[channel.channel_name] for channel in channels}

    async def _begin(self, channel: ChannelConfig) -> None:
        """Make an open plan: list the channel's first objects now, and the others in a task of `Listings`."""
        name, notes = channel.channel_name, PlanningLog(self._state, channel)
        open_plan = self._listings.open_plan(channel, notes.progress)

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
            deal = deal_of(ranks, self._state.hosts.shard(channel.source) or Shard())
            load = find_index if self._runs else load_index
            if channel.needs_index:
                async with self._one_index:
                    index = await load(channel, self._listings.memory, access)

        def plan(progressed: Callable[[], None]) -> Awaitable[Plan]:
            def note(entries: int) -> None:
                progressed()
                notes.progress(entries)

            return self._listings.source(channel, note).plan()

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
                        memory=self._listings.memory,
                        epoch=epoch,
                        build=self._runs,
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
            if self._runs:
                self._listings.attend(name, notes.line_ends(whole, self._clients))


def _sum_up(planned: Planned, epoch: int) -> None:
    """Compute size and digest of the plans, which cache both."""
    for plan in (planned.whole, *planned.fifos.values()):
        plan.total_bytes(epoch)
        _ = plan.digest
