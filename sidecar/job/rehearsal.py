"""Checks, before any request to S3, that this machine allows what a job needs, and undoes every attempt.

`penstock run` and `exec` begin with `local` and end if it raises. `penstock doctor` runs the same checks one
by one. `disk` runs later, because the size of File channels is known only after listing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from sidecar.admin.port import listening
from sidecar.download.directory import DownloadDirectory, Occupied
from sidecar.download.paths import without_markers
from sidecar.process.resources import memory_limit
from streamer.aio import in_thread
from streamer.directory import Directory
from streamer.errors import SinkError
from streamer.linux import write_remedy
from streamer.relay.transport import open_files
from streamer.sink.fifo_names import check_name
from streamer.trailer import fifo_path
from streamer.units import MIB, decimal_bytes, human_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sidecar.config.job import Job
    from sidecar.job.layout import Layout
    from sidecar.process.resources import Footprint
    from streamer.plan import Plan

ADMIN_PORT = 9781
"""Default admin port of `penstock run`, for probes and scrapers; `exec` takes any free port."""


async def local(job: Job, layout: Layout, *, fresh: bool, keeper: bool = False) -> None:
    """Run all checks but `disk` and `port` (`penstock run` listens on the port itself). Raises SinkError.

    `fresh`: the job continues no FIFO of an earlier sidecar. `keeper`: the sidecar starts a keeper.
    """
    memory(job, job.footprint(keeper=keeper))
    files(job)
    await asyncio.to_thread(directory, job, layout, fresh=fresh)


def files(job: Job) -> None:
    """Check the limit of open files against the FIFOs of the job. Raises SinkError."""
    open_files(max(1, sum(len(job.fifos(channel)) for channel in job.channels("Pipe"))))


def memory(job: Job, footprint: Footprint) -> str:
    """Check the memory that the job may take against the limit of the container or machine.

    Return both as text. Raises SinkError: the kernel would kill the process in mid-stream.
    """
    budget, limit = job.budget, memory_limit()
    needed = footprint.needed(budget)
    text = f"up to {human_bytes(needed)}, {human_bytes(budget)} of it MemoryBudget, of {human_bytes(limit)}"
    if needed <= limit:
        return text
    remedies = [f"raise the memory limit of the container to {needed // MIB} MiB"]
    if (fitting := footprint.largest_budget(limit)) >= job.least_budget:
        remedies.append(f"lower MemoryBudget to {fitting // MIB}MiB")
    if replace(footprint, requests=footprint.fifos).needed(budget) <= limit:
        remedies.append(f"lower RequestsInFlight (now up to {footprint.requests})")
    remedies.append("have fewer channels")
    keeper = " and a keeper" if footprint.keeper else ""
    fifos = f"{footprint.fifos} FIFO{'' if footprint.fifos == 1 else 's'}"
    raise SinkError(
        f"the memory limit of {human_bytes(limit)} is too low: {fifos} over the {footprint.transport} "
        f"transport{keeper} may take {human_bytes(needed)}, {human_bytes(budget)} of it MemoryBudget; "
        + ", or ".join(remedies)
    )


def directory(job: Job, layout: Layout, *, fresh: bool = True) -> None:
    """Try to make the tree, its lock, a FIFO and a file; check the names of FIFOs and File channels.

    Raises SinkError.
    """
    missing = [path for path in layout.parents() if not os.path.lexists(path)]
    name = f".penstock-try-{os.getpid()}"
    try:
        layout.create()
        layout.check_unlocked()
        with _tried(layout.place, name) as data:
            os.mkfifo(name, 0o600, dir_fd=data.fd)
        place = os.path.join(layout.root, "input", "config")
        with _tried(place, name) as config, open(config.create(name), "wb") as file:
            file.write(bytes(4096))
        for channel in job.channels("Pipe") if fresh else ():
            for fifo in job.fifos(channel):
                check_name(fifo_path(layout.place, fifo, 0))
        with Directory.at(layout.place) as data:
            for channel in job.channels("File"):
                DownloadDirectory(data, channel.channel_name).check()
    finally:
        for path in reversed(missing):
            with contextlib.suppress(OSError):
                os.rmdir(path)


@contextlib.contextmanager
def _tried(path: str, name: str) -> Iterator[Directory]:
    """Open the directory for the block, which makes `name` in it; remove `name`. Raises SinkError."""
    try:
        with Directory.at(path) as directory:
            try:
                yield directory
            finally:
                directory.remove(name)
    except OSError as error:
        remedy = write_remedy(
            error, "set Penstock.BaseDirectory to a local directory that this user may write, with free space"
        )
        raise SinkError(f"cannot make a file or FIFO in {path}: {error.strerror}; {remedy}") from error


async def port(job: Job, default: int) -> str:
    """Listen once on the admin address and return it. Raises SinkError; ConfigError for the token."""
    admin = job.penstock.admin
    await in_thread(admin.token)
    number = default if admin.port is None else admin.port
    async with listening(admin.host, number):
        return f"{admin.host}:{number}" if number else f"{admin.host}, any free port"


def disk(layout: Layout, plans: Mapping[str, Plan]) -> str:
    """Check the space for the objects of these File channels' plans that are not downloaded yet.

    The space of a download that has not ended counts as free: the next one keeps its files or removes them.
    Returns needed and free space as text. Raises SinkError.
    """
    directory = next(path for path in (layout.place, *layout.parents()[::-1]) if os.path.isdir(path))
    status = os.statvfs(directory)
    needed = entries = 0
    for name, whole in plans.items():
        plan, here = without_markers(whole), Occupied(0, 0)
        if directory == layout.place:
            with Directory.at(directory) as data:
                download = DownloadDirectory(data, name)
                if download.has(plan):
                    continue
                here = download.occupied(plan)
        size = sum(-(-ref.size // status.f_frsize) * status.f_frsize for ref in plan.refs(0))
        needed += max(0, size - here.bytes)
        entries += max(0, plan.objects(0) - here.files)
    free = status.f_bavail * status.f_frsize
    needs = f"{decimal_bytes(needed)} and {entries} file{'' if entries == 1 else 's'}"
    if needed > free or (status.f_files and entries > status.f_favail):
        raise SinkError(
            f"File channels need {needs}; {directory} has {decimal_bytes(free)} and {status.f_favail} left; "
            "free some, set Penstock.BaseDirectory, or use InputMode: Pipe"
        )
    return f"File channels need {needs} of {decimal_bytes(free)} in {directory}"
