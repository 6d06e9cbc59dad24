"""The parent's side of one engine process, and the set of all of them.

One task per place has a process forked, waits for its end and has the next one forked: at once, or after a
wait that doubles if the process ended before it was ready. The spans of an ended process fail with
`Transient`, so the relay asks for the rest of each. A process that does not answer for `silent_after`
seconds, because it is stopped or spins, is killed and thereby replaced too.

    asked for ─ forked (pidfd) ─▶ settings ─ ready ─▶ serves ─ pidfd or socket ends ─▶ ended
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict

from streamer.aio import task_group
from streamer.engines.link import Link, Message
from streamer.engines.template import Template, cannot_start
from streamer.errors import SinkError

START_WITHIN = 30.0
"""Seconds for a process to start."""
PING_EVERY = 5.0
"""Seconds between two checks of a process."""
FIRST_WAIT, LONGEST_WAIT = 0.1, 5.0
"""Seconds before a process is replaced that ended before it was ready: the first wait, and the longest."""


class SpanCalls(Protocol):
    """What an engine reports of a span; implemented by `EngineBody`."""

    def opened(self, peer: str | None) -> None:
        """Note that the first response header is right."""

    def phase(self, phase: Any, report: Any) -> None:
        """Note a wait before a retry, or its end."""

    def ended(self, written: int, error: Any, report: Any) -> None:
        """Note that the engine has written `written` bytes, and no further byte will come."""

    def lost(self, why: str) -> None:
        """Note that the engine has ended."""


class EngineSettings(TypedDict):
    """What every engine process gets after its start, over its socket. Headers may hold a customer's key."""

    anonymous: bool
    headers: dict[str, str]
    sends_if_match: bool
    stall_timeout: float
    retry: dict[str, Any]
    """Fields of the `RetryPolicy`."""


@dataclass(frozen=True, slots=True)
class EngineUsage:
    """What one engine process uses, for metrics and status."""

    number: int
    pid: int
    cpu_seconds: float
    resident_bytes: int
    requested_bytes: int
    """Bytes that have been asked for and have not been taken."""


