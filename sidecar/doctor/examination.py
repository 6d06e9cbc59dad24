"""`penstock doctor`: checks everything that a job needs before it runs.

Checks of the machine run first, then those of the storage. Each returns a finding: one line, and what to do.
A check that depends on a failed one is left out.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from sidecar.config.index_place import index_uri
from sidecar.config.outputs import DEFAULT_BASE
from sidecar.doctor import machine
from sidecar.doctor.machine import Finding, refused
from sidecar.doctor.remedies import failed
from sidecar.doctor.storage import storage
from sidecar.index.object import open_channel_index
from sidecar.index.objects import Access
from sidecar.index.stored import check_format
from sidecar.job.channels import job_clients
from sidecar.job.layout import Layout, resolve_host
from sidecar.job.listings import open_listings
from sidecar.process.exits import Exit
from sidecar.process.resources import memory_limit
from sidecar.records.rank_advice import expected_small_requests
from sidecar.records.ranks import deal_of, find_index
from streamer.aio import in_thread
from streamer.errors import ConfigError, Denied, PenstockError
from streamer.plan import Shard
from streamer.s3.client.versions import moved_botocore
from streamer.s3.pages.validation import PlanMemory
from streamer.units import counted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from sidecar.config.hosts import Hosts
    from sidecar.config.job import Job
    from sidecar.config.records import RecordsConfig
    from sidecar.config.request import ChannelConfig
    from sidecar.job.layout import Flags
    from streamer.plan import Plan
    from streamer.s3.client.session import Clients


async def examine(
    job: Job, flags: Flags, *, command: Literal["run", "exec"] | None, begin: Callable[[str], None]
) -> AsyncIterator[Finding]:
    """Run all checks; yield each finding at once.

    `command`: that will run the job; None if it is not known. `begin` is called with the name of a check that
    may take long, before it begins.
    """
    default = os.path.join(tempfile.gettempdir(), "penstock") if command == "exec" else DEFAULT_BASE
    layout = Layout.of(job, job.penstock.base_directory or default)
    job, hosts = resolve_host(job, layout, flags)
    if moved := moved_botocore():
        yield Finding("packages", "warning", moved, "Do what the text says.")
    yield machine.memory(job)
    yield machine.pipes(job)
    yield machine.open_files(job)
    for channel in job.channels("Pipe"):
        if (unequal := machine.steps(channel, hosts)) is not None:
            yield unequal
    begin("FIFO directory")
    directory = machine.fifo_directory(job, layout)
    yield _unless_exec(directory, command, unset=job.penstock.base_directory is None)
    port = await machine.admin_port(job, any_free=command == "exec")
    yield _unless_exec(port, command, unset=job.penstock.admin.port is None)
    try:
        async with job_clients(job) as clients:
            listed = set()
            async for finding in storage(job, clients, begin):
                yield finding
                listed |= {finding.check} if finding.state == "ok" else set()
            async for finding in _record_indexes(job, clients, hosts, begin):
                yield finding
            files = [each for each in job.channels("File") if f"list {each.channel_name}" in listed]
            if files and directory.state != "failure":
                begin("disk")
                yield machine.disk(layout, await _plans(job, clients, hosts, files))
    except PenstockError as error:
        yield failed("credentials" if isinstance(error, Denied) else "endpoint", error)


def _unless_exec(finding: Finding, command: str | None, *, unset: bool) -> Finding:
    """Make a failure a warning if its key is `unset`, and the command may be `exec`, which needs it not."""
    if finding.state != "failure" or finding.code != Exit.LOCAL or command is not None or not unset:
        return finding
    fix = f"For penstock run: {finding.fix} penstock exec takes a temporary directory and a free port."
    return replace(finding, state="warning", fix=fix, code=0)


async def _plans(job: Job, clients: Clients, hosts: Hosts, channels: list[ChannelConfig]) -> dict[str, Plan]:
    """Plan these channels completely, as `run` does. Raises PenstockError."""
    async with open_listings(job, hosts, clients) as listings:
        return {
            channel.channel_name: await listings.source(channel, lambda _: None).plan()
            for channel in channels
        }


async def _record_indexes(
    job: Job, clients: Clients, hosts: Hosts, begin: Callable[[str], None]
) -> AsyncIterator[Finding]:
    """Check the index of every channel that needs one, and name small requests of its ranks.

    Only `run` looks at the objects.
    """
    for channel in job.channels("Pipe"):
        if (records := channel.learnt) is not None:
            begin(f"index {channel.channel_name}")
            yield await _learnt(channel.channel_name, records, Access(job, clients))
        ranks, name = channel.penstock.by_record, channel.channel_name
        if ranks is None:
            continue
        check, access = f"index {name}", Access(job, clients)
        try:
            deal = deal_of(ranks, hosts.shard(channel.source) or Shard())
        except PenstockError as error:
            yield refused(f"ranks {name}", error, "Do what the error says.")
            continue
        if channel.record_wrapper_type != "None":
            continue  # objects are the records, and only a listing has their sizes
        record_bytes = float(channel.record_format.size)
        if channel.needs_index:
            begin(check)
            try:
                index = await find_index(channel, PlanMemory(memory_limit() // 2), access)
            except PenstockError as error:
                yield refused(check, error, "Do what the error says, or correct Records.Index.")
                continue
            if index is None:
                yield Finding(check, "ok", "there is none yet; run builds it at its start, from all bytes")
                continue
            objects = counted(len(index), "object")
            yield Finding(check, "ok", f"{counted(index.records, 'record')} of {index.format} in {objects}")
            record_bytes = index.bytes / max(1, index.records)
        if (small := expected_small_requests(channel, deal, record_bytes=record_bytes)) is not None:
            yield Finding(f"requests {name}", "ok", *small)


async def _learnt(channel: str, records: RecordsConfig, access: Access) -> Finding:
    """Check the index that a channel learns, as far as it is there."""
    check, place = f"index {channel}", records.place
    if index_uri(place, channel) is None and (folder := _not_writable(place)):
        fix = "Let Records.Index name a directory that this user may write. The channel streams without, too."
        return Finding(check, "warning", f"the directory {folder} cannot be written", fix)
    try:
        stored = await open_channel_index(place, channel, access)
    except ConfigError:
        return Finding(check, "ok", "there is none yet; the channel learns it while it streams")
    except PenstockError as error:
        return refused(check, error, "Do what the error says, or correct Records.Index.")
    try:
        index = await in_thread(partial(stored.index, growing=True))
        check_format(stored.path, index, records.record_format)
    except PenstockError as error:
        return refused(check, error, "Do what the error says, or correct Records.")
    text = f"it has {counted(len(index), 'object')}; the channel learns the others while it streams"
    return Finding(check, "ok", text)


def _not_writable(folder: str) -> str:
    """Return the directory, or the one above that exists, if this user may not write in it; else empty."""
    place = os.path.abspath(folder)
    while not os.path.exists(place):
        place = os.path.dirname(place)
    return "" if os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK) else place
