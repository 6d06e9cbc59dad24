"""What this machine must allow for a job: tried before storage is asked, and left as it was.

`penstock run` and `exec` begin with `local`, and end there if it raises; `penstock doctor` makes the same
attempts one by one. Only the size of File channels must be listed first: `disk` comes as soon as it is known.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING

from sidecar.admin.server import listening
from sidecar.job.download import digest_of, is_made
from streamer.errors import SinkError
from streamer.relay.transport import open_files
from streamer.sink.fifo import check_name
from streamer.trailer import fifo_path
from streamer.units import human_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sidecar.config.job import Job
    from sidecar.job.layout import Layout
    from streamer.plan import Plan

ADMIN_PORT = 9781
"""Of `penstock run`, where probes and scrapers look for it; `exec` takes any free one."""


async def local(job: Job, layout: Layout, *, fresh: bool) -> None:
    """Everything but the disk and the admin port, which `run` takes at once. Raises SinkError.

    `fresh`: no FIFO of an earlier sidecar may be gone on with.
    """
    files(job)
    await asyncio.to_thread(directory, job, layout, fresh=fresh)


def files(job: Job) -> None:
    """The limit of open files, for the FIFOs of the job. Raises SinkError."""
    open_files(max(1, sum(len(job.fifos(channel)) for channel in job.channels("Pipe"))))


def directory(job: Job, layout: Layout, *, fresh: bool = True) -> None:
    """The tree, its lock, a FIFO, a file, and the names that FIFOs and File channels will have.

    Raises SinkError.
    """
    missing = [path for path in layout.parents() if not os.path.lexists(path)]
    try:
        layout.create()
        layout.check_unlocked()
        with _removed(os.path.join(layout.data, f".penstock-try-{os.getpid()}")) as path:
            os.mkfifo(path, 0o600)
        with _removed(os.path.join(layout.config, f".penstock-try-{os.getpid()}")) as path:
            _write(path)
        for channel in job.channels("Pipe") if fresh else ():
            for name in job.fifos(channel):
                check_name(fifo_path(layout.data, name, 0))
        for channel in job.channels("File"):
            is_made(layout.data, channel.channel_name, b"")
    finally:
        for path in reversed(missing):
            with contextlib.suppress(OSError):
                os.rmdir(path)


@contextlib.contextmanager
def _removed(path: str) -> Iterator[str]:
    try:
        yield path
    except OSError as error:
        raise SinkError(
            f"cannot make a file or FIFO in {os.path.dirname(path)}: {error.strerror}; set "
            "Penstock.BaseDirectory to a local directory that this user may write, with free space"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _write(path: str) -> None:
    with open(path, "xb") as file:
        file.write(bytes(4096))


async def port(job: Job, *, default: int = ADMIN_PORT) -> str:
    """The admin server's address, once it could be had. Raises SinkError; ConfigError for its token."""
    admin = job.penstock.admin
    admin.token()
    wanted = default if admin.port is None else admin.port
    async with listening(asyncio.Protocol, admin.host, wanted):
        return f"{admin.host}:{wanted}" if wanted else f"{admin.host}, any free port"


def disk(layout: Layout, plans: Mapping[str, Plan]) -> str:
    """Room for the File channels of these plans, but for those that are there already. Raises SinkError.

    Returns what there is, in words.
    """
    place = next(path for path in (layout.data, *layout.parents()[::-1]) if os.path.isdir(path))
    found = os.statvfs(place)
    needed = entries = 0
    for name, plan in plans.items():
        if not is_made(layout.data, name, digest_of(plan)):
            needed += sum(-(-ref.size // found.f_frsize) * found.f_frsize for ref in plan.refs(0))
            entries += plan.objects(0)
    free = found.f_bavail * found.f_frsize
    wanted = f"{human_bytes(needed)} and {entries} files"
    if needed > free or (found.f_files and entries > found.f_favail):
        raise SinkError(
            f"File channels need {wanted}; {place} has {human_bytes(free)} and {found.f_favail} left; "
            "free some, set Penstock.BaseDirectory, or use InputMode: Pipe"
        )
    return f"File channels need {wanted} of {human_bytes(free)} in {place}"
