"""`penstock index`: builds, verifies and shows the record indexes of a job's channels.

build, verify   plan the channels ─▶ objects of all hosts ─▶ `sidecar.index.build`, `sidecar.index.check`
show            reads the indexes of a job's channels in S3; those of a folder are `index_figures`

An index that is in S3 is copied before the channels are listed, so that it has no rows of objects that
another build has found later, and that this one would remove (`sidecar.index.target`).
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sidecar.commands.index_figures import figures
from sidecar.config.hosts import Hosts
from sidecar.config.index_place import index_uri
from sidecar.index.build import Findings, IndexBuild
from sidecar.index.check import check_all, check_borders, check_rows, sample_borders
from sidecar.index.object import open_channel_index
from sidecar.index.objects import Access, ChannelObjects
from sidecar.index.target import index_target
from sidecar.job.channels import job_clients
from sidecar.job.listings import open_listings
from sidecar.job.planning import JobPlanner
from sidecar.observe.state import JobState
from sidecar.process.progress import progress_line, transferred
from sidecar.process.resources import freeze_gc
from streamer.aio import in_thread
from streamer.errors import ConfigError, CorruptObject
from streamer.formats.record_format import RecordFormat
from streamer.relay.statistics import ChannelCounters
from streamer.units import decimal_bytes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from sidecar.config.job import Job
    from sidecar.config.request import ChannelConfig
    from sidecar.index.target import IndexTarget
    from streamer.plan import Plan
    from streamer.s3.client.session import Clients


def chosen(job: Job, names: Sequence[str]) -> Job:
    """Return the job with the channels of these names alone; all of them if there is no name.

    Raises ConfigError for an unknown name, and for a channel without addressable records.
    """
    channels = {channel.channel_name: channel for channel in job.input_data_config}
    if unknown := [name for name in names if name not in channels]:
        raise ConfigError(f"the job file has no channel {unknown[0]!r}; it has {', '.join(channels)}")
    if names:
        channels = {name: channel for name, channel in channels.items() if name in names}
    for name, channel in channels.items():
        if (why := channel.not_indexable) is not None:
            raise ConfigError(
                f"channel {name!r} needs no record index, or can have none: {why}; see --channel"
            )
    return job.model_copy(update={"input_data_config": tuple(map(_undivided, channels.values()))})


def _undivided(channel: ChannelConfig) -> ChannelConfig:
    """Return the channel without its distribution over ranks, hosts and instance groups."""
    whole = {"s3_data_distribution_type": "FullyReplicated", "instance_group_names": ()}
    source = {"s3_data_source": channel.source.model_copy(update=whole)}
    return channel.model_copy(
        update={
            "data_source": channel.data_source.model_copy(update=source),
            "penstock": channel.penstock.model_copy(update={"ranks": None}),
        }
    )


class _Work:
    """What `build` and `verify` need, and the text of the progress line."""

    def __init__(self, job: Job, clients: Clients) -> None:
        self.indexes = Access(job, clients)
        """Access to indexes in S3; the progress line does not show their bytes."""
        self.state = JobState(job, Hosts(0, ("algo-1",)))
        self._channel = ""
        self._total = 0
        self._started = 0.0
        self._counters = ChannelCounters()

    def begin(self, channel: str, total: int) -> Access:
        """Return access to the objects of a channel, of which `total` bytes are read; 0: not known."""
        self._channel, self._total, self._started = channel, total, time.monotonic()
        self._counters = ChannelCounters()
        return replace(self.indexes, counters=self._counters)

    def progress(self) -> str:
        if not self._channel:
            return self.state.planning_text() or "looking for the rows of the index"
        done = self._counters.consumed_bytes
        if not self._total:
            return f"{self._channel}: {decimal_bytes(done)} read"
        return f"{self._channel}: {transferred(done, self._total, time.monotonic() - self._started)}"

    async def plans(self) -> dict[str, Plan]:
        """Plan the channels; return the plans by channel."""
        async with open_listings(self.state.job, self.state.hosts, self.indexes.clients) as listings:
            plans = await JobPlanner(self.state, listings).plan_all()
        freeze_gc()
        return {name: each.whole for name, each in plans.items()}


@contextlib.asynccontextmanager
async def _working(
    whole: Job, place: str | None, channels: Sequence[str], *, quiet: bool
) -> AsyncIterator[_Work]:
    """Open what the channels that are asked for need; show progress until the end of the block."""
    uris = (index_uri(place, each.channel_name) for each in whole.input_data_config if place is not None)
    indexes = whole.index_objects.union(uri for uri in uris if uri is not None)
    names = channels or (_indexed(whole) if place is None else ())
    job = chosen(whole, names).with_index_objects(indexes)  # those of other channels are no data either
    async with job_clients(job) as clients:
        work = _Work(job, clients)
        with progress_line(work.progress, quiet=quiet):
            yield work


async def build(
    job: Job,
    place: str | None,
    *,
    channels: Sequence[str],
    record_format: RecordFormat | None,
    quiet: bool,
) -> dict[str, Any]:
    """Build the index of every channel; return the document of `penstock index build --json`.

    `place`: folder of the indexes, or a prefix of S3; None: that of each channel. `channels`: their names;
    none: all, or those with a place. `record_format`: see `_format`. Objects that are not of the format are
    logged; the first is raised at the end.
    """
    document: dict[str, Any] = {}
    failure: CorruptObject | None = None
    async with _working(job, place, channels, quiet=quiet) as work, contextlib.AsyncExitStack() as stack:
        targets = {}
        for channel in work.state.job.input_data_config:
            name = channel.channel_name
            target = await stack.enter_async_context(index_target(_place(channel, place), name, work.indexes))
            targets[name] = target, _format(target, channel, record_format)
        for name, plan in (await work.plans()).items():
            try:
                document[name] = await _build(name, plan, *targets[name], work)
            except CorruptObject as error:
                failure = failure or error
    if failure is not None:
        raise failure
    return {"channels": document}


async def _build(
    name: str, plan: Plan, target: IndexTarget, record_format: RecordFormat, work: _Work
) -> dict[str, Any]:
    """Build the index of a channel; return its part of the document. Raises CorruptObject at the end."""
    objects = await in_thread(ChannelObjects, plan)
    async with target.open(record_format) as (file, upload):
        building = await in_thread(IndexBuild, file, objects, Findings(name), upload)
        access = work.begin(name, building.bytes_to_read)
        began, cpu = time.monotonic(), time.process_time()
        await building.run(access)
        size = file.size
    seconds, cpu = time.monotonic() - began, time.process_time() - cpu
    read = access.counters.consumed_bytes
    return figures(target.name, file.index, size) | {
        "scanned": building.scanned,
        "bytes_read": read,
        "seconds": round(seconds, 3),
        "cpu_seconds_per_gb": round(cpu / read * 1e9, 3) if read else None,
    }


def _format(target: IndexTarget, channel: ChannelConfig, record_format: RecordFormat | None) -> RecordFormat:
    """Return the format of an index: as asked for, of the job file, or of the index there is.

    Raises ConfigError if no format is known.
    """
    if record_format is None and channel.penstock.records is not None:
        record_format = channel.record_format
    record_format = record_format or target.format()
    if record_format is None:
        raise ConfigError(
            f"the record format of channel {channel.channel_name!r} is unknown: add Records: {{Format: "
            "TFRecord, Index: DIRECTORY} to the channel, or write --format TFRecord, RecordIO, lines or tar"
        )
    if record_format.size:
        raise ConfigError(
            f"channel {channel.channel_name!r} has records of one size ({record_format}), which need no "
            "index; see --channel"
        )
    return record_format


def _indexed(job: Job) -> list[str]:
    """Return the names of the channels whose index the job file has a place of."""
    return [each.channel_name for each in job.input_data_config if each.penstock.index is not None]


def _place(channel: ChannelConfig, place: str | None) -> str:
    """Return the place of a channel's index: as asked for, or of the job file. Raises ConfigError."""
    found = place or channel.penstock.index
    if found is None:
        raise ConfigError(
            f"channel {channel.channel_name!r} names no place of an index: add Records: {{Format: TFRecord, "
            "Index: DIRECTORY} to it, or name the place in the command"
        )
    return found


