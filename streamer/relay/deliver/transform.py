"""Transforms bytes between stage and outlet: inflates, wraps, aligns and joins objects, in stream order.

    head of line ─ at most 256 KiB ─▶ Inflater ─ at most 1 MiB ─▶ outlet          (unwrapped)
                              │                ├▶ spool ─ header, content, padding ─▶ outlet   (wrapped)
                              └────────────────┴▶ Joiner ─ without end marks ─▶ outlet         (joined)

Parts are fetched compressed, so parts reserve compressed bytes; of inflated content, one piece is in memory
at a time. A worker thread inflates (ISA-L and zstd release the GIL), except for pieces so small that the hop
to the thread would cost more. Delivery waits for each piece, so bytes stay in order, and a full FIFO stops
inflating too. Literals pass unchanged.

A RecordIO header holds the length of the content (contract §5.1), which is known only after inflating all of
it. So a wrapped object is spooled before its first byte is sent: up to 8 MiB in memory, a longer one in an
unnamed file in TMPDIR. If a wrapped object is damaged, none of its bytes are delivered. If an unwrapped one
is damaged, the bytes before the damage have been delivered, and the trailer never becomes `complete`.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections import deque
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from streamer.aio import in_thread
from streamer.errors import CorruptObject, ErrorContext, ReaderGone, SinkError
from streamer.formats.arrow_joiner import ArrowJoiner
from streamer.formats.join import Join, Joiner, NotJoinable
from streamer.formats.tar_joiner import TarJoiner
from streamer.inflate import Inflater
from streamer.plan import LONGEST_RECORD, frame
from streamer.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from streamer.plan import ObjectRef, Part
    from streamer.relay.deliver.frame_aligner import FrameAligner
    from streamer.relay.statistics import StateTimer
    from streamer.sink.outlet import Outlet

MOST_TAKEN = 256 * KIB
"""Maximum bytes taken from a stage at a time."""
PIECE = 1 * MIB
"""Bytes of inflated content in memory at a time: the capacity of a FIFO."""
_LITTLE = 16 * KIB
"""Up to this many compressed bytes are inflated on the loop; a hop to a thread and back costs as much."""
_LITTLE_PIECE = 64 * KIB
SPOOL_MEMORY = 8 * MIB
"""Bytes of a wrapped object that are kept in memory; a longer object is spooled to a file."""
_MAX_VECTORS = 64


class ByteQueue:
    """Queue of byte pieces that drain into a descriptor; a `streamer.sink.outlet.Drainable`."""

    def __init__(self, pieces: Sequence[bytes | memoryview]) -> None:
        self._left = deque(memoryview(piece) for piece in pieces if piece)

    def __bool__(self) -> bool:
        return bool(self._left)

    def drain_into(self, fd: int) -> int:
        count = left = os.writev(fd, list(islice(self._left, _MAX_VECTORS)))
        while left:
            first = self._left[0]
            if left < len(first):
                self._left[0] = first[left:]
                break
            left -= len(self._left.popleft())
        return count


class BodyTransformer:
    """Transforms the bytes of one epoch and writes them to `outlet`; its owner closes it once.

    `account` is called with the number of bytes that the outlet accepts. `again`: the first bytes of the
    stream to drop, because the outlet accepted them before a restart. `inflate`: inflate the objects. `wrap`:
    every object is a RecordIO record; without `inflate` the plan's literals already frame it. `aligner`:
    passes only whole records on. `joiner`: joins the objects into one; not used with `wrap` or `aligner`.
    """

    def __init__(
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
    ) -> None:
        self._outlet = outlet
        self._inflate = inflate
        self._wrap = wrap
        self._aligner = aligner
        self._joiner = joiner
        self._timer = timer
        self._account = account
        self._again = again
        self._inflater: Inflater | None = None
        """Inflater of the current object."""
        self._spool: tempfile.SpooledTemporaryFile[bytes] | None = None

    def __repr__(self) -> str:
        return f"<BodyTransformer {self._inflater} {self._aligner}>"

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

    async def pass_on(self, part: Part, at: int, data: bytes) -> None:
        """Deliver `data`, the bytes of `part` from offset `at` on: either literals or bytes of its body.

        Raises CorruptObject, ReaderGone, and SinkError if the spool file cannot be written.
        """
        place = at - len(part.leading)
        if not 0 <= place < part.body:
            await self._write([data])
            return
        start = part.start + place
        if start == 0:
            self._begin(part.object)
        last = start + len(data) == part.object.size
        if not self._inflate:
            await self._write(self._joined(part.object, [data]))
            if last:
                self._end_joined(part.object)
            return
        inflater = self._inflater
        if inflater is None:
            raise RuntimeError(f"byte {start} of {part.object.key} without those before it")
        inflater.feed(data)
        while not inflater.drained:
            pieces = await self._next(inflater, part.object, fed=len(data))
            # Small pieces are inflated on the loop: yield to other tasks between them.
            await asyncio.sleep(0)
            if self._spool is None:
                await self._write(self._joined(part.object, pieces))
            elif inflater.produced > LONGEST_RECORD:
                raise _too_long(part.object)
            elif self._outlet.reader_gone:
                raise ReaderGone("the reader closed the pipe")
        if last:
            inflater.finish()
            if self._spool is not None:
                await self._record(self._spool, inflater.produced)
            self._end_joined(part.object)
            self.close()

    async def finish(self) -> None:
        """Deliver the bytes that the aligner keeps back or the joiner adds at the end. Raises ReaderGone."""
        if self._aligner is not None:
            await self._send([self._aligner.rest()])
        if self._joiner is not None:
            await self._send([self._joiner.finish()])

    def close(self) -> None:
        """Drop the state of the current object; further calls do nothing."""
        self._inflater = None
        if self._spool is not None:
            spool, self._spool = self._spool, None
            spool.close()

    def _begin(self, ref: ObjectRef) -> None:
        self.close()
        if self._aligner is not None and (self._inflate or not self._wrap):
            self._aligner.begins()  # a wrapped object that is not inflated began with its literal header
        if self._joiner is not None:
            self._joiner.begin()
        if not self._inflate:
            return
        self._inflater = Inflater(partial(damaged, ref))
        if self._wrap:
            self._spool = tempfile.SpooledTemporaryFile(SPOOL_MEMORY)  # noqa: SIM115 - closed by `close`

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

    async def _next(self, inflater: Inflater, ref: ObjectRef, *, fed: int) -> list[bytes]:
        """Return the next inflated pieces; if the object is wrapped, they are in the spool too."""
        in_memory = self._spool is None or inflater.produced + _LITTLE_PIECE <= SPOOL_MEMORY
        if fed <= _LITTLE and in_memory:
            return self._step(inflater, ref, _LITTLE_PIECE)
        self._timer.starve("inflate")
        pieces = await in_thread(self._step, inflater, ref, PIECE)
        self._timer.enter("moving")
        return pieces

    def _step(self, inflater: Inflater, ref: ObjectRef, most: int) -> list[bytes]:
        pieces = inflater.pieces(most)
        if self._spool is not None:
            try:
                self._spool.writelines(pieces)
            except OSError as error:
                raise _no_space(ref, error) from error
        return pieces

    async def _record(self, spool: tempfile.SpooledTemporaryFile[bytes], size: int) -> None:
        """Deliver the spooled object as one record."""
        header, padding = frame(size)
        if size <= _LITTLE_PIECE:
            spool.seek(0)
            await self._write([header, spool.read(), padding])
            return
        await self._write([header])
        await in_thread(spool.seek, 0)
        while content := await in_thread(spool.read, PIECE):
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

    async def _write(self, pieces: Sequence[bytes | memoryview]) -> None:
        if self._aligner is not None:
            pieces = [self._aligner.pass_on(bytes(piece)) for piece in pieces]
        await self._send(pieces)

    async def _send(self, pieces: Sequence[bytes | memoryview]) -> None:
        left = ByteQueue(self._new(pieces))
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
        f"cannot spool s3://{ref.bucket}/{ref.key} in {tempfile.gettempdir()}: {error.strerror}; an object "
        "that is inflated and wrapped is spooled whole: let TMPDIR name a directory with space for it"
    )
