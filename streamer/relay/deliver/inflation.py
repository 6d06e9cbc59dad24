"""Inflates one object in a worker thread while the event loop receives the object's further bytes.

    loop      feed ──▶ queue of compressed bytes ──▶ Inflater ──▶ `emit`, which writes the FIFO     thread
    loop      `advance` returns what the FIFO did not accept ◀──────┘

A turn of the thread lasts until the queue is empty, the FIFO is full, or MOST_INFLATED bytes are inflated.
During a turn the loop adds bytes to the queue, so the thread need not wait for the loop between two pieces:
without the queue it waited for a third of the time. The loop starts every turn, and between two turns it
writes what the FIFO did not accept. So one of the two writes at a time, and bytes stay in order.

Invariants: only the thread touches the inflater during a turn. `_fed` is changed by the loop alone and
`_taken` by the thread alone. The queue holds at most MOST_QUEUED bytes and one feed. An error of a turn is
raised by the next `advance`, after the bytes before the damage were written.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from streamer.aio import finished
from streamer.relay.deliver.byte_queue import ByteQueue
from streamer.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamer.aio import WorkerThread
    from streamer.inflate import Inflater
    from streamer.plan import ObjectRef
    from streamer.relay.statistics import StateTimer

PIECE = 256 * KIB
"""Bytes of inflated content in memory at a time."""
MOST_QUEUED = 512 * KIB
"""Compressed bytes after which `advance` waits for the thread."""
_ROOM = MOST_QUEUED // 2
"""Compressed bytes in the queue at which the thread wakes a waiting loop."""
MOST_INFLATED = 4 * MIB
"""Maximum bytes of one turn, however well they are compressed: some 5 ms."""
LITTLE = 16 * KIB
"""Up to this many compressed bytes are inflated on the loop; a hop to a thread and back costs as much."""
LITTLE_PIECE = 64 * KIB


class Inflation:
    """Inflates the bytes of one object: `feed` them in order, `advance`, and `close` it once."""

    def __init__(
        self,
        ref: ObjectRef,
        inflater: Inflater,
        *,
        thread: WorkerThread,
        emit: Callable[[list[bytes]], ByteQueue],
        count: Callable[[], None],
        timer: StateTimer,
    ) -> None:
        """`emit` is called in the thread with inflated pieces; it returns those that the FIFO did not accept.

        `count` is called on the loop when the thread may have written bytes.
        """
        self.ref = ref
        self.inflater = inflater
        self._thread = thread
        self._emit = emit
        self._count = count
        self._timer = timer
        self._queue: deque[bytes] = deque()
        self._fed = 0
        self._taken = 0
        self._turn: asyncio.Future[ByteQueue] | None = None
        """The turn that runs, or has ended and is not collected."""
        self._wake_at = -1
        """Queued bytes at which the thread wakes the loop; -1: the loop waits for the turn's end alone."""
        self._progress = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._closing = False

    def __repr__(self) -> str:
        return f"<Inflation {self.inflater}, {self._queued} bytes queued>"

    @property
    def busy(self) -> bool:
        """Whether bytes fed are not inflated, or not written."""
        return self._turn is not None or bool(self._queue) or not self.inflater.drained

    @property
    def _queued(self) -> int:
        return self._fed - self._taken

    def feed(self, data: bytes) -> None:
        """Add the object's next bytes."""
        self._queue.append(data)
        self._fed += len(data)

    async def advance(self, most: int, *, in_memory: bool) -> ByteQueue | None:
        """Inflate until at most `most` bytes are queued, or, if `most` is 0, until the object's are written.

        Returns None then. Returns earlier with the bytes that the FIFO did not accept, perhaps none: the
        caller writes them and calls again. `in_memory`: `emit` cannot wait for a disk, so little may be
        inflated on the loop. Raises as `emit`, and the error of a damaged object.
        """
        while True:
            if self._turn is None:
                if not self._queue and self.inflater.drained:
                    return None
                if in_memory and self._queued <= LITTLE:
                    return await self._inflate_here()
                self._turn = self._thread.start(self._inflate, MOST_INFLATED)
                self._turn.add_done_callback(self._on_turn_ended)
            elif self._turn.done():
                turn, self._turn = self._turn, None
                self._count()
                return turn.result()
            elif most and self._queued <= most:
                self._count()
                return None
            else:
                await self._wait(_ROOM if most else -1)

    async def _inflate_here(self) -> ByteQueue:
        try:
            left = self._inflate(LITTLE_PIECE)
        finally:  # what was written before the damage counts
            self._count()
        await asyncio.sleep(0)  # other tasks run between two small objects
        return left

    async def _wait(self, wake_at: int) -> None:
        """Wait until the turn has ended or at most `wake_at` bytes are queued."""
        self._progress.clear()
        self._wake_at = wake_at
        if self._turn is None or self._turn.done() or self._queued <= wake_at:
            return  # it happened before the thread could see `_wake_at`
        self._timer.starve("inflate")
        try:
            await self._progress.wait()
        finally:
            self._timer.enter("moving")
            self._wake_at = -1

    def _on_turn_ended(self, _: asyncio.Future[ByteQueue]) -> None:
        self._progress.set()

    def _inflate(self, most: int) -> ByteQueue:
        """Inflate at most `most` bytes, until the FIFO is full; return those that it does not accept."""
        inflater = self.inflater
        end = inflater.produced + most
        left = ByteQueue([])
        while not (left or self._closing) and inflater.produced < end:
            if inflater.drained and not self._feed_next():
                break
            left = self._emit(inflater.pieces(min(PIECE, end - inflater.produced)))
        return left

    def _feed_next(self) -> bool:
        """Pass the queue's next bytes to the inflater; return False if there are none."""
        try:
            data = self._queue.popleft()
        except IndexError:  # the queue is empty, or `close` has emptied it
            return False
        self._taken += len(data)
        self.inflater.feed(data)
        if self._queued <= self._wake_at:
            self._wake_at = -1
            self._loop.call_soon_threadsafe(self._progress.set)
        return True

    async def close(self) -> None:
        """End the turn after its current piece and drop what is queued.

        If cancelled, waits for the turn's end all the same: the thread uses the FIFO.
        """
        self._closing = True
        self._queue.clear()
        turn, self._turn = self._turn, None
        if turn is not None:
            try:
                await finished(turn)
            finally:
                self._count()
                if not turn.cancelled():
                    turn.exception()  # retrieved, so that asyncio does not log it
