"""Stages in user memory, for bodies that are read, and decrypted under TLS.

    socket ─read─→ buffers ─writev─→ FIFO       part of more than 1 MiB: read when it is the head of line
    socket ─read─→ buffers ... ─writev─→ FIFO   smaller part, or more than the socket holds: read on arrival

A stage reads into buffers from a pool, and returns each buffer once its bytes are delivered. The last buffer
returned is the next one used, so its memory is still in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable

from streamer.errors import SourceError
from streamer.plan import Part
from streamer.relay.staging.stage import Chunk, Stage, bytes_per_request
from streamer.relay.statistics import ChannelCounters
from streamer.s3.ranges import Body
from streamer.schedule.budget import ChannelQuota
from streamer.units import KIB

BUFFER_SIZE = 128 * KIB
OWN_BUFFER = 64 * KIB
"""Parts up to this many bytes get a buffer of their own size, so that small objects reserve little memory."""
READ_AT_ONCE = 256 * KIB
"""Bytes read per event or delivery; so few are still in the processor's cache when they are written."""


class BufferPool:
    """Pool of buffers of `BUFFER_SIZE` bytes; the last one returned is the next one taken."""

    def __init__(self) -> None:
        self._free: list[bytearray] = []

    def take(self) -> bytearray:
        return self._free.pop() if self._free else bytearray(BUFFER_SIZE)

    def give(self, chunk: Chunk) -> None:
        """Take a chunk's memory back, if it is a buffer of the pool's size."""
        if isinstance(chunk.memory, bytearray) and len(chunk.memory) == BUFFER_SIZE:
            self._free.append(chunk.memory)


class BufferStage(Stage):
    """Stage whose bytes are in user memory, in buffers of a pool."""

    def __init__(
        self,
        part: Part,
        pool: BufferPool,
        *,
        on_change: Callable[[], None],
        counters: ChannelCounters,
        eager: bool = False,
    ) -> None:
        """`eager`: read all bytes as they arrive, even those of a large part before its delivery."""
        super().__init__(part, on_change=on_change, counters=counters)
        self._parks = self._parks and not eager
        self._pool = pool
        self.on_leave: Callable[[memoryview], None] | None = None
        """Called with the object's bytes when they are delivered, in order."""

    def read_ahead(self) -> None:
        """Read all bytes as they arrive from now on, as with `eager`."""
        if self._parks:
            self._parks = False
            if self._body is not None and not self.awaited:
                self._on_bytes()

    @property
    def staged(self) -> int:
        return len(self._before) + self._in_memory

    def _fill(self, body: Body) -> None:
        # At most READ_AT_ONCE, so that the loop serves other connections in between.
        taken = 0
        try:
            while body.left and taken < READ_AT_ONCE:
                memory = self._unfilled()[: body.left]
                count = body.read_into(memory)
                taken += count
                self._chunks[-1].filled += count
                self._in_memory += count
                self._arrived(count)
                if count < len(memory):
                    break
        except BlockingIOError:
            if not taken:
                raise
        finally:
            if taken:
                self._changed()

    def _unfilled(self) -> memoryview:
        """Return memory for the next bytes; never empty, since the part's bytes are reserved."""
        last = self._chunks[-1] if self._chunks else None
        if last is None or isinstance(last.memory, bytes) or last.filled == len(last.memory):
            size = self.part.body - self.received
            last = Chunk(bytearray(size) if self.part.body <= OWN_BUFFER else self._pool.take(), 0)
            self._chunks.append(last)
        return memoryview(last.memory)[last.filled :]

    def take(self, most: int) -> bytes:
        """Deliver a copy of at most `most` next bytes: literals or bytes of the body, never both.

        Returns empty bytes if the socket has none now.
        """
        if self._before:
            data = bytes(self._before[:most])
            self._before = self._before[len(data) :]
            return data
        pieces: list[bytes] = []
        while most:
            self._pull()
            chunk = self._chunks[0] if self._in_memory else None
            if chunk is None or (chunk.literal and pieces):
                break
            pieces.append(bytes(chunk.unsent[:most]))
            self._leave(chunk, len(pieces[-1]))
            most = 0 if chunk.literal else most - len(pieces[-1])
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _drain_rest(self, fd: int) -> int:
        self._pull()
        return self._write_memory(fd) if self._in_memory else 0

    def _pull(self) -> None:
        """Read from the socket if no byte is in memory."""
        body = self._body
        if self._in_memory or body is None or not body.left:
            return
        try:
            self._fill(body)
        except BlockingIOError:
            self._dry = True
        except SourceError:
            self._dry = True
            return  # `Body.taken` raises it too
        if body.left and (self._dry or not self._parks):
            body.notify(self._on_bytes)  # read the rest of a small part on arrival, to free its connection

    def _leave(self, chunk: Chunk, count: int) -> None:
        if self.on_leave is not None and not chunk.literal:
            self.on_leave(memoryview(chunk.memory)[chunk.sent : chunk.sent + count])
        super()._leave(chunk, count)
        if chunk.sent == chunk.filled:
            self._pool.give(chunk)

    def discard(self) -> None:
        for chunk in self._chunks:
            self._pool.give(chunk)
        super().discard()


class BufferStages:
    """One channel's stages in user memory."""

    def __init__(self, quota: ChannelQuota, pool: BufferPool) -> None:
        self.quota = quota
        self._pool = pool

    def part_size(self) -> int:
        quota = self.quota
        return quota.concurrency.part_size(min(quota.floor, bytes_per_request(quota)))

    def reserved_bytes(self, part: Part) -> int:
        """Return the length of the part's body, of a large one in whole buffers.

        Literals (64 KiB at most) do not count.
        """
        size = part.body or len(part)
        return size if size <= OWN_BUFFER else -(-size // BUFFER_SIZE) * BUFFER_SIZE

    def make(self, part: Part, *, on_change: Callable[[], None], counters: ChannelCounters) -> Stage:
        return BufferStage(part, self._pool, on_change=on_change, counters=counters)
