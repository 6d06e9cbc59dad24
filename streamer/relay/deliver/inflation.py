"""Inflates one object in a worker thread while the event loop receives the object's further bytes.

    loop      feed ──▶ compressed bytes ──▶ ObjectInflater ──▶ `emit` ──▶ `write` to the FIFO     thread
    loop      `advance` returns what the FIFO did not accept ◀────────────────┘

A turn of the thread lasts until no byte is left, the FIFO is full, or MOST_INFLATED bytes are inflated.
During a turn the loop adds bytes, so the thread need not wait for the loop between two pieces: without that
it waited for a third of the time. The loop starts every turn, and between two turns it writes what the FIFO
did not accept. So one of the two writes at a time, and bytes stay in order.

With a `Lookahead` a second thread inflates the next objects. When an object's turn comes, this thread writes
the content that is there, and inflates the rest. While the FIFO is full this thread inflates ahead too, and
writes again after each step: so a reader that is slower for some milliseconds costs no hop to the loop.

Invariants: the loop alone changes `_fed`, and only the thread changes `_reached`. An error of a turn is
raised by the next `advance`, after the bytes before the damage were written.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from streamer.aio import finished
from streamer.relay.deliver.byte_queue import ByteQueue
from streamer.relay.deliver.lookahead import STEP
from streamer.relay.deliver.object_inflater import ObjectInflater
from streamer.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamer.aio import WorkerThread
    from streamer.inflate import Inflater
    from streamer.plan import ObjectRef
    from streamer.relay.deliver.lookahead import Lookahead
    from streamer.relay.statistics import StateTimer

PIECE = 256 * KIB
"""Bytes of inflated content in memory at a time. A larger piece is out of the processor's cache when it is
written."""
MOST_QUEUED = 512 * KIB
"""Compressed bytes after which `advance` waits for the thread."""
MOST_INFLATED = 4 * MIB
"""Maximum bytes of one turn, however well they are compressed: some 5 ms."""
LITTLE = 16 * KIB
"""Up to this many compressed bytes are inflated on the loop; a hop to a thread and back costs as much."""
LITTLE_PIECE = 64 * KIB
LEAST_AHEAD = 256 * KIB
"""Objects up to this many compressed bytes are not inflated ahead: content of 100 kB that one thread made and
another freed took 270,000 page faults a GB, and twice the CPU time."""


class Inflation:
    """Inflates the bytes of one object: `feed` them in order, `advance`, `finish`, and `close` it once."""

    def __init__(
        self,
        ref: ObjectRef,
        make: Callable[..., Inflater],
        *,
        thread: WorkerThread,
        emit: Callable[[list[bytes]], ByteQueue],
        write: Callable[[ByteQueue], None],
        count: Callable[[], None],
        timer: StateTimer,
        lookahead: Lookahead | None = None,
    ) -> None:
        """`make`: as of `ObjectInflater`.

        `emit` is called in the thread with inflated pieces; it returns what is to be written to the FIFO.
        `write`, called in the thread too, writes what the FIFO accepts now, and removes it from the queue.
        `count` is called on the loop when the thread may have written bytes. `lookahead` inflates bytes that
        are fed before their turn; None: nothing does.
        """
        self.ref = ref
        self.produced = 0
        """Bytes of content passed to `emit`."""
        self._thread = thread
        self._emit = emit
        self._write = write
        self._count = count
        self._timer = timer
        self._lookahead = lookahead
        self._looked_ahead = lookahead is not None and ref.size > LEAST_AHEAD
        """Whether bytes may be inflated before their turn."""
        self._piece = STEP if self._looked_ahead else PIECE
        self._inflater = ObjectInflater(make, ahead=self._looked_ahead)
        if lookahead is not None and self._looked_ahead:
            lookahead.add(self._inflater)
        self._fed = 0
        self._passed = 0
        """Bytes fed, and those of them whose turn has come."""
        self._reached = 0
        """Bytes passed to the inflater."""
        self._exhausted = 0
        """Bytes fed when the thread found nothing more to do."""
        self._turn: asyncio.Future[ByteQueue] | None = None
        """The turn that runs, or has ended and is not collected."""
        self._wake_at: int | None = None
        """Queued bytes at which the thread wakes the loop; None: the loop waits for the turn's end alone."""
        self._progress = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._closing = False

    def __repr__(self) -> str:
        return f"<Inflation, {self._queued} bytes queued, {self._inflater}>"

    @property
    def busy(self) -> bool:
        """Whether bytes fed are not inflated, or not written."""
        return self._turn is not None or self._exhausted != self._fed

    @property
    def waiting(self) -> int:
        """Compressed bytes in memory, perhaps a little more."""
        return self._fed - self._reached

    @property
    def _queued(self) -> int:
        return self._passed - self._reached

    def feed(self, data: bytes | bytearray, *, last: bool = False) -> None:
        """Add the object's next bytes; `last`: there are no more. Their turn may not have come."""
        self._inflater.add(data, last=last)
        self._fed += len(data)
        if self._lookahead is not None:
            self._lookahead.start()

    async def advance(self, most: int, *, in_memory: bool) -> ByteQueue | None:
        """Inflate until at most `most` bytes are queued, or, if `most` is 0, until the object's are written.

        Returns None then. Returns earlier with the bytes that the FIFO did not accept, perhaps none: the
        caller writes them and calls again. `in_memory`: `emit` cannot wait for a disk, so little may be
        inflated on the loop. Raises as `emit`, and the error of a damaged object.
        """
        while True:
            if self._turn is None:
                if self._exhausted == self._fed:
                    return None
                if in_memory and self._queued <= LITTLE and not self._looked_ahead:
                    return await self._inflate_here()
                self._turn = self._thread.start(self._inflate, MOST_INFLATED, self._lookahead)
                self._turn.add_done_callback(self._on_turn_ended)
            elif self._turn.done():
                turn, self._turn = self._turn, None
                self._count()
                return turn.result()
            elif most and self._queued <= most:
                self._count()
                return None
            else:
                await self._wait(most // 2 if most else None)

    async def _inflate_here(self) -> ByteQueue:
        try:
            left = self._inflate(LITTLE_PIECE, None)
        finally:  # what was written before the damage counts
            self._count()
        await asyncio.sleep(0)  # other tasks run between two small objects
        return left

    async def _wait(self, wake_at: int | None) -> None:
        """Wait until the turn has ended or at most `wake_at` bytes are queued."""
        self._progress.clear()
        self._wake_at = wake_at
        if self._turn is None or self._turn.done() or (wake_at is not None and self._queued <= wake_at):
            return  # it happened before the thread could see `_wake_at`
        self._timer.starve("inflate")
        try:
            await self._progress.wait()
        finally:
            self._timer.enter("moving")
            self._wake_at = None

    def _on_turn_ended(self, _: asyncio.Future[ByteQueue]) -> None:
        self._progress.set()
        if self._lookahead is not None:
            self._lookahead.start()

    def _inflate(self, most: int, lookahead: Lookahead | None) -> ByteQueue:
        """Inflate at most `most` bytes, until the FIFO is full; return those that it does not accept.

        `lookahead`: inflates ahead, in this thread, while the FIFO is full; None: nothing does.
        """
        end = self.produced + most
        left = ByteQueue([])
        while not (left or self._closing) and self.produced < end:
            fed = self._fed
            pieces = self._pieces(min(self._piece, end - self.produced))
            if not pieces:
                self._exhausted = fed
                break
            self.produced += sum(map(len, pieces))
            left = self._emit(pieces)
            self._write_out(left, lookahead)
        return left

    def _write_out(self, left: ByteQueue, lookahead: Lookahead | None) -> None:
        """Write what the FIFO accepts; while it is full, inflate ahead, and write again after each step."""
        self._write(left)
        while left and not self._closing and lookahead is not None and lookahead.help():
            self._write(left)

    def _pieces(self, most: int) -> list[bytes]:
        """Return the object's next content; none if more bytes are needed, or all content was returned."""
        inflater = self._inflater
        self._lock_inflater()
        try:
            self._took(inflater.begin())
            ahead = inflater.has_content
            try:
                pieces = inflater.pieces(most)
            finally:
                self._reach(inflater.used)
        finally:
            inflater.lock.release()
        if ahead:
            self._took(sum(map(len, pieces)))
        return pieces

    def _lock_inflater(self) -> None:
        """Lock the inflater; while the other thread is in a step of it, inflate others ahead."""
        self._inflater.wanted = True
        while not self._inflater.lock.acquire(blocking=False):
            if self._lookahead is None or not self._lookahead.help():
                self._inflater.lock.acquire()
                return

    def _took(self, count: int) -> None:
        if self._lookahead is not None:
            self._lookahead.took(count)

    def _reach(self, offset: int) -> None:
        self._reached = offset
        if self._wake_at is not None and self._queued <= self._wake_at:
            self._wake_at = None
            self._loop.call_soon_threadsafe(self._progress.set)

    def pass_on(self, count: int) -> None:
        """Note that the turn of the next `count` bytes has come."""
        self._passed += count

    def finish(self) -> None:
        """Check that the object is complete, after all its content was passed to `emit`."""
        self._inflater.finish()

    async def close(self) -> None:
        """End the turn after its current piece and drop what is queued.

        If cancelled, still waits for the turn's end, because the thread uses the FIFO.
        """
        self._closing = True
        turn, self._turn = self._turn, None
        if turn is not None:
            try:
                await finished(turn)
            finally:
                self._count()
                if not turn.cancelled():
                    turn.exception()  # retrieved, so that asyncio does not log it