async def verify(
    job: Job, place: str | None, *, channels: Sequence[str], samples: int, everything: bool, quiet: bool
) -> dict[str, Any]:
    """Compare the index of every channel with its objects; return the document of `--json`.

    `place`, `channels`: as for `build`. `samples`: most records of a channel that are looked at, unless
    `everything` is read. Records that are not where the index has them are logged. Raises CorruptObject for
    the first of them at the end of its channel, and SourceChanged at once for an object without a row.
    """
    document: dict[str, Any] = {}
    async with _working(job, place, channels, quiet=quiet) as work:
        indexes = {
            each.channel_name: await open_channel_index(_place(each, place), each.channel_name, work.indexes)
            for each in work.state.job.input_data_config
        }
        for name, plan in (await work.plans()).items():
            index = await in_thread(indexes[name].index)
            objects = await in_thread(ChannelObjects, plan)
            await in_thread(check_rows, index, objects)
            access = work.begin(name, objects.bytes if everything else 0)
            looked, findings = 0, Findings(name)
            if everything:
                await check_all(index, objects, access, findings)
            else:
                borders = sample_borders(index, objects, samples, range(len(objects)))
                looked = await check_borders(index.format, borders, access, on_bad=findings.note)
            findings.check("more are wrong", "remove the record index and build it again")
            document[name] = figures(indexes[name].path, index, indexes[name].size) | {
                "verified": "all bytes" if everything else f"{looked} indexed records"
            }
    return {"channels": document}


async def show(job: Job, place: str | None) -> dict[str, Any]:
    """Return the document of `penstock index show --json` for the channels of a job.

    Raises ConfigError for a channel without an index in S3.
    """
    document = {}
    async with job_clients(job) as clients:
        names = _indexed(job) if place is None else ()
        for channel in job.input_data_config:
            name = channel.channel_name
            if names and name not in names:
                continue
            stored = await open_channel_index(_place(channel, place), name, Access(job, clients))
            document[name] = figures(stored.path, await in_thread(stored.index), stored.size)
    return {"channels": document}
