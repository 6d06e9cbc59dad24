"""File channels: every object below the prefix as a file, before any FIFO is offered.

    check    keys become paths below `<data>/<channel>`; one that would leave it, or clash, ends the job
    fetch    a fixed number of workers take parts in turn, over all objects, with the retries of a stream;
             a part waits in memory, so workers x part size is what a download may hold
    publish  everything lies in a temporary directory beside; one rename makes it the channel

So the directory is absent or whole. What it was made from (the plan's digest) is noted beside it: the
same plan is not fetched again after a restart, another plan's files of ours are replaced, and a
directory that we did not make is refused, never touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sidecar.process.logs import log
from streamer.aio import in_thread
from streamer.errors import BadAnswer, ConfigError, ErrorContext, SinkError
from streamer.plan import Part, Plan, cut
from streamer.relay.fetch.part_fetch import PartFetch
from streamer.relay.staging.buffers import BufferPool, MemoryStage
from streamer.relay.statistics import ChannelCounters
from streamer.retry import RetryPolicy
from streamer.s3.aiobotocore_source import AiobotocoreSource
from streamer.s3.ranges import RangeSource
from streamer.schedule.budget import MemoryBudget
from streamer.schedule.concurrency import ConcurrencyController
from streamer.trailer import replace_file
from streamer.units import MIB

if TYPE_CHECKING:
    from sidecar.config.job import Job
    from sidecar.job.layout import Layout
    from streamer.s3.client.session import Clients

DEFAULT_WORKERS = 32
"""Parts that are fetched at once where the job file names no number, as far as the budget goes."""
DEFAULT_PART = 8 * MIB
"""Bytes of a part where the job file names none."""
LONGEST_NAME = 255
"""Bytes of one path component that Linux file systems take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadLimits:
    """`part_size` in bytes; `workers` parts are in memory at once."""

    part_size: int
    workers: int
    policy: RetryPolicy


