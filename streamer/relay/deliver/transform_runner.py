"""Transforms bytes between stage and outlet, in stream order, in a thread that writes the FIFO itself.

    loop    `feed` ──▶ compressed bytes ──▶ Lookahead ──▶ Transform ──▶ EpochWriter ──▶ FIFO     thread
    loop    writes what the FIFO did not accept ◀──────────────────────────┘
    loop    `pass_on` ──▶ bytes that are not inflated ──▶ Transform ──▶ EpochWriter ──▶ FIFO

Parts are fetched compressed, so parts reserve compressed bytes; of inflated content, one piece is in memory
at a time. A worker thread inflates (ISA-L and zstd release the GIL) and writes each piece into the FIFO while
the processor's cache has it. A turn of the thread lasts until no byte is left, the FIFO is full, or
MOST_AT_ONCE bytes are inflated. Meanwhile the event loop serves sockets and other channels, and feeds bytes,
so the thread need not wait for the loop between two pieces: without that it waited for a third of the time.
The loop starts every turn, and before that it writes what the FIFO did not accept. So one of the two writes
at a time, bytes stay in order, and a full FIFO stops inflating too. Bytes so few that the hop to the thread
would cost more are inflated on the loop. Literals pass unchanged.

Bytes may be fed before their turn, to be inflated ahead (`Lookahead`). While the FIFO is full the thread
inflates ahead too, and writes again after each step: so a reader that is slower for some milliseconds costs
no hop to the loop.

The bytes of one object overlap, objects do not: `pass_on` returns from an object's last byte when the outlet
has accepted all of it. So at the border of two objects all counts are exact. Before the owner waits for
storage it calls `settle`, so that no inflated byte waits with it.

If an object is damaged, the bytes before the damage have been delivered, and the trailer never becomes
`complete`. The error of a turn is raised after those bytes were written and counted.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from streamer.aio import WorkerThread, finished
from streamer.linux import keep_free_memory
from streamer.relay.deliver.epoch_writer import ByteQueue
from streamer.relay.deliver.lookahead import MOST_AT_ONCE, STEP, Lookahead, transforming
from streamer.relay.deliver.wrap import SPOOL_MEMORY
from streamer.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from streamer.formats.transform import Transform
    from streamer.plan import Segment
    from streamer.relay.deliver.epoch_writer import EpochWriter
    from streamer.relay.deliver.lookahead import InflatedObject

PIECE = 256 * KIB
"""Bytes of inflated content in memory at a time, with one thread. A larger piece is out of the processor's
cache when it is written."""
MOST_QUEUED = 512 * KIB
"""Compressed bytes after which `pass_on` waits for the thread."""
LITTLE = 16 * KIB
"""Up to this many compressed bytes are inflated on the loop; a hop to a thread and back costs as much."""
LITTLE_PIECE = 64 * KIB
LARGEST_KEPT, MOST_KEPT = 2 * MIB, 32 * MIB
"""Bytes of a block, and of all, that the C library keeps when they are freed: without it, the same content
took 0 to 160,000 page faults a GB, by what the process had freed before."""


class TransformRunner:
    """Transforms the bytes of one epoch and passes them to `writer`; its owner closes it once."""

    def __init__(self, writer: EpochWriter, transform: Transform, *, inflate: bool, ahead: int = 0) -> None:
        """`inflate`: inflate the objects before `transform` gets their bytes.

        `ahead`: memory in which further bytes are inflated before their turn; 0 to inflate nothing ahead.
        """
        self.writer = writer
        self._transform = transform
        self._inflate = inflate
        self._thread = WorkerThread("inflate")
        self._most_ahead = ahead // 4
        """Compressed bytes that may be fed ahead; content may have the rest of `ahead`."""
        self.lookahead = Lookahead(ahead - self._most_ahead)
        if inflate:
            keep_free_memory(LARGEST_KEPT, MOST_KEPT)
        self._object: InflatedObject | None = None
        """Object whose turn it is, or was last."""
        self._next: deque[InflatedObject] = deque()
        """Objects after it, of which bytes were fed."""
        self._rest: Iterator[bytes] | None = None
        """What the stream has after the object's content; None before its end."""
        self._passed = 0
        """Bytes of the object whose turn has come."""
        self._produced = 0
        """Bytes that the object has become."""
        self._idle_at = 0
        """Bytes of the object that were fed when the thread found nothing more to do."""
        self._turn: asyncio.Future[ByteQueue] | None = None
        """The turn that runs, or has ended and is not collected."""
        self._wake_at: int | None = None
        """Queued bytes at which the thread wakes the loop; None: the loop waits for the turn's end alone."""
        self._progress = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._closing = False

    def __repr__(self) -> str:
        return f"<TransformRunner, {self._queued} bytes queued, {self._object}, {self.writer}>"

    @property
    def busy(self) -> bool:
        """Whether bytes of the object are not inflated, or not written, so that `settle` has to be called."""
        each = self._object
        return each is not None and (self._turn is not None or self._idle_at != each.fed)

    @property
    def room_ahead(self) -> int:
        """Bytes that may be fed before their turn now."""
        waiting = 0 if self._object is None else self._object.fed - self._object.used
        return self._most_ahead - waiting - sum(each.fed for each in self._next)

    @property
    def _queued(self) -> int:
        return 0 if self._object is None else self._passed - self._object.used

    def feed(self, item: Segment | bytes, place: int, data: bytes | bytearray) -> None:
        """Take bytes that `pass_on` will get later, in the same order; they may be inflated meanwhile."""
        if not self._inflate or isinstance(item, bytes):
            return
        ref, start = item.object, item.start + place
        if start == 0:
            self._next.append(self.lookahead.begin(ref))
        each = self._next[-1] if self._next else self._object
        if each is None:
            raise RuntimeError(f"byte {start} of {ref.key} without those before it")
        each.add(data, last=start + len(data) == ref.size)
        self.lookahead.start()

    async def pass_on(self, item: Segment | bytes, place: int, data: bytes | bytearray) -> None:
        """Deliver `data`, the bytes of a range or a literal from offset `place` on, which were fed before.

        Returns when all bytes are delivered, or, before the last byte of an inflated object, when the thread
        has at most MOST_QUEUED of them left to inflate. Raises CorruptObject, ReaderGone, and SinkError if
        the spool file cannot be written.
        """
        if isinstance(item, bytes):
            await self.writer.write([data])
            return
        ref, start = item.object, item.start + place
        last = start + len(data) == ref.size
        if start == 0:
            self._begin()
        if self._inflate:
            self._passed += len(data)
            await self._advance(0 if last else MOST_QUEUED)
            return
        with transforming(ref, inflated=False):
            pieces = self._transform.feed(data)
        await self.writer.write(pieces)
        if last:
            with transforming(ref, inflated=False):
                pieces = self._transform.end()
            await self.writer.write(pieces)

    def _begin(self) -> None:
        """Begin the turn of the next object."""
        self._transform.begin()
        self._rest, self._passed, self._produced, self._idle_at = None, 0, 0, 0
        if self._inflate:
            self._object = self._next.popleft()

    async def settle(self) -> None:
        """Wait until all bytes passed on are delivered. Raises as `pass_on`."""
        await self._advance(0)

    async def finish(self) -> None:
        """Write what ends the stream after the last object. Raises ReaderGone."""
        await self.writer.write([self._transform.finish()])

    async def _advance(self, most: int) -> None:
        """Inflate and write until at most `most` bytes are queued; 0: until all are delivered."""
        while (each := self._object) is not None and self.busy:
            if self._turn is None:
                # Not what is spooled to a file: the loop does not wait for a disk.
                little = self._queued <= LITTLE and self._produced + LITTLE_PIECE <= SPOOL_MEMORY
                if little and not each.ahead:
                    await self._run_here(each)
                    continue
                self._turn = self._thread.start(self._run, each, MOST_AT_ONCE)
                self._turn.add_done_callback(self._on_turn_ended)
            elif self._turn.done():
                turn, self._turn = self._turn, None
                self.writer.count()
                await self.writer.push(turn.result())
            elif most and self._queued <= most:
                self.writer.count()
                return
            else:
                await self._wait(most // 2 if most else None)

    async def _run_here(self, each: InflatedObject) -> None:
        try:
            left = self._run(each, LITTLE_PIECE, helps=False)
        finally:  # what was written before the damage counts
            self.writer.count()
        await asyncio.sleep(0)  # other tasks run between two small objects
        await self.writer.push(left)

    async def _wait(self, wake_at: int | None) -> None:
        """Wait until the turn has ended or at most `wake_at` bytes are queued."""
        self._progress.clear()
        self._wake_at = wake_at
        if self._turn is None or self._turn.done() or (wake_at is not None and self._queued <= wake_at):
            return  # it happened before the thread could see `_wake_at`
        self.writer.timer.starve("inflate")
        try:
            await self._progress.wait()
        finally:
            self.writer.timer.enter("moving")
            self._wake_at = None

    def _on_turn_ended(self, _: asyncio.Future[ByteQueue]) -> None:
        self._progress.set()
        self.lookahead.start()

    def _run(self, each: InflatedObject, most: int, *, helps: bool = True) -> ByteQueue:
        """Move at most `most` bytes, until the FIFO is full; return those that it does not accept.

        `helps`: inflate ahead while the FIFO is full, in this thread.
        """
        end, left = self._produced + most, ByteQueue()
        while not (left or self._closing) and self._produced < end:
            pieces = self._pieces(each, min(STEP if each.ahead else PIECE, end - self._produced))
            if pieces is None:
                break
            left = self.writer.queue(pieces)
            self._write_out(left, helps=helps)
        return left

    def _write_out(self, left: ByteQueue, *, helps: bool) -> None:
        """Write what the FIFO accepts; while it is full, inflate ahead, and write again after each step."""
        self.writer.drain(left)
        while left and helps and not self._closing and self.lookahead.help():
            self.writer.drain(left)

    def _pieces(self, each: InflatedObject, most: int) -> Iterable[bytes | bytearray | memoryview] | None:
        """Return what the stream gets next, perhaps nothing yet; None if there is no more before `feed`."""
        fed, ended = each.fed, each.ended  # before the look at its bytes, to which the loop may add some
        content = self.lookahead.content(each, most)
        if self._wake_at is not None and self._queued <= self._wake_at:
            self._wake_at = None
            self._loop.call_soon_threadsafe(self._progress.set)
        with transforming(each.ref, inflated=True):
            if content:
                self._produced += sum(map(len, content))
                return [piece for data in content for piece in self._transform.feed(data)]
            if ended:
                if self._rest is None:
                    each.finish()
                    self._rest = iter(self._transform.end())
                if (piece := next(self._rest, None)) is not None:
                    self._produced += len(piece)
                    return [piece]
        self._idle_at = fed
        return None

    async def aclose(self) -> None:
        """End the turn after its current piece, drop all state and end the threads.

        If cancelled, still waits for the turn's end, because the thread uses the FIFO. All bytes that the
        outlet has accepted are passed to `account` then.
        """
        self._closing = True
        turn, self._turn = self._turn, None
        try:
            if turn is not None:
                try:
                    await finished(turn)
                finally:
                    self.writer.count()
                    if not turn.cancelled():
                        turn.exception()  # retrieved, so that asyncio does not log it
        finally:
            try:
                await self.lookahead.close()
            finally:
                self._thread.close()
                self._transform.close()
