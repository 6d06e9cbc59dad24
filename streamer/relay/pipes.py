"""Stages in the kernel: a part's bytes wait in pipes, moved there and onward by splice(2).

    socket ─splice→ pipe ─splice→ FIFO          a part that waits for its turn
    socket ────────splice───────→ FIFO          the head of line, while its pipe is empty

A stage puts at most 1 MiB into a pipe, so a part larger than that stays in its socket until it is
delivered; TCP then holds the server back. A stage whose pipe is full may take further pipes from a
common reserve. A pipe has one slot per network fragment (pipe(7)), whatever the fragment's size. Small
fragments fill it early, which is what the reserve is for. Large ones (32 KiB on loopback) would let it
hold more than its size, which the stage prevents for its own pipes; the FIFO can be seen to take several
MiB that way. A pipe that still holds bytes of an abandoned part is closed, never reused.

Pipes are counted against the channel's budget at their full size, and against what the kernel grants an
unprivileged user in all (/proc/sys/fs/pipe-user-pages-soft, 64 MiB), FIFOs included. Where the kernel
refuses a pipe worth having, bytes go through user memory instead, within the same room.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
from collections import deque
from collections.abc import Callable

from streamer.errors import ReaderGone
from streamer.plan import Part
from streamer.relay.stages import Stage
from streamer.relay.statistics import Durations
from streamer.sink.outlet import Outlet
from streamer.source.ranges import NoRoom
from streamer.units import KIB, MIB

PIPE_SIZE = 1 * MIB
"""/proc/sys/fs/pipe-max-size, the most that an unprivileged process may ask for."""
WORTH_HAVING = 256 * KIB
"""A smaller pipe costs more in splices and wake-ups than it saves in copies."""
READ_SIZE = 256 * KIB
_FLAGS = os.SPLICE_F_NONBLOCK | os.SPLICE_F_MOVE
_CAPABLE = (1 << 24) | (1 << 21)
"""CAP_SYS_RESOURCE, CAP_SYS_ADMIN: either lifts the limit on pipe pages (pipe(7))."""


def pipe_allowance() -> int | None:
    """Bytes of pipes that this user may have in all; None if there is no limit."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            capabilities = next(int(line.split()[1], 16) for line in status if line.startswith("CapEff:"))
        with open("/proc/sys/fs/pipe-user-pages-soft", encoding="ascii") as limit:
            pages = int(limit.read())
    except (OSError, ValueError, StopIteration):
        return 64 * MIB
    return None if capabilities & _CAPABLE or pages == 0 else pages * os.sysconf("SC_PAGE_SIZE")


class Pipe:
    """A pipe of ours, and how many bytes are in it."""

    __slots__ = ("count", "full_at", "read_fd", "size", "write_fd")

    def __init__(self) -> None:
        """Raises OSError if the kernel grants no pipe of a size worth having."""
        self.read_fd, self.write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.count = 0
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.write_fd, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
        self.size = fcntl.fcntl(self.write_fd, fcntl.F_GETPIPE_SZ)
        self.full_at = self.size
        """The count at which no more goes in; less than the size once small fragments used up the slots."""
        if self.size < WORTH_HAVING:
            self.close()
            raise OSError(f"the kernel grants pipes of only {self.size} bytes")

    def close(self) -> None:
        os.close(self.read_fd)
        os.close(self.write_fd)