async def download_channels(job: Job, plans: Mapping[str, Plan], clients: Clients, layout: Layout) -> None:
    """Bring every File channel's objects. Raises SourceError, SinkError, ConfigError."""
    penstock = job.penstock
    part_size = int(penstock.part_size or DEFAULT_PART)
    limits = DownloadLimits(
        part_size=part_size,
        workers=min(penstock.requests_in_flight or DEFAULT_WORKERS, max(1, job.budget // part_size)),
        policy=RetryPolicy(give_up_after=penstock.give_up_after),
    )
    for channel in job.channels("File"):
        name, plan = channel.channel_name, plans[channel.channel_name]
        size = {"objects": plan.objects(0), "bytes": plan.total_bytes(0)}
        log.info("downloading", channel=name, **size)
        source = AiobotocoreSource(clients.data, clients.credentials)
        fetched = await download(plan, source, directory=layout.data, channel=name, limits=limits)
        log.info("downloaded" if fetched else "downloaded before", channel=name, **size)


def relative_path(key: str, prefix: str) -> str:
    """Where an object lies in its channel's directory: below the last `/` of the prefix.

    `s3://b/data/tr` names `data/train/x`, which becomes `train/x`. Raises ConfigError for a key that is
    no safe path: it would be outside of the directory, or has control characters or an endless name.
    """
    above = prefix[: prefix.rfind("/") + 1]
    if not key.startswith(above):
        raise ConfigError(f"{key!r} is not below {above!r}, so it cannot be a file of the channel")
    path = key.removeprefix(above)
    for name in path.split("/"):
        if name in ("", ".", "..") or any(ord(char) < 0x20 or ord(char) == 0x7F for char in name):
            raise ConfigError(f"{key!r} cannot be a file below the channel's directory; use InputMode: Pipe")
        if len(name.encode()) > LONGEST_NAME:
            raise ConfigError(f"{key!r} has a name of over {LONGEST_NAME} bytes; use InputMode: Pipe")
    return path


def file_paths(plan: Plan) -> list[str]:
    """The relative path of every object of the plan. Raises ConfigError, also for clashes."""
    prefix = plan.base.key if plan.base else ""
    paths = [relative_path(ref.key, prefix) for ref in plan.refs(0)]
    files = set(paths)
    for path in paths:
        above = os.path.dirname(path)
        while above:
            if above in files:
                raise ConfigError(
                    f"{above!r} and {path!r} cannot both be files: one would be a directory; "
                    "use InputMode: Pipe"
                )
            above = os.path.dirname(above)
    return paths


async def download(
    plan: Plan, source: RangeSource, *, directory: str, channel: str, limits: DownloadLimits
) -> bool:
    """Make `<directory>/<channel>` hold the plan's objects. False if it does already.

    Raises SourceError, SinkError, ConfigError; the directory is then as it was before.
    """
    paths = file_paths(plan)
    target, note = os.path.join(directory, channel), _note(directory, channel)
    digest = digest_of(plan)
    if await in_thread(is_made, directory, channel, digest):
        return False
    temporary = os.path.join(directory, f".{channel}.penstock.new")
    try:
        with _local_errors():
            await in_thread(_prepare, temporary, paths)
        await _fetch(plan, [os.path.join(temporary, path) for path in paths], source, limits)
        with _local_errors():
            await in_thread(_publish, temporary, target, note, digest)
    finally:
        await in_thread(_remove, temporary)
    return True


async def _fetch(plan: Plan, files: list[str], source: RangeSource, limits: DownloadLimits) -> None:
    counters, pool = ChannelCounters(), BufferPool()
    concurrency = ConcurrencyController(limits.workers, limits.part_size, fixed_limit=True, fixed_part=True)
    quota = MemoryBudget(limits.workers * limits.part_size, concurrency).quota()
    places = {(ref.bucket, ref.key): file for ref, file in zip(plan.refs(0), files, strict=True)}
    parts: Iterator[Part] = cut(plan.segments(0), part_size=lambda: limits.part_size, epoch=0)

    async def work() -> None:
        for part in parts:  # shared: each worker takes the next
            stage = MemoryStage(part, pool, on_change=_nothing, counters=counters, eager=True)
            await PartFetch(stage, source, policy=limits.policy, counters=counters, quota=quota).run()
            with _local_errors():
                await in_thread(_write, places[part.object.bucket, part.object.key], stage)

    async with asyncio.TaskGroup() as group:
        for _ in range(limits.workers):
            group.create_task(work())
    for ref, file in zip(plan.refs(0), files, strict=True):
        if os.stat(file).st_size != ref.size:
            raise BadAnswer(
                f"{file} is not of the {ref.size} bytes that were listed", ErrorContext(ref.bucket, ref.key)
            )


def _nothing() -> None:
    """Nobody waits for a stage that is written when it is whole."""


def _write(path: str, stage: MemoryStage) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.lseek(fd, stage.part.start, os.SEEK_SET)
        while stage.staged:
            stage.drain_into(fd)
    finally:
        os.close(fd)


def _prepare(temporary: str, paths: list[str]) -> None:
    """Every directory and every file, empty; what an earlier run left is removed."""
    shutil.rmtree(temporary, ignore_errors=True)
    os.mkdir(temporary)
    for folder in sorted({os.path.dirname(path) for path in paths}):
        os.makedirs(os.path.join(temporary, folder), exist_ok=True)
    for path in paths:
        os.close(os.open(os.path.join(temporary, path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))


def _remove(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)


def digest_of(plan: Plan) -> bytes:
    """What tells the downloads of two plans apart."""
    return f"{plan.digest} {plan.base}\n".encode()


def _note(directory: str, channel: str) -> str:
    """The file that says what a channel's directory was made from."""
    return os.path.join(directory, f".{channel}.penstock.files")


def is_made(directory: str, channel: str, digest: bytes) -> bool:
    """Whether the channel's directory is the download of this digest. Raises SinkError if it is not ours."""
    target, note = os.path.join(directory, channel), _note(directory, channel)
    if not os.path.lexists(target):
        return False
    try:
        with open(note, "rb") as file:
            return file.read() == digest
    except FileNotFoundError:
        raise SinkError(
            f"{target} exists and is not a download of ours; remove it or rename the channel"
        ) from None
    except OSError as error:
        raise SinkError(f"cannot read {note}: {error.strerror}") from error


def _publish(temporary: str, target: str, note: str, digest: bytes) -> None:
    """Rename into place. The note is written first: what it then speaks of is ours, or absent."""
    old = f"{temporary}.old"
    shutil.rmtree(old, ignore_errors=True)
    if os.path.lexists(target):
        os.rename(target, old)
    replace_file(note, digest)
    os.rename(temporary, target)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _local_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SinkError(f"cannot write {error.filename or 'a downloaded file'}: {error.strerror}") from error
