"""Inflates one object in a worker thread while the event loop receives the object's further bytes.

    loop      feed ──▶ runs of compressed bytes ──▶ Inflater ──▶ `emit` ──▶ `write` to the FIFO     thread
    loop      `advance` returns what the FIFO did not accept ◀────────────────┘

A turn of the thread lasts until no byte is left, the FIFO is full, or MOST_INFLATED bytes are inflated.
During a turn the loop adds bytes, so the thread need not wait for the loop between two pieces: without that
it waited for a third of the time. The loop starts every turn, and between two turns it writes what the FIFO
did not accept. So one of the two writes at a time, and bytes stay in order.

With a `Lookahead` an object is divided into runs where members seem to begin, and a second thread inflates
the runs whose turn has not come, also those of the next objects. When a run's turn comes, this thread writes
the content that is there, and inflates the rest. While the FIFO is full this thread inflates ahead too, and
writes again after each step: so a reader that is slower for some milliseconds costs no hop to the loop.

Invariants: only the thread uses the first run during a turn. The loop alone changes `_fed`, and only the
thread changes `_reached`. An error of a turn is raised by the next `advance`, after the bytes before the
damage were written.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import TYPE_CHECKING

from streamer.aio import finished
from streamer.inflate import GZIP_MAGIC, ZSTD_MAGIC, member_border
from streamer.relay.deliver.byte_queue import ByteQueue
from streamer.relay.deliver.lookahead import STEP
from streamer.relay.deliver.run import Run
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
MOST_SEARCHED = 2 * MIB
"""Compressed bytes without a further run after which none is searched for."""
MOST_WRONG = 2
"""Runs of an object whose begin was guessed wrong, as in an archive of gzip files, before guessing ends."""
WINDOW_AHEAD = 23
"""As `LARGEST_WINDOW`, for content inflated ahead: 8 MiB, which suffices for Zstandard's levels up to 19."""


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
        """`make` returns an inflater from its `start` and, ahead of its turn, its `largest_window`.

        `emit` is called in the thread with inflated pieces; it returns what is to be written to the FIFO.
        `write`, called in the thread too, writes what the FIFO accepts now, and removes it from the queue.
        `count` is called on the loop when the thread may have written bytes. `lookahead` inflates bytes that
        are fed before their turn; None: nothing does.
        """
        self.ref = ref
        self.produced = 0
        """Bytes of content passed to `emit`."""
        self._make = make
        self._thread = thread
        self._emit = emit
        self._write = write
        self._count = count
        self._timer = timer
        self._lookahead = lookahead
        self._piece = STEP if self._looked_ahead else PIECE
        self._runs: deque[Run] = deque()
        self._lock = threading.Lock()
        """Held while the order of `_runs` or the end of the last one is changed."""
        self._magic = b""
        """Magic of the object's first member, with which further runs begin; empty: there are none."""
        self._searched = 0
        """Bytes in which no further run was found."""
        self._wrong = 0
        """Runs whose begin was guessed wrong."""
        self._fed = 0
        self._passed = 0
        """Bytes fed, and those of them whose turn has come."""
        self._reached = 0
        """Bytes passed to inflaters, from the object's start on."""
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
        return f"<Inflation, {self._queued} bytes queued, {self._runs}>"

    @property
    def busy(self) -> bool:
        """Whether bytes fed are not inflated, or not written."""
        return self._turn is not None or self._exhausted != self._fed

    @property
    def waiting(self) -> int:
        """Compressed bytes in memory, perhaps a little more."""
        return self._fed - self._reached

    @property
    def _looked_ahead(self) -> bool:
        return self._lookahead is not None and self.ref.size > LEAST_AHEAD

    @property
    def _queued(self) -> int:
        return self._passed - self._reached

    def feed(self, data: bytes | bytearray, *, last: bool = False) -> None:
        """Add the object's next bytes; `last`: there are no more. Their turn may not have come."""
        if not self._runs:
            self._runs.append(self._run(0))
            if self._lookahead is not None and self._looked_ahead:
                self._lookahead.add(self._runs[0])
                self._magic = ZSTD_MAGIC if data.startswith(ZSTD_MAGIC) else GZIP_MAGIC
        at, view = 0, memoryview(data)
        while (border := self._border(data, at)) is not None:
            self._add(view[at:border], ended=True)
            at = border
            with self._lock:
                self._runs.append(run := self._run(self._fed))
            if self._lookahead is not None:
                self._lookahead.add(run)
        self._add(view[at:], ended=last)
        if self._lookahead is not None:
            self._lookahead.start()

    def _run(self, start: int) -> Run:
        if not self._looked_ahead:
            return Run(start, self._make(start=start), make=self._make)
        inflater = self._make(start=start, largest_window=WINDOW_AHEAD)
        return Run(start, inflater, make=self._make)

    def _add(self, data: memoryview, *, ended: bool) -> None:
        with self._lock:
            run = self._runs[-1]
            run.add(data)
            self._fed += len(data)
            run.ended = ended

    def _border(self, data: bytes | bytearray, after: int) -> int | None:
        """Return where the next run may begin in `data`, and not before `after`."""
        if not self._magic or self._lookahead is None or self._wrong >= MOST_WRONG:
            return None
        start = after + max(0, self._lookahead.shortest_run - self._runs[-1].fed)
        if start >= len(data):
            return None
        found = member_border(data, start, self._magic)
        self._searched = 0 if found is not None else self._searched + len(data) - start
        if self._searched > MOST_SEARCHED:  # the object probably has one member
            self._magic = b""
        return found

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
        while True:
            run = self._runs[0]
            self._lock_run(run)
            try:
                if not run.its_turn:
                    self._took(run.begin(None))
                ahead = run.has_content
                try:
                    pieces = run.pieces(most)
                finally:
                    self._reach(run.start + run.used)
            finally:
                run.lock.release()
            if pieces:
                if ahead:
                    self._took(sum(map(len, pieces)))
                return pieces
            if not self._next_run(run):
                return []

    def _lock_run(self, run: Run) -> None:
        """Lock the run; while the other thread is in a step of it, inflate others ahead."""
        run.wanted = True
        while not run.lock.acquire(blocking=False):
            if self._lookahead is None or not self._lookahead.help():
                run.lock.acquire()
                return

    def _next_run(self, run: Run) -> bool:
        """Go on with the run after `run`, or with `run` and the bytes of that; return False if neither."""
        if not run.ended or run.pending or len(self._runs) == 1:
            return False
        following = self._runs[1]
        self._lock_run(following)
        with self._lock:
            if run.inflater.between_members and not following.spoiled:
                lost = following.begin(run)
                self._runs.popleft()
            else:
                lost = run.join(following)
                del self._runs[1]
                self._wrong += 1
        following.lock.release()
        self._took(lost)
        return True

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
        self._runs[0].inflater.finish()

    async def close(self) -> None:
        """End the turn after its current piece and drop what is queued.

        If cancelled, waits for the turn's end all the same: the thread uses the FIFO.
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