class PipeStages:
    """One channel's pipes: one for each part admitted, and a reserve for parts of small fragments."""

    def __init__(self, budget: int) -> None:
        """`budget` in bytes; three quarters are for parts, a quarter is reserve."""
        pipes = max(1, budget // PIPE_SIZE)
        self._reserve = pipes // 4
        self.budget = (pipes - self._reserve) * PIPE_SIZE
        self._free: list[Pipe] = []
        self._refused = False
        self._closed = False

    def room(self, part: Part) -> int:
        """A pipe costs what it may hold; literals (64 KiB at most) do not count beside it."""
        return PIPE_SIZE if part.body else len(part)

    def make(self, part: Part, *, on_change: Callable[[], None], first_byte: Durations) -> Stage:
        return PipeStage(part, self, on_change=on_change, first_byte=first_byte)

    def take(self) -> Pipe | None:
        """A pipe for a part that has none; None if the kernel refuses one."""
        if self._free:
            return self._free.pop()
        if self._refused:
            return None
        try:
            return Pipe()
        except OSError:
            self._refused = True
            return None

    def take_further(self) -> Pipe | None:
        """A further pipe for a part whose last is full, while the reserve lasts."""
        if self._reserve == 0 or (pipe := self.take()) is None:
            return None
        self._reserve -= 1
        return pipe

    def give(self, pipe: Pipe, *, further: bool) -> None:
        """Take a pipe back; one that is not empty is closed."""
        self._reserve += further
        if pipe.count or self._closed:
            pipe.close()
        else:
            self._free.append(pipe)

    def close(self) -> None:
        self._closed = True
        while self._free:
            self._free.pop().close()


class _Socket:
    """A socket as a thing to drain, for the direct way."""

    __slots__ = ("fd", "limit")

    def __init__(self, fd: int, limit: int) -> None:
        self.fd = fd
        self.limit = limit

    def drain_into(self, fd: int) -> int:
        return os.splice(self.fd, fd, self.limit, flags=_FLAGS)


class PipeStage(Stage):
    """A part's bytes in pipes; in user memory only where a transport feeds them or no pipe is granted."""

    def __init__(
        self, part: Part, stages: PipeStages, *, on_change: Callable[[], None], first_byte: Durations
    ) -> None:
        super().__init__(part, on_change=on_change, first_byte=first_byte)
        self._stages = stages
        self._pipes: deque[Pipe] = deque()
        self._piped = 0
        self._direct: tuple[Outlet, Callable[[int], None]] | None = None
        self._discarded = False

    @property
    def staged(self) -> int:
        return len(self._head) + self._piped + self._in_memory

    @property
    def full(self) -> bool:
        return self.staged >= PIPE_SIZE

    def deliver_directly(self, outlet: Outlet, account: Callable[[int], None]) -> None:
        self._direct = (outlet, account)

    def take_from(self, fd: int, limit: int) -> int:
        """As `streamer.source.ranges.SpliceReceiver`."""
        if self._discarded:
            raise NoRoom
        if self._direct is not None and not self.staged:
            with contextlib.suppress(BlockingIOError):  # the FIFO is full or the socket empty: stage tells
                return self._pass_through(fd, limit, *self._direct)
        if self._in_memory:
            return self._read_into_memory(fd, limit)
        while True:
            pipe = self._pipe_with_room()
            if pipe is None:
                return self._read_into_memory(fd, limit)
            try:
                room = pipe.full_at - pipe.count
                count = os.splice(fd, pipe.write_fd, min(limit, room), flags=_FLAGS)
            except BlockingIOError:
                if not pipe.count or not _readable(fd):
                    raise
                pipe.full_at = pipe.count
                continue
            pipe.count += count
            self._piped += count
            self._arrived(count)
            self._changed()
            return count

    def _pass_through(self, fd: int, limit: int, outlet: Outlet, account: Callable[[int], None]) -> int:
        try:
            count = outlet.push(_Socket(fd, limit))
        except ReaderGone:
            raise NoRoom from None  # delivery learns of it by itself, and abandons the epoch
        self._arrived(count)
        if count:
            account(count)
        if self.staged:
            self._changed()  # the body is out, and literals are left for delivery
        return count

    def _pipe_with_room(self) -> Pipe | None:
        """The last pipe, a first one, or a further one. None if there is none to be had; NoRoom if full."""
        if not self._pipes:
            first = self._stages.take()
            if first is not None:
                self._pipes.append(first)
            return first
        last = self._pipes[-1]
        if last.count < last.full_at:
            return last
        further = self._stages.take_further()
        if further is None:
            raise NoRoom
        self._pipes.append(further)
        return further

    def _read_into_memory(self, fd: int, limit: int) -> int:
        if self._in_memory >= PIPE_SIZE:
            raise NoRoom
        data = os.read(fd, min(limit, READ_SIZE))
        if data:
            self.feed(data)
        return len(data)

    def _drain_rest(self, fd: int) -> int:
        if self._piped:
            pipe = self._pipes[0]
            count = os.splice(pipe.read_fd, fd, pipe.count, flags=_FLAGS)
            pipe.count -= count
            self._piped -= count
            if not pipe.count:
                pipe.full_at = pipe.size
                if len(self._pipes) > 1:
                    self._stages.give(self._pipes.popleft(), further=True)
        else:
            count = self._write_memory(fd)
        if self.on_room is not None:
            resume, self.on_room = self.on_room, None
            resume()
        return count

    def discard(self) -> None:
        self._discarded = True
        self._direct = None
        self._head = memoryview(b"")
        self._chunks.clear()
        while self._pipes:
            pipe = self._pipes.pop()
            self._stages.give(pipe, further=bool(self._pipes))
        self._piped = self._in_memory = 0


def _readable(fd: int) -> bool:
    """Whether the socket has something to read, be it its end."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))
