"""Stages in user memory, for bodies that are read, and decrypted under TLS.

    socket ─read─→ buffers ─writev─→ FIFO       part of more than 1 MiB: read when it is the head of line
    socket ─read─→ buffers ... ─writev─→ FIFO   smaller part, or more than the socket holds: read on arrival

A stage reads into buffers from a pool, and returns each buffer once its bytes are delivered. The last buffer
returned is the next one used, so its memory is still in the processor's cache.

The bytes of a part that a tap wants are read, and those of any other part go the channel's own way
(`TappedStages`).

A part reserves the memory of its buffers, not its length (`buffer_bytes`), and the pool unmaps free
buffers while all buffers together exceed what is reserved. So the memory budget bounds what is allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

from streamer.errors import SourceError
from streamer.linux import ALL
from streamer.plan.parts import RANGE_COST, Part
from streamer.relay.staging.stage import Chunk, Stage, Stages, at_most_the_floor, bytes_per_request
from streamer.relay.staging.taps import Tap
from streamer.relay.statistics import ChannelCounters
from streamer.s3.ranges import Body
from streamer.schedule.budget import ChannelQuota
from streamer.units import KIB

BUFFER_SIZE = 128 * KIB
OWN_BUFFER = 64 * KIB
"""Parts up to this many bytes get a buffer of their own size, so that small objects reserve little memory."""
WIDE_BUFFER = 4 * BUFFER_SIZE
"""Where as many bytes of a part are missing, one such buffer takes the place of four: one call fills it."""
READ_AT_ONCE = WIDE_BUFFER
"""Bytes read per event or delivery; so few are still in the processor's cache when they are written."""


def buffer_bytes(size: int) -> int:
    """Return the bytes that a part of `size` bytes reserves for the buffers that hold them."""
    if size <= OWN_BUFFER:
        return size
    rest = size % BUFFER_SIZE
    # A few bytes beyond whole buffers, such as literals, get memory of their own.
    return size if rest <= RANGE_COST else size - rest + BUFFER_SIZE


def range_costs(part: Part) -> int:
    """Return the memory of the objects that represent the part and its ranges, if these are small.

    For larger ones it is less than a thirtieth of their bytes.
    """
    count = part.requests or 1
    return RANGE_COST * count if part.size <= OWN_BUFFER * count else 0


