"""The keeper: a tiny process that holds the FIFOs' write ends, so that a sidecar may die and come back.

    sidecar ──write, splice──▶ pipe ──splice, counted──▶ FIFO ──▶ reader
                                 └────────── the keeper ───┘

A FIFO ends for its reader when its last write end closes, and the kernel counts nothing. So the write end
is here, in a process with nothing in it that could fail: no S3, no configuration, no package but the
standard library. A sidecar that dies leaves a pause. What it had put into the pipe still goes to the
reader, and the next sidecar is told how many bytes that makes: those counted here, and those left in the
pipe (FIONREAD), which nobody but the keeper takes out and, the sidecar being dead, nobody puts in. That sum
is the exact byte to continue at, whenever the sidecar was killed.

One thread runs everything with epoll. open(2) of a FIFO blocks until a reader comes, and has a thread of
its own for each channel that waits (contract §1.7-1). One sidecar is served at a time; the next is accepted
when the last one has closed its connection, which the kernel does after its last write.

No failure ends a FIFO that has not failed itself, and none ends the process:

- An event is a hint, and what it leads to an `Act`, which looks at the descriptor itself and may be repeated.
- An act that raises, whatever it raises, is repeated every RETRY seconds. Its descriptors are not watched
  until then. So a shortage is waited for, and what never mends is held open.
- What a FIFO needs (a thread, a pipe) is there before its reader can come. If not, the sidecar gets `failed`
  and asks again.
- Nothing is said to a sidecar that has no room for it. What is due waits, and is worded when it is sent;
  until then no further message is taken from that sidecar.

Messages are JSON, one a packet (SOCK_SEQPACKET), descriptors beside them (SCM_RIGHTS):

    hello                           -> hello: version, pid, number of channels; then of each channel
                                       held: epoch, state, accepted, digest, skipped, mark
    open channel epoch digest skipped, with an O_PATH descriptor of the FIFO
                                    -> opened, once a reader has come, with the pipe's write end; or gone
    expect, as open                 -> expected, at once: the next sidecar will want it open
    adopt channel epoch digest skipped moved mark, with the FIFO's write end
                                    -> adopted; a sidecar that had it itself leaves, `moved` bytes are through
    mark channel mark               kept for the next sidecar
    settle channel                  -> settled, once the FIFO has accepted everything; or gone
    close channel                   the epoch is over; the next one is due
    forget channel                  the channel is over

`failed` channel do errno is the answer to an open, expect or adopt that lacked something, or whose FIFO
cannot be opened. States: `idle` no reader has come, `open` one reads, `gone` it has left before the end.

Run by path, in an interpreter without site-packages: `python -I -S keeper.py SOCKET [IDLE_SECONDS]`. With
IDLE_SECONDS it ends by itself, when no sidecar is there and no reader either for so long, and at once when
the last channel is forgotten.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import fcntl
import json
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
import termios
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

VERSION = 2
LONGEST_MESSAGE = 64 * 1024
LONGEST_MARK = 16
RETRY = 0.1
"""Seconds until what has failed is tried again."""
BACKLOG = 128
"""Sidecars that may wait: each start of one while the keeper stands still leaves a connection."""
_STACK = 128 * 1024
"""Bytes of a thread's stack, which has little to do; there may be a thousand."""

# A copy of definitions in streamer/linux.py, since this file runs alone; tests/test_arrows.py compares them.
PIPE_SIZE = 1 << 20
SPLICE_FLAGS = os.SPLICE_F_NONBLOCK | os.SPLICE_F_MOVE

Act = tuple[Callable[..., None], Any]
"""What there is to do, and with which channel, opening or None."""


def descriptor_path(fd: int) -> str:
    """Return a path to the inode of a descriptor; it stays valid when the file is renamed (proc(5))."""
    return f"/proc/self/fd/{fd}"


def bytes_unread(fd: int) -> int:
    """Return how many bytes wait in a pipe (FIONREAD, pipe(7)) or TCP socket (SIOCINQ, tcp(7))."""
    return int(struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0"))[0])


def set_pipe_size(fd: int, size: int = PIPE_SIZE, *, least: int = 128 * 1024) -> int:
    """Ask for a pipe of `size` bytes, then for halves of it down to `least`; return the pipe's size.

    Past a user's 64 MiB of pipe pages F_SETPIPE_SZ answers EPERM and the pipe keeps its size (pipe(7)).
    """
    while size >= least:
        with contextlib.suppress(OSError):
            return fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, size)
        size //= 2
    return fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ)


