"""`penstock run`: the sidecar, until a signal."""

from __future__ import annotations

import asyncio
import signal
from functools import partial
from typing import TYPE_CHECKING, Any

from sidecar.config.outputs import DEFAULT_BASE
from sidecar.job.layout import Flags, Layout, resolve_host
from sidecar.job.rehearsal import ADMIN_PORT
from sidecar.job.supervisor import Supervisor
from sidecar.job.uploads import code_after, failure_reason, keep_files, tell_kubernetes
from sidecar.process.early_signals import STOPS, kept
from sidecar.process.exits import Exit
from sidecar.process.logs import log
from sidecar.process.signals import Shutdown, handled
from streamer.aio import TaskGroup, first_of, in_thread
from streamer.errors import ConfigError, SinkError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidecar.config.job import Job


RESTART = -1
"""Result of `run` when a keeper has taken all FIFOs over and the process must restart."""


async def run(
    job: Job,
    flags: Flags,
    *,
    keeper: str | None,
    resume: str | None,
    resume_anyway: bool,
    reload: Callable[[], object],
) -> int:
    """Serve the job until a signal; drain on the first, end at once on the second.

    `keeper`, `resume`, `resume_anyway`: see `Supervisor`. `reload` reads the job file before a restart; if it
    raises ConfigError, the sidecar does not restart.
    """
    shutdown = Shutdown()
    layout = Layout.of(job, job.penstock.base_directory or DEFAULT_BASE)
    job, hosts = resolve_host(job, layout, flags)
    supervisor = Supervisor(
        job,
        hosts,
        layout,
        default_admin_port=ADMIN_PORT,
        keeper=keeper,
        resume=resume,
        resume_anyway=resume_anyway,
    )

    handed_over = False

    async def until(supervisor: Supervisor) -> None:
        layout.note("ready")
        await first_of(until_end(supervisor), supervisor.requests.serve(partial(_finish, supervisor)))

    async def until_end(supervisor: Supervisor) -> None:
        nonlocal handed_over
        while not handed_over:
            await first_of(shutdown.requested.wait(), shutdown.restart.wait())
            if shutdown.requested.is_set():
                await first_of(_end(supervisor, layout), shutdown.at_once.wait())
                return
            shutdown.restart.clear()
            try:
                await in_thread(reload)
                await supervisor.hand_over()
                handed_over = True
            except (ConfigError, SinkError) as error:
                log.error("cannot restart, going on", error=str(error))
                layout.note("cannot restart", str(error))

    with handled((*STOPS, signal.SIGUSR2), shutdown.note):
        code = await _unless_stopped_early(supervisor.serve(until), shutdown, supervisor)
        if handed_over:
            if shutdown.requested.is_set():
                kept.append(signal.SIGTERM)  # for the next program; this one has nothing left to end
            return RESTART
    keep_files(layout, supervisor.uploaded, job, temporary=False, trained=supervisor.state.started)
    if shutdown.at_once.is_set():
        return Exit.INTERRUPTED
    return code_after(supervisor.uploaded, code)


async def _finish(supervisor: Supervisor, code: int, reason: str) -> tuple[int, str]:
    """Upload what the trainer has left; return the code and the text of the reply to `penstock-finish`."""
    tell_kubernetes(reason)
    if supervisor.all_uploaded:
        return Exit.NOT_UPLOADED, (
            "nothing of this trainer is uploaded, because another one of this pod has ended with 0 before "
            "it; start one penstock-finish in each pod"
        )
    await supervisor.upload(code)
    if supervisor.uploaded is None or not supervisor.uploaded.left:
        return Exit.OK, ""
    left = "; ".join(f"{name}: {why}" for name, why in supervisor.uploaded.left.items())
    return Exit.NOT_UPLOADED, f"not uploaded: {left}"


async def _end(supervisor: Supervisor, layout: Layout) -> None:
    """Let epochs end, and upload what the trainer has left.

    Unless `penstock-finish` has told the trainer's exit code, the trainer counts as failed if it has written
    why into `output/failure`.
    """
    await supervisor.drain()
    await supervisor.upload(Exit.BUG if failure_reason(layout) else Exit.OK)


async def _unless_stopped_early(serving: Any, shutdown: Shutdown, supervisor: Supervisor) -> int:
    """Await `serving`; a signal before the FIFOs are offered cancels it, since nothing is to drain."""
    async with TaskGroup() as group:
        task = group.create_task(serving)
        stop = group.create_task(shutdown.requested.wait())
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not task.done() and not supervisor.state.started:
            task.cancel()
        try:
            return int(await task)
        except asyncio.CancelledError:
            return int(Exit.OK)