class BufferPool:
    """Buffers of several stages. Free ones are kept while all buffers together have at most `limit` bytes."""

    def __init__(self, limit: int = 0) -> None:
        self.limit = limit
        self.allocated = 0
        """Bytes of all buffers, free ones included."""
        self._free: dict[int, list[mmap]] = {BUFFER_SIZE: [], WIDE_BUFFER: []}
        """Free buffers by their size."""

    def take(self, most: int) -> bytearray | mmap:
        """Return a buffer for at most `most` bytes, and no larger than the buffers that they reserve."""
        if most <= OWN_BUFFER:
            memory: bytearray | mmap = bytearray(most)
        else:
            size = WIDE_BUFFER if most >= WIDE_BUFFER else BUFFER_SIZE
            if self._free[size]:
                return self._free[size].pop()
            memory = _mapped(size)
        self.allocated += len(memory)
        self.trim()
        return memory

    def give(self, chunk: Chunk) -> None:
        """Take back a chunk's memory, if it is a buffer."""
        if isinstance(chunk.memory, mmap):
            self._free[len(chunk.memory)].append(chunk.memory)
        elif isinstance(chunk.memory, bytearray):
            self.allocated -= len(chunk.memory)
        self.trim()

    def trim(self) -> None:
        """Unmap free buffers until the limit holds, those first that were returned first."""
        for size, free in self._free.items():
            count = min(-((self.limit - self.allocated) // size), len(free))
            if count > 0:
                del free[:count]
                self.allocated -= count * size


def _mapped(size: int) -> mmap:
    """Return memory that goes back to the system when it is dropped; the C library would keep it."""
    try:
        return mmap(-1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for a buffer: {error.strerror}") from error


class BufferStage(Stage):
    """Stage whose bytes are in user memory, in buffers of a pool."""

    def __init__(
        self,
        part: Part,
        pool: BufferPool,
        *,
        on_change: Callable[[], None],
        counters: ChannelCounters,
    ) -> None:
        super().__init__(part, on_change=on_change, counters=counters)
        self._pool = pool
        self._seen = 0
        """Bytes of the part that have left, if there are taps."""

    def _show(self, data: memoryview) -> None:
        """Show bytes that leave to the taps; literals are left out."""
        while data:
            item, at = self.part.item_at(self._seen)
            step = data[: len(item) - at]
            self._seen += len(step)
            data = data[len(step) :]
            if not isinstance(item, bytes):
                for tap in self.taps:
                    tap.see(item, step)

    @property
    def staged(self) -> int:
        return self._in_memory

    def _fill(self, body: Body) -> None:
        self._read(body)

    def _read(self, body: Body) -> None:
        # At most READ_AT_ONCE, so that the loop serves other connections in between.
        taken = 0
        try:
            while body.left and taken < READ_AT_ONCE:
                memory = self._unfilled()[: body.left]
                count = body.read_into(memory)
                taken += count
                self._chunks[-1].filled += count
                self._in_memory += count
                self._doubt_more(body, count)
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
            rest, size = self.part.size - self.received, self.part.size
            own = size <= OWN_BUFFER or rest <= RANGE_COST
            last = Chunk(self._pool.take(rest if own else max(rest, BUFFER_SIZE)), 0)
            self._chunks.append(last)
        return memoryview(last.memory)[last.filled :]

    def take(self, wanted: int) -> bytes | bytearray:
        """Deliver at most `wanted` next bytes, in memory of their own.

        Returns empty bytes if the socket has none now, but perhaps for those in doubt.
        """
        most = min(wanted, self._in_memory - self.in_doubt)
        if most <= 0:
            return self._take_from_socket(wanted)
        views: list[memoryview] = []
        size = 0
        for chunk in self._chunks:
            if size == most:
                break
            views.append(chunk.unsent[: most - size])
            size += len(views[-1])
        joined = b"".join(views)
        self._leave_some(size)
        return joined

    def _take_from_socket(self, most: int) -> bytes | bytearray:
        """Read bytes of the body; deliver those not in doubt, without a copy unless the body has failed."""
        body, failed = self._body, False
        if body is None or not body.left:
            return b""
        before = self.in_doubt
        data, count = bytearray(before + min(most, body.left)), before
        with memoryview(data) as view:
            try:
                while count < len(data):
                    count += body.read_into(view[count:])
            except BlockingIOError:
                self._dry = True
            except SourceError:
                self._dry = failed = True  # `Body.taken` raises it too
            if not failed and body.left and (self._dry or not self._parks):
                # Read the rest of a small part on arrival, to free its connection.
                body.notify(self._on_bytes)
            if count == before:
                return b""
            view[:before] = self._last(before)
            while self._chunks:
                self._release(self._chunks.pop())
            self._in_memory = 0
            self._doubt_more(body, count - before)
            leaving = min(most, count - self.in_doubt)
            if self.taps:
                self._show(view[:leaving])
            if leaving < count:
                self._hold(bytes(view[leaving:count]))
        self._arrived(count - before)
        self._changed()
        if failed:
            return data[:leaving]  # the error's traceback holds views of `data`, which may not shrink then
        del data[leaving:]
        return data

    def drain_into(self, fd: int, most: int = ALL) -> int:
        self._pull()
        return self._write_memory(fd, most)

    def _leave(self, chunk: Chunk, count: int) -> None:
        if self.taps:
            self._show(memoryview(chunk.memory)[chunk.sent : chunk.sent + count])
        super()._leave(chunk, count)

    def _release(self, chunk: Chunk) -> None:
        self._pool.give(chunk)

    def discard(self) -> None:
        for chunk in self._chunks:
            self._pool.give(chunk)
        super().discard()


class BufferStages:
    """One channel's `Stages` in user memory."""

    def __init__(self, quota: ChannelQuota, pool: BufferPool) -> None:
        self.quota = quota
        self._pool = pool

    def part_size(self) -> int:
        quota = self.quota
        return quota.concurrency.part_size(min(quota.floor, bytes_per_request(quota)))

    def reserved_bytes(self, part: Part) -> int:
        held = buffer_bytes(part.size) + range_costs(part)
        return at_most_the_floor(held, buffer_bytes(part.body), self.quota)

    def make(self, part: Part, *, on_change: Callable[[], None], counters: ChannelCounters) -> BufferStage:
        self._pool.limit = self.quota.budget
        return BufferStage(part, self._pool, on_change=on_change, counters=counters)


class TappedStages:
    """`Stages` that keep the parts that `tap` wants in user memory, and all others in `others`."""

    def __init__(self, others: Stages, read: Stages, tap: Tap) -> None:
        """`read`: stages in memory, of the same quota as `others`, or the same ones."""
        self._others = others
        self._read = read
        self.tap = tap

    @property
    def quota(self) -> ChannelQuota:
        return self._others.quota

    def part_size(self) -> int:
        return min(self._others.part_size(), self._read.part_size())

    def reserved_bytes(self, part: Part) -> int:
        return (self._read if self._wanted(part) else self._others).reserved_bytes(part)

    def make(self, part: Part, *, on_change: Callable[[], None], counters: ChannelCounters) -> Stage:
        if not self._wanted(part):
            return self._others.make(part, on_change=on_change, counters=counters)
        stage = self._read.make(part, on_change=on_change, counters=counters)
        stage.taps += (self.tap,)
        stage.on_whole = self.tap.on_whole or stage.on_whole
        return stage

    def _wanted(self, part: Part) -> bool:
        return any(not isinstance(item, bytes) and self.tap.wants(item.object) for item in part.items)
