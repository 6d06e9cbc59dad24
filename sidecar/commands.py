"""What each command does, as a coroutine that returns an exit code. `cli` parses and reports."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from sidecar.environment import trainer_environment
from sidecar.exits import Exit, exit_code
from sidecar.identity import identify, local_job
from sidecar.logs import log
from sidecar.memory import memory_limit
from sidecar.planning import patiently
from sidecar.rehearsal import ADMIN_PORT
from sidecar.resume import load_saved
from sidecar.runtime import DEFAULT_BASE, Layout, keep_loaded, platform_resource_config
from sidecar.signals import Shutdown, handled
from sidecar.supervisor import Supervisor
from streamer.errors import ReaderGone, SinkError
from streamer.plan import Arrangement, cut
from streamer.relay.cat import stream_once
from streamer.relay.pace import MOST_LANES
from streamer.relay.race import first_of
from streamer.relay.statistics import Tally
from streamer.relay.transport import Wish, open_transport, why_read
from streamer.sink.outlet import FileOutlet, PipeOutlet
from streamer.source.described import PlanMemory
from streamer.source.listing import plan_uris
from streamer.source.retry import RetryPolicy
from streamer.source.session import STALL_TIMEOUT, Endpoint, open_clients
from streamer.trailer import mark_pipe
from streamer.units import human_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidecar.config import Job
    from sidecar.identity import Hosts
    from streamer.plan import Join, Plan, S3Uri
    from streamer.sink.outlet import Outlet

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
GRACE_AFTER_FAILURE = 10
"""Seconds that `exec` gives the trainer to notice a failed channel by itself, and then to obey SIGTERM."""


Flags = tuple[int | None, int | None]
"""`--host-index` and `--host-count`."""


def settle(job: Job, layout: Layout, flags: Flags) -> tuple[Job, Hosts]:
    """Who this host is, and the job as it concerns this host. Raises ConfigError."""
    hosts = identify(job, flags=flags, environment=os.environ, document=platform_resource_config(layout))
    return local_job(job, hosts), hosts


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
    job, hosts = settle(job, layout, flags)
    supervisor = Supervisor(
        job,
        layout,
        hosts,
        default_admin_port=ADMIN_PORT,
        keeper=continuation.keeper,
        saved=saved,
        resume_anyway=continuation.resume_anyway,
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
        if not task.done() and not supervisor.started:
            task.cancel()
        try:
            return int(await task)
        except asyncio.CancelledError:
            return int(Exit.OK)


async def execute(job: Job, flags: Flags, command: tuple[str, ...]) -> int:
    """Run `command` as the trainer, beside the channels; return its exit code, or ours if we failed it."""
    with ExitStack() as stack:
        base = job.penstock.base_directory
        if base is None:
            base = stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-"))
        layout = Layout(base)
        job, hosts = settle(job, layout, flags)
        supervisor = Supervisor(job, layout, hosts, default_admin_port=0, keep_proof=False)
        code = Exit.OK.value

        async def until(supervisor: Supervisor) -> None:
            nonlocal code
            environment = os.environ | trainer_environment(layout, job, hosts)
            code = await _run_trainer(supervisor, command, environment)

        failure = await supervisor.serve(until)
        return failure or code


async def _run_trainer(supervisor: Supervisor, command: tuple[str, ...], environment: dict[str, str]) -> int:
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
            failed = race.create_task(supervisor.failed.wait())
            ended = race.create_task(child.wait())
            await asyncio.wait({failed, ended}, return_when=asyncio.FIRST_COMPLETED)
            failed.cancel()
            if not ended.done():
                await _end_child(send, ended, _told(supervisor))
    status = child.returncode or 0
    return 128 - status if status < 0 else status


def _told(supervisor: Supervisor) -> dict[str, object]:
    """Which channel failed, why, and what the exit code will be."""
    failure = supervisor.failure
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CatOptions:
    """What `penstock cat` may use; None leaves a number to the transport."""

    budget: int
    part_size: int | None
    connections: int | None
    transport: Wish
    give_up_after: float
    join: Join | None = None


async def cat(
    uris: list[S3Uri],
    *,
    endpoint: Endpoint,
    options: CatOptions,
    promised: bool,
    report: Callable[[str], None],
) -> int:
    """Stream the URIs to standard output; `report` gets one closing line.

    `promised`: standard output is marked as a stream whose end will be marked, too (`streamer.trailer`).
    """
    policy = RetryPolicy(give_up_after=options.give_up_after)
    async with open_clients(
        endpoint,
        connections=options.connections or MOST_LANES,
        stall_timeout=min(STALL_TIMEOUT, options.give_up_after),
    ) as clients:
        memory, arrangement = PlanMemory(memory_limit() // 2), Arrangement(join=options.join)
        plan = await patiently(
            lambda progressed: plan_uris(
                clients.control, uris, arrangement, progress=lambda _: progressed(), memory=memory
            ),
            policy,
        )
        why = why_read(plan)
        tally, started, cpu = Tally(), time.monotonic(), time.process_time()
        try:
            async with open_transport(
                clients,
                wish=options.transport,
                buckets={uri.bucket for uri in uris},
                channels=[why],
                budget=options.budget,
                connections=options.connections,
                part_size=options.part_size,
                to_pipes=stat.S_ISFIFO(os.fstat(1).st_mode),
            ) as transport:
                keep_loaded()
                await stream_once(
                    plan,
                    transport.source,
                    transport.stages(why),
                    policy=policy,
                    tally=tally,
                    open_outlet=partial(_standard_output, give_up_after=options.give_up_after),
                )
        except ReaderGone:
            return Exit.READER_GONE
    if promised:
        mark_pipe(1, "complete")
    seconds = time.monotonic() - started
    total = plan.total_bytes(0)
    cpu_per_gb = (time.process_time() - cpu) / max(total, 1) * 1e9
    report(
        f"{plan.objects(0)} objects, {total} bytes in {seconds:.2f} s by {transport.name}: "
        f"{total / max(seconds, 1e-9) / 1e6:.0f} MB/s, {cpu_per_gb:.2f} CPU-s/GB, "
        f"{transport.allotment.pace.lanes} lanes"
    )
    return Exit.OK


def _standard_output(on_gone: Callable[[], None], *, give_up_after: float) -> Outlet:
    """Standard output as an outlet, whose kernel may refuse to write for so many seconds.

    A pipe is reopened through /proc, so that making it non-blocking does not change the open file that
    the shell and others may share.
    """
    if not stat.S_ISFIFO(os.fstat(1).st_mode):
        return FileOutlet(1)
    try:
        fd = os.open("/proc/self/fd/1", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except PermissionError:  # a pipe that another user made, as under sudo
        fd = os.dup(1)
    except OSError as error:  # ENXIO: nobody has the read end any more
        raise ReaderGone("nobody reads standard output") from error
    outlet = PipeOutlet(fd, on_gone=on_gone)
    outlet.give_up_after = give_up_after
    return outlet


async def plan(job: Job, flags: Flags) -> dict[str, Any]:
    """What `penstock plan` shows: every channel's objects, bytes, parts and digest."""
    layout = Layout(job.penstock.base_directory or DEFAULT_BASE)
    job, hosts = settle(job, layout, flags)
    supervisor = Supervisor(job, layout, hosts, default_admin_port=0)
    modes = {channel.channel_name: job.mode(channel) for channel in job.input_data_config}
    async with supervisor.clients() as clients:
        plans = await supervisor.plans(clients)
        async with supervisor.open_transport(clients, plans) as transport:
            part_size = transport.stages().part_size()
            return {
                "transport": transport.name,
                "reason": transport.reason,
                "host": {"index": hosts.index, "hosts": list(hosts.names)},
                "connections": transport.allotment.pace.lanes,
                "open_files": transport.few_files,
                "budget": transport.allotment.budget,
                "channels": {
                    name: {"mode": modes[name]}
                    | _summary(found.whole, part_size)
                    | {"keys": [[ref.bucket, ref.key, ref.size, ref.etag] for ref in found.whole.refs(0)]}
                    | (
                        {"lanes": {lane: _summary(plan, part_size) for lane, plan in found.fifos.items()}}
                        if name in job.lanes
                        else {}
                    )
                    for name, found in plans.items()
                },
            }


def _summary(plan: Plan, part_size: int) -> dict[str, Any]:
    """What is known before anything is streamed; a part size that adapts is the one it begins with."""
    parts = sum(1 for _ in cut(plan.segments(0), part_size=lambda: part_size, epoch=0))
    return {
        "objects": plan.objects(0),
        "bytes": plan.total_bytes(0),
        "size": human_bytes(plan.total_bytes(0)),
        "parts": parts,
        "part_size": part_size,
        "digest": plan.digest,
    }
