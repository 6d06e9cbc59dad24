"""The keeper: a small process that holds the FIFOs' write ends, so that a sidecar may die and be restarted.

    sidecar ──write, splice──▶ pipe ──splice, counted──▶ FIFO ──▶ reader
                                 └────────── the keeper ───┘

A FIFO ends for its reader when its last write end closes, and the kernel does not count its bytes. So the
keeper holds the write end, in a process where little can fail: no S3, no configuration, only the standard
library. While the sidecar is dead, the stream pauses. Bytes that the sidecar had written to the pipe still go
to the reader. The next sidecar gets the number of bytes accepted: those that the keeper has counted, plus
those left in the pipe (FIONREAD), which only the keeper reads and, after the sidecar's death, nobody writes.
The next sidecar resumes at that byte, whenever the last one was killed.

One thread runs everything with epoll. Each channel that waits for its reader has one more thread, because
open(2) of a FIFO blocks until a reader opens it (contract §1.7-1). The keeper serves one sidecar at a time.
It accepts the next when the last has closed its connection, which the kernel does after its last write.

No failure ends the process, or any FIFO but the one that failed:

- An event is only a hint. It leads to an `Act`, which checks the descriptor itself and may be repeated.
- An act that raises any exception is repeated every RETRY seconds. Its descriptors are not watched until
  then. So a shortage is retried, and a FIFO that cannot recover stays open.
- The thread and the pipe of a FIFO are created before its reader can open it. If that fails, the sidecar gets
  `failed` and repeats its request.
- Replies wait while the sidecar's socket is full, and are written with the state at the time of sending.
  Until then the keeper reads no further message of that sidecar.

Messages are JSON, one a packet (SOCK_SEQPACKET), descriptors beside them (SCM_RIGHTS):

    hello                           -> hello: version, pid, number of channels; then of each channel
                                       held: epoch, state, accepted, digest, skipped, mark
    open channel epoch digest skipped, with an O_PATH descriptor of the FIFO
                                    -> opened, once a reader has come, with the pipe's write end; or gone
    expect, as open                 -> expected, at once: the next sidecar needs the FIFO
    adopt channel epoch digest skipped moved mark, with the FIFO's write end
                                    -> adopted; a sidecar that ends hands over, after `moved` accepted bytes
    mark channel mark               stored for the next sidecar
    settle channel                  -> settled, once the FIFO has accepted everything; or gone
    close channel                   the epoch has ended; go to the next
    forget channel                  the channel has ended

`failed` channel do errno is the reply to an open, expect or adopt that lacked resources, or whose FIFO cannot
be opened. States: `idle` no reader has opened the FIFO, `open` a reader reads, `gone` it left before the end.

Run by path, in an interpreter without site-packages: `python -I -S keeper.py SOCKET [IDLE_SECONDS]`. With
IDLE_SECONDS the keeper exits when it has had neither sidecar nor reader for so long, and at once when the
last channel is forgotten.
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
"""Seconds until a failed act is repeated."""
BACKLOG = 128
"""Connections that may wait; each start of a sidecar while the keeper is stopped leaves one."""
_STACK = 128 * 1024
"""Bytes of a thread's stack; there may be a thousand threads."""

# A copy of definitions in streamer/linux.py, since this file runs alone; tests/test_arrows.py compares them.
PIPE_SIZE = 1 << 20
SPLICE_FLAGS = os.SPLICE_F_NONBLOCK | os.SPLICE_F_MOVE

Act = tuple[Callable[..., None], Any]
"""A method to call, and its argument: a channel, an opening or None."""


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
    """Return the user id of the process at the other end of a Unix socket (SO_PEERCRED, unix(7))."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def _close(*fds: int) -> None:
    """Close the descriptors that are not -1. Linux frees a descriptor whatever close(2) returns."""
    for fd in fds:
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


class Channel:
    """One channel: its epoch, and the epoch's FIFO once a reader has opened it."""

    def __init__(self, name: str, epoch: int, digest: str, skipped: int) -> None:
        self.name = name
        self.epoch = epoch
        self.digest = digest
        self.skipped = skipped
        """Bytes of the epoch before the FIFO's first byte."""
        self.mark: list[int] | None = None
        """The sidecar's resume point, stored for the next sidecar and not interpreted."""
        self.state = "idle"
        self.moved = 0
        """Bytes that the FIFO has accepted."""
        self.settling = False
        self.wanted = False
        """Whether the connected sidecar waits for the reader."""
        self.opening: Opening | None = None
        self.fifo = self.read_fd = self.write_fd = -1
        self.full: bool | None = None
        """Whether the keeper waits for room in the FIFO, not for bytes in the pipe; None if for neither."""

    @property
    def accepted(self) -> int:
        """Bytes that the FIFO has accepted or will accept; exact while no sidecar writes."""
        return self.moved + (bytes_unread(self.read_fd) if self.fifo >= 0 else 0)

    def account(self) -> dict[str, object]:
        """Return the channel's state as messages carry it."""
        names = ("epoch", "state", "accepted", "digest", "skipped", "mark")
        return {name: getattr(self, name) for name in names}


