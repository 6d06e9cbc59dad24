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
when the last one's connection is closed, which the kernel does after its last write.

Messages are JSON, one a packet (SOCK_SEQPACKET), descriptors beside them (SCM_RIGHTS):

    hello                           -> channels: epoch, state, accepted, digest, skipped, mark
    open channel epoch digest skipped, with an O_PATH descriptor of the FIFO
                                    -> opened, once a reader has come, with the pipe's write end; or gone
    adopt channel epoch digest skipped moved mark, with the FIFO's write end
                                    a sidecar that had it itself leaves, and `moved` bytes are through
    mark channel mark               kept for the next sidecar
    settle channel                  -> settled, once the FIFO has accepted everything; or gone
    close channel                   the epoch is over; the next one is due
    forget channel                  the channel is over

States: `idle` no reader has come, `open` one reads, `gone` it has left before the end.

Run by path, in an interpreter without site-packages: `python -I -S keeper.py SOCKET [IDLE_SECONDS]`. With
IDLE_SECONDS it ends by itself, when no sidecar is there and no reader either for so long, and at once when
the last channel is forgotten.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import stat
import struct
import sys
import termios
import threading
from collections.abc import Iterator

VERSION = 1
PIPE_SIZE = 1 << 20
"""Of FIFO and pipe; the most that an unprivileged process may ask for (pipe(7))."""
LONGEST_MESSAGE = 64 * 1024
_FLAGS = os.SPLICE_F_NONBLOCK | os.SPLICE_F_MOVE


def by_descriptor(path_fd: int) -> str:
    """A path that leads to the inode of an O_PATH descriptor, whatever its own path is now (open(2))."""
    return f"/proc/self/fd/{path_fd}"


def unread(fd: int) -> int:
    """Bytes in a pipe."""
    return int(struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0"))[0])


def enlarge(fd: int) -> int:
    """Ask for a 1 MiB pipe, or as near as the kernel grants; return its size in bytes.

    Past a user's 64 MiB of pipe pages F_SETPIPE_SZ answers EPERM and the pipe keeps its size (pipe(7)).
    """
    size = PIPE_SIZE
    while size > 64 * 1024:
        with contextlib.suppress(OSError):
            return fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, size)
        size //= 2
    return fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ)


def peer(sock: socket.socket) -> int:
    """The user who connected to a Unix socket, or listens at its other end (SO_PEERCRED, unix(7))."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


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

    @property
    def accepted(self) -> int:
        """Bytes that the FIFO has accepted or will; exact while no sidecar writes."""
        return self.moved + (unread(self.read_fd) if self.read_fd >= 0 else 0)

    def account(self) -> dict[str, object]:
        """What the next sidecar must know."""
        names = ("epoch", "state", "accepted", "digest", "skipped", "mark")
        return {name: getattr(self, name) for name in names}

    def begin(self, fifo: int) -> None:
        """A reader has come."""
        os.set_blocking(fifo, False)
        enlarge(fifo)
        self.read_fd, self.write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        enlarge(self.write_fd)
        self.fifo, self.state, self.moved = fifo, "open", 0

    def end(self, state: str) -> None:
        """Let go of every descriptor; the sidecar sees its pipe break."""
        self.state = state
        if self.opening is not None:
            self.opening.release()
            self.opening = None
        for fd in (self.fifo, self.read_fd, self.write_fd):
            if fd >= 0:
                os.close(fd)
        self.fifo = self.read_fd = self.write_fd = -1


class Opening:
    """A thread that blocks in open(2) of one FIFO, and puts the result into `ready`."""

    def __init__(self, channel: str, path_fd: int, wake_fd: int) -> None:
        self.channel = channel
        self.path_fd = path_fd
        found = os.fstat(path_fd)
        self.inode = found.st_dev, found.st_ino
        self.fd = -1
        self.error: OSError | None = None
        self.released = False
        self._wake_fd = wake_fd
        self.done = threading.Event()
        threading.Thread(target=self._open, daemon=True, name=f"open {channel}").start()

    def _open(self) -> None:
        try:
            self.fd = os.open(by_descriptor(self.path_fd), os.O_WRONLY | os.O_CLOEXEC)
        except OSError as error:
            self.error = error
        self.done.set()
        os.eventfd_write(self._wake_fd, 1)

    def release(self) -> None:
        """Wake the thread by a reader of our own, wait for it, and close everything."""
        if not self.released:
            self.released = True
            read_end = os.open(by_descriptor(self.path_fd), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            self.done.wait()
            for fd in (read_end, self.path_fd, self.fd):
                if fd >= 0:
                    os.close(fd)

    def taken(self) -> int:
        """The write end, now the caller's. Raises OSError if it could not be opened."""
        self.released = True
        os.close(self.path_fd)
        if self.error is not None:
            raise self.error
        return self.fd


