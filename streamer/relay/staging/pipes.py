"""Stages in the kernel: a part's bytes stay in their socket or in pipes, and splice(2) moves them.

    socket ────────splice───────→ FIFO          part of more than 1 MiB: moved when it is the head of line
    socket ─splice→ pipe ─splice→ FIFO          smaller part, or more than the socket holds: moved on arrival

A large part stays in its socket, whose receive window is enlarged (`Connection.widen`): each byte is spliced
once, and no event wakes the loop before delivery needs the part. The part keeps its connection until then. A
small part is not worth a connection, so it is moved into a small pipe. If a socket is full before the whole
part has arrived, its bytes go into a pipe of 1 MiB, then into further ones, up to a quarter of the channel
quota; TCP then stops the server. Delivery empties the pipes, then the socket; it alone writes into the FIFO.

A pipe has one slot per network fragment (pipe(7)), whatever the fragment's size, so small fragments fill
it early. Large fragments (32 KiB on loopback) would let a pipe hold more than its size. The stage prevents
that for its own pipes, but a FIFO may hold several MiB that way. A pipe that still holds bytes of an
abandoned part is closed, never reused.

The items of a part share one pipe, which has a page for each at the least.

A part reserves its whole length, since bytes outside its pipes are in its socket, whose pages are charged to
the container too; a part of small ranges reserves the kernel's memory for its pipe as well.

Pipes are scarce: an unprivileged user may have 64 MiB of them (/proc/sys/fs/pipe-user-pages-soft), FIFOs
included, and each takes two open files. If that is less than the memory budget, a pipe reserves
proportionally more than its size, so that the channel quota bounds pipes too.
If the kernel refuses a pipe, the part's bytes go through user memory, within the same reserved bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from streamer.linux import ALL, PIPE_SIZE, SPLICE_FLAGS, Pipe
from streamer.plan.parts import RANGE_COST, Part
from streamer.relay.staging.buffers import range_costs
from streamer.relay.staging.stage import (
    Chunk,
    Stage,
    StageFull,
    at_most_the_floor,
    bytes_per_request,
)
from streamer.relay.statistics import ChannelCounters
from streamer.s3.client.doubt import NothingArrived
from streamer.s3.ranges import Body
from streamer.schedule.budget import ChannelQuota
from streamer.units import KIB

WORTH_HAVING = 256 * KIB
"""Bytes; a smaller pipe costs more in splices and wake-ups than it saves in copies."""
SMALLEST_PIPE = 64 * KIB
PIPE_COST = 4 * KIB
"""Memory of a pipe beside its bytes: 2.1 KiB of the kernel, measured, and the rest of its last page."""
READ_SIZE = 256 * KIB
PAGE = 4 * KIB


class StagePipe(Pipe):
    """A pipe in which bytes of a part wait."""

    __slots__ = ("cost", "full_at", "further")

    def __init__(self, size: int) -> None:
        """Make the pipe. Raises OSError if the kernel grants less than `size` and `WORTH_HAVING` bytes."""
        super().__init__(size, least=size)
        self.further = False
        """Whether the pipe is a further one, not covered by the part's reserved bytes."""
        self.cost = 0
        """Bytes that a further pipe reserves of the channel quota."""
        self.full_at = self.size
        """`count` at which the pipe is full; less than `size` if small fragments have used up the slots."""
        if self.size < min(size, WORTH_HAVING):
            self.close()
            raise OSError(f"the kernel grants pipes of only {self.size} bytes")


class PipePool:
    """Pipes of all channels; channel quotas account for those in use."""

    def __init__(self, budget: int, *, most: int) -> None:
        """`budget`: bytes of all pipes together. `most`: number of pipes."""
        self.smallest = SMALLEST_PIPE
        """Bytes of the smallest pipe; large enough that `budget` allows no more than `most` pipes."""
        while self.smallest < PIPE_SIZE and budget // self.smallest > most:
            self.smallest *= 2
        self.budget = budget
        self._most = most
        self._made = 0
        self._count = 0
        self._free: dict[int, list[StagePipe]] = {}
        self._refused = False

    def take(self, size: int) -> StagePipe | None:
        """Return an empty pipe for `size` bytes; None if the kernel or the limit of open files refuses it."""
        if free := self._free.get(size):
            return free.pop()
        if self._made + size > self.budget or self._count >= self._most:
            self.close()  # idle pipes of other sizes
        if self._refused or self._count >= self._most:
            return None
        try:
            pipe = StagePipe(size)
        except OSError:
            self._refused = True
            return None
        self._made += pipe.size
        self._count += 1
        return pipe

    def give(self, pipe: StagePipe) -> None:
        """Take back a pipe; close it unless it is empty."""
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

    def _close(self, pipe: StagePipe) -> None:
        self._made -= pipe.size
        self._count -= 1
        pipe.close()


