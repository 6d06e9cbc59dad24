"""One seed: the keeper's own event handling over real pipes, FIFOs and sockets, in an order that is drawn.

    sidecars ──socket, pipes──> Keeper <──FIFOs── readers        each step: one of them does one thing

The keeper runs in this process, one `Act` at a time: which of those that are ready is next is drawn. So are
what sidecars and readers do, which system calls of the keeper fail, and when a sidecar is killed, which is to
close everything that it has. The model knows what was written and which epochs were released, and checks:

- a reader gets exactly the bytes that were written, over any number of take-overs;
- what `hello` and `settled` say was accepted is what was written;
- a FIFO ends for its reader only after its epoch was released (`close`, `forget`);
- a second sidecar gets no answer while the first one lives;
- what fails for one FIFO, for ever, keeps no other from its end;
- when all is well again, everything ends, and no descriptor is left.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pkgutil
import random
import resource
import select
import shutil
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from streamer import linux
from streamer.helpers import keeper
from streamer.helpers.keeper.loop import Act
from streamer.helpers.keeper.protocol import LONGEST_MESSAGE
from streamer.helpers.keeper.server import Keeper

STEPS = 400
"""Drawn steps of a seed, before everything is let end."""
LONGEST = 30_000
"""Steps within which everything must end then."""
SMALL = 4096
"""Bytes of every pipe, so that they are full all the time."""
LONGEST_EPOCH = 30_000
UNKNOWN = "x"
"""A channel that only strangers name. An open that lacks descriptors leaves it in the keeper, without any."""
PATTERN = random.Random(0).randbytes(1 << 17)

ERRORS = {
    "splice": (errno.ENOMEM, errno.EIO, errno.EINVAL),
    "pipe2": (errno.EMFILE, errno.ENFILE),
    "fstat": (errno.EIO,),
    "ioctl": (errno.EIO,),
    "eventfd_read": (errno.EIO,),
    "register": (errno.ENOMEM, errno.ENOSPC),
    "modify": (errno.ENOMEM,),
    "poll": (errno.ENOMEM, errno.EINTR),
    "accept": (errno.EMFILE, errno.ENOMEM, errno.ECONNABORTED),
    "recv_fds": (errno.ENOMEM, errno.ENOBUFS),
    "send_fds": (errno.ENOMEM, errno.ETOOMANYREFS, errno.EPIPE),
    "start_new_thread": (errno.EAGAIN,),
    "open": (errno.EMFILE, errno.ENOMEM),
}
"""System calls of the keeper that may fail, as Python names them."""
_MODULES = (each.name for each in pkgutil.iter_modules(keeper.__path__) if each.name != "__main__")
CALLERS = [linux, *(import_module(f"{keeper.__name__}.{name}") for name in _MODULES)]
"""The modules that make them."""


class Broken(Exception):
    """A promise of the keeper does not hold."""


class Failing:
    """A module or object of the system's, some of whose functions fail when the seed says so."""

    def __init__(self, real: Any, world: World) -> None:
        self._real = real
        self._world = world

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if name not in ERRORS:
            return found

        def call(*arguments: Any, **options: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                self._world.may_fail(name, arguments)
                if name == "start_new_thread":
                    return found(self._world.opening(arguments[0]), ())
            elif _thread_fails.now:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return found(*arguments, **options)

        return call


class _ThreadFails(threading.local):
    """Whether the open(2) of this thread is to fail."""

    now = False


_thread_fails = _ThreadFails()


@dataclass
class Epoch:
    """What the model knows of one FIFO."""

    length: int
    written: int = 0
    read: int = 0
    left: bool = False
    settled: bool = False
    """Whether the keeper has said that the FIFO has everything."""
    released: bool = False


@dataclass
class Channel:
    """One channel, and its reader."""

    name: str
    epochs: list[Epoch]
    start: int
    """Where in the pattern its bytes begin."""
    read_fd: int = -1
    reading: int = 0
    """The epoch that its reader is in, or opens next."""
    met: bool = False
    """Whether the FIFO that it has open has had a writer."""
    over: bool = False
    """Whether a sidecar has said `forget`."""

    def piece(self, epoch: int, begin: int, end: int) -> bytes:
        """Bytes of an epoch's stream."""
        at = self.start + 1000 * epoch
        return PATTERN[at + begin : at + end]


@dataclass
class Sidecar:
    """A connection to the keeper, and what its owner knows."""

    sock: socket.socket
    stranger: bool = False
    asked: bool = False
    count: int = -1
    held: dict[str, dict[str, Any]] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    """State of each channel: new, asked, open, settling, settled."""
    epochs: dict[str, int] = field(default_factory=dict)
    fds: dict[str, int] = field(default_factory=dict)

    @property
    def greeted(self) -> bool:
        return len(self.held) == self.count


class World:
    """Everything of one seed. Use `play` once."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.found: Counter[str] = Counter()
        self._directory = Path(tempfile.mkdtemp(prefix="penstock-"))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(self._directory / "k"))
        listener.listen(8)
        self._listener = listener
        self.channels = [
            Channel(
                f"c{number}",
                [Epoch(self.dice.choice((0, 1, self.dice.randrange(LONGEST_EPOCH)))) for _ in range(epochs)],
                start=1000 * self.dice.randrange(50),
            )
            for number, epochs in enumerate(self.dice.choices((1, 2, 3), k=self.dice.randint(1, 4)))
        ]
        self.sidecars: list[Sidecar] = []
        """The first is the one that the keeper serves, or will as soon as it looks."""
        self._rate = self.dice.choice((0.0, 0.02, 0.1, 0.3))
        """How many of the keeper's system calls fail."""
        self._doomed = self.dice.choice((None, None, None, self.dice.choice(self.channels).name))
        """A channel whose splice fails as long as the others live."""
        self._armed = False
        self._epoll = select.epoll()
        failing: Any = Failing
        self._keeper = Keeper(failing(listener, self), epoll=failing(self._epoll, self))
        self._loop, self._fifos = self._keeper.loop, self._keeper.fifos
        self._pending: list[Act] = []
        self._unlimited = threading.Event()
        """Set while threads may call open(2): the limit of descriptors is this process's."""
        self._unlimited.set()

    # What the seed draws

    def may_fail(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Raise what this system call of the keeper is to fail with, if it is."""
        if name == "splice" and self._doomed is not None:
            owner = self._fifos.pump.owners.get(arguments[0])
            if owner is not None and owner.name == self._doomed:
                self.found["doomed"] += 1
                raise OSError(errno.EIO, "doomed")
        if self._armed and self.dice.random() < self._rate:
            self.found[f"{name} failed"] += 1
            number = self.dice.choice(ERRORS[name])
            if name == "start_new_thread":
                raise RuntimeError("can't start new thread")
            if name == "recv_fds" and self.dice.random() < 0.1:
                raise MemoryError
            raise OSError(number, os.strerror(number))

    def opening(self, function: Callable[[], None]) -> Callable[[], None]:
        """What a thread runs, so that a seed decides what it meets."""
        fails = self._armed and self.dice.random() < self._rate
        self.found["open failed"] += fails

        def run() -> None:
            _thread_fails.now = fails
            self._unlimited.wait()
            function()

        return run

    def play(self) -> None:
        """Raises Broken."""
        with self._faulty():
            try:
                self._armed = True
                for _ in range(STEPS):
                    self.dice.choices((self._keep, self._serve, self._read), (6, 5, 3))[0]()
                self._armed = False
                self._finish()
                self._check_left()
            finally:
                self._close()

    @contextlib.contextmanager
    def _faulty(self) -> Iterator[None]:
        names = {"os", "fcntl", "select", "socket", "_thread"}
        with pytest.MonkeyPatch.context() as patch:
            for caller in CALLERS:
                for name in names & vars(caller).keys():
                    patch.setattr(caller, name, Failing(getattr(caller, name), self))
                if hasattr(caller, "RETRY"):
                    patch.setattr(caller, "RETRY", 0.0)
            yield

    # The keeper

    def _keep(self) -> None:
        """One act of the keeper, under a limit of descriptors if the seed says so."""
        before = set(os.listdir("/proc/self/task"))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        short = self._armed and self.dice.random() < self._rate
        try:
            if short:
                self.found["no descriptors"] += 1
                free = os.dup(self._listener.fileno())
                os.close(free)
                self._unlimited.clear()
                resource.setrlimit(resource.RLIMIT_NOFILE, (free + self.dice.randrange(3), hard))
            self._pending += [act for act in self._keeper.ready(0.0) if act not in self._pending]
            if self._pending:
                index = self.dice.randrange(len(self._pending))
                self._loop.perform(self._pending.pop(index))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            self._unlimited.set()
        self._await_threads(before)
        if self._keeper.over:
            raise Broken("the keeper is over")
        if self._keeper.connection.client is not None:  # room for a few answers
            self._keeper.connection.client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)

    @staticmethod
    def _await_threads(before: set[str]) -> None:
        """Until every new thread waits in open(2), or is over."""
        deadline = time.monotonic() + 20
        for task in set(os.listdir("/proc/self/task")) - before:
            with contextlib.suppress(OSError):
                while not Path(f"/proc/self/task/{task}/syscall").read_text().startswith("257 "):
                    time.sleep(0)
                    if time.monotonic() > deadline:
                        raise Broken("a thread does not come to its open(2)")

    def _await_opened(self, inode: tuple[int, int]) -> None:
        """Until the thread that waited for this reader has noted that it has come."""
        deadline = time.monotonic() + 20
        while any(
            channel.opening is not None
            and channel.opening.inode == inode
            and channel.opening not in self._fifos.arrived
            for channel in self._fifos.channels.values()
        ):
            time.sleep(0)
            if time.monotonic() > deadline:
                raise Broken("a thread does not see its reader")

    # Readers

    def _read(self, channel: Channel | None = None) -> bool:
        """A reader opens, reads or leaves; whether anything came of it."""
        channel = channel or self.dice.choice(self.channels)
        if channel.reading >= len(channel.epochs):
            return False
        epoch = channel.epochs[channel.reading]
        if channel.read_fd < 0:
            return self._come(channel)
        if not self._met(channel):
            if epoch.released:
                self._leave(channel)
            return epoch.released  # it waits in its open(2)
        if self._armed and self.dice.random() < 0.03:
            epoch.left = True
            self.found["left"] += 1
            self._leave(channel)
            return True
        events = select.poll()
        events.register(channel.read_fd, select.POLLIN)
        happened = dict(events.poll(0)).get(channel.read_fd, 0)
        if happened & select.POLLIN:
            data = os.read(channel.read_fd, self.dice.choice((1, 100, 5000)))
            if data != channel.piece(channel.reading, epoch.read, epoch.read + len(data)):
                raise Broken(f"{channel.name} epoch {channel.reading}: other bytes at {epoch.read}")
            epoch.read += len(data)
            return True
        if happened & select.POLLHUP:
            if not epoch.released:
                raise Broken(f"{channel.name} epoch {channel.reading}: ended after {epoch.read} bytes")
            if epoch.settled and epoch.read != epoch.written:
                raise Broken(f"{channel.name}: {epoch.written} bytes written, {epoch.read} read")
            self.found["whole" if epoch.read == epoch.length else "released"] += 1
            self._leave(channel)
            return True
        return False

    def _come(self, channel: Channel) -> bool:
        path = self._directory / f"{channel.name}_{channel.reading}"
        if channel.epochs[channel.reading].released:
            channel.reading += 1  # nobody writes there any more
            return True
        with contextlib.suppress(FileNotFoundError):
            channel.read_fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            fcntl.fcntl(channel.read_fd, fcntl.F_SETPIPE_SZ, SMALL)
            found = os.fstat(channel.read_fd)
            self._await_opened((found.st_dev, found.st_ino))
            return True
        return False

    def _met(self, channel: Channel) -> bool:
        """Whether the FIFO that a reader has open has had a writer."""
        if not channel.met:
            found = os.fstat(channel.read_fd)
            inode = found.st_dev, found.st_ino
            kept = [os.fstat(each.fifo) for each in self._fifos.channels.values() if each.fifo >= 0]
            arrived = [each.inode for each in self._fifos.arrived if each.fd >= 0]
            channel.met = inode in [(each.st_dev, each.st_ino) for each in kept] + arrived
        return channel.met

    def _leave(self, channel: Channel) -> None:
        channel.met = False
        os.close(channel.read_fd)
        channel.read_fd = -1
        channel.reading += 1

    # Sidecars

    def _serve(self) -> None:
        """A sidecar does something; sometimes one comes, or dies."""
        draw = self.dice.random()
        if len(self.sidecars) < 2 and (not self.sidecars or draw < 0.02):
            self._connect(stranger=draw < 0.004)
        elif draw < 0.03:
            self._kill(self.dice.choice(self.sidecars))
        else:
            self._act(self.dice.choice(self.sidecars))

    def _connect(self, *, stranger: bool = False) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        sock.connect(str(self._directory / "k"))
        self.found["strangers" if stranger else "sidecars"] += 1
        self.sidecars.append(Sidecar(sock, stranger))

    def _kill(self, sidecar: Sidecar) -> None:
        """Close all that it has: its pipes, and its connection with what is under way in it."""
        self.found["killed"] += 1
        for fd in sidecar.fds.values():
            os.close(fd)
        sidecar.sock.close()
        self.sidecars.remove(sidecar)

    def _act(self, sidecar: Sidecar) -> bool:
        """One thing that this sidecar can do; whether anything came of it."""
        if sidecar.stranger:
            return self._babble(sidecar)
        if not sidecar.asked:
            sidecar.asked = self._say(sidecar, "hello")
            return True
        can: list[Callable[[], bool]] = [partial(self._hear, sidecar)]
        if sidecar.greeted:
            due = [each for each in self.channels if not each.over]
            can += [partial(self._go_on, sidecar, channel) for channel in due]
        return self.dice.choice(can)()

    def _babble(self, sidecar: Sidecar) -> bool:
        junk = [b"", b"x", b"{}", b"[1]", b'{"do": "open", "channel": "c0"}', b"[" * 5000, b'{"do":']
        junk += [
            b'{"do": "adopt", "channel": "c0", "epoch": 0, "digest": "", "skipped": 0, "moved": 0, "mark": 0}'
        ]
        junk += [b'{"do": "mark", "channel": "c0", "mark": [1e400]}', b'{"do": "settle", "channel": "x"}']
        junk += [b'{"do": "open", "channel": "x", "epoch": 0, "digest": "", "skipped": 0}']
        with contextlib.suppress(OSError):
            extra = [self._listener.fileno()] * self.dice.randrange(7)
            socket.send_fds(sidecar.sock, [self.dice.choice(junk)], extra)
        return True

    def _say(self, sidecar: Sidecar, do: str, channel: str | None = None, fd: int = -1, **more: Any) -> bool:
        message = {"do": do} | ({} if channel is None else {"channel": channel}) | more
        try:
            socket.send_fds(sidecar.sock, [json.dumps(message).encode()], [] if fd < 0 else [fd])
        except BlockingIOError:
            return False
        except OSError as error:
            raise Broken(f"the keeper took no {do}: {error}") from error
        return True

    def _hear(self, sidecar: Sidecar) -> bool:
        try:
            data, fds, _, _ = socket.recv_fds(sidecar.sock, LONGEST_MESSAGE, 4)
        except BlockingIOError:
            return False
        if not data:
            raise Broken("the keeper has hung up on a sidecar")
        if self.sidecars[0].stranger:
            self._kill(self.sidecars[0])  # an empty packet looks like its end
        if sidecar is not self.sidecars[0]:
            raise Broken(f"two sidecars are served at once: {data!r}")
        self._note(sidecar, json.loads(data), fds)
        return True

    def _note(self, sidecar: Sidecar, message: dict[str, Any], fds: list[int]) -> None:
        did, name = message["did"], message.get("channel", "")
        self.found[did] += 1
        if did == "hello":
            sidecar.count = message["channels"]
            return
        if name == UNKNOWN:
            sidecar.held[name] = message
            return
        channel = next(each for each in self.channels if each.name == name)
        if did == "failed":
            sidecar.states[name] = "new"
            return
        index, state = message["epoch"], message["state"]
        epoch = channel.epochs[index] if index < len(channel.epochs) else Epoch(0)
        if did == "held":
            sidecar.held[name] = message
            sidecar.epochs[name] = index
        if state == "open" and message["accepted"] != epoch.written:
            raise Broken(f"{name}: {epoch.written} bytes written, {message['accepted']} told by {did}")
        # A reader also goes when a `forget` that the keeper has not read yet is under way.
        may_go = epoch.left or epoch.released
        if message["accepted"] > epoch.written or (state == "gone" and not may_go):
            raise Broken(f"{name}: {message} of {epoch}")
        if did == "opened":
            if (state == "open") != (len(fds) == 1):
                raise Broken(f"{message} with {len(fds)} descriptors")
            sidecar.states[name] = "open" if fds else "settled"
            if fds:
                sidecar.fds[name] = fds[0]
                fcntl.fcntl(fds[0], fcntl.F_SETPIPE_SZ, SMALL)
                os.set_blocking(fds[0], False)
        elif did == "settled":
            epoch.settled = epoch.written == epoch.length
            sidecar.states[name] = "settled" if epoch.written == epoch.length or state == "gone" else "open"

    def _go_on(self, sidecar: Sidecar, channel: Channel) -> bool:
        """The next thing to do with a channel."""
        name = channel.name
        state, index = sidecar.states.get(name, "new"), sidecar.epochs.get(name, 0)
        if index >= len(channel.epochs) or (self._armed and self.dice.random() < 0.002):
            channel.over = self._say(sidecar, "forget", name)
            for epoch in channel.epochs:
                epoch.released = True
            return True
        epoch = channel.epochs[index]
        if state == "new":
            return self._ask(sidecar, channel, index)
        if state == "open":
            if epoch.written < epoch.length and name in sidecar.fds:
                return self._write(sidecar, channel, index)
            if self._say(sidecar, "settle", name):
                sidecar.states[name] = "settling"
            return True
        if state == "settled":
            if name in sidecar.fds:
                os.close(sidecar.fds.pop(name))
            epoch.released = True
            self._say(sidecar, "close", name)
            sidecar.states[name], sidecar.epochs[name] = "new", index + 1
            return True
        return False

    def _ask(self, sidecar: Sidecar, channel: Channel, index: int) -> bool:
        path = self._directory / f"{channel.name}_{index}"
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path)
        path_fd = os.open(path, os.O_PATH)
        more = {"epoch": index, "digest": "d", "skipped": 0}
        if self._say(sidecar, "open", channel.name, path_fd, **more):
            sidecar.states[channel.name] = "asked"
        os.close(path_fd)
        return True

    def _write(self, sidecar: Sidecar, channel: Channel, index: int) -> bool:
        epoch, name = channel.epochs[index], channel.name
        end = min(epoch.length, epoch.written + self.dice.choice((1, 500, 9000)))
        try:
            epoch.written += os.write(sidecar.fds[name], channel.piece(index, epoch.written, end))
        except BlockingIOError:
            return False
        except BrokenPipeError:
            os.close(sidecar.fds.pop(name))
            if not epoch.left:
                raise Broken(f"{name} epoch {index}: the pipe broke under a reader that reads") from None
            self._say(sidecar, "settle", name)
            sidecar.states[name] = "settling"
        return True

    # The end

    def _finish(self) -> None:
        """Let everything end, what is doomed last."""
        for sidecar in [each for each in self.sidecars if each.stranger]:
            self._kill(sidecar)
        for _ in range(LONGEST):
            if not self.sidecars:
                self._connect()
            if self._doomed is not None and all(
                self._done(each) for each in self.channels if each.name != self._doomed
            ):
                self._doomed = None
            if self._doomed is None and all(map(self._done, self.channels)):
                return
            self._keep()
            self._act(self.sidecars[0])
            self._read()
        kept = {name: vars(each) for name, each in self._fifos.channels.items()}
        raise Broken(f"hangs: {self.channels}, {self.sidecars}; the keeper: {vars(self._keeper)}, {kept}")

    def _done(self, channel: Channel) -> bool:
        return channel.over and channel.reading >= len(channel.epochs)

    def _check_left(self) -> None:
        """No channel, and no descriptor of one, once the sidecars are gone."""
        while self.sidecars:
            self._kill(self.sidecars[0])
        for _ in range(1000):
            self._keep()
            held = self._fifos.channels.keys() - {UNKNOWN}
            if not (held or self._keeper.connection.client or self._fifos.released):
                break
            time.sleep(0)
        else:
            raise Broken(f"left: {self._fifos.channels} {self._fifos.released}")
        if self._loop.watched or self._fifos.pump.owners:
            raise Broken(f"left: {self._loop.watched} {self._fifos.pump.owners}")

    def _close(self) -> None:
        for channel in self.channels:
            if channel.read_fd >= 0:
                os.close(channel.read_fd)
        while self.sidecars:
            self._kill(self.sidecars[0])
        self._fifos.end_all()
        if self._keeper.connection.client is not None:
            self._keeper.connection.client.close()
        self._epoll.close()
        self._listener.close()
        os.close(self._loop.wake_fd)
        shutil.rmtree(self._directory)


def run_seed(seed: int) -> Counter[str]:
    """What happened in a seed, counted. Raises Broken."""
    before = len(os.listdir("/proc/self/fd"))
    world = World(seed)
    world.play()
    if (left := len(os.listdir("/proc/self/fd")) - before) != 0:
        raise Broken(f"{left} descriptors are left")
    return world.found