class Keeper:
    """Serves one listening socket until told to stop, or until it is idle."""

    def __init__(self, listener: socket.socket, *, idle_for: float | None = None) -> None:
        self._listener = listener
        self._idle_for = idle_for
        self._channels: dict[str, Channel] = {}
        self._client: socket.socket | None = None
        self._epoll = select.epoll()
        self._owners: dict[int, Channel] = {}
        """Channels by the descriptors that epoll watches."""
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._over = False
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._epoll.register(listener.fileno(), select.EPOLLIN)

    def stop(self, *_: object) -> None:
        """End `run`; a signal handler."""
        self._over = True
        os.eventfd_write(self._wake_fd, 1)

    def run(self) -> None:
        """Serve. When it returns every FIFO is closed."""
        try:
            while not self._over:
                waiting = self._client is not None or any(c.state == "open" for c in self._channels.values())
                timeout = None if waiting or self._idle_for is None else self._idle_for
                events = self._epoll.poll(timeout)
                if not events and timeout is not None:
                    return
                for fd, event in events:
                    self._handle(fd, event)
        finally:
            for channel in self._channels.values():
                channel.end("gone")

    def _handle(self, fd: int, event: int) -> None:
        if fd == self._wake_fd:
            os.eventfd_read(fd)
            for channel in list(self._channels.values()):
                self._opened(channel)
        elif fd == self._listener.fileno():
            self._accept()
        elif self._client is not None and fd == self._client.fileno():
            self._receive()
        elif (owner := self._owners.get(fd)) is not None:
            if fd == owner.fifo and event & (select.EPOLLERR | select.EPOLLHUP):
                self._leave(owner)
            else:
                self._move(owner)

    # The sidecar

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        if peer(client) not in (0, os.geteuid()):
            client.close()
            return
        self._client = client
        self._epoll.register(client.fileno(), select.EPOLLIN)
        # The next sidecar waits in the backlog until this one is gone, and so are its writes.
        self._epoll.unregister(self._listener.fileno())

    def _receive(self) -> None:
        assert self._client is not None  # noqa: S101 - for the type checker
        try:
            data, fds, _, _ = socket.recv_fds(self._client, LONGEST_MESSAGE, 4, socket.MSG_DONTWAIT)
        except (BlockingIOError, ConnectionResetError):
            return  # reset: it died before it read our last word; what it said comes next, then its end
        except OSError:
            data, fds = b"", []
        if not data:
            self._hang_up()
            return
        try:
            self._obey(json.loads(data), fds)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            self._hang_up()  # no sidecar of ours says such things
        finally:
            for fd in fds:
                os.close(fd)

    def _hang_up(self) -> None:
        assert self._client is not None  # noqa: S101 - for the type checker
        self._epoll.unregister(self._client.fileno())
        self._client.close()
        self._client = None
        for channel in self._channels.values():
            channel.settling = channel.wanted = False
        self._epoll.register(self._listener.fileno(), select.EPOLLIN)
        if self._idle_for is not None and not self._channels:
            self._over = True

    def _say(self, message: dict[str, object], *fds: int) -> None:
        if self._client is not None:
            with contextlib.suppress(OSError):  # it is dying; its end of the connection will tell
                socket.send_fds(self._client, [json.dumps(message).encode()], fds, socket.MSG_DONTWAIT)

    def _obey(self, message: dict[str, object], fds: list[int]) -> None:
        what, name = message["do"], str(message.get("channel"))
        if what == "hello":
            accounts = {name: channel.account() for name, channel in self._channels.items()}
            self._say({"did": "hello", "version": VERSION, "pid": os.getpid(), "channels": accounts})
        elif what == "open":
            self._open(name, message, fds)
        elif what == "adopt":
            self._adopt(name, message, fds)
        elif what == "mark":
            self._channels[name].mark = message["mark"]  # type: ignore[assignment] # kept as it is
        elif what == "settle":
            channel = self._channels[name]
            channel.settling = True
            self._settle(channel)
        elif what == "close":
            channel = self._channels[name]
            self._end(channel, "idle")
            channel.epoch, channel.moved, channel.skipped, channel.mark = channel.epoch + 1, 0, 0, None
        elif what == "forget":
            if (gone := self._channels.pop(name, None)) is not None:
                self._end(gone, "gone")
        else:
            raise ValueError(what)

    # The FIFOs

    def _open(self, name: str, message: dict[str, object], fds: list[int]) -> None:
        epoch, digest, skipped = (
            int(str(message["epoch"])),
            str(message["digest"]),
            int(str(message["skipped"])),
        )
        channel = self._channels.get(name)
        if channel is None or (channel.state == "idle" and channel.epoch != epoch):
            if channel is not None:
                self._end(channel, "gone")
            channel = self._channels[name] = Channel(name, epoch, digest, skipped)
        channel.digest, channel.wanted = digest, True
        if channel.epoch != epoch:
            raise ValueError(epoch)
        if channel.state != "idle":
            self._tell(channel)
            return
        channel.skipped = skipped
        found = os.fstat(fds[0])
        if not stat.S_ISFIFO(found.st_mode):
            raise ValueError(name)
        if channel.opening is not None:
            if channel.opening.inode == (found.st_dev, found.st_ino):
                return
            channel.opening.release()
        channel.opening = Opening(name, os.dup(fds[0]), self._wake_fd)

    def _adopt(self, name: str, message: dict[str, object], fds: list[int]) -> None:
        epoch, digest, skipped, moved = (message[each] for each in ("epoch", "digest", "skipped", "moved"))
        channel = Channel(name, int(str(epoch)), str(digest), int(str(skipped)))
        channel.mark = message["mark"]  # type: ignore[assignment] # kept as it is
        channel.begin(os.dup(fds[0]))
        channel.moved = int(str(moved))
        self._channels[name] = channel
        self._watch(channel)

    def _watch(self, channel: Channel) -> None:
        self._owners |= {channel.fifo: channel, channel.read_fd: channel}
        self._epoll.register(channel.fifo, 0)
        self._epoll.register(channel.read_fd, select.EPOLLIN)

    def _opened(self, channel: Channel) -> None:
        """Take what the channel's opening thread has brought."""
        if channel.opening is None or not channel.opening.done.is_set():
            return
        opening, channel.opening = channel.opening, None
        try:
            fifo = opening.taken()
            try:
                channel.begin(fifo)
            except OSError:
                os.close(fifo)
                raise
        except OSError as error:
            channel.end("idle")
            self._say({"did": "failed", "channel": channel.name, "error": error.strerror or str(error)})
            return
        self._watch(channel)
        if channel.wanted:
            self._tell(channel)

    def _tell(self, channel: Channel) -> None:
        told = {"did": "opened", "channel": channel.name} | channel.account()
        self._say(told, *([channel.write_fd] if channel.state == "open" else []))

    def _move(self, channel: Channel) -> None:
        """Move what the pipe has to the FIFO, as far as it has room."""
        try:
            channel.moved += os.splice(channel.read_fd, channel.fifo, PIPE_SIZE, flags=_FLAGS)
        except BlockingIOError:
            full = unread(channel.read_fd) > 0
            self._epoll.modify(channel.fifo, select.EPOLLOUT if full else 0)
            self._epoll.modify(channel.read_fd, 0 if full else select.EPOLLIN)
        except BrokenPipeError:
            self._leave(channel)
            return
        self._settle(channel)

    def _leave(self, channel: Channel) -> None:
        """The reader has left; what the sidecar writes has nobody to go to."""
        self._end(channel, "gone")
        self._settle(channel)

    def _settle(self, channel: Channel) -> None:
        if channel.settling and (channel.state != "open" or not unread(channel.read_fd)):
            channel.settling = False
            self._say({"did": "settled", "channel": channel.name} | channel.account())

    def _end(self, channel: Channel, state: str) -> None:
        for fd in (channel.fifo, channel.read_fd):
            if self._owners.pop(fd, None) is not None:
                self._epoll.unregister(fd)
        channel.end(state)


@contextlib.contextmanager
def address(path: str) -> Iterator[str]:
    """The path of a socket in a form that is never too long for one: 108 bytes (unix(7)). Raises OSError."""
    directory, name = os.path.split(os.path.abspath(path))
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield os.path.join(by_descriptor(fd), name)
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
    listener.listen(4)
    return listener


def main(arguments: list[str]) -> int:
    """Serve the socket that the first argument names; the second is IDLE_SECONDS."""
    path = arguments[0]
    try:
        listener = listen(path)
    except OSError as error:
        sys.stdout.write(f"{path}: {error.strerror or error}\n")
        return 7
    keeper = Keeper(listener, idle_for=float(arguments[1]) if len(arguments) > 1 else None)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, keeper.stop)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    # What started it may wait for the end of its output, and must not wait for ours.
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (1, 2):
        os.dup2(nowhere, standard)
    try:
        keeper.run()
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