class Opening:
    """A thread that blocks in open(2) of one FIFO and then calls `arrived` with itself."""

    def __init__(
        self, channel: Channel, path_fd: int, inode: tuple[int, int], arrived: Callable[[Opening], None]
    ) -> None:
        """Start the thread and take ownership of `path_fd`; raise RuntimeError if no thread can start."""
        self.channel = channel
        self.path_fd = path_fd
        self.inode = inode
        self.fd = self.read_end = -1
        self.error: Exception | None = None
        self.over = False
        """Whether the keeper has handled the result."""
        self._arrived = arrived
        _thread.start_new_thread(self._open, ())

    def _open(self) -> None:
        try:
            self.fd = os.open(descriptor_path(self.path_fd), os.O_WRONLY | os.O_CLOEXEC)
        except Exception as error:  # noqa: BLE001 - the keeper reports every error to the sidecar
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
        """Whether the client has broken the protocol: the keeper only waits for it to disconnect."""
        self._broken = False
        """Whether sending to the client fails; it still counts as connected until its end of file."""
        self._message: tuple[bytes, list[int], bool] | None = None
        """The client's message in progress: bytes, descriptors, and whether some descriptors were cut off."""
        self._unsent: deque[tuple[str, Channel | None, dict[str, object]]] = deque()
        """Replies that wait for room in the client's socket: kind, channel, further fields."""
        self._owners: dict[int, Channel] = {}
        """Channels by their FIFO's and pipe's descriptors."""
        self._watched: dict[int, int] = {}
        """The events that epoll watches for, by descriptor of a channel or the client."""
        self._arrived: deque[Opening] = deque()
        self._released: set[tuple[int, int]] = set()
        """Inodes of FIFOs whose opening was cancelled, while the thread has not returned from open(2)."""
        self._again: dict[Act, None] = {}
        """Acts to repeat: those that failed, and those that must run without an event."""
        self._again_at = 0.0
        self._over = False
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        listener.settimeout(0)
        # Edge-triggered: a sidecar that waits in the backlog must not wake the loop again and again.
        self._epoll.register(listener.fileno(), select.EPOLLIN | select.EPOLLET)

    def stop(self, *_: object) -> None:
        """End `run`; a signal handler."""
        self._over = True
        self._wake()

    def run(self) -> None:
        """Serve until `stop` or idleness, then close every FIFO."""
        while not self._over:
            for act in self.ready():
                self.perform(act)
        for channel in self._channels.values():
            self._end(channel, "gone")

    def ready(self, longest: float | None = None) -> list[Act]:
        """Wait at most `longest` seconds for events; return the acts that they lead to."""
        try:
            events = self._epoll.poll(self._timeout(longest))
            acts = [self._act(*event) for event in events]
        except Exception:  # noqa: BLE001 - any failure is retried; readers wait meanwhile
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
        """Run one act; if it fails, repeat it later. Other acts are not affected."""
        method, subject = act
        try:
            method(subject)
        except Exception:  # noqa: BLE001 - one FIFO's failure must not end the others
            self._repeat(act)
            with contextlib.suppress(Exception):
                self._ignore(act)

    def _repeat(self, act: Act) -> None:
        if not self._again:
            self._again_at = time.monotonic() + RETRY
        self._again[act] = None

    def _ignore(self, act: Act) -> None:
        """Stop watching the descriptors of a failed act; its repetition watches them again."""
        method, subject = act
        fds: tuple[int, ...] = ()
        if isinstance(subject, Channel):
            subject.full, fds = None, (subject.fifo, subject.read_fd)
        elif method in (self._accept, self._serve, self._flush) and self._client is not None:
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
        """Stop watching a descriptor before it is closed."""
        if self._watched.pop(fd, None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)

    # The sidecar

    def _accept(self, _: None = None) -> None:
        # The next sidecar waits in the backlog until this one's connection, and so its writes, have ended.
        if self._client is None:
            with contextlib.suppress(BlockingIOError):
                self._client, _address = self._listener.accept()
                self._refused = False
        self._serve()

    def _serve(self, _: None = None) -> None:
        """Send the waiting replies, and only then handle the client's next message."""
        if self._client is None:
            return
        if self._client.fileno() not in self._watched:
            self._client.settimeout(0)  # recv_fds and send_fds of the standard library ignore flags
            if peer(self._client) not in (0, os.geteuid()):
                self._hang_up()
                return
        self._flush()
        if (self._unsent and not self._broken) or (self._message is None and not self._receive()):
            return
        if self._message is not None:
            self._handle(*self._message)
        self._flush()

    def _receive(self) -> bool:
        """Receive a message, if there is one; return false if the client has disconnected."""
        assert self._client is not None  # noqa: S101 - for the type checker
        try:
            data, fds, flags, _ = socket.recv_fds(self._client, LONGEST_MESSAGE, 4)
        except (BlockingIOError, ConnectionResetError):
            return True  # reset: the client died; its last messages come next, then its end
        if not data:
            _close(*fds)
            self._hang_up()
            return False
        self._message = data, fds, bool(flags & socket.MSG_CTRUNC)
        return True

    def _hang_up(self) -> None:
        client, self._client = self._client, None
        self._unsent.clear()
        for channel in self._channels.values():
            channel.settling = channel.wanted = False
        if self._idle_for is not None and not self._channels:
            self._over = True
        self._again[self._accept, None] = None
        self._again_at = 0.0
        if client is not None:
            self._unwatch(client.fileno())
            client.close()

    def _reply(self, kind: str, subject: Channel | None = None, **fields: object) -> None:
        """Queue a reply and send it when there is room; a channel's state is added at that time."""
        if self._client is not None and not self._refused:
            self._unsent.append((kind, subject, fields))
            self.perform((self._flush, None))

    def _flush(self, _: None = None) -> None:
        """Send the waiting replies, as far as the client's socket has room."""
        if self._client is None:
            return
        self._broken = False
        while self._unsent:
            kind, channel, fields = self._unsent[0]
            message, fds = {"did": kind} | fields, []
            if channel is not None:
                message |= {"channel": channel.name} | channel.account()
                if kind == "opened" and channel.state == "open":
                    fds = [channel.write_fd]
            try:
                socket.send_fds(self._client, [json.dumps(message).encode()], fds)
            except BlockingIOError:
                break
            except (BrokenPipeError, ConnectionResetError):
                self._broken = True  # the client is dying; its last messages come first, then its end
                self._repeat((self._serve, None))
                break
            self._unsent.popleft()
        wants_room = self._unsent and not self._broken
        self._watch(self._client.fileno(), select.EPOLLOUT if wants_room else select.EPOLLIN)

    def _handle(self, data: bytes, fds: list[int], cut: bool) -> None:  # noqa: FBT001 - as recvmsg(2) has it
        """Handle a message. If that raises, it is handled again."""
        assert self._client is not None  # noqa: S101 - for the type checker
        if not self._refused:
            try:
                self._do(json.loads(data), fds, cut=cut)
            except (OSError, MemoryError):
                raise
            except Exception:  # noqa: BLE001 - any other error is the message's fault: do not repeat
                # The message breaks the protocol. The client sees an end of file, but may still write.
                self._refused = True
                self._unsent.clear()
                with contextlib.suppress(OSError):
                    self._client.shutdown(socket.SHUT_WR)
        self._message = None
        _close(*fds)

    def _do(self, message: dict[str, Any], fds: list[int], *, cut: bool) -> None:
        kind, name = message["do"], str(message.get("channel"))
        if kind == "hello":
            self._reply("hello", version=VERSION, pid=os.getpid(), channels=len(self._channels))
            for channel in self._channels.values():
                self._reply("held", channel)
        elif kind in ("open", "expect", "adopt"):
            step = self._adopt if kind == "adopt" else self._open
            if cut and not fds:
                fds = [-1]  # the kernel dropped the descriptor: too many are open
            try:
                step(name, message, fds)
            except (OSError, MemoryError) as error:
                self._fail(kind, name, error)
        elif kind == "mark":
            mark = [int(number) for number in message["mark"]]
            if len(mark) > LONGEST_MARK:
                raise ValueError(mark)
            self._channels[name].mark = mark
        elif kind == "settle":
            self._channels[name].settling = True
            self.perform((self._move, self._channels[name]))  # a failure must not repeat the message
        elif kind == "close":
            channel = self._channels[name]
            self._end(channel, "idle")
            channel.settling = channel.wanted = False
            channel.epoch, channel.moved, channel.skipped, channel.mark = channel.epoch + 1, 0, 0, None
        elif kind == "forget":
            if (gone := self._channels.pop(name, None)) is not None:
                self._end(gone, "gone")
                gone.settling = gone.wanted = False
        else:
            raise ValueError(kind)

    def _fail(self, do: str, name: str, error: Exception) -> None:
        """Reply that a request lacked resources; the client repeats it."""
        number = getattr(error, "errno", None) or errno.ENOMEM
        self._reply("failed", do=do, channel=name, errno=number)

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
            self._reply("expected", channel)
        elif channel.state == "idle":
            channel.wanted = True
        else:
            self._reply("opened", channel)

    def _await_reader(self, channel: Channel, fds: list[int]) -> None:
        """Create the FIFO's pipe and the thread that waits for its reader. Raises OSError."""
        status = os.fstat(_first(fds))
        inode = status.st_dev, status.st_ino
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
        previous = self._channels.get(name)
        if previous is not None and previous.state != "idle":
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
        if previous is not None:
            self._end(previous, "gone")
        self._channels[name] = channel
        self._begin(channel, fifo)
        self._reply("adopted", channel)

    def _note(self, opening: Opening) -> None:
        """Queue a finished opening for `_collect`. Called in the opening's thread."""
        self._arrived.append(opening)
        self._wake()

    def _wake(self) -> None:
        """Make `ready` return. A signal handler needs this too: epoll waits again after a signal."""
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
        """Handle the result of an opening."""
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
            self._reply("opened", channel)

    def _begin(self, channel: Channel, fifo: int) -> None:
        """Start to move bytes: a reader has opened the FIFO."""
        channel.fifo, channel.state = fifo, "open"
        self._owners |= {fifo: channel, channel.read_fd: channel}
        for fd in (fifo, channel.write_fd):
            with contextlib.suppress(OSError):
                set_pipe_size(fd)
        self.perform((self._move, channel))

    def _move(self, channel: Channel) -> None:
        """Move the pipe's bytes to the FIFO, as far as that has room."""
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
        """End the FIFO if poll(2) confirms that its reader has left: the event may be a stale one."""
        if channel.fifo >= 0:
            poll = select.poll()
            poll.register(channel.fifo, 0)
            if poll.poll(0):
                self._leave(channel)
            else:
                self._move(channel)

    def _leave(self, channel: Channel) -> None:
        """Close the FIFO and its pipe after the reader has left."""
        self._end(channel, "gone")
        self._settle(channel)

    def _settle(self, channel: Channel) -> None:
        if channel.settling and (channel.state != "open" or not bytes_unread(channel.read_fd)):
            channel.settling = False
            self._reply("settled", channel)

    def _end(self, channel: Channel, state: str) -> None:
        """Close every descriptor of the channel; the sidecar's next write raises BrokenPipeError."""
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
        """Make a thread return from open(2) by opening the read end, which `_opened` closes."""
        if not opening.over and opening.read_end < 0:
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
            opening.read_end = os.open(descriptor_path(opening.path_fd), flags)


