"""Transforms bytes between stage and outlet: inflates, wraps, aligns and joins objects, in stream order.

    head of line ─ at most 128 KiB ─▶ Inflation ─ at most 256 KiB ─▶ outlet        (unwrapped)
                              │                 ├▶ spool ─ header, content, padding ─▶ outlet   (wrapped)
                              └─────────────────┴▶ Joiner ─ without end marks ─▶ outlet         (joined)

Parts are fetched compressed, so parts reserve compressed bytes; of inflated content, one piece is in memory
at a time. A worker thread inflates (ISA-L and zstd release the GIL) and writes each piece into the FIFO while
the processor's cache has it, until the FIFO is full. The event loop meanwhile serves sockets and other
channels, and queues the object's next bytes for the thread (`Inflation`). It writes the piece that the FIFO
did not accept, and only then inflating goes on. So bytes stay in order, and a full FIFO stops inflating too.
Bytes so few that the hop to the thread would cost more are inflated on the loop. Literals pass unchanged.

With memory for it, `feed` gets bytes before their turn, to be inflated ahead (`Lookahead`).

The bytes of one object overlap, objects do not: `pass_on` returns from an object's last byte when the outlet
has accepted all of it. So at the border of two objects all counts are exact. Before the owner waits for
storage it calls `settle`, so that no inflated byte waits with it.

A RecordIO header holds the length of the content (contract §5.1), which is known only after inflating all of
it. So a wrapped object is spooled before its first byte is sent: up to 8 MiB in memory, a longer one in an
unnamed file in TMPDIR. If a wrapped object is damaged, none of its bytes are delivered. If an unwrapped one
is damaged, the bytes before the damage have been delivered, and the trailer never becomes `complete`.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from streamer.aio import WorkerThread
from streamer.errors import CorruptObject, ErrorContext, ReaderGone, SinkError
from streamer.formats.arrow_joiner import ArrowJoiner
from streamer.formats.join import Join, Joiner, NotJoinable
from streamer.formats.tar_joiner import TarJoiner
from streamer.inflate import Inflater
from streamer.linux import keep_free_memory
from streamer.plan import LONGEST_RECORD, frame
from streamer.relay.deliver.byte_queue import ByteQueue
from streamer.relay.deliver.inflation import LITTLE_PIECE, MOST_QUEUED, PIECE, Inflation
from streamer.relay.deliver.lookahead import Lookahead
from streamer.scratch import scratch_folder
from streamer.sink.outlet import PipeOutlet
from streamer.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from streamer.plan import ObjectRef, Part
    from streamer.relay.deliver.frame_aligner import FrameAligner
    from streamer.relay.statistics import StateTimer
    from streamer.sink.outlet import Outlet

MOST_TAKEN = 512 * KIB
"""Maximum bytes taken from a stage at a time."""
LESS_TAKEN = 128 * KIB
"""The same under a bandwidth limit, which is checked between two of them, and for a thread that inflates,
which has the first bytes sooner."""
LARGEST_KEPT, MOST_KEPT = 2 * MIB, 32 * MIB
"""Bytes of a block, and of all, that the C library keeps when they are freed: without it, the same content
took 0 to 160,000 page faults a GB, by what the process had freed before."""
SPOOL_MEMORY = 8 * MIB
"""Bytes of a wrapped object that are kept in memory; a longer object is spooled to a file."""


class BodyTransformer:
    """Transforms the bytes of one epoch and writes them to `outlet`; its owner closes it once.

    `account` is called with the number of bytes that the outlet accepts. `again`: the first bytes of the
    stream to drop, because the outlet accepted them before a restart. `inflate`: inflate the objects. `wrap`:
    every object is a RecordIO record; without `inflate` the plan's literals already frame it. `aligner`:
    passes only whole records on. `joiner`: joins the objects into one; not used with `wrap` or `aligner`.
    `ahead`: memory in which further bytes are inflated before their turn; 0: none are.
    """

    def __init__(  # noqa: PLR0913 - all that an epoch's bytes may need
        self,
        outlet: Outlet,
        *,
        inflate: bool,
        wrap: bool,
        timer: StateTimer,
        account: Callable[[int], None],
        again: int = 0,
        aligner: FrameAligner | None = None,
        joiner: Joiner | None = None,
        ahead: int = 0,
    ) -> None:
        self._outlet = outlet
        self._inflate = inflate
        self._wrap = wrap
        self._aligner = aligner
        self._joiner = joiner
        self._timer = timer
        self._account = account
        self._again = again
        self._pipe = outlet if isinstance(outlet, PipeOutlet) else None
        """Outlet that the thread may write, too."""
        self._written = 0
        """Bytes that the outlet has accepted from `_emit`; only the thread changes it during a turn."""
        self._counted = 0
        """Bytes of `_written` that `account` was called with."""
        self._thread = WorkerThread("inflate")
        self._ahead_thread = WorkerThread("inflate-ahead")
        self._most_ahead = ahead // 4
        """Compressed bytes that may be fed ahead; content may have the rest of `ahead`."""
        self._content_ahead = ahead - self._most_ahead
        self._lookahead = Lookahead(self._ahead_thread, self._content_ahead) if ahead else None
        if inflate:
            keep_free_memory(LARGEST_KEPT, MOST_KEPT)
        self._inflation: Inflation | None = None
        """Inflation of the current object."""
        self._next: deque[Inflation] = deque()
        """Inflations of the objects after it, of which bytes were fed."""
        self._next_bytes = 0
        """Compressed bytes of `_next`."""
        self._spool: tempfile.SpooledTemporaryFile[bytes] | None = None

    def __repr__(self) -> str:
        return f"<BodyTransformer {self._inflation} {self._aligner}>"

    @property
    def busy(self) -> bool:
        """Whether bytes that were passed on are not delivered, so that `settle` has to be called."""
        return self._inflation is not None and self._inflation.busy

    @property
    def at_border(self) -> bool:
        """Whether the bytes that the outlet has accepted certainly end with a whole record."""
        return self._aligner is not None and self._aligner.at_border and not self._again

    @property
    def anchored(self) -> bool:
        """Whether an epoch may be resumed at the first byte of the current object."""
        return self._joiner is None or self._joiner.anchored

    @property
    def held(self) -> int:
        """Bytes that the aligner keeps back."""
        return 0 if self._aligner is None else self._aligner.held

    @property
    def pending(self) -> int:
        """Bytes of the stream from what the outlet has accepted to the next byte that is passed on.

        Negative after a restart, while bytes are dropped that the outlet has accepted.
        """
        return self.held - self._again

    @property
    def room_ahead(self) -> int:
        """Bytes that may be fed before their turn now."""
        waiting = 0 if self._inflation is None else self._inflation.waiting
        return self._most_ahead - waiting - self._next_bytes

    def feed(self, part: Part, at: int, data: bytes | bytearray) -> None:
        """Take bytes that `pass_on` will get later, in the same order; they may be inflated meanwhile."""
        place = at - len(part.leading)
        if not (self._inflate and 0 <= place < part.body):
            return
        start = part.start + place
        if start == 0:
            self._next.append(self._new_inflation(part.object))
        inflation = self._next[-1] if self._next else self._inflation
        if inflation is None:
            raise RuntimeError(f"byte {start} of {part.object.key} without those before it")
        if self._next:
            self._next_bytes += len(data)
        inflation.feed(data, last=start + len(data) == part.object.size)

    async def forget(self) -> None:
        """Drop the bytes that were fed and will not be passed on."""
        if self._lookahead is not None:
            await self._lookahead.close()
            self._lookahead = Lookahead(self._ahead_thread, self._content_ahead)
        self._next.clear()
        self._next_bytes = 0

    async def pass_on(self, part: Part, at: int, data: bytes | bytearray) -> None:
        """Deliver `data`, the bytes of `part` from offset `at` on: either literals or bytes of its body.

        The bytes were passed to `feed` before.

        Returns when all bytes are delivered, or, before the last byte of an inflated object, when the thread
        has at most MOST_QUEUED of them left to inflate. Raises CorruptObject, ReaderGone, and SinkError if
        the spool file cannot be written.
        """
        place = at - len(part.leading)
        if not 0 <= place < part.body:
            await self._write([bytes(data)])
            return
        start = part.start + place
        if start == 0:
            await self._begin()
        last = start + len(data) == part.object.size
        if not self._inflate:
            await self._write(self._joined(part.object, [bytes(data)]))
            if last:
                self._end_joined(part.object)
            return
        inflation = self._inflation
        if inflation is None:
            raise RuntimeError(f"byte {start} of {part.object.key} was not fed")
        inflation.pass_on(len(data))
        await self._advance(inflation, 0 if last else MOST_QUEUED)
        if last:
            inflation.finish()
            if self._spool is not None:
                await self._record(self._spool, inflation.produced)
            self._end_joined(part.object)
            await self._drop_object()

    async def settle(self) -> None:
        """Wait until all bytes passed on are delivered. Raises as `pass_on`."""
        if self._inflation is not None:
            await self._advance(self._inflation, 0)

    async def finish(self) -> None:
        """Deliver the bytes that the aligner keeps back or the joiner adds at the end. Raises ReaderGone."""
        if self._aligner is not None:
            await self._send([self._aligner.rest()])
        if self._joiner is not None:
            await self._send([self._joiner.finish()])

    async def close(self) -> None:
        """Wait for the thread's current piece, drop all state and end the thread.

        All bytes that the outlet has accepted are passed to `account` then. Further calls do nothing.
        """
        try:
            await self._drop_object()
        finally:
            try:
                await self.forget()
            finally:
                self._thread.close()
                self._ahead_thread.close()

    async def _drop_object(self) -> None:
        inflation, self._inflation = self._inflation, None
        try:
            if inflation is not None:
                await inflation.close()
        finally:
            self._drop_spool()

    def _drop_spool(self) -> None:
        if self._spool is not None:
            spool, self._spool = self._spool, None
            spool.close()

    async def _begin(self) -> None:
        await self._drop_object()
        if self._aligner is not None and (self._inflate or not self._wrap):
            self._aligner.begins()  # a wrapped object that is not inflated began with its literal header
        if self._joiner is not None:
            self._joiner.begin()
        if not self._inflate:
            return
        self._inflation = self._next.popleft()
        self._next_bytes -= self._inflation.waiting
        if self._wrap:
            self._spool = tempfile.SpooledTemporaryFile(SPOOL_MEMORY)  # noqa: SIM115 - closed by `close`

    def _new_inflation(self, ref: ObjectRef) -> Inflation:
        return Inflation(
            ref,
            partial(Inflater, partial(damaged, ref)),
            thread=self._thread,
            emit=partial(self._emit, ref),
            count=self._count_written,
            timer=self._timer,
            lookahead=self._lookahead,
        )

    def _joined(self, ref: ObjectRef, pieces: Sequence[bytes]) -> Sequence[bytes | memoryview]:
        """Return the bytes of `pieces` that belong to the joined stream. Raises CorruptObject."""
        if self._joiner is None:
            return pieces
        try:
            return [part for piece in pieces for part in self._joiner.feed(piece)]
        except NotJoinable as error:
            raise self._not_joinable(ref, error) from error

    def _end_joined(self, ref: ObjectRef) -> None:
        if self._joiner is not None:
            try:
                self._joiner.end()
            except NotJoinable as error:
                raise self._not_joinable(ref, error) from error

    def _not_joinable(self, ref: ObjectRef, error: NotJoinable) -> CorruptObject:
        if self._inflate:
            return CorruptObject(
                f"{error}; at byte {error.offset} of what it inflates to", ErrorContext(ref.bucket, ref.key)
            )
        return CorruptObject(str(error), ErrorContext(ref.bucket, ref.key, error.offset))

    async def _advance(self, inflation: Inflation, most: int) -> None:
        """Inflate into outlet or spool until at most `most` bytes are queued; 0: until all are delivered."""
        while (left := await inflation.advance(most, in_memory=self._in_memory(inflation))) is not None:
            if self._spool is None:
                await self._push(left)
            elif inflation.produced > LONGEST_RECORD:
                raise _too_long(inflation.ref)
            elif self._outlet.reader_gone:
                raise ReaderGone("the reader closed the pipe")

    def _in_memory(self, inflation: Inflation) -> bool:
        """Return whether the next piece is not written to a file."""
        return self._spool is None or inflation.produced + LITTLE_PIECE <= SPOOL_MEMORY

    def _count_written(self) -> None:
        """Pass on to `account` what the outlet has accepted from `_emit`."""
        count = self._written - self._counted
        self._counted += count
        self._account(count)

    def _emit(self, ref: ObjectRef, pieces: list[bytes]) -> ByteQueue:
        """Write inflated pieces to outlet or spool; return what the outlet does not accept now."""
        if self._spool is None:
            left = ByteQueue(self._new(self._aligned(self._joined(ref, pieces))))
            self._write_now(left)
            return left
        try:
            self._spool.writelines(pieces)
        except OSError as error:
            raise _no_space(ref, error) from error
        return ByteQueue([])

    def _write_now(self, left: ByteQueue) -> None:
        """Write what the FIFO accepts now. The loop repeats a write that fails, and handles its error."""
        with contextlib.suppress(OSError):
            while left and self._pipe is not None:
                self._written += self._pipe.drain(left)

    async def _record(self, spool: tempfile.SpooledTemporaryFile[bytes], size: int) -> None:
        """Deliver the spooled object as one record."""
        header, padding = frame(size)
        if size <= LITTLE_PIECE:
            spool.seek(0)
            await self._write([header, spool.read(), padding])
            return
        await self._write([header])
        await self._thread.run(spool.seek, 0)
        while content := await self._thread.run(spool.read, PIECE):
            await self._write([content])
        await self._write([padding])

    def _new(self, pieces: Sequence[bytes | memoryview]) -> Sequence[bytes | memoryview]:
        """Return the pieces without the bytes that the outlet accepted before a restart."""
        if not self._again:
            return pieces
        found: list[bytes | memoryview] = []
        for piece in pieces:
            dropped = min(self._again, len(piece))
            self._again -= dropped
            if dropped < len(piece):
                found.append(piece[dropped:])
        return found

    def _aligned(self, pieces: Sequence[bytes | memoryview]) -> Sequence[bytes | memoryview]:
        """Return the whole records that end in the pieces, if the stream is aligned."""
        if self._aligner is None:
            return pieces
        return [self._aligner.pass_on(bytes(piece)) for piece in pieces]

    async def _write(self, pieces: Sequence[bytes | memoryview]) -> None:
        await self._send(self._aligned(pieces))

    async def _send(self, pieces: Sequence[bytes | memoryview]) -> None:
        await self._push(ByteQueue(self._new(pieces)))

    async def _push(self, left: ByteQueue) -> None:
        while left:
            self._timer.enter("moving")
            try:
                count = self._outlet.push(left)
            except BlockingIOError:
                self._timer.enter("blocked")
                await self._outlet.writable()
                continue
            self._account(count)
        self._timer.enter("moving")


def joiner_of(join: Join, *, resumed: bool) -> Joiner:
    """Return a joiner for one epoch. `resumed`: the reader already has bytes of earlier objects."""
    return TarJoiner() if join == "tar" else ArrowJoiner(resumed=resumed)


def _too_long(ref: ObjectRef) -> CorruptObject:
    return CorruptObject(
        f"the object inflates to more than the {LONGEST_RECORD} bytes that a RecordIO record holds; "
        "split it, or set RecordWrapperType: None",
        ErrorContext(ref.bucket, ref.key),
    )


def damaged(ref: ObjectRef, what: str, offset: int) -> CorruptObject:
    """Return the error of an object that cannot be inflated. `offset`: byte of the object."""
    return CorruptObject(f"the object {what}", ErrorContext(ref.bucket, ref.key, offset))


def _no_space(ref: ObjectRef, error: OSError) -> SinkError:
    return SinkError(
        f"cannot spool s3://{ref.bucket}/{ref.key} in {scratch_folder()}: {error.strerror}; an object "
        "that is inflated and wrapped is spooled whole: let TMPDIR name a directory with space for it"
    )