class PipeStages:
    """One channel's `Stages` in the kernel: a pipe for each part, and further ones if it is full."""

    def __init__(self, quota: ChannelQuota, pool: PipePool) -> None:
        self.quota = quota
        self._pool = pool
        self._further = 0
        """Bytes of further pipes, at most a quarter of the channel quota."""

    def part_size(self) -> int:
        quota = self.quota
        return quota.concurrency.part_size(min(quota.floor, quota.byte_limit // 4, bytes_per_request(quota)))

    def reserved_bytes(self, part: Part) -> int:
        held = self._held(part)
        if self.quota.budget > self._pool.budget and part.body:
            held = max(held, self._cost(self.pipe_size(part)))
        return at_most_the_floor(held, part.body, self.quota)

    def _held(self, part: Part) -> int:
        """Return the memory that the part takes, wherever its bytes wait.

        A large part does not reserve few literals, so that a budget of whole parts holds them.
        """
        if costs := range_costs(part):
            return part.size + costs + (PIPE_COST if part.requests else 0)
        literals = part.size - part.body
        return part.size if literals > RANGE_COST else part.body

    def _cost(self, size: int) -> int:
        """Return the bytes that a pipe reserves because pipes are scarcer than memory; 0 if they are not."""
        budget = self.quota.budget
        return size * budget // self._pool.budget if budget > self._pool.budget else 0

    def pipe_size(self, part: Part) -> int:
        """Return the size of a part's pipes, in bytes."""
        count = max(part.size, len(part.items) * PAGE)
        return min(PIPE_SIZE, max(self._pool.smallest, 1 << (count - 1).bit_length()))

    def make(self, part: Part, *, on_change: Callable[[], None], counters: ChannelCounters) -> Stage:
        return PipeStage(part, self, on_change=on_change, counters=counters)

    def take(self, part: Part) -> StagePipe | None:
        """Return the first pipe of a part, which the part's reserved bytes cover; None if refused."""
        return self._pool.take(self.pipe_size(part))

    def take_further(self, part: Part) -> StagePipe | None:
        """Return a further pipe for a part whose last one is full; None if the quota or kernel refuses."""
        size = self.pipe_size(part)
        cost = self._cost(size)
        if self._further + size > self.quota.byte_limit // 4 or not self.quota.fits(cost):
            return None
        pipe = self._pool.take(size)
        if pipe is not None:
            pipe.further, pipe.cost = True, cost  # stored, since the budget may change before the return
            self._further += size
            self.quota.take(cost)
        return pipe

    def give(self, pipe: StagePipe) -> None:
        """Take back a pipe, and what it reserved."""
        further, pipe.further = pipe.further, False
        self._pool.give(pipe)
        if further:
            self._further -= pipe.size
            self.quota.give(pipe.cost)


class PipeStage(Stage):
    """Stage whose bytes are in pipes; in memory if the body cannot be spliced or no pipe is granted."""

    def __init__(
        self, part: Part, stages: PipeStages, *, on_change: Callable[[], None], counters: ChannelCounters
    ) -> None:
        super().__init__(part, on_change=on_change, counters=counters)
        self._stages = stages
        self._pipes: list[StagePipe] = []
        self._piped = 0

    @property
    def staged(self) -> int:
        return self._piped + self._in_memory

    def _fill(self, body: Body) -> None:
        pipe = None if self._in_memory or not body.spliceable else self._writable_pipe()
        if pipe is None:
            self._read(body)
        else:
            self._splice(body, pipe)
        self._changed()

    def _splice(self, body: Body, pipe: StagePipe) -> None:
        try:
            count = body.splice_into(pipe.write_fd, pipe.full_at - pipe.count, revocable=not self._parks)
        except NothingArrived:
            raise
        except BlockingIOError:
            if not pipe.count:
                raise
            if not self._parks:
                body.probe()  # raises BlockingIOError if the socket is empty; otherwise the pipe is full
            pipe.full_at = pipe.count
            self._fill(body)
            return
        pipe.count += count
        self._piped += count
        if not self._parks:
            self._doubt_more(body, count)
        self._arrived(count)

    def _read(self, body: Body) -> None:
        if self._in_memory >= self._stages.reserved_bytes(self.part):
            raise StageFull
        memory = bytearray(min(body.left, READ_SIZE))
        count = body.read_into(memoryview(memory))
        self._hold(memory if count == len(memory) else memory[:count])  # a cut one would keep its memory
        self._doubt_more(body, count)
        self._arrived(count)

    def _writable_pipe(self) -> StagePipe | None:
        """Return a pipe that is not full; None if the pool grants no first pipe.

        Raises StageFull if no further pipe is granted.
        """
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

    def drain_into(self, fd: int, most: int = ALL) -> int:
        free = self._piped + self._in_memory - self.in_doubt
        if free <= 0:
            body = self._body
            if body is None or not body.left:
                return 0
            if not (self._piped or self._in_memory) and body.spliceable:
                return self._move_on(fd, body, most)
            self._pull()
            free = self._piped + self._in_memory - self.in_doubt
            if free <= 0:
                return 0
        most = min(most, free)
        if self._piped:
            pipe = self._pipes[0]
            count = os.splice(pipe.read_fd, fd, min(pipe.count, most), flags=SPLICE_FLAGS)
            pipe.count -= count
            self._piped -= count
            if not pipe.count:
                pipe.full_at = pipe.size
                if len(self._pipes) > 1:
                    self._stages.give(self._pipes.pop(0))
        else:
            count = self._write_memory(fd, most)
        self._note_freed()
        return count

    def _recall(self) -> None:
        for pipe in reversed(self._pipes):
            if pipe.count:
                data = os.read(pipe.read_fd, pipe.count)
                self._chunks.insert(0, Chunk(data, len(data)))
                pipe.count = 0
        self._in_memory += self._piped
        # Bytes that are not counted may follow: a body that another one replaces may just have failed.
        self._give_pipes(dirty=True)

    def _give_pipes(self, *, dirty: bool) -> None:
        """Give the pipes back. `dirty`: bytes may be in them that are not counted (`Body.splice_into`)."""
        while self._pipes:
            pipe = self._pipes.pop()
            pipe.count = pipe.count or dirty
            self._stages.give(pipe)
        self._piped = 0

    def discard(self) -> None:
        dirty = self._body is not None and self._body.left > 0
        super().discard()
        self._give_pipes(dirty=dirty)
