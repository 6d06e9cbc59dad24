"""`penstock exec`: the trainer as a child process beside the channels."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from sidecar.job.environment import trainer_environment
from sidecar.job.layout import Flags, Layout, resolve_host
from sidecar.job.supervisor import JobSpec, Supervisor
from sidecar.process.exits import Exit, exit_code
from sidecar.process.logs import log
from sidecar.process.signals import handled
from streamer.errors import SinkError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidecar.config.job import Job
    from sidecar.observe.state import JobState


FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
GRACE_AFTER_FAILURE = 10
"""Seconds that `exec` gives the trainer to notice a failed channel by itself, and then to obey SIGTERM."""


async def execute(job: Job, flags: Flags, command: tuple[str, ...]) -> int:
    """Run `command` as the trainer, beside the channels; return its exit code, or ours if we failed it."""
    with ExitStack() as stack:
        base = job.penstock.base_directory
        if base is None:
            base = stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-"))
        layout = Layout(base)
        job, hosts = resolve_host(job, layout, flags)
        spec = JobSpec(job=job, hosts=hosts, layout=layout, default_admin_port=0, keep_proof=False)
        supervisor = Supervisor(spec)
        code = Exit.OK.value

        async def until(_: Supervisor) -> None:
            nonlocal code
            environment = os.environ | trainer_environment(layout, job, hosts)
            code = await _run_trainer(supervisor.state, command, environment)

        failure = await supervisor.serve(until)
        return failure or code


async def _run_trainer(state: JobState, command: tuple[str, ...], environment: dict[str, str]) -> int:
    """The child's exit code as a shell gives it: 128 + n if signal n ended it."""
    early: list[signal.Signals] = []
    send: Callable[[signal.Signals], None] = early.append
    # From before it exists: a signal that ended us now would leave the child behind.
    with handled(FORWARDED, lambda number: _forward(send, number)):
        try:
            # Under a terminal the child must stay in its process group, for Ctrl-C and for reading from it.
            own_group = not _in_foreground()
            child = await asyncio.create_subprocess_exec(
                *command, env=environment, start_new_session=own_group
            )
        except FileNotFoundError:
            log.error("no such command", command=command[0])
            return Exit.NOT_FOUND
        except OSError as error:
            raise SinkError(f"cannot run {command[0]}: {error.strerror}") from error
        send = partial(_send, child, own_group=own_group)
        for number in early:
            send(number)
        async with asyncio.TaskGroup() as race:
            failed = race.create_task(state.failed.wait())
            ended = race.create_task(child.wait())
            await asyncio.wait({failed, ended}, return_when=asyncio.FIRST_COMPLETED)
            failed.cancel()
            if not ended.done():
                await _end_child(send, ended, _told(state))
    status = child.returncode or 0
    return 128 - status if status < 0 else status


def _told(state: JobState) -> dict[str, object]:
    """Which channel failed, why, and what the exit code will be."""
    failure = state.failure
    if failure is None:
        raise RuntimeError("no channel has failed")
    name, error = failure
    return {"channel": name, "error": str(error), "code": int(exit_code(error))}


async def _end_child(
    send: Callable[[signal.Signals], None], ended: asyncio.Task[int], told: dict[str, object]
) -> None:
    """Wait, then ask, then kill: all of it, for whatever reads on would take our end for the data's."""
    log.error("a channel failed; the trainer is given time to notice", seconds=GRACE_AFTER_FAILURE, **told)
    for number in (signal.SIGTERM, signal.SIGKILL):
        await asyncio.wait({ended}, timeout=GRACE_AFTER_FAILURE)
        if not ended.done():
            log.error("ending the trainer, whose channel failed", signal=number.name, **told)
        send(number)
        if ended.done():
            return


def _send(child: asyncio.subprocess.Process, number: signal.Signals, *, own_group: bool) -> None:
    """Send a signal to the child, and to what it has started if they have a group of their own."""
    with contextlib.suppress(ProcessLookupError):
        if own_group:
            os.killpg(child.pid, number)
        elif child.returncode is None:
            child.send_signal(number)


def _forward(send: Callable[[signal.Signals], None], number: signal.Signals) -> None:
    """Pass a signal on, unless the terminal has given it to the child already."""
    if not (number in (signal.SIGINT, signal.SIGQUIT) and _in_foreground()):
        send(number)


def _in_foreground() -> bool:
    """Whether a terminal's Ctrl-C goes to our whole process group, and so to the child."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False
