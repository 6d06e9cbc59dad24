"""`penstock cat`: objects to standard output."""

from __future__ import annotations

import codecs
import contextlib
import os
import select
import stat
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from sidecar.process.logs import WaitLog, log
from sidecar.process.progress import progress_line, transferred
from sidecar.process.resources import freeze_gc, memory_limit
from sidecar.process.terminal import asking
from streamer.errors import ConfigError, ReaderGone
from streamer.linux import descriptor_path
from streamer.plan import Arrangement
from streamer.relay.once import stream_once
from streamer.relay.statistics import ChannelCounters
from streamer.relay.transport import open_transport, why_read
from streamer.s3.client.endpoint import STALL_TIMEOUT
from streamer.s3.client.session import open_clients
from streamer.s3.pages.open_plan import OpenPlan
from streamer.s3.pages.pages import open_pages
from streamer.s3.pages.sources import Sources
from streamer.s3.pages.validation import PlanMemory
from streamer.schedule.concurrency import MOST_REQUESTS
from streamer.sink.outlet import FileOutlet, PipeOutlet
from streamer.sink.stdout import refused
from streamer.units import counted, decimal_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamer.plan import Join, Plan, S3Uri
    from streamer.plan.selection import Selection
    from streamer.relay.transport import TransportSpec
    from streamer.retry import RetryPolicy
    from streamer.s3.client.endpoint import Endpoint
    from streamer.s3.client.session import Clients
    from streamer.sink.outlet import Drainable, Outlet


class _StreamProgress:
    """How far the command is, for the progress line."""

    def __init__(self) -> None:
        self.listed = 0
        """Objects listed so far."""
        self.plan: Plan | None = None
        self.counters = ChannelCounters()
        self.started = 0.0
        """When the stream began (monotonic seconds)."""

    def text(self) -> str:
        done = self.counters.consumed_bytes
        if self.plan is None or (total := self.plan.known_bytes(0)) is None:
            return f"listing: {counted(self.listed, 'object')}" + (f", {decimal_bytes(done)}" if done else "")
        return transferred(done, total, time.monotonic() - self.started)


async def cat(
    uris: list[S3Uri],
    *,
    endpoint: Endpoint,
    spec: TransportSpec,
    join: Join | None = None,
    selection: Selection | None = None,
    quiet: bool = False,
) -> dict[str, Any] | None:
    """Stream the URIs to standard output while they are listed; return the figures.

    None if the reader has left. `spec`: limits and retries; its channel is that of the URIs. `quiet`: show no
    progress line.
    """
    progress, waits = _StreamProgress(), WaitLog(give_up_after=spec.retry.give_up_after)
    mode = os.fstat(1).st_mode
    async with contextlib.AsyncExitStack() as stack:
        clients = await stack.enter_async_context(
            open_clients(
                endpoint,
                connections=spec.requests_in_flight or MOST_REQUESTS,
                stall_timeout=min(STALL_TIMEOUT, spec.retry.give_up_after),
                by_aiobotocore=spec.wish == "aiobotocore",
                give_up_after=spec.retry.give_up_after,
                on_wait=waits.waiting,
                ask=asking(),
            )
        )
        # A program that reads a pipe may write to the same terminal, so only a file has the line.
        stack.enter_context(progress_line(progress.text, quiet=quiet or not stat.S_ISREG(mode)))
        arrangement = Arrangement(join=join)
        sources = Sources(
            stack.enter_context(open_pages(clients)),
            uris,
            arrangement,
            selection,
            exact=True,
            progress=partial(setattr, progress, "listed"),
            memory=PlanMemory(memory_limit() // 2),
        )
        open_plan = OpenPlan(arrangement, sources)
        plan = progress.plan = open_plan.plan
        why = why_read(plan)
        progress.started, cpu = time.monotonic(), time.process_time()
        spec = replace(spec, channels=[why], to_pipes=stat.S_ISFIFO(mode))
        try:
            async with open_transport(clients, spec) as transport:
                freeze_gc()
                await stream_once(
                    plan,
                    transport.source,
                    transport.stages(why),
                    policy=spec.retry,
                    counters=progress.counters,
                    open_outlet=partial(_standard_output, give_up_after=spec.retry.give_up_after),
                    listing=_list(open_plan, spec.retry, waits, joined=join is not None),
                )
        except ReaderGone:
            return None
        if join is None:
            await _warn_of_line_ends(plan, clients)
    if plan.strays is not None and plan.strays.keys:
        from sidecar.records.endmarks import option_advice, warn_of_strays

        warn_of_strays(plan.strays, advice=option_advice)
    total = plan.total_bytes(0)
    return {
        "objects": plan.objects(0),
        "bytes": total,
        "seconds": round(time.monotonic() - progress.started, 3),
        "transport": transport.name,
        "cpu_seconds_per_gb": round((time.process_time() - cpu) / max(total, 1) * 1e9, 3),
        "requests_in_flight": transport.memory_budget.concurrency.limit,
    }


async def _list(open_plan: OpenPlan, policy: RetryPolicy, waits: WaitLog, *, joined: bool) -> None:
    """List the objects; warn of end marks even if the reader leaves at the first one."""
    try:
        await open_plan.list(policy, on_wait=waits.waiting)
    finally:
        if not joined:
            from sidecar.records.endmarks import warn_of_end_marks

            warn_of_end_marks(open_plan.plan)


async def _warn_of_line_ends(plan: Plan, clients: Clients) -> None:
    from sidecar.records.line_ends import remedy, unended

    if (ref := await unended(plan.refs(0), clients)) is not None:
        log.warning(
            "an object does not end with a line feed",
            object=f"s3://{ref.bucket}/{ref.key}",
            do=remedy("--join lines"),
        )


def _standard_output(on_gone: Callable[[], None], *, give_up_after: float) -> Outlet:
    """Return standard output as an outlet. `give_up_after`: seconds to retry a write the kernel refuses.

    A pipe is reopened through /proc, so that O_NONBLOCK does not change the open file that the shell and
    other processes may share.
    """
    if not stat.S_ISFIFO(os.fstat(1).st_mode):
        return TerminalOutlet(1) if os.isatty(1) else FileOutlet(1)
    try:
        fd = os.open(descriptor_path(1), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except PermissionError:  # another user made the pipe, as under sudo
        fd = os.dup(1)
    except OSError as error:  # ENXIO: every reader has closed the pipe
        raise ReaderGone("nobody reads standard output") from error
    outlet = PipeOutlet(fd, on_gone=on_gone)
    outlet.give_up_after = give_up_after
    return outlet


class TerminalOutlet(FileOutlet):
    """Standard output that is a terminal: it takes text only.

    Other bytes would switch the terminal's modes, and may even type commands there.
    """

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._terminal = fd
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        self._pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def push(self, source: Drainable) -> int:
        """Raises ConfigError for bytes that are not text, before any of them is written."""
        count = source.drain_into(self._pipe[1])
        data = os.read(self._pipe[0], count) if count else b""
        try:
            text = self._decode(data)
        except UnicodeDecodeError:
            text = "\0"
        if any(ord(each) < 32 and each not in "\t\n\r" for each in text):
            raise ConfigError(
                "standard output is a terminal, and the objects are not text: write them to a file (> FILE) "
                "or to a program (| COMMAND)"
            )
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._terminal, left) :]
            except BlockingIOError:  # another program has made the terminal non-blocking
                select.select([], [self._terminal], [])
            except OSError as error:
                raise refused(error) from error
        return count

    def close(self) -> None:
        super().close()
        for fd in self._pipe:
            if fd >= 0:
                os.close(fd)
        self._pipe = (-1, -1)
