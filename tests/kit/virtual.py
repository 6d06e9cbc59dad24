"""An event loop in virtual time whose order of events is drawn from a seed.

    real pipes, FIFOs, socket pairs ──epoll──> what is ready ──dice──> some of it now, the rest later
    timers                          ──clock─────────────────────────> jumped to when nothing is ready
    threads (open(2), executors)    ──dice──> run on the loop, begun and ended at drawn moments
    connect(2), getaddrinfo         ──dice──> a socket pair, a refusal or silence, after a drawn delay

Only what no platform promises is drawn: which of the ready descriptors is told first, how late, how many in
one turn, and how long the process was away between two turns. What asyncio promises stays: `call_soon` is
first in, first out, and a timer is never early. A socket pair stands in for a TCP connection, since its bytes
arrive within the call that sends them; SO_RCVLOWAT, which Unix sockets do not heed, is heeded here.

The same seed makes the same calls in the same order: `lines` are a trace of them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import fcntl
import itertools
import os
import random
import select
import selectors
import socket
import stat
import sys
import termios
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

from streamer.sink import write_ends

_REAL_EPOLL = select.epoll
_WAKES = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
MOST_STEPS = 300_000
"""Turns of the loop after which a run counts as going round in a circle."""

LOOKS, LONG = 8, 0.5
"""Turns, and virtual seconds, between two looks whether a FIFO that is being opened has a reader; readers
that know us tell."""


_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")


class Hang(BaseException):
    """Nothing is ready, and no timer is left; or the run has no end. Past every `except Exception`."""


class Task(asyncio.Task):  # type: ignore[type-arg]
    """Hashed by its number: the order of a set of tasks is that of their making, in every run."""

    numbers = itertools.count()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._number = next(self.numbers)
        super().__init__(*arguments, **options)

    def __hash__(self) -> int:
        return self._number

    __eq__ = object.__eq__


class Epoll:
    """`select.epoll` for the loop that is running: in a drawn order, and heeding SO_RCVLOWAT."""

    def __init__(self) -> None:
        self._real = _REAL_EPOLL()
        self._loop = asyncio.get_running_loop()
        self._masks: dict[int, int] = {}
        self._sockets: set[int] = set()
        self._reported: dict[int, int] = {}
        """Events of one-shot registrations that the kernel has told, and the owner has not heard."""
        if isinstance(self._loop, ScheduledLoop):
            self._loop.epolls[self._real.fileno()] = self

    @property
    def closed(self) -> bool:
        return self._real.closed

    def fileno(self) -> int:
        return self._real.fileno()

    def register(self, fd: int, mask: int) -> None:
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            self._sockets.add(fd)
            mask |= select.EPOLLRDHUP
        self._real.register(fd, mask)
        self._masks[fd] = mask

    def modify(self, fd: int, mask: int) -> None:
        self._reported.pop(fd, None)
        self._real.modify(fd, mask)
        self._masks[fd] = mask

    def unregister(self, fd: int) -> None:
        self._reported.pop(fd, None)
        self._sockets.discard(fd)
        del self._masks[fd]
        self._real.unregister(fd)

    @property
    def reported(self) -> bool:
        """Whether the kernel has told of something that the owner has not heard."""
        return bool(self._reported)

    def ready(self) -> list[tuple[int, int]]:
        """All that the kernel tells now."""
        found = dict(self._reported)
        for fd, events in self._real.poll(0, 1000):
            if fd in self._sockets and not events & _WAKES and not _enough(fd):
                continue
            if self._masks[fd] & select.EPOLLONESHOT:
                self._reported[fd] = events
            found[fd] = events
        return sorted(found.items())

    def poll(self, timeout: float | None = None, maxevents: int = -1) -> list[tuple[int, int]]:
        if timeout != 0:
            raise RuntimeError("the loop waits, nobody else")
        found = self.ready()
        dice = self._loop.dice if isinstance(self._loop, ScheduledLoop) else random.Random(0)
        dice.shuffle(found)
        most = len(found) if maxevents < 0 else min(len(found), maxevents)
        found = found[: dice.randint(min(1, most), most)]
        for fd, _ in found:
            self._reported.pop(fd, None)
        return [(fd, events & ~select.EPOLLRDHUP) for fd, events in found]

    def close(self) -> None:
        if not self._real.closed:
            if isinstance(self._loop, ScheduledLoop):
                self._loop.epolls.pop(self._real.fileno(), None)
            self._real.close()


def _enough(fd: int) -> bool:
    """Whether the socket has as many bytes as it is to wake for (SO_RCVLOWAT)."""
    queued = int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0"), sys.byteorder)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fileno=fd)
    try:
        return queued >= sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)
    finally:
        sock.detach()


class _Selector(selectors.EpollSelector):
    """Tells some of what is ready, in a drawn order; moves the clock when there is nothing."""

    loop: ScheduledLoop

    def __init__(self) -> None:
        with _real_epoll():
            super().__init__()
        self._due: dict[tuple[int, int], float] = {}

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        loop, dice = self.loop, self.loop.dice
        loop.turn()
        timer = None if timeout is None else loop.now + timeout
        while True:
            ready = [each for each in self._ready() if self._when(each) <= loop.now]
            if ready:
                chosen = dice.sample(ready, dice.randint(1, len(ready)))
                for key, mask in chosen:
                    del self._due[key.fd, mask]
                loop.note("ready", [(key.fd, mask) for key, mask in chosen])
                return chosen
            upto = min([*self._due.values(), *([] if timer is None else [timer])], default=loop.now + LONG)
            if loop.opening and upto - loop.now >= LONG and loop.try_to_open():
                return []  # which is a timer now
            # A timer that is due before any of what is ready is told of comes first.
            moments = list(self._due.values())
            if timer is not None:
                if timer <= loop.now or timer <= min(moments, default=timer):
                    loop.now = max(loop.now, timer)
                    return []
                moments.append(timer)
            if not moments:
                raise Hang(f"nothing is left to wait for at {loop.now:.3f} s")
            loop.now = max(loop.now, min(moments))

    def _ready(self) -> list[tuple[selectors.SelectorKey, int]]:
        found = []
        for key, mask in super().select(0):
            epoll = self.loop.epolls.get(key.fd)
            if epoll is None or epoll.ready():
                found.append((key, mask))
        listed = {key.fd for key, _ in found}
        for fd, epoll in self.loop.epolls.items():
            # The kernel has told us, and tells nobody again.
            if epoll.reported and fd not in listed and fd in self.get_map():
                found.append((self.get_map()[fd], selectors.EVENT_READ))
        found.sort(key=lambda each: each[0].fd)
        now = {(key.fd, mask) for key, mask in found}
        for gone in [each for each in self._due if each not in now]:
            del self._due[gone]
        return found

    def _when(self, event: tuple[selectors.SelectorKey, int]) -> float:
        """When the loop hears of it."""
        name = event[0].fd, event[1]
        if name not in self._due:
            self._due[name] = self.loop.now + self.loop.delay()
        return self._due[name]


class OnLoop(concurrent.futures.Executor):
    """An executor whose one thread is the loop's: work begins and ends at drawn moments.

    Opening a FIFO to write, which blocks until somebody reads, is tried again whenever somebody may.
    """

    def __init__(self, max_workers: int = 1, thread_name_prefix: str = "") -> None:
        loop = asyncio.get_running_loop()
        if not isinstance(loop, ScheduledLoop):
            raise TypeError("made for a ScheduledLoop")
        self._loop = loop
        del max_workers, thread_name_prefix

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._loop.call_later(self._loop.delay(), self._begin, future, call, arguments, options)
        return future

    def _begin(self, future: Any, call: Callable[..., Any], arguments: Any, options: Any) -> None:
        if not future.set_running_or_notify_cancel():
            return
        if call is os.open:
            self._loop.opening[future] = arguments
            self._loop.try_to_open()
            return
        try:
            found, error = call(*arguments, **options), None
        except BaseException as caught:  # noqa: BLE001 - the caller's
            found, error = None, caught
        self._loop.call_later(self._loop.delay(), _settle, future, found, error)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        del wait, cancel_futures


class OpenerOnLoop:
    """`write_ends.Opener` without a thread."""

    def __init__(self, name: str) -> None:
        del name
        self._executor = OnLoop()

    def open(self, path: str) -> concurrent.futures.Future[int]:
        opening: concurrent.futures.Future[int] = self._executor.submit(os.open, path, write_ends.WRITE_END)
        return opening

    def close(self) -> None:
        pass


def _settle(future: Any, found: Any, error: BaseException | None) -> None:
    if error is None:
        future.set_result(found)
    else:
        future.set_exception(error)


class ScheduledLoop(asyncio.SelectorEventLoop):
    """See the module. `connect` is asked for every connection; `addresses` are what every name leads to."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(f"{seed} schedule")
        self.now = 1000.0
        self.steps = 0
        self.paused = 0.0
        """Seconds that the process was away, so far."""
        self.epolls: dict[int, Epoll] = {}
        self.opening: dict[Any, Any] = {}
        self.faults: list[str] = []
        """What was told to the exception handler."""
        self.lines: list[str] | None = None
        """All that is noted, if somebody wants to read it."""
        self.addresses = ["192.0.2.1", "192.0.2.2"]
        self.connect: Callable[[str], tuple[float, OSError | Callable[[socket.socket], None] | None]]
        # How this run's loop is: prompt or sluggish, steady or with pauses.
        self._lateness = self.dice.choice([0.0, 0.0002, 0.002, 0.02])
        self._late = self.dice.choice([0.1, 0.3, 0.6])
        self._away = self.dice.choice([0.0, 0.001, 0.01])
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)
        self.set_task_factory(lambda loop, work, **options: Task(work, loop=loop, **options))
        self.set_exception_handler(lambda _, context: self.faults.append(str(context)))

    def time(self) -> float:
        return self.now

    def note(self, what: str, of: object) -> None:
        """Add to the trace."""
        if self.lines is not None:
            self.lines.append(f"{self.steps} {self.now:.6f} {what} {of}")

    def delay(self) -> float:
        """Seconds until something that has happened is heard of."""
        dice = self.dice
        return dice.expovariate(1 / self._lateness) if self._lateness and dice.random() < self._late else 0.0

    def turn(self) -> None:
        """A turn of the loop takes its time."""
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise Hang(f"still busy after {self.steps} turns, at {self.now:.3f} s")
        self.now += self.dice.expovariate(20_000)
        if self.dice.random() < self._away:
            pause = self.dice.expovariate(5)
            self.now += pause
            self.paused += pause
        if self.opening and self.steps % LOOKS == 0:
            self.try_to_open()

    def try_to_open(self) -> bool:
        """To be called when somebody may have opened the other end of a FIFO, before it is closed again.

        Whether anybody has.
        """
        before = len(self.opening)
        found: int | None
        failed: OSError | None
        for future, (path, flags) in list(self.opening.items()):
            try:
                fd = os.open(path, flags | os.O_NONBLOCK)
            except BlockingIOError:
                continue
            except OSError as error:
                if error.errno == errno.ENXIO:  # nobody reads it yet
                    continue
                found, failed = None, error
            else:
                os.set_blocking(fd, True)
                found, failed = fd, None
            del self.opening[future]
            self.call_later(self.delay(), _settle, future, found, failed)
        return len(self.opening) < before

    def _write_to_self(self) -> None:
        """Nothing: no other thread calls."""

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*_Arguments], _Result], *arguments: *_Arguments
    ) -> asyncio.Future[_Result]:
        del executor
        return asyncio.wrap_future(OnLoop().submit(func, *arguments), loop=self)

    async def getaddrinfo(self, host: Any, port: Any, **_: Any) -> Any:
        del host
        await asyncio.sleep(self.delay())
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (each, port)) for each in self.addresses]

    async def sock_connect(self, sock: socket.socket, address: Any) -> None:
        seconds, outcome = self.connect(address[0])
        await asyncio.sleep(seconds)
        if isinstance(outcome, OSError):
            raise outcome
        if outcome is None:
            await self.create_future()  # silence
            return
        ours, theirs = socket.socketpair()
        with ours:
            ours.setblocking(False)
            theirs.setblocking(False)
            os.dup2(ours.fileno(), sock.fileno(), inheritable=False)
        outcome(theirs)


@contextlib.contextmanager
def _real_epoll() -> Iterator[None]:
    now, select.epoll = select.epoll, _REAL_EPOLL  # type: ignore[misc]
    try:
        yield
    finally:
        select.epoll = now  # type: ignore[misc]


@contextlib.contextmanager
def virtual(seed: int) -> Iterator[ScheduledLoop]:
    """A loop for `seed`, and its clock for everybody, until the end of the block."""
    loop = ScheduledLoop(seed)
    clock, wall, epoll = time.monotonic, time.time, select.epoll
    opener = write_ends.Opener
    time.monotonic = lambda: loop.now
    time.time = lambda: 1.8e9 + loop.now
    select.epoll = Epoll  # type: ignore[assignment,misc]
    write_ends.Opener = OpenerOnLoop  # type: ignore[assignment,misc]
    random.seed(seed)
    Task.numbers = itertools.count()
    try:
        yield loop
    finally:
        time.monotonic, time.time, select.epoll = clock, wall, epoll  # type: ignore[misc]
        write_ends.Opener = opener  # type: ignore[misc]
        loop.close()


__all__ = ["Hang", "OnLoop", "ScheduledLoop", "virtual"]
