"""One run of a shape, with one fault in it or none, and its outcome.

    lab   what all runs of a worker share: a warmed process to fork from, and the S3 stub
    run   keeper (if any), sidecar, and a reader for each FIFO name. When a sidecar has died and a keeper
          holds on, the next one starts. Once every reader has ended, sidecar and keeper are sent SIGTERM.

One thread polls everything: filters' descriptors, processes, their logs, the readers' progress. PROCESS of a
point is one of `PROCESSES`. In a run whose fault is in the last two the first sidecar is killed when the
readers have a third of their bytes, so that the fault strikes during the recovery.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import shutil
import signal
import socket
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.kit.patience import Patience
from tests.kit.processes import write_job
from tests.machines.crash.calls import NAMES, Point, errors_of
from tests.machines.crash.notify import Listener, Stopped, group_of, kind_of
from tests.machines.crash.readers import Reader, trailer_state
from tests.machines.crash.shapes import CLOSE, EPOCHS, Servers, Shape
from tests.machines.crash.zygote import Zygote, scratch

PROCESSES = ("sidecar", "keeper", "successor", "handover")
"""The first sidecar and its keeper; the sidecar after one that was killed, and the keeper in such a run."""
DELAY = 0.3
"""Seconds that a delayed call takes longer."""
LONGEST = 40.0
"""Seconds without progress after which a run counts as hung."""
_HELD_FOR = 1.5
"""Seconds for which a reader of a failed channel must see nothing before its FIFO counts as held."""
_MOST_SIDECARS = 4
_OURS = (0, 2, 3, 4, 5, 6, 7, 8)
"""Exit codes that say what was wrong."""
_ABORTS = ("epoll_ctl", "clone3")
"""Where libuv aborts if it is refused a thread, or room in epoll; to readers that is a kill."""
_OF_ONE = ("connect", "sendto", "recvfrom", "splice", "readv", "writev", "vmsplice", "tee")
"""Calls whose error concerns one connection or one FIFO, and so one channel at the most."""
_UNEXPECTED = ("Traceback", "never retrieved", "Exception in callback", "Exception ignored", "report it")


class Hung(Exception):
    """A condition did not come."""


@dataclass
class Lab:
    """What runs share."""

    zygote: Zygote
    servers: Servers


@dataclass
class Outcome:
    """What came of a run."""

    state: str
    """equal, told, exit (told, and the process ended by itself), or broken."""
    why: list[str] = field(default_factory=list)
    """What is broken."""
    reached: bool = True
    """Whether the call was made that the fault was for."""
    seconds: float = 0.0
    codes: list[int] = field(default_factory=list)
    """Exit codes of the sidecars."""
    suffered: list[str] = field(default_factory=list)
    """FIFO names whose readers have not all."""
    log: str = ""
    calls: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """Kind of each descriptor, by process and call, in a run that records."""


class Run:
    """Use `outcome` once."""

    def __init__(
        self, lab: Lab, shape: Shape, point: Point | None = None, *, record: tuple[str, ...] = ()
    ) -> None:
        self._lab = lab
        self._shape = shape
        self._point = point
        self._record = record
        struck = {point.process} if point else set(record)
        self._recovery = bool(struck & {"successor", "handover"})
        self._base = Path(tempfile.mkdtemp(prefix="penstock-crash-", dir=scratch()))
        self._data = self._base / "ml" / "input" / "data"
        self._poll = select.poll()
        self._on: dict[int, Callable[[], None]] = {}
        self._pids: dict[str, int] = {}
        """Ids of the processes that run, by name."""
        self._listeners: list[Listener] = []
        self._threads: dict[int, int] = {}
        self._delayed: list[tuple[float, Listener, Stopped]] = []
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._seen = self._later = 0
        """Calls that the fault may meet, and how many of them it was not meant for."""
        self._calls: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        self._log: list[str] = []
        self._lines: dict[str, bytes] = {}
        self._codes: list[int] = []
        self._keeper_code: int | None = None
        self._keeper_ready = False
        self._killed_by_us: set[str] = set()
        self._ending = False
        self._failed: set[str] = set()
        """Channels that the log says have failed."""
        self._why: list[str] = []
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._readers: list[Reader] = []
        self._patience = Patience(LONGEST)

    def outcome(self) -> Outcome:
        """Run it, end everything, and judge."""
        began = time.monotonic()
        try:
            try:
                self._go()
            except Hung as error:
                self._why.append(f"hangs: {error}")
            left = [reader for reader in self._readers if not reader.done]
            self._end_all()
        finally:
            shutil.rmtree(self._base, ignore_errors=True)
        outcome = Outcome("equal", self._why)
        self._judge(outcome, left)
        outcome.seconds = time.monotonic() - began
        outcome.reached = self._point is None or self._seen >= self._point.n + self._later
        outcome.codes = self._codes
        outcome.log = "".join(self._log)
        outcome.calls = {process: dict(calls) for process, calls in self._calls.items()}
        return outcome

    # The course of a run

    def _go(self) -> None:
        shape = self._shape
        self._watch(self._wake_fd, self._progress)
        self._keeper_socket = str(self._base / "keeper")
        self._job = write_job(self._base / "job.json", shape.document(self._lab.servers, self._base / "ml"))
        self._data.mkdir(parents=True)
        if shape.keeper:
            self._start("handover" if self._recovery else "keeper")
            self._wait(lambda: self._keeper_ready or not self._keeper, "the keeper does not listen")
        turn = 0 if self._point is None else self._point.n
        for index, name in enumerate(shape.fifos):
            foreign = (index + turn) % 2 == 1
            self._readers.append(Reader(self._data, name, foreign=foreign, wake_fd=self._wake_fd))
        self._start("sidecar" if not self._recovery else "first")
        for reader in self._readers:
            reader.start()
        self._wait(lambda: self._settled, "the readers do not end")
        self._ending = True
        for name in list(self._pids):
            if name not in ("keeper", "handover"):
                os.kill(self._pids[name], signal.SIGTERM)
        self._wait(lambda: not self._sidecar, "the sidecar does not end on SIGTERM")
        if keeper := self._keeper:
            os.kill(keeper, signal.SIGTERM)
            self._wait(lambda: not self._keeper, "the keeper does not end on SIGTERM")

    @property
    def _keeper(self) -> int:
        return self._pids.get("keeper") or self._pids.get("handover") or 0

    @property
    def _sidecar(self) -> int:
        return next((pid for name, pid in self._pids.items() if name not in ("keeper", "handover")), 0)

    @property
    def _settled(self) -> bool:
        return all(reader.done or reader.given_up for reader in self._readers)

    def _start(self, name: str) -> None:
        keeper = name in ("keeper", "handover")
        arguments = [self._keeper_socket] if keeper else self._shape.arguments(self._job, self._keeper_socket)
        read_fd, write_fd = os.pipe()
        ours = theirs = None
        calls: list[str] | None = None
        if name in self._record or (self._point and self._point.process == name):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            calls = None if self._point is None else [self._point.call]
        pid = self._lab.zygote.start(
            "keeper" if keeper else "sidecar",
            arguments,
            write_fd,
            calls,
            None if theirs is None else theirs.fileno(),
        )
        os.close(write_fd)
        self._pids[name] = pid
        self._lines[name] = b""
        self._watch(read_fd, lambda: self._read_log(name, read_fd))
        pidfd = os.pidfd_open(pid)
        self._watch(pidfd, lambda: self._ended(name, pid, pidfd))
        if ours is not None and theirs is not None:
            theirs.close()
            with ours:
                _, fds, _, _ = socket.recv_fds(ours, 16, 1)
            if not fds:
                raise Hung(f"{name} has no filter: {self._log}")
            listener = Listener(fds[0])
            self._listeners.append(listener)
            self._watch(listener.fd, lambda: self._stopped(name, pid, listener))

    def _ended(self, name: str, pid: int, pidfd: int) -> None:
        self._unwatch(pidfd)
        code = self._lab.zygote.wait(pid)
        del self._pids[name]
        if name in ("keeper", "handover"):
            self._keeper_code = code
            return
        self._codes.append(code)
        if self._ending or self._settled:
            return
        if self._keeper and len(self._codes) < _MOST_SIDECARS:
            first = name == "first"
            self._start("successor" if first else f"restart {len(self._codes)}")
            return
        if self._shape.keeper and self._keeper and "restart" in name:
            self._why.append(f"{len(self._codes)} sidecars ended with {self._codes}")
        # Nobody will write: what a reader has by itself within that time counts.
        self._after(_HELD_FOR, self._give_up)

    def _give_up(self) -> None:
        for reader in self._readers:
            if not reader.done:
                reader.give_up()

    def _progress(self) -> None:
        os.eventfd_read(self._wake_fd)
        if self._recovery and (pid := self._pids.get("first")):
            total = sum(len(self._shape.truth(reader.name, 0)) for reader in self._readers) * EPOCHS
            if (
                sum(reader.received for reader in self._readers) > total // 3
                and "first" not in self._killed_by_us
            ):
                self._killed_by_us.add("first")
                os.kill(pid, signal.SIGKILL)

    def _read_log(self, name: str, fd: int) -> None:
        data = os.read(fd, 1 << 16)
        if not data:
            self._unwatch(fd)
            return
        *lines, self._lines[name] = (self._lines[name] + data).split(b"\n")
        for line in lines:
            text = line.decode(errors="replace")
            self._log.append(f"{name}: {text}\n")
            if name in ("keeper", "handover") and text == "ready":
                self._keeper_ready = True
            if '"epoch failed"' in text:
                self._note_failed(text)

    def _note_failed(self, text: str) -> None:
        for reader in self._readers:
            if f'"channel": "{reader.name}"' in text:
                self._failed.add(reader.name)
                if reader.foreign:
                    self._after(_HELD_FOR, functools.partial(_give_up, reader))

    # The fault

    def _stopped(self, name: str, pid: int, listener: Listener) -> None:
        try:
            stopped = listener.receive()
        except OSError:  # all that were under the filter have ended
            self._unwatch(listener.fd, close=False)
            return
        if stopped is None:
            if name not in self._pids:
                self._unwatch(listener.fd, close=False)
            return
        error = 0
        if (group := self._threads.get(stopped.thread)) is None:
            group = self._threads[stopped.thread] = group_of(stopped.thread)
        if group == pid:
            if self._point is None:
                kind = kind_of(stopped)
                self._calls[name][NAMES.get(stopped.number, str(stopped.number))].append(kind)
            else:
                self._seen += 1
                past = self._seen - self._point.n - self._later
                if past == 0 and self._point.errno and not self._plausible(stopped):
                    self._later += 1
                    past = -1
                if past == 0 and self._point.fault == "kill":
                    self._killed_by_us.add(name)
                    os.kill(pid, signal.SIGKILL)
                    return
                if past == 0 and self._point.fault == "delay":
                    self._delayed.append((time.monotonic() + DELAY, listener, stopped))
                    return
                if 0 <= past < self._point.times and (past == 0 or self._plausible(stopped)):
                    error = self._point.errno
        listener.answer(stopped, error)

    def _plausible(self, stopped: Stopped) -> bool:
        """Whether the call can return this error; its descriptor may be of another kind than recorded."""
        assert self._point is not None
        kind = kind_of(stopped)
        return self._point.fault in errors_of(self._point.call, kind)

    # Waiting

    def _watch(self, fd: int, callback: Callable[[], None]) -> None:
        self._on[fd] = callback
        self._poll.register(fd, select.POLLIN)

    def _unwatch(self, fd: int, *, close: bool = True) -> None:
        del self._on[fd]
        self._poll.unregister(fd)
        if close:
            os.close(fd)

    def _after(self, seconds: float, callback: Callable[[], Any]) -> None:
        self._timers.append((time.monotonic() + seconds, callback))

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        while not condition():
            now = time.monotonic()
            if self._patience.exhausted():
                raise Hung(f"{what}; {self._readers}")
            due = min([now + 1, *(at for at, *_ in self._delayed), *(at for at, _ in self._timers)])
            for fd, _ in self._poll.poll(max(0.0, due - now) * 1000 + 1):
                if fd in self._on:
                    self._on[fd]()
            now = time.monotonic()
            for each in [each for each in self._delayed if each[0] <= now]:
                self._delayed.remove(each)
                each[1].answer(each[2])
            for timer in [timer for timer in self._timers if timer[0] <= now]:
                self._timers.remove(timer)
                timer[1]()

    def _end_all(self) -> None:
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for name, pid in self._pids.items():
            code = self._lab.zygote.wait(pid)
            self._log.append(f"{name} was killed at the end: {code}\n")
        for reader in self._readers:
            reader.give_up()
        for reader in self._readers:
            if not reader.join(20):
                self._why.append(f"{reader} is stuck")
        self._states = {
            (reader.name, epoch): _state(self._data, reader.name, epoch)
            for reader in self._readers
            for epoch in range(EPOCHS)
        }
        for fd in list(self._on):
            with contextlib.suppress(OSError):
                if data := os.read(fd, 1 << 16) if self._is_log(fd) else b"":
                    self._log.append(data.decode(errors="replace"))
            self._unwatch(fd, close=all(fd != listener.fd for listener in self._listeners))
        for listener in self._listeners:
            listener.close()

    def _is_log(self, fd: int) -> bool:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:")

    # The outcome

    def _judge(self, outcome: Outcome, left: list[Reader]) -> None:
        why = outcome.why
        self._judge_readers(outcome, left)
        self._judge_processes(why)
        log = "".join(self._log)
        why.extend(f"the log has {text!r}" for text in _UNEXPECTED if text in log)
        due = ["a"] if self._shape.failing else []
        suffered = [name for name in outcome.suffered if name not in due]
        if suffered and (self._point is None or self._point.fault == "delay"):
            why.append(f"{suffered} suffered without a fault")
        self._judge_reach(outcome)
        if why:
            outcome.state = "broken"
        elif any(code not in (0, -signal.SIGKILL) for code in self._codes[:-1]) or (
            self._codes and self._codes[-1] not in (0, -signal.SIGKILL) and not self._failed
        ):
            outcome.state = "exit"
        elif suffered:
            outcome.state = "told"

    def _judge_readers(self, outcome: Outcome, left: list[Reader]) -> None:
        """What each reader has read, and which channels have suffered."""
        why, shape = outcome.why, self._shape
        keeper_died = self._keeper_code not in (None, 0) or not shape.keeper
        for reader in self._readers:
            whole = len(reader.epochs) == EPOCHS
            for epoch, got in enumerate(reader.epochs):
                truth = shape.truth(reader.name, epoch)
                whole &= self._judge_epoch(reader, epoch, got, truth, why, keeper_died=keeper_died)
            if not whole:
                outcome.suffered.append(reader.name)
            if reader in left and not reader.foreign and reader.name in self._failed:
                why.append(f"{reader} was not told that its channel has failed")

    def _judge_processes(self, why: list[str]) -> None:
        """How sidecars and the keeper have ended."""
        for code in self._codes:
            # SIGTERM kills a sidecar that is just ending by itself: it has put the default action back.
            killed = code == -signal.SIGKILL and self._killed_by_us
            aborted = code == -signal.SIGABRT and self._point and self._point.call in _ABORTS
            late = code == -signal.SIGTERM and self._ending
            if code not in _OURS and not (killed or aborted or late):
                why.append(f"a sidecar ended with {code}")
        if self._keeper_code not in (None, 0, -signal.SIGKILL, 7):
            why.append(f"the keeper ended with {self._keeper_code}")
        if self._keeper_code == -signal.SIGKILL and not self._killed_by_us & {"keeper", "handover"}:
            why.append("the keeper was killed, and not by us")
        if self._keeper_code == 7 and self._keeper_ready:
            why.append("the keeper ended with 7 after it had begun")

    def _judge_reach(self, outcome: Outcome) -> None:
        """Whether an error of one connection or FIFO has ended more than its channel."""
        point = self._point
        if point is None or not point.errno or point.call not in _OF_ONE:
            return
        if point.process not in ("sidecar", "successor"):
            return
        if any(code not in (0, -signal.SIGKILL) for code in self._codes) and not self._failed:
            outcome.why.append("the fault of one connection or FIFO ended the process")
        if len({name[0] for name in outcome.suffered}) > 1:
            outcome.why.append("the fault of one connection or FIFO made both channels suffer")

    def _judge_epoch(
        self, reader: Reader, epoch: int, got: Any, truth: bytes, why: list[str], *, keeper_died: bool
    ) -> bool:
        """Whether the reader has the whole epoch, rightly."""
        data, name = bytes(got.data), f"{reader.name}_{epoch}"
        failing = self._shape.failing and reader.name == "a"
        if data == truth and got.ended:
            if not reader.foreign or got.trailer == "complete":
                return True
            # The end came by the death of the writer, when all was through.
            return got.trailer in ("open", "stopped")
        closes = failing and self._shape.channel == CLOSE and got.trailer == "failed"
        if not truth.startswith(data):
            at = next((i for i, (x, y) in enumerate(zip(data, truth, strict=False)) if x != y), len(truth))
            why.append(f"{reader} has a wrong byte at {at} of {len(truth)} in {name}, {len(data)} bytes")
        elif got.ended and not reader.foreign:
            why.append(f"{name}: a proven end after {len(data)} of {len(truth)} bytes")
        elif got.ended and got.trailer == "complete":
            why.append(f"{name}: complete, after {len(data)} of {len(truth)} bytes")
        elif got.ended and not closes and not keeper_died:
            why.append(f"{name}: a foreign reader saw an end after {len(data)} of {len(truth)} bytes")
        return False


def _state(data: Path, name: str, epoch: int) -> str:
    try:
        return trailer_state(data, name, epoch)
    except (OSError, ValueError) as error:
        return str(error)


def _give_up(reader: Reader) -> None:
    if not reader.done:
        reader.give_up()