def _first(fds: list[int]) -> int:
    """Return the message's first descriptor. Raises OSError if the kernel dropped it."""
    if fds[0] < 0:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return fds[0]


@contextlib.contextmanager
def address(path: str) -> Iterator[str]:
    """Return a path to a socket that is shorter than the limit of 108 bytes (unix(7)). Raises OSError."""
    directory, name = os.path.split(os.path.abspath(path))
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield os.path.join(descriptor_path(fd), name)
    finally:
        os.close(fd)


def listen(path: str) -> socket.socket:
    """Listen on a socket of mode 0600 at `path`; replace one that a dead keeper has left. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with address(path) as short_path:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
                other.connect(short_path)
            raise FileExistsError("another keeper listens there")
        except (ConnectionRefusedError, FileNotFoundError):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        mask = os.umask(0o177)
        try:
            listener.bind(short_path)
        finally:
            os.umask(mask)
    listener.listen(BACKLOG)
    return listener


def _report_failure(path: str, error: OSError) -> int:
    """Write the error to standard output, if that is open; return the exit code."""
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
        return _report_failure(path, error)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, keeper.stop)
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    _thread.stack_size(_STACK)
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    try:
        null = os.open(os.devnull, os.O_RDWR)
        os.write(1, b"ready\n")  # unbuffered, so an error is raised here
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(path)
        return _report_failure(path, error)
    # The parent process may wait for the end of our output.
    for output in (1, 2):
        os.dup2(null, output)
    try:
        keeper.run()
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
