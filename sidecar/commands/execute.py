"""`penstock exec`: the trainer as a child process beside the channels."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from sidecar.job.environment import trainer_environment
from sidecar.job.layout import Flags, Layout, resolve_host
from sidecar.job.supervisor import Supervisor
from sidecar.job.uploads import code_after, failure_reason, keep_files, tell_kubernetes
from sidecar.process.early_signals import STOPS
from sidecar.process.exits import Exit, exit_code
from sidecar.process.logs import log
from sidecar.process.signals import handled
from sidecar.process.terminal import asking
from streamer.aio import TaskGroup, first_of, readable, time_limit
from streamer.directory import scratch_directory
from streamer.errors import SinkError
from streamer.finish import FORWARDED, in_foreground
from streamer.linux import is_ready

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from sidecar.config.job import Job
    from sidecar.observe.state import JobState


GRACE = 10
"""Seconds from a channel's failure until `exec` sends the trainer SIGTERM, and from SIGTERM until SIGKILL."""


async def execute(
    job: Job,
    flags: Flags,
    command: tuple[str, ...],
    *,
    resume: str | None,
    resume_anyway: bool,
) -> int:
    """Run `command` as the trainer beside the channels; return the sidecar's error code or its exit code.

    `resume`, `resume_anyway`: see `Supervisor`.
    """
    if not _exists(command[0], os.environ | job.environment):
        return _not_found(command)
    with ExitStack() as stack:
        base = job.penstock.base_directory
        if base is None:
            base = stack.enter_context(scratch_directory("penstock-"))
        layout = Layout.of(job, base)
        job, hosts = resolve_host(job, layout, flags)
        supervisor = Supervisor(
            job,
            hosts,
            layout,
            default_admin_port=0,
            keep_proof=False,
            resume=resume,
            resume_anyway=resume_anyway,
        )
        supervisor.ask = asking()
        code = Exit.OK.value

        async def train() -> None:
            nonlocal code
            environment = os.environ | trainer_environment(layout, job, hosts)
            code = await _run_trainer(supervisor.state, command, environment)

        async def until(_: Supervisor) -> None:
            nonlocal code
            layout.note("trainer runs")
            await first_of(train(), supervisor.requests.serve(_uploaded_later))
            if code == Exit.OK:
                _warn_of_unread(supervisor.state)
            reason = failure_reason(layout) if code else ""
            log.info("the trainer has ended", code=code, reason=reason)
            tell_kubernetes(reason)
            code = await _upload(supervisor, code)

        failed = await _or_signal_code(supervisor.serve(until))
        temporary = job.penstock.base_directory is None
        trained = supervisor.state.started
        keep_files(layout, supervisor.uploaded, job, temporary=temporary, trained=trained)
        return failed or code


async def _uploaded_later(_code: int, _reason: str) -> tuple[int, str]:
    """Reply to a trainer that runs by `penstock-finish`, too: `exec` uploads after its end."""
    return Exit.OK, ""


async def _upload(supervisor: Supervisor, code: int) -> int:
    """Upload what the trainer has left; return its exit code, or that of what failed after it.

    A first signal is noted only, because the trainer has ended; a second one ends the upload.
    """
    at_once = asyncio.Event()
    stops = 0

    def note(number: signal.Signals) -> None:
        nonlocal stops
        stops += 1
        if stops > 1:
            log.warning("second signal, ending now", signal=number.name)
            at_once.set()
        else:
            log.info("signal, when the upload has ended", signal=number.name)

    with handled(STOPS, note):
        await first_of(supervisor.upload(code), at_once.wait())
    if at_once.is_set():
        return Exit.INTERRUPTED
    return code_after(supervisor.uploaded, code)


def _exists(name: str, environment: dict[str, str]) -> bool:
    """Return whether there is such a command; files that the sidecar downloads are not executable."""
    places = [name] if "/" in name else [os.path.join(each, name) for each in os.get_exec_path(environment)]
    return any(map(os.path.exists, places))


def _not_found(command: tuple[str, ...]) -> int:
    do = "correct the command, install it, or put its directory into the PATH of Environment"
    log.error("no such command", command=command[0], do=do)
    return Exit.NOT_FOUND


async def _or_signal_code(serving: Coroutine[Any, Any, int]) -> int:
    """Return the code of `serving`, or 128 + n if signal n ends it before the trainer starts."""
    task, stopped_by = asyncio.ensure_future(serving), 0

    def stop(number: signal.Signals) -> None:
        nonlocal stopped_by
        stopped_by = number
        log.info("signal, ending before the trainer has begun", signal=number.name)
        task.cancel()

    with handled((signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT), stop):
        try:
            return await task
        except asyncio.CancelledError:
            if not stopped_by:
                raise
            return 128 + stopped_by


