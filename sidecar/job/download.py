"""Downloads File channels: every object becomes a file, before any FIFO is offered.

    check    map keys to paths below `<data>/<channel>`; a key whose path would be outside, or clash with
             another, ends the job
    fetch    a fixed number of workers fetch the parts of all objects into a temporary directory, with the
             retries of a stream; each worker has one part in memory
    publish  rename the temporary directory to the channel's directory

So the directory is absent or complete. A note beside it has the digest of its plan. After a restart the
sidecar does not download the same plan again, replaces a download of another plan, and refuses a directory
without a note, which it never changes.
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
from streamer.relay.staging.buffers import BufferPool, BufferStage
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
"""Parts in flight unless the job file sets RequestsInFlight; a small memory budget allows fewer."""
DEFAULT_PART = 8 * MIB
"""Bytes of a part unless the job file sets PartSize."""
LONGEST_NAME = 255
"""Most bytes of a path component on Linux file systems."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadLimits:
    """Limits of a download. `part_size`: bytes. `workers`: number of parts in memory at one time."""

    part_size: int
    workers: int
    policy: RetryPolicy


async def download_channels(job: Job, plans: Mapping[str, Plan], clients: Clients, layout: Layout) -> None:
    """Download every File channel. Raises SourceError, SinkError, ConfigError."""
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
    """Return the path of an object in its channel's directory: the key after the last `/` of the prefix.

    With `s3://b/data/tr`, the key `data/train/x` becomes `train/x`. Raises ConfigError for a key that is not
    a safe path: outside of the directory, with control characters, or with a name that is too long.
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
    """Return the relative path of every object of the plan. Raises ConfigError, also for clashes."""
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
    """Download the plan's objects to `<directory>/<channel>`; return False if they are there already.

    Raises SourceError, SinkError, ConfigError, and then leaves the directory as it was.
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
    paths = {(ref.bucket, ref.key): file for ref, file in zip(plan.refs(0), files, strict=True)}
    parts: Iterator[Part] = cut(plan.segments(0), part_size=lambda: limits.part_size, epoch=0)

    async def work() -> None:
        for part in parts:  # shared: each worker takes the next
            stage = BufferStage(part, pool, on_change=_nothing, counters=counters, eager=True)
            await PartFetch(stage, source, policy=limits.policy, counters=counters, quota=quota).run()
            with _local_errors():
                await in_thread(_write, paths[part.object.bucket, part.object.key], stage)

    async with asyncio.TaskGroup() as group:
        for _ in range(limits.workers):
            group.create_task(work())
    for ref, file in zip(plan.refs(0), files, strict=True):
        if os.stat(file).st_size != ref.size:
            raise BadAnswer(
                f"{file} has not the {ref.size} bytes that were listed", ErrorContext(ref.bucket, ref.key)
            )


def _nothing() -> None:
    """Ignore changes of a stage, because it is written only when it is complete."""


def _write(path: str, stage: BufferStage) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.lseek(fd, stage.part.start, os.SEEK_SET)
        while stage.staged:
            stage.drain_into(fd)
    finally:
        os.close(fd)


def _prepare(temporary: str, paths: list[str]) -> None:
    """Make every directory and an empty file for each object; remove those of an earlier run."""
    shutil.rmtree(temporary, ignore_errors=True)
    os.mkdir(temporary)
    for folder in sorted({os.path.dirname(path) for path in paths}):
        os.makedirs(os.path.join(temporary, folder), exist_ok=True)
    for path in paths:
        os.close(os.open(os.path.join(temporary, path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))


def _remove(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)


def digest_of(plan: Plan) -> bytes:
    """Return the text of the note for a plan, which differs for each plan."""
    return f"{plan.digest} {plan.base}\n".encode()


def _note(directory: str, channel: str) -> str:
    """Return the path of the note beside a channel's directory."""
    return os.path.join(directory, f".{channel}.penstock.files")


def is_made(directory: str, channel: str, digest: bytes) -> bool:
    """Return whether the channel's directory has the note `digest`. Raises SinkError if it has no note."""
    target, note = os.path.join(directory, channel), _note(directory, channel)
    if not os.path.lexists(target):
        return False
    try:
        with open(note, "rb") as file:
            return file.read() == digest
    except FileNotFoundError:
        raise SinkError(
            f"{target} exists and is not a sidecar's download; remove it or rename the channel"
        ) from None
    except OSError as error:
        raise SinkError(f"cannot read {note}: {error.strerror}") from error


def _publish(temporary: str, target: str, note: str, digest: bytes) -> None:
    """Rename a download to its final path.

    Writes the note first, so that every downloaded directory has a note.
    """
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
