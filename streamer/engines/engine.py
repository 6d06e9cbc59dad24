"""The parent's side of one engine process, and the set of all of them.

One task per place starts a process, waits for its end and starts the next: at once, or after a wait that
doubles if the process ended before it was ready. The spans of an ended process fail with `Transient`, so the
relay asks for the rest of each. A process that does not answer for `silent_after` seconds, because it is
stopped or spins, is killed and thereby replaced too. Starting and reaping block, so a thread does both.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict

from streamer.aio import in_thread, task_group
from streamer.engines.link import Link, Message
from streamer.errors import SinkError
from streamer.helpers import spawn

START_WITHIN = 30.0
"""Seconds for a process to start."""
PING_EVERY = 5.0
"""Seconds between two checks of a process."""
FIRST_WAIT, LONGEST_WAIT = 0.1, 5.0
"""Seconds before a process is replaced that ended before it was ready: the first wait, and the longest."""
_MAIN = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from streamer.engines.process import main; main()"
)


class SpanBody(Protocol):
    """What an engine tells about a span; implemented by `EngineBody`."""

    def opened(self, peer: str | None) -> None:
        """Note that the first response header is right."""

    def phase(self, phase: Any, report: Any) -> None:
        """Note a wait before a retry, or its end."""

    def ended(self, written: int, error: Any, report: Any) -> None:
        """Note that the engine has written `written` bytes, and no further byte will come."""

    def lost(self, why: str) -> None:
        """Note that the engine has ended."""


class EngineSettings(TypedDict):
    """What every engine process gets at its start, over its socket. Headers may hold a customer's key."""

    anonymous: bool
    headers: dict[str, str]
    sends_if_match: bool
    certificates: str | None
    """File of the certificates to trust; None: no TLS."""
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

    def __init__(self, number: int, process: subprocess.Popen[bytes], sock: socket.socket) -> None:
        """`sock`: our end of the socket; owned from now on."""
        self.number = number
        self.process = process
        self.ready = False
        """Whether the process serves."""
        self.ended = asyncio.Event()
        """Set when the process has ended or closed its end of the socket."""
        self.spans: dict[int, SpanBody] = {}
        self.load = 0
        """Bytes of the spans in flight."""
        self.sent: dict[str, Any] = {}
        """Credentials and endpoints that the process has, by name."""
        self.on_ready: Callable[[], None] = lambda: None
        self._heard = time.monotonic()
        self._link = Link(sock, self._on_message, self.ended.set)

    def __repr__(self) -> str:
        return f"<Engine {self.number}, pid {self.process.pid}, {len(self.spans)} spans>"

    @property
    def serves(self) -> bool:
        """Whether the process is ready and has not ended."""
        return self.ready and not self.ended.is_set()

    def send(self, *message: Any, descriptors: tuple[int, ...] = ()) -> None:
        """Send a message. Raises OSError (`Link.send`)."""
        self._link.send(message, descriptors)

    def _on_message(self, message: Message, descriptors: list[int]) -> None:
        for fd in descriptors:
            os.close(fd)
        self._heard = time.monotonic()
        what, *rest = message
        if what == "ready":
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
            with open(f"/proc/{self.process.pid}/stat", "rb", buffering=0) as file:
                fields = file.read(1024).rpartition(b")")[2].split()
        except OSError:
            return EngineUsage(self.number, self.process.pid, 0.0, 0, self.load)
        seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        resident = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
        return EngineUsage(self.number, self.process.pid, seconds, resident, self.load)

    def check(self, silent_after: float) -> None:
        """Ask the process for an answer; note its end if it has given none for `silent_after` seconds.

        A process that has exited counts as ended even if its socket has not reported the end.
        """
        silent = self.ready and time.monotonic() - self._heard > silent_after
        if silent or self.process.poll() is not None:
            self.ended.set()  # `close` kills it
        else:
            self.send("ping")

    def close(self) -> None:
        """Kill the process, and fail its spans. It must still be waited for."""
        self._link.close()
        self.ended.set()
        self.process.kill()
        spans, self.spans = self.spans, {}
        for span in spans.values():
            span.lost(f"engine process {self.process.pid} has ended")


class Engines:
    """The engine processes of one job. Use `running`."""

    def __init__(
        self, count: int, settings: EngineSettings, *, silent_after: float, ping_every: float
    ) -> None:
        """`silent_after`: seconds without an answer after which a process is killed."""
        self.replaced = 0
        """Processes that have ended and were replaced."""
        self._settings = settings
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
                engine = await _start(place)
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
            engine.send("settings", self._settings)
            while not engine.ended.is_set():
                engine.check(self._silent_after)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._ping_every):
                        await engine.ended.wait()
            return engine.ready
        finally:
            self._engines[engine.number] = None
            engine.close()
            code = await in_thread(engine.process.wait)
            if not engine.ready:
                self._note_failure(
                    SinkError(
                        f"an engine process ended with code {code} before it was ready; see its messages"
                    )
                )

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
    count: int, settings: EngineSettings, *, silent_after: float, ping_every: float = PING_EVERY
) -> AsyncIterator[Engines]:
    """Run `count` engine processes until the end of the block. Raises SinkError if one does not start."""
    engines = Engines(count, settings, silent_after=silent_after, ping_every=ping_every)
    async with task_group() as tasks:
        keeping = [tasks.create_task(engines.keep(place), name=f"engine {place}") for place in range(count)]
        try:
            await engines.started()
            yield engines
        finally:
            for task in keeping:
                task.cancel()


async def _start(number: int) -> Engine:
    """Start a process. Raises SinkError."""
    ours, theirs = socket.socketpair()
    started: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        started.append(
            subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-I", "-c", _MAIN, json.dumps(sys.path), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=spawn.environment(),
                pass_fds=[theirs.fileno()],
            )
        )

    try:
        with theirs:
            await in_thread(start)
    except OSError as error:
        ours.close()
        raise SinkError(
            f"cannot start an engine process: {error.strerror}; raise the limits of processes and memory, "
            "or set Penstock.Processes: 0"
        ) from error
    except BaseException:
        ours.close()
        for process in started:
            process.kill()
            await in_thread(process.wait)
        raise
    return Engine(number, started[0], ours)
