"""Stages in the kernel: a part's bytes wait in their socket or in pipes, and are moved by splice(2).

    socket ────────splice───────→ FIFO          a part larger than a pipe, once its turn has come
    socket ─splice→ pipe ─splice→ FIFO          a small part, and what a socket cannot hold of a large one

A large part stays in its socket, which has been given the room for it (`Connection.widen`): one splice a
byte, and nobody is woken before its turn. It keeps its connection meanwhile. A small part would keep a
connection for little, so it waits in a small pipe. A socket that is full before the part is all there is
emptied into a pipe of 1 MiB, then into further ones, up to a quarter of the channel's share; TCP then holds
the server back. Delivery takes what is in pipes, then pulls from the socket; it alone writes into the FIFO.

A pipe has one slot per network fragment (pipe(7)), whatever the fragment's size, so small fragments fill
it early. Large ones (32 KiB on loopback) would let it hold more than its size, which the stage prevents
for its own pipes; the FIFO can be seen to take several MiB that way. A pipe that still holds bytes of an
abandoned part is closed, never reused.

A part takes its whole length of the channel's share, since what is not in its pipes waits in its socket,
whose pages are charged to the container as well. Pipes are scarce too: an unprivileged user may have 64 MiB
of them (/proc/sys/fs/pipe-user-pages-soft), FIFOs included, and each takes two open files. Where that is
less than the budget, a pipe costs in proportion, so that the share bounds both. Where the kernel refuses a
pipe worth having, bytes go through user memory instead, within the same room.
"""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Callable

from streamer.errors import SourceError
from streamer.linux import PIPE_SIZE, SPLICE_FLAGS, is_ready, set_pipe_size
from streamer.plan import Part
from streamer.relay.staging.stage import Stage, StageFull, bytes_per_request
from streamer.relay.statistics import ChannelCounters
from streamer.s3.ranges import Body
from streamer.schedule.budget import ChannelQuota
from streamer.units import KIB

WORTH_HAVING = 256 * KIB
"""A smaller pipe costs more in splices and wake-ups than it saves in copies."""
SMALLEST_PIPE = 64 * KIB
READ_SIZE = 256 * KIB


class Pipe:
    """A pipe of ours, and how many bytes are in it."""

    __slots__ = ("cost", "count", "full_at", "further", "read_fd", "size", "write_fd")

    def __init__(self, size: int) -> None:
        """Raises OSError if the kernel grants no pipe of that size, nor one worth having."""
        self.read_fd, self.write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.count = 0
        self.further = False
        """Whether it came on top of the room that is reserved for a part."""
        self.cost = 0
        """What it then takes of the share."""
        self.size = set_pipe_size(self.write_fd, size, least=size)
        self.full_at = self.size
        """The count at which no more goes in; less than the size once small fragments used up the slots."""
        if self.size < min(size, WORTH_HAVING):
            self.close()
            raise OSError(f"the kernel grants pipes of only {self.size} bytes")

    def close(self) -> None:
        os.close(self.read_fd)
        os.close(self.write_fd)


class PipePool:
    """The pipes of all channels: those in use are accounted for by their users' shares."""

    def __init__(self, budget: int, *, most: int) -> None:
        """At the most `budget` bytes of pipes, and `most` of them."""
        self.smallest = SMALLEST_PIPE
        """Bytes of the smallest pipe, so that the budget makes no more than `most`."""
        while self.smallest < PIPE_SIZE and budget // self.smallest > most:
            self.smallest *= 2
        self.budget = budget
        self._most = most
        self._made = 0
        self._count = 0
        self._free: dict[int, list[Pipe]] = {}
        self._refused = False

    def take(self, size: int) -> Pipe | None:
        """An empty pipe for `size` bytes; None if the kernel refuses one, or open files allow no more."""
        if free := self._free.get(size):
            return free.pop()
        if self._made + size > self.budget or self._count >= self._most:
            self.close()  # idle pipes of other sizes
        if self._refused or self._count >= self._most:
            return None
        try:
            pipe = Pipe(size)
        except OSError:
            self._refused = True
            return None
        self._made += pipe.size
        self._count += 1
        return pipe

    def give(self, pipe: Pipe) -> None:
        """Take a pipe back; one that is not empty is closed."""
        if pipe.count:
            self._close(pipe)
        else:
            pipe.full_at = pipe.size
            self._free.setdefault(pipe.size, []).append(pipe)

    def close(self) -> None:
        """Close the idle pipes."""
        for free in self._free.values():
            while free:
                self._close(free.pop())

    def _close(self, pipe: Pipe) -> None:
        self._made -= pipe.size
        self._count -= 1
        pipe.close()