async def _run_trainer(state: JobState, command: tuple[str, ...], environment: dict[str, str]) -> int:
    """Run the trainer; return its exit code as a shell would: 128 + n if signal n ended it."""
    early: list[signal.Signals] = []
    send: Callable[[signal.Signals], None] = early.append
    # Under a terminal the child stays in the sidecar's process group, for Ctrl-C and terminal input.
    shared = in_foreground()
    stopped = False

    def forward(number: signal.Signals) -> None:
        nonlocal stopped
        stopped |= number in STOPS
        if not (shared and _sent_by_terminal(number)):
            send(number)

    # Handled before the child exists: a signal that ended the sidecar now would leave an orphan.
    with handled(FORWARDED, forward):
        try:
            child = await asyncio.create_subprocess_exec(
                *command, env=environment, start_new_session=not shared
            )
        except FileNotFoundError:
            return _not_found(command)
        except OSError as error:
            remedy = "make it executable (chmod +x), or write its interpreter before it, as python"
            raise SinkError(f"cannot run {command[0]}: {error.strerror}; {remedy}") from error
        send = partial(_send, child)
        for number in early:
            send(number)
        try:
            async with TaskGroup() as group:
                failed = group.create_task(state.failed.wait())
                ended = group.create_task(child.wait())
                try:
                    await asyncio.wait({failed, ended}, return_when=asyncio.FIRST_COMPLETED)
                except asyncio.CancelledError:  # the sidecar itself fails, and its FIFOs end with it
                    log.error("ending the trainer, because the sidecar ends")
                    stopped = True
                    await _end_child(send, ended, {}, notice=0)
                    raise
                failed.cancel()
                if not ended.done():
                    stopped = True
                    fields, notice = _failure_fields(state), GRACE
                    log.error(
                        "a channel failed; the trainer is given time to notice", seconds=notice, **fields
                    )
                    await _end_child(send, ended, fields, notice=notice)
        finally:
            if stopped and not shared:
                await _end_group(child.pid)
    status = child.returncode or 0
    return 128 - status if status < 0 else status


def _warn_of_unread(state: JobState) -> None:
    """Log the channels whose FIFOs no process has opened, if there are any."""
    unread = [name for name, each in state.statistics().items() if not each.readers_come]
    if unread:
        log.warning(
            "the trainer has not read every channel",
            channels=unread,
            do="open their FIFOs, or leave the channels out of the job file",
        )


def _failure_fields(state: JobState) -> dict[str, object]:
    """Return the log fields of the first failure: channel, error and exit code."""
    failure = state.failure
    if failure is None:
        raise RuntimeError("no channel has failed")
    name, error = failure
    return {"channel": name, "error": str(error), "code": int(exit_code(error))}


async def _end_child(
    send: Callable[[signal.Signals], None],
    ended: asyncio.Task[int],
    fields: dict[str, object],
    *,
    notice: float,
) -> None:
    """Wait `notice` seconds, send SIGTERM, wait, send SIGKILL, to the trainer alone, until it has ended.

    `fields`: of the channel's failure; empty if the sidecar itself fails.
    """
    for number, seconds in ((signal.SIGTERM, notice), (signal.SIGKILL, GRACE)):
        await asyncio.wait({ended}, timeout=seconds)
        if ended.done():
            return
        if fields:
            log.error("ending the trainer, whose channel failed", signal=number.name, **fields)
        send(number)
    await asyncio.wait({ended}, timeout=GRACE)  # a process that waits for a device survives SIGKILL


async def _end_group(group: int) -> None:
    """End the processes that a trainer has left in its process group: SIGTERM, SIGKILL after `GRACE`.

    The FIFOs stay open meanwhile: a process that read on would take their end for the end of the data. A
    trainer that a signal reaches ends its workers itself, so they get no signal before it has ended.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(TimeoutError, ProcessLookupError, PermissionError):
            os.killpg(group, number)
            async with time_limit(GRACE):
                while (process := _living(group)) is not None:  # it may have forked meanwhile
                    await _end_of(process)
            return


def _living(group: int) -> int | None:
    """Return a pidfd of a process of the group that has not ended; None if there is none.

    killpg(2) does not do: it also counts zombies, and only their parents can remove those.
    """
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if os.getpgid(pid) == group:
                process = os.pidfd_open(pid)
                if not is_ready(process, select.POLLIN):
                    return process
                os.close(process)
    return None


async def _end_of(process: int) -> None:
    """Wait for the end of a process; close `process`, its pidfd."""
    try:
        await readable(process)
    finally:
        os.close(process)


def _send(child: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Send a signal to the trainer alone, unless it has ended."""
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(number)


def _sent_by_terminal(number: signal.Signals) -> bool:
    r"""Return whether every process of the sidecar's group has got a signal because of the terminal.

    Ctrl-C and Ctrl-\ go to the foreground group. When a terminal hangs up, the kernel sends SIGHUP to the
    leader of its session, usually a shell, which sends it to all processes of its jobs.
    """
    if number == signal.SIGHUP:
        return os.getsid(0) != os.getpid() and not in_foreground()
    return number in (signal.SIGINT, signal.SIGQUIT) and in_foreground()