def peer(sock: socket.socket) -> int:
    """The user who connected to a Unix socket, or listens at its other end (SO_PEERCRED, unix(7))."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def _close(*fds: int) -> None:
    """Close descriptors that are there. Linux frees one whatever close(2) returns."""
    for fd in fds:
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


class Channel:
    """One channel: its epoch, and the FIFO of it once a reader has come."""

    def __init__(self, name: str, epoch: int, digest: str, skipped: int) -> None:
        self.name = name
        self.epoch = epoch
        self.digest = digest
        self.skipped = skipped
        """Bytes of the epoch that lie before the FIFO's first one."""
        self.mark: list[int] | None = None
        """Where the sidecar wants to begin again; a word of its own that is only kept here."""
        self.state = "idle"
        self.moved = 0
        """Bytes that the FIFO has accepted."""
        self.settling = False
        self.wanted = False
        """Whether the sidecar that is here waits for the reader."""
        self.opening: Opening | None = None
        self.fifo = self.read_fd = self.write_fd = -1
        self.full: bool | None = None
        """Whether the FIFO's room is waited for, and not the pipe's bytes; None if neither is."""

    @property
    def accepted(self) -> int:
        """Bytes that the FIFO has accepted or will; exact while no sidecar writes."""
        return self.moved + (bytes_unread(self.read_fd) if self.fifo >= 0 else 0)

    def account(self) -> dict[str, object]:
        """What the next sidecar must know."""
        names = ("epoch", "state", "accepted", "digest", "skipped", "mark")
        return {name: getattr(self, name) for name in names}


class Opening:
    """A thread that blocks in open(2) of one FIFO, and then calls `arrived`, with itself."""

    def __init__(
        self, channel: Channel, path_fd: int, inode: tuple[int, int], arrived: Callable[[Opening], None]
    ) -> None:
        """Raises RuntimeError if there is no thread to be had; `path_fd` is the caller's then."""
        self.channel = channel
        self.path_fd = path_fd
        self.inode = inode
        self.fd = self.read_end = -1
        self.error: Exception | None = None
        self.over = False
        """Whether the keeper has taken what it brought."""
        self._arrived = arrived
        _thread.start_new_thread(self._open, ())

    def _open(self) -> None:
        try:
            self.fd = os.open(descriptor_path(self.path_fd), os.O_WRONLY | os.O_CLOEXEC)
        except Exception as error:  # noqa: BLE001 - the sidecar must hear of it, whatever it is
            self.error = error
        self._arrived(self)


