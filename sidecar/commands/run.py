"""`penstock run`: the sidecar, until a signal."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sidecar.job.layout import DEFAULT_BASE, Flags, Layout, resolve_host
from sidecar.job.rehearsal import ADMIN_PORT
from sidecar.job.resume import load_saved
from sidecar.job.supervisor import JobSpec, Supervisor
from sidecar.process.exits import Exit
from sidecar.process.logs import log
from sidecar.process.signals import Shutdown, handled
from streamer.aio import first_of
from streamer.errors import SinkError

if TYPE_CHECKING:
    from sidecar.config.job import Job


RESTART = -1
"""What `run` returns when it has left everything to a keeper, and this process is to begin anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """How `penstock run` begins, and what survives it."""

    keeper: str | None = None
    """The socket of a keeper, or `auto`."""
    resume: str | None = None
    """What readers' `state_dict()` returned: a file, or JSON."""
    resume_anyway: bool = False


async def run(job: Job, flags: Flags, continuation: Continuation) -> int:
    """Serve until a signal; drain on the first, end at once on the second."""
    saved = {} if continuation.resume is None else load_saved(continuation.resume)
    shutdown = Shutdown()
    layout = Layout(job.penstock.base_directory or DEFAULT_BASE)
    job, hosts = resolve_host(job, layout, flags)
    supervisor = Supervisor(
        JobSpec(
            job=job,
            hosts=hosts,
            layout=layout,
            default_admin_port=ADMIN_PORT,
            keeper=continuation.keeper,
            saved=saved,
            resume_anyway=continuation.resume_anyway,
        )
    )

    left = False

    async def until(supervisor: Supervisor) -> None:
        nonlocal left
        while not left:
            await first_of(shutdown.asked.wait(), shutdown.restart.wait())
            if shutdown.asked.is_set():
                await first_of(supervisor.drain(), shutdown.now.wait())
                return
            shutdown.restart.clear()
            try:
                await supervisor.leave()
                left = True
            except SinkError as error:
                log.error("cannot restart, going on", error=str(error))

    with handled((signal.SIGTERM, signal.SIGINT, signal.SIGUSR2), shutdown.note):
        code = await _unless_stopped(supervisor.serve(until), shutdown, supervisor)
        if left:
            return RESTART
    return Exit.INTERRUPTED if shutdown.now.is_set() else code


async def _unless_stopped(serving: Any, shutdown: Shutdown, supervisor: Supervisor) -> int:
    """Let a signal end the start-up too: before the FIFOs are offered there is nothing to drain."""
    async with asyncio.TaskGroup() as race:
        task = race.create_task(serving)
        stop = race.create_task(shutdown.asked.wait())
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not task.done() and not supervisor.state.started:
            task.cancel()
        try:
            return int(await task)
        except asyncio.CancelledError:
            return int(Exit.OK)
