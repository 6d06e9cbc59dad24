"""Stages in user memory: of bodies that are copied or decrypted, or come in memory of the transport's own.

    socket ─read─→ buffers ─writev─→ FIFO       a part of more than 1 MiB, once its turn has come
    socket ─read─→ buffers ... ─writev─→ FIFO   a small one, or what a socket cannot hold, as it comes

Memory that a transport reads into comes in buffers from a pool, and goes back to it as soon as it is
delivered: the next bytes to arrive land where the last ones left, while the processor's cache still has
them.
"""

from __future__ import annotations

from collections.abc import Callable

from streamer.plan import Part
from streamer.relay.allotment import Share
from streamer.relay.stages import Chunk, Stage, lane_room
from streamer.relay.statistics import Tally
from streamer.source.integrity import PartSum
from streamer.source.ranges import CopiedBody
from streamer.units import KIB

BUFFER_SIZE = 128 * KIB


class BufferPool:
    """Buffers of `BUFFER_SIZE` bytes, the last one returned being the next one taken."""

    def __init__(self) -> None:
        self._free: list[bytearray] = []

    def take(self) -> bytearray:
        return self._free.pop() if self._free else bytearray(BUFFER_SIZE)

    def give(self, chunk: Chunk) -> None:
        """Take a chunk's memory back, if it is a buffer."""
        if isinstance(chunk.memory, bytearray):
            self._free.append(chunk.memory)


class MemoryStage(Stage):
    """All bytes in user memory: in buffers that `room` hands out, or as a transport fed them."""

    _body: CopiedBody | None

    def __init__(
        self,
        part: Part,
        pool: BufferPool,
        *,
        on_change: Callable[[], None],
        tally: Tally,
        eager: bool = False,
    ) -> None:
        """`eager`: read it all as it comes, whether or not it is delivered meanwhile."""
        super().__init__(part, on_change=on_change, tally=tally)
        self._waits = self._waits and not eager
        self._pool = pool
        self.part_sum: PartSum | None = None
        """As `streamer.source.integrity.Summing`."""

    @property
    def staged(self) -> int:
        return len(self._head) + self._in_memory

    def feed(self, data: bytes) -> None:
        super().feed(data)
        if self.part_sum is not None:
            self.part_sum.update(data)

    def room(self, limit: int) -> memoryview:
        """As `streamer.source.ranges.CopyReceiver`; there always is some, since it was reserved."""
        last = self._chunks[-1] if self._chunks else None
        if last is None or isinstance(last.memory, bytes) or last.filled == len(last.memory):
            last = Chunk(self._pool.take(), 0)
            self._chunks.append(last)
        return memoryview(last.memory)[last.filled : last.filled + limit]

    def filled(self, count: int) -> None:
        last = self._chunks[-1]
        last.filled += count
        self._in_memory += count
        if count:
            if self.part_sum is not None:
                self.part_sum.update(memoryview(last.memory)[last.filled - count : last.filled])
            self._arrived(count)
            self._changed()

    def take(self, most: int) -> bytes:
        """A copy of the next bytes, at most `most`: some literals, or some of the body, never both.

        The part is delivered up to behind them. Empty if the socket has nothing now.
        """
        if self._head:
            data = bytes(self._head[:most])
            self._head = self._head[len(data) :]
            return data
        self._pull()
        if not self._in_memory:
            return b""
        chunk = self._chunks[0]
        data = bytes(chunk.unsent[:most])
        chunk.sent += len(data)
        self._in_memory -= len(data)
        if chunk.sent == chunk.filled:
            self._sent(self._chunks.popleft())
        return data

    def _drain_rest(self, fd: int) -> int:
        self._pull()
        return self._write_memory(fd) if self._in_memory else 0

    def _pull(self) -> None:
        """If nothing is in memory, have some of what is in the socket."""
        if not self._in_memory and self._body is not None:
            body = self._body
            count = body.pull()
            self._there = count > 0 and self.received < self.part.body
            if not count:
                body.want()

    def _sent(self, chunk: Chunk) -> None:
        self._pool.give(chunk)

    def discard(self) -> None:
        for chunk in self._chunks:
            self._pool.give(chunk)
        super().discard()


class MemoryStages:
    """Stages in user memory: a part takes its length, in whole buffers if it is read into those."""

    def __init__(self, share: Share, pool: BufferPool | None) -> None:
        """`pool`: None for a transport that brings memory of its own."""
        self.share = share
        self._pool = pool or BufferPool()
        self._unit = BUFFER_SIZE if pool else 1

    def part_size(self) -> int:
        share = self.share
        return share.pace.part_size(min(share.floor, lane_room(share)))

    def room(self, part: Part) -> int:
        """What its body takes; literals (64 KiB at most) do not count beside it."""
        return -(-(part.body or len(part)) // self._unit) * self._unit

    def make(self, part: Part, *, on_change: Callable[[], None], tally: Tally) -> Stage:
        return MemoryStage(part, self._pool, on_change=on_change, tally=tally)