class PipeStages:
    """One channel's stages: a pipe for each part admitted, further ones for parts of small fragments."""

    def __init__(self, quota: ChannelQuota, pool: PipePool) -> None:
        self.quota = quota
        self._pool = pool
        self._further = 0
        """Bytes of further pipes, which may be a quarter of what the channel may hold."""

    def part_size(self) -> int:
        quota = self.quota
        return quota.concurrency.part_size(min(quota.floor, quota.byte_limit // 4, bytes_per_request(quota)))

    def reserved_bytes(self, part: Part) -> int:
        """What its body takes; literals (64 KiB at most) do not count beside it."""
        return max(part.body, self._cost(self.pipe_size(part))) if part.body else len(part)

    def _cost(self, size: int) -> int:
        """What a pipe takes of the share because there are only so many."""
        budget = self.quota.budget
        return size * budget // self._pool.budget if budget > self._pool.budget else 0

    def pipe_size(self, part: Part) -> int:
        """Bytes of the pipe that a part begins with."""
        return min(PIPE_SIZE, max(self._pool.smallest, 1 << (part.body - 1).bit_length()))

    def make(self, part: Part, *, on_change: Callable[[], None], counters: ChannelCounters) -> Stage:
        return PipeStage(part, self, on_change=on_change, counters=counters)

    def take(self, part: Part) -> Pipe | None:
        """The first pipe of a part; its room is reserved."""
        return self._pool.take(self.pipe_size(part))

    def take_further(self, part: Part) -> Pipe | None:
        """A further pipe for a part whose last is full, while there is room for it."""
        size = self.pipe_size(part)
        cost = self._cost(size)
        if self._further + size > self.quota.byte_limit // 4 or not self.quota.fits(cost):
            return None
        pipe = self._pool.take(size)
        if pipe is not None:
            pipe.further, pipe.cost = True, cost  # the budget may be another when it comes back
            self._further += size
            self.quota.take(cost)
        return pipe

    def give(self, pipe: Pipe) -> None:
        """Take a pipe back."""
        further, pipe.further = pipe.further, False
        self._pool.give(pipe)
        if further:
            self._further -= pipe.size
            self.quota.give(pipe.cost)


class PipeStage(Stage):
    """A part's bytes in pipes; in memory only if the body must be read, or the kernel grants no pipe."""

    def __init__(
        self, part: Part, stages: PipeStages, *, on_change: Callable[[], None], counters: ChannelCounters
    ) -> None:
        super().__init__(part, on_change=on_change, counters=counters)
        self._stages = stages
        self._pipes: deque[Pipe] = deque()
        self._piped = 0

    @property
    def staged(self) -> int:
        return len(self._before) + self._piped + self._in_memory

    def _fill(self, body: Body) -> None:
        pipe = None if self._in_memory or not body.spliceable else self._pipe_with_room()
        if pipe is None:
            self._read(body)
        else:
            self._splice(body, pipe)
        self._changed()

    def _splice(self, body: Body, pipe: Pipe) -> None:
        try:
            count = body.splice_into(pipe.write_fd, pipe.full_at - pipe.count)
        except BlockingIOError:
            if not pipe.count:
                raise
            body.probe()  # raises if it is the socket that has nothing
            pipe.full_at = pipe.count
            self._fill(body)
            return
        pipe.count += count
        self._piped += count
        self._arrived(count)

    def _read(self, body: Body) -> None:
        if self._in_memory >= self._stages.reserved_bytes(self.part):
            raise StageFull
        memory = bytearray(min(body.left, READ_SIZE))
        count = body.read_into(memoryview(memory))
        del memory[count:]
        self._hold(memory)
        self._arrived(count)

    def _pipe_with_room(self) -> Pipe | None:
        """Return the last pipe, a first or a further one; None if there is none. Raises StageFull."""
        if not self._pipes:
            first = self._stages.take(self.part)
            if first is not None:
                self._pipes.append(first)
            return first
        last = self._pipes[-1]
        if last.count < last.full_at:
            return last
        further = self._stages.take_further(self.part)
        if further is None:
            raise StageFull
        self._pipes.append(further)
        return further

    def _drain_rest(self, fd: int) -> int:
        if self._piped:
            pipe = self._pipes[0]
            count = os.splice(pipe.read_fd, fd, pipe.count, flags=SPLICE_FLAGS)
            pipe.count -= count
            self._piped -= count
            if not pipe.count:
                pipe.full_at = pipe.size
                if len(self._pipes) > 1:
                    self._stages.give(self._pipes.popleft())
        elif self._in_memory:
            count = self._write_memory(fd)
        elif self._body is not None and self._body.left:
            return self._move_on(fd, self._body)
        else:
            return 0
        self._made_room()
        return count

    def _move_on(self, fd: int, body: Body) -> int:
        """Move bytes from the socket, with nothing of the part between it and `fd`."""
        try:
            if not body.spliceable:
                self._read(body)
                return self._write_memory(fd)
            count = body.splice_into(fd, body.left)
        except BlockingIOError:
            if is_ready(fd, select.POLLOUT):  # the pipe has room, or nobody reads it
                self._dry = True
                body.notify(self._on_bytes)
                return 0
            if not self._parks:
                body.notify(self._on_bytes)  # to wait here, and not on a connection
            raise
        except SourceError:
            self._dry = True
            return 0  # raised by `Body.taken`, too
        self._arrived(count)
        return count

    def discard(self) -> None:
        super().discard()
        while self._pipes:
            self._stages.give(self._pipes.pop())
        self._piped = 0