class Keeper:
    """Serves one listening socket until told to stop, or until it is idle."""

    def __init__(self, listener: socket.socket, *, idle_for: float | None = None) -> None:
        self._listener = listener
        self._idle_for = idle_for
        self._idle_since: float | None = None
        self._channels: dict[str, Channel] = {}
        self._client: socket.socket | None = None
        self._refused = False
        """Whether the client has said what no sidecar of ours says: only its end is waited for."""
        self._broken = False
        """Whether nothing can be sent to it any more; only its end says that it is gone."""
        self._heard: tuple[bytes, list[int], bool] | None = None
        """Its message that is being obeyed: bytes, descriptors, whether some of those were cut off."""
        self._due: deque[tuple[str, Channel | None, dict[str, object]]] = deque()
        """What the client has yet to be told."""
        self._owners: dict[int, Channel] = {}
        """Channels by their FIFO's and pipe's descriptors."""
        self._watched: dict[int, int] = {}
        """The events that epoll watches for, by descriptor of a channel or the client."""
        self._arrived: deque[Opening] = deque()
        self._released: set[tuple[int, int]] = set()
        """Inodes of FIFOs that a thread still opens for nobody."""
        self._again: dict[Act, None] = {}
        """What has failed, or must be looked at without an event."""
        self._again_at = 0.0
        self._over = False
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        listener.settimeout(0)
        # Edge-triggered: who waits in the backlog while another is served must not wake us.
        self._epoll.register(listener.fileno(), select.EPOLLIN | select.EPOLLET)

    def stop(self, *_: object) -> None:
        """End `run`; a signal handler."""
        self._over = True
        self._wake()

    def run(self) -> None:
        """Serve. When it returns every FIFO is closed."""
        while not self._over:
            for act in self.ready():
                self.perform(act)
        for channel in self._channels.values():
            self._end(channel, "gone")

    def ready(self, longest: float | None = None) -> list[Act]:
        """Wait for something to do, at most `longest` seconds, and return it."""
        try:
            events = self._epoll.poll(self._timeout(longest))
            acts = [self._act(*event) for event in events]
        except Exception:  # noqa: BLE001 - whatever it is, it passes, and readers wait meanwhile
            time.sleep(RETRY)
            return [(self._accept, None), (self._collect, None)]
        if self._again and time.monotonic() >= self._again_at:
            again, self._again = self._again, {}
            acts += again
        if not acts and self._idle_since is not None and self._idle_for is not None:
            self._over = time.monotonic() - self._idle_since >= self._idle_for
        return acts

    def _timeout(self, longest: float | None) -> float | None:
        now = time.monotonic()
        waits = [] if longest is None else [longest]
        if self._again:
            waits.append(max(0.0, self._again_at - now))
        if self._idle_for is not None:
            busy = self._client is not None or any(c.state == "open" for c in self._channels.values())
            self._idle_since = None if busy else self._idle_since or now
            if self._idle_since is not None:
                waits.append(max(0.0, self._idle_since + self._idle_for - now))
        return min(waits, default=None)

    def _act(self, fd: int, event: int) -> Act:
        if fd == self._wake_fd:
            return self._collect, None
        if fd == self._listener.fileno():
            return self._accept, None
        if (owner := self._owners.get(fd)) is None:
            return self._serve, None
        gone = fd == owner.fifo and event & (select.EPOLLERR | select.EPOLLHUP)
        return (self._look if gone else self._move), owner

    def perform(self, act: Act) -> None:
        """Do what there is to do; what fails is done again later, and nothing else is touched."""
        what, subject = act
        try:
            what(subject)
        except Exception:  # noqa: BLE001 - that of one FIFO must not end the others, whatever it is
            self._repeat(act)
            with contextlib.suppress(Exception):
                self._ignore(act)

    def _repeat(self, act: Act) -> None:
        if not self._again:
            self._again_at = time.monotonic() + RETRY
        self._again[act] = None

    def _ignore(self, act: Act) -> None:
        """Let the descriptors of what has failed wake nobody until it is tried again, which watches them."""
        what, subject = act
        fds: tuple[int, ...] = ()
        if isinstance(subject, Channel):
            subject.full, fds = None, (subject.fifo, subject.read_fd)
        elif what in (self._accept, self._serve, self._flush) and self._client is not None:
            fds = (self._client.fileno(),)
        for fd in fds:
            if fd in self._watched:
                self._watch(fd, 0)

    def _watch(self, fd: int, events: int) -> None:
        before = self._watched.get(fd)
        if before is None:
            self._epoll.register(fd, events)
        elif before != events:
            self._epoll.modify(fd, events)
        self._watched[fd] = events

    def _unwatch(self, fd: int) -> None:
        """Stop watching what is to be closed."""
        if self._watched.pop(fd, None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)

    # The sidecar

    def _accept(self, _: None = None) -> None:
        # The next sidecar waits in the backlog until this one is gone, and so are its writes.
        if self._client is None:
            with contextlib.suppress(BlockingIOError):
                self._client, _address = self._listener.accept()
                self._refused = False
        self._serve()

    def _serve(self, _: None = None) -> None:
        """Tell the client what is due, and only then take its next message."""
        if self._client is None:
            return
        if self._client.fileno() not in self._watched:
            self._client.settimeout(0)  # recv_fds and send_fds of the standard library ignore flags
            if peer(self._client) not in (0, os.geteuid()):
                self._hang_up()
                return
        self._flush()
        if (self._due and not self._broken) or (self._heard is None and not self._receive()):
            return
        if self._heard is not None:
            self._obey(*self._heard)
        self._flush()

    def _receive(self) -> bool:
        """Take one message, if there is one; False if the client is gone."""
        assert self._client is not None  # noqa: S101 - for the type checker
        try:
            data, fds, flags, _ = socket.recv_fds(self._client, LONGEST_MESSAGE, 4)
        except (BlockingIOError, ConnectionResetError):
            return True  # reset: it died before it read our last word; what it said comes next, then its end
        if not data:
            _close(*fds)
            self._hang_up()
            return False
        self._heard = data, fds, bool(flags & socket.MSG_CTRUNC)
        return True

    def _hang_up(self) -> None:
        client, self._client = self._client, None
        self._due.clear()
        for channel in self._channels.values():
            channel.settling = channel.wanted = False
        if self._idle_for is not None and not self._channels:
            self._over = True
        self._again[self._accept, None] = None
        self._again_at = 0.0
        if client is not None:
            self._unwatch(client.fileno())
            client.close()

    def _say(self, did: str, about: Channel | None = None, **more: object) -> None:
        """Have the client told; of a channel, what holds when there is room to say it."""
        if self._client is not None and not self._refused:
            self._due.append((did, about, more))
            self.perform((self._flush, None))

    def _flush(self, _: None = None) -> None:
        """Tell the client what is due, as far as it has room."""
        if self._client is None:
            return
        self._broken = False
        while self._due:
            did, channel, more = self._due[0]
            message, fds = {"did": did} | more, []
            if channel is not None:
                message |= {"channel": channel.name} | channel.account()
                if did == "opened" and channel.state == "open":
                    fds = [channel.write_fd]
            try:
                socket.send_fds(self._client, [json.dumps(message).encode()], fds)
            except BlockingIOError:
                break
            except (BrokenPipeError, ConnectionResetError):
                self._broken = True  # it is dying; what it has said comes first, and then its end
                self._repeat((self._serve, None))
                break
            self._due.popleft()
        wants_room = self._due and not self._broken
        self._watch(self._client.fileno(), select.EPOLLOUT if wants_room else select.EPOLLIN)

    def _obey(self, data: bytes, fds: list[int], cut: bool) -> None:  # noqa: FBT001 - as recvmsg(2) has it
        """Do what a message says. If that raises, it is done again."""
        assert self._client is not None  # noqa: S101 - for the type checker
        if not self._refused:
            try:
                self._do(json.loads(data), fds, cut=cut)
            except (OSError, MemoryError):
                raise
            except Exception:  # noqa: BLE001 - whatever else a message leads to, it must not be repeated
                # No sidecar of ours says such things. It is told of an end, but may write until its own.
                self._refused = True
                self._due.clear()
                with contextlib.suppress(OSError):
                    self._client.shutdown(socket.SHUT_WR)
        self._heard = None
        _close(*fds)

    def _do(self, message: dict[str, Any], fds: list[int], *, cut: bool) -> None:
        what, name = message["do"], str(message.get("channel"))
        if what == "hello":
            self._say("hello", version=VERSION, pid=os.getpid(), channels=len(self._channels))
            for channel in self._channels.values():
                self._say("held", channel)
        elif what in ("open", "expect", "adopt"):
            step = self._adopt if what == "adopt" else self._open
            if cut and not fds:
                fds = [-1]  # it came, and there was no room for it
            try:
                step(name, message, fds)
            except (OSError, MemoryError) as error:
                self._fail(what, name, error)
        elif what == "mark":
            mark = [int(number) for number in message["mark"]]
            if len(mark) > LONGEST_MARK:
                raise ValueError(mark)
            self._channels[name].mark = mark
        elif what == "settle":
            self._channels[name].settling = True
            self.perform((self._move, self._channels[name]))  # not to be told twice, should it fail now
        elif what == "close":
            channel = self._channels[name]
            self._end(channel, "idle")
            channel.settling = channel.wanted = False
            channel.epoch, channel.moved, channel.skipped, channel.mark = channel.epoch + 1, 0, 0, None
        elif what == "forget":
            if (gone := self._channels.pop(name, None)) is not None:
                self._end(gone, "gone")
                gone.settling = gone.wanted = False
        else:
            raise ValueError(what)

    def _fail(self, do: str, name: str, error: Exception) -> None:
        """Have the client told what is lacking; it asks again."""
        number = getattr(error, "errno", None) or errno.ENOMEM
        self._say("failed", do=do, channel=name, errno=number)

    # The FIFOs

    def _open(self, name: str, message: dict[str, Any], fds: list[int]) -> None:
        epoch, digest, skipped = int(message["epoch"]), str(message["digest"]), int(message["skipped"])
        if fds[0] >= 0 and not stat.S_ISFIFO(os.fstat(fds[0]).st_mode):
            raise ValueError(name)
        channel = self._channels.get(name)
        if channel is None or (channel.state == "idle" and channel.epoch != epoch):
            if channel is not None:
                self._end(channel, "gone")
            channel = self._channels[name] = Channel(name, epoch, digest, skipped)
        if channel.epoch != epoch:
            raise ValueError(epoch)
        channel.digest = digest
        if channel.state == "idle":
            channel.skipped = skipped
            self._await_reader(channel, fds)
        if message["do"] == "expect":
            self._say("expected", channel)
        elif channel.state == "idle":
            channel.wanted = True
        else:
            self._say("opened", channel)

    def _await_reader(self, channel: Channel, fds: list[int]) -> None:
        """Get everything that the FIFO will need, and open it when its reader comes. Raises OSError."""
        found = os.fstat(_first(fds))
        inode = found.st_dev, found.st_ino
        if channel.opening is not None and channel.opening.inode == inode:
            return
        self._end(channel, "idle")
        if inode in self._released:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        channel.read_fd, channel.write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            channel.opening = Opening(channel, fds[0], inode, self._note)
        except RuntimeError as error:
            self._end(channel, "idle")
            raise BlockingIOError(errno.EAGAIN, str(error)) from error
        del fds[0]

    def _adopt(self, name: str, message: dict[str, Any], fds: list[int]) -> None:
        epoch, digest, skipped = int(message["epoch"]), str(message["digest"]), int(message["skipped"])
        moved, mark = int(message["moved"]), [int(number) for number in message["mark"]]
        known = self._channels.get(name)
        if known is not None and known.state != "idle":
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        fifo = _first(fds)
        if not stat.S_ISFIFO(os.fstat(fifo).st_mode):
            raise ValueError(name)
        if fcntl.fcntl(fifo, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY:
            raise ValueError(name)
        channel = Channel(name, epoch, digest, skipped)
        channel.moved, channel.mark = moved, mark
        channel.read_fd, channel.write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        del fds[0]
        if known is not None:
            self._end(known, "gone")
        self._channels[name] = channel
        self._begin(channel, fifo)
        self._say("adopted", channel)

    def _note(self, opening: Opening) -> None:
        """Have `_collect` take what an opening has brought; in its thread."""
        self._arrived.append(opening)
        self._wake()

    def _wake(self) -> None:
        """Have `ready` return; without that a signal is not noticed either."""
        while True:
            try:
                os.eventfd_write(self._wake_fd, 1)
            except OSError:
                time.sleep(RETRY)
            else:
                return

    def _collect(self, _: None = None) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        while self._arrived:
            self.perform((self._opened, self._arrived.popleft()))

    def _opened(self, opening: Opening) -> None:
        """Take what a thread has brought."""
        opening.over = True
        _close(opening.path_fd, opening.read_end)
        opening.path_fd = opening.read_end = -1
        channel = opening.channel
        if channel.opening is not opening:
            self._released.discard(opening.inode)
            _close(opening.fd)
            return
        channel.opening = None
        wanted, channel.wanted = channel.wanted, False
        if opening.error is not None:
            self._end(channel, "idle")
            if wanted:
                self._fail("open", channel.name, opening.error)
            return
        self._begin(channel, opening.fd)
        if wanted:
            self._say("opened", channel)

    def _begin(self, channel: Channel, fifo: int) -> None:
        """A reader has come."""
        channel.fifo, channel.state = fifo, "open"
        self._owners |= {fifo: channel, channel.read_fd: channel}
        for fd in (fifo, channel.write_fd):
            with contextlib.suppress(OSError):
                set_pipe_size(fd)
        self.perform((self._move, channel))

    def _move(self, channel: Channel) -> None:
        """Move what the pipe has to the FIFO, as far as it has room."""
        if channel.fifo < 0:
            self._settle(channel)
            return
        if channel.full is None:
            self._await(channel, full=False)
        try:
            channel.moved += os.splice(channel.read_fd, channel.fifo, PIPE_SIZE, flags=SPLICE_FLAGS)
        except BlockingIOError:
            self._await(channel, full=bytes_unread(channel.read_fd) > 0)
        except BrokenPipeError:
            self._leave(channel)
        self._settle(channel)

    def _await(self, channel: Channel, *, full: bool) -> None:
        """Wait for room in the FIFO if it is full, else for bytes in the pipe."""
        if channel.full is not full:
            channel.full = None
            self._watch(channel.fifo, select.EPOLLOUT if full else 0)
            self._watch(channel.read_fd, 0 if full else select.EPOLLIN)
            channel.full = full

    def _look(self, channel: Channel) -> None:
        """End the FIFO if its reader has left, which the FIFO itself must say: an event may be an old one."""
        if channel.fifo >= 0:
            poll = select.poll()
            poll.register(channel.fifo, 0)
            if poll.poll(0):
                self._leave(channel)
            else:
                self._move(channel)

    def _leave(self, channel: Channel) -> None:
        """The reader has left; what the sidecar writes has nobody to go to."""
        self._end(channel, "gone")
        self._settle(channel)

    def _settle(self, channel: Channel) -> None:
        if channel.settling and (channel.state != "open" or not bytes_unread(channel.read_fd)):
            channel.settling = False
            self._say("settled", channel)

    def _end(self, channel: Channel, state: str) -> None:
        """Let go of every descriptor; the sidecar sees its pipe break."""
        channel.state = state
        opening, channel.opening = channel.opening, None
        if opening is not None:
            self._released.add(opening.inode)
            self.perform((self._release, opening))
        for fd in (channel.fifo, channel.read_fd):
            self._owners.pop(fd, None)
            self._unwatch(fd)
        _close(channel.fifo, channel.read_fd, channel.write_fd)
        channel.fifo = channel.read_fd = channel.write_fd = -1
        channel.full = None

    def _release(self, opening: Opening) -> None:
        """Have a thread return from open(2), by a reader of our own, which `_opened` closes."""
        if not opening.over and opening.read_end < 0:
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
            opening.read_end = os.open(descriptor_path(opening.path_fd), flags)


def _first(fds: list[int]) -> int:
    """The descriptor that a message must have. Raises OSError if it came and had no room."""
    if fds[0] < 0:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return fds[0]


@contextlib.contextmanager
def address(path: str) -> Iterator[str]:
    """The path of a socket in a form that is never too long for one: 108 bytes (unix(7)). Raises OSError."""
    directory, name = os.path.split(os.path.abspath(path))
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield os.path.join(descriptor_path(fd), name)
    finally:
        os.close(fd)


def listen(path: str) -> socket.socket:
    """A socket of mode 0600 at `path`; one that a dead keeper has left is replaced. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with address(path) as reachable:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
                other.connect(reachable)
            raise FileExistsError("another keeper listens there")
        except (ConnectionRefusedError, FileNotFoundError):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        mask = os.umask(0o177)
        try:
            listener.bind(reachable)
        finally:
            os.umask(mask)
    listener.listen(BACKLOG)
    return listener


def _refuse(path: str, error: OSError) -> int:
    """Say why nobody serves `path`, as far as there is somebody to hear; the exit code."""
    with contextlib.suppress(OSError):
        os.write(1, f"{path}: {error.strerror or error}\n".encode())
    return 7


def main(arguments: list[str]) -> int:
    """Serve the socket that the first argument names; the second is IDLE_SECONDS."""
    path = arguments[0]
    try:
        listener = listen(path)
        keeper = Keeper(listener, idle_for=float(arguments[1]) if len(arguments) > 1 else None)
    except OSError as error:
        return _refuse(path, error)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, keeper.stop)
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    _thread.stack_size(_STACK)
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.write(1, b"ready\n")  # unbuffered: what fails must not be said later
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(path)
        return _refuse(path, error)
    # What started it may wait for the end of its output, and must not wait for ours.
    for standard in (1, 2):
        os.dup2(nowhere, standard)
    try:
        keeper.run()
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