class Engine:
    """One engine process."""

    def __init__(self, number: int, sock: socket.socket, settings: EngineSettings) -> None:
        """`sock`: our end of the socket; owned from now on. `settings`: sent once the process runs."""
        self.number = number
        self.pid = 0
        """Process id; 0 until the template has forked the process."""
        self.ready = False
        """Whether the process serves."""
        self.ended = asyncio.Event()
        """Set when the process has ended or closed its end of the socket."""
        self.refusal: str | None = None
        """Why the kernel refused the process."""
        self.spans: dict[int, SpanCalls] = {}
        self.load = 0
        """Bytes of the spans in flight."""
        self.sent: dict[str, Any] = {}
        """Credentials and endpoints that the process has, by name."""
        self.on_ready: Callable[[], None] = lambda: None
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._pidfd: int | None = None
        self._exited = asyncio.Event()
        self._last_message_at = time.monotonic()
        self._link = Link(sock, self._on_message, self.ended.set)

    def __repr__(self) -> str:
        return f"<Engine {self.number}, pid {self.pid}, {len(self.spans)} spans>"

    @property
    def serves(self) -> bool:
        """Whether the process is ready and has not ended."""
        return self.ready and not self.ended.is_set()

    def send(self, *message: Any, descriptors: tuple[int, ...] = ()) -> None:
        """Send a message. Raises OSError (`Link.send`)."""
        self._link.send(message, descriptors)

    def _on_message(self, message: Message, descriptors: list[int]) -> None:
        self._last_message_at = time.monotonic()
        what, *rest = message
        match what:
            case "forked" if not descriptors:
                self.refusal = os.strerror(errno.EMFILE)  # the kernel has dropped the pidfd
                self.ended.set()
                return
            case "forked":
                self.pid, self._pidfd = rest[0], descriptors[0]
                self._loop.add_reader(self._pidfd, self._on_exit)
                self.send("settings", self._settings)
                return
            case "refused":
                self.refusal = rest[0]
                return
            case "ready":
                self.ready = True
                self.on_ready()
                return
        if what == "pong" or (span := self.spans.get(rest[0])) is None:
            return
        match what:
            case "opened":
                span.opened(rest[1])
            case "phase":
                span.phase(rest[1], rest[2])
            case "ended":
                del self.spans[rest[0]]
                span.ended(*rest[1:])

    def usage(self) -> EngineUsage:
        """Return what the process uses now; zeros if it has just ended (proc(5))."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb", buffering=0) as file:
                fields = file.read(1024).rpartition(b")")[2].split()
        except OSError:
            return EngineUsage(self.number, self.pid, 0.0, 0, self.load)
        seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        resident = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
        return EngineUsage(self.number, self.pid, seconds, resident, self.load)

    def check(self, silent_after: float) -> None:
        """Ask the process for an answer; note its end if it has given none for `silent_after` seconds."""
        if time.monotonic() - self._last_message_at > (silent_after if self.ready else START_WITHIN):
            self.ended.set()  # `close` kills it
        elif self.ready:
            self.send("ping")

    def _on_exit(self) -> None:
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
        self._exited.set()
        self.ended.set()

    async def close(self, reap: Callable[[int], None]) -> None:
        """Kill the process, fail its spans, wait for its end, and pass its pidfd to `reap`, which owns it."""
        self._link.close()
        self.ended.set()
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        spans, self.spans = self.spans, {}
        for span in spans.values():
            span.lost(f"engine process {self.pid} has ended")
        if self._pidfd is None:
            return
        try:
            await self._exited.wait()
        finally:
            self._loop.remove_reader(self._pidfd)
            pidfd, self._pidfd = self._pidfd, None
            reap(pidfd)


class Engines:
    """The engine processes of one job. Use `running`."""

    def __init__(
        self,
        count: int,
        settings: EngineSettings,
        template: Template,
        *,
        silent_after: float,
        ping_every: float,
    ) -> None:
        """`silent_after`: seconds without an answer after which a process is killed."""
        self.replaced = 0
        """Processes that have ended and were replaced."""
        self._settings = settings
        self._template = template
        self._silent_after = max(silent_after, 3 * ping_every)
        self._ping_every = ping_every
        self._engines: list[Engine | None] = [None] * count
        self._available = asyncio.Event()
        """Set while a process may serve."""
        self._failed: SinkError | None = None
        """Why a first process did not start."""
        self._started = asyncio.Event()
        """Set when every first process serves, or one has failed."""

    def __repr__(self) -> str:
        return f"<Engines {self._engines}>"

    def usage(self) -> list[EngineUsage]:
        """Return what each process that serves uses."""
        return [engine.usage() for engine in self.engines if engine.serves]

    @property
    def engines(self) -> list[Engine]:
        """The processes that have not ended, in the order of their numbers."""
        return [engine for engine in self._engines if engine is not None]

    async def keep(self, place: int) -> None:
        """Run a process, and another when it has ended, until this task is cancelled."""
        failures = 0
        while True:
            ready = False
            try:
                engine = Engine(place, await self._template.fork(), self._settings)
            except SinkError as error:
                self._note_failure(error)
            else:
                ready = await self._run(engine)
            failures = 0 if ready else failures + 1
            if failures:
                await asyncio.sleep(min(LONGEST_WAIT, FIRST_WAIT * 2 ** min(failures - 1, 10)))
            self.replaced += 1

    async def _run(self, engine: Engine) -> bool:
        """Serve requests with the process until it ends; return whether it was ready."""
        self._engines[engine.number] = engine
        engine.on_ready = self._note_ready
        try:
            while not engine.ended.is_set():
                engine.check(self._silent_after)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._ping_every):
                        await engine.ended.wait()
            return engine.ready
        finally:
            self._engines[engine.number] = None
            await engine.close(self._template.reap)
            if not engine.ready:
                self._note_failure(
                    SinkError("an engine process ended before it was ready; see its messages")
                    if engine.refusal is None
                    else cannot_start(engine.refusal)
                )
            if not engine.pid and engine.refusal is None:
                await self._template.discard()  # it has ended, or does not answer

    def _note_ready(self) -> None:
        self._available.set()
        if len(self.engines) == len(self._engines) and all(each.ready for each in self.engines):
            self._started.set()

    def _note_failure(self, error: SinkError) -> None:
        if not self._started.is_set():
            self._failed = error
            self._started.set()

    async def started(self) -> None:
        """Wait until every first process serves. Raises SinkError if one does not start."""
        try:
            async with asyncio.timeout(START_WITHIN):
                await self._started.wait()
        except TimeoutError:
            raise SinkError(
                f"an engine process was not ready in {START_WITHIN:.0f} s; set Penstock.Processes: 0"
            ) from None
        if self._failed is not None:
            raise self._failed

    async def least_busy(self) -> Engine:
        """Return the process with the fewest bytes in flight; wait for one if none serves."""
        while not (serving := [engine for engine in self.engines if engine.serves]):
            self._available.clear()
            await self._available.wait()
        return min(serving, key=lambda engine: engine.load)


@contextlib.asynccontextmanager
async def running(
    count: int,
    settings: EngineSettings,
    certificates: str | None,
    *,
    silent_after: float,
    ping_every: float = PING_EVERY,
) -> AsyncIterator[Engines]:
    """Run `count` engine processes until the end of the block. Raises SinkError if one does not start.

    `certificates`: file of the certificates to trust; None: no TLS.
    """
    template = Template(certificates)
    engines = Engines(count, settings, template, silent_after=silent_after, ping_every=ping_every)
    try:
        async with task_group() as tasks:
            keeping = [
                tasks.create_task(engines.keep(place), name=f"engine {place}") for place in range(count)
            ]
            try:
                await engines.started()
                yield engines
            finally:
                for task in keeping:
                    task.cancel()
    finally:
        await template.close()
