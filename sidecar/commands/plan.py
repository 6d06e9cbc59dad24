"""`penstock plan`: what every channel would stream."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from sidecar.config.outputs import DEFAULT_BASE
from sidecar.job.channels import fifos, footprint, job_clients, job_transport
from sidecar.job.layout import Flags, Layout, resolve_host
from sidecar.job.listings import open_listings
from sidecar.job.planning import JobPlanner
from sidecar.job.planning_log import figures_by_record
from sidecar.observe.state import JobState
from sidecar.process.progress import progress_line
from sidecar.records.line_ends import wrong_format
from sidecar.records.rank_advice import small_requests, unequal_steps
from streamer.aio import in_thread
from streamer.plan.folds import count_parts, number_of_parts
from streamer.plan.record_plan import RecordPlan
from streamer.units import decimal_bytes

if TYPE_CHECKING:
    from sidecar.config.job import Job
    from sidecar.config.request import ChannelConfig
    from sidecar.job.planning import Planned
    from streamer.plan import Plan


async def plan(job: Job, flags: Flags, *, keys: bool, quiet: bool = False) -> dict[str, Any]:
    """Return the document of `penstock plan`: every channel's objects, bytes, parts and digest.

    `keys`: name every object too, which takes hundreds of bytes each. `quiet`: show no progress line.
    """
    layout = Layout.of(job, job.penstock.base_directory or DEFAULT_BASE)
    job, hosts = resolve_host(job, layout, flags)
    state = JobState(job, hosts)

    def progress() -> str:
        return state.planning_text() or "counting the parts"

    with progress_line(progress, quiet=quiet):
        async with job_clients(job) as clients, open_listings(job, hosts, clients) as listings:
            plans = await JobPlanner(state, listings).plan_all()
            wrong = {
                channel.channel_name: found._asdict()
                for channel in job.channels("Pipe")
                if channel.penstock.records is not None
                and (found := await wrong_format(channel, plans[channel.channel_name].whole.refs(0), clients))
            }
            streams = fifos(job, plans)
            async with job_transport(state, clients, streams, plans) as transport:
                part_size = transport.stages().part_size()
                return {
                    "transport": transport.name,
                    "reason": transport.reason,
                    "host": {"index": hosts.index, "hosts": list(hosts.names)},
                    "requests_in_flight": transport.memory_budget.concurrency.limit,
                    "open_files": transport.few_files,
                    "memory_budget": transport.memory_budget.budget,
                    "memory": footprint(job, transport, streams).needed(transport.memory_budget.budget),
                    "channels": await in_thread(
                        partial(_channels, keys=keys), job, plans, part_size, len(hosts.names), wrong
                    ),
                }


def _channels(
    job: Job,
    plans: dict[str, Planned],
    part_size: int,
    hosts: int,
    wrong: dict[str, dict[str, str]],
    *,
    keys: bool,
) -> dict[str, Any]:
    """Return the part of the document for the channels; takes seconds for a million objects.

    `wrong`: advice for the channels whose first object is not of their record format.
    """
    configured = {channel.channel_name: channel for channel in job.input_data_config}
    unequal = {
        channel.channel_name: found._asdict()
        for channel in job.channels("Pipe")
        if (found := unequal_steps(channel, hosts=hosts)) is not None
    }
    return {
        name: {"mode": job.mode(configured[name])}
        | _summary(planned.whole, planned.whole, part_size, parts)
        | ({"keys": _keys(planned.whole)} if keys else {})
        | (
            {
                "ranks": {
                    rank: _summary(plan, planned.fetched(rank), part_size, parts)
                    for rank, plan in planned.fifos.items()
                }
            }
            if name in job.ranks
            else {}
        )
        | ({"unequal_steps": unequal[name]} if name in unequal else {})
        | ({"wrong_format": wrong[name]} if name in wrong else {})
        | parts.small_requests(configured[name])
        for name, planned in plans.items()
        for parts in [_Parts(planned.whole, part_size)]
    }


def _keys(plan: Plan) -> list[list[Any]]:
    """Return bucket, key, size and ETag of each object."""
    return [[ref.bucket, ref.key, ref.size, ref.etag] for ref in plan.refs(0)]


class _Parts:
    """Numbers of parts of a channel's plans."""

    def __init__(self, whole: Plan, part_size: int) -> None:
        self._whole = whole
        self._part_size = part_size
        self._of_ranks = count_parts(whole, 0, part_size) if isinstance(whole, RecordPlan) else None

    def of(self, plan: Plan) -> int:
        """Return the parts of `plan`: the whole one, or that of a rank."""
        counted = self._of_ranks
        if counted is None or not isinstance(plan, RecordPlan):
            return number_of_parts(plan, self._part_size)
        return counted[plan.number]

    def small_requests(self, channel: ChannelConfig) -> dict[str, Any]:
        """Return why the requests of ranks are small, and what to do; nothing if they are not."""
        if self._of_ranks is None:
            return {}
        *by_rank, together = self._of_ranks
        total = self._whole.total_bytes(0)
        found = small_requests(channel, bytes_total=total, separately=sum(by_rank), together=together)
        return {} if found is None else {"small_requests": found._asdict()}


def _summary(plan: Plan, fetched: Plan | None, part_size: int, parts: _Parts) -> dict[str, Any]:
    """Return the figures of one plan. `part_size`: the initial one if it adapts.

    `fetched`: the plan whose parts are requested for it; None if they are requested for another FIFO.
    """
    return {
        "objects": plan.objects(0),
        "bytes": plan.total_bytes(0),
        "size": decimal_bytes(plan.total_bytes(0)),
        "parts": 0 if fetched is None else parts.of(fetched),
        "requested": 0 if fetched is None else fetched.total_bytes(0),
        "part_size": part_size,
        "digest": plan.digest,
    } | figures_by_record(plan)
