"""Transforms bytes between stage and outlet: inflates, wraps and joins objects, in stream order.

    head of line ─ at most 128 KiB ─▶ Inflation ─ at most 256 KiB ─▶ outlet        (unwrapped)
                              │                 ├▶ spool ─ header, content, padding ─▶ outlet   (wrapped)
                              └─────────────────┴▶ Joiner ─ other end marks ─▶ outlet           (joined)

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
unnamed file in TMPDIR. If a wrapped object is damaged, no byte of it is delivered. If an unwrapped one
is damaged, the bytes before the damage have been delivered, and the trailer never becomes `complete`.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from streamer.aio import WorkerThread
from streamer.errors import ReaderGone
from streamer.inflate import Inflater
from streamer.linux import keep_free_memory
from streamer.plan import LONGEST_RECORD
from streamer.relay.deliver.byte_queue import ByteQueue
from streamer.relay.deliver.inflation import MOST_QUEUED, Inflation
from streamer.relay.deliver.lookahead import Lookahead
from streamer.relay.deliver.object_errors import not_inflatable, too_long
from streamer.relay.deliver.spool import Spool
from streamer.units import MIB

if TYPE_CHECKING:
    from streamer.plan import ObjectRef, Segment
    from streamer.relay.deliver.stream_writer import StreamWriter
    from streamer.relay.statistics import StateTimer

LARGEST_KEPT, MOST_KEPT = 2 * MIB, 32 * MIB
"""Bytes of a block, and of all, that the C library keeps when they are freed: without it, the same content
took 0 to 160,000 page faults a GB, by what the process had freed before."""


class BodyTransformer:
    """Transforms the bytes of one epoch and passes them to `writer`; its owner closes it once.

    `inflate`: inflate the objects. `wrap`: every inflated object is a RecordIO record. `ahead`: memory in
    which further bytes are inflated before their turn; 0 to inflate nothing ahead.
    """

    def __init__(
        self, writer: StreamWriter, *, inflate: bool, wrap: bool, timer: StateTimer, ahead: int = 0
    ) -> None:
        self.writer = writer
        self._inflate = inflate
        self._wrap = wrap
        self._timer = timer
        self._thread = WorkerThread("inflate")
        self._ahead_thread = WorkerThread("inflate-ahead")
        self._most_ahead = ahead // 4
        """Compressed bytes that may be fed ahead; content may have the rest of `ahead`."""
        self._lookahead = Lookahead(self._ahead_thread, ahead - self._most_ahead) if ahead else None
        if inflate:
            keep_free_memory(LARGEST_KEPT, MOST_KEPT)
        self._inflation: Inflation | None = None
        """Inflation of the current object."""
        self._next: deque[Inflation] = deque()
        """Inflations of the objects after it, of which bytes were fed."""
        self._next_bytes = 0
        """Compressed bytes of `_next`."""
        self._spool: Spool | None = None
        """Content of the current object, if it is inflated and wrapped."""

    def __repr__(self) -> str:
        return f"<BodyTransformer {self._inflation} {self.writer}>"

    @property
    def busy(self) -> bool:
        """Whether bytes that were passed on are not delivered, so that `settle` has to be called."""
        return self._inflation is not None and self._inflation.busy

    @property
    def room_ahead(self) -> int:
        """Bytes that may be fed before their turn now."""
        waiting = 0 if self._inflation is None else self._inflation.waiting
        return self._most_ahead - waiting - self._next_bytes

    def feed(self, item: Segment | bytes, place: int, data: bytes | bytearray) -> None:
        """Take bytes that `pass_on` will get later, in the same order; they may be inflated meanwhile."""
        if not self._inflate or isinstance(item, bytes):
            return
        ref, start = item.object, item.start + place
        if start == 0:
            self._next.append(self._new_inflation(ref))
        inflation = self._next[-1] if self._next else self._inflation
        if inflation is None:
            raise RuntimeError(f"byte {start} of {ref.key} without those before it")
        if self._next:
            self._next_bytes += len(data)
        inflation.feed(data, last=start + len(data) == ref.size)

    async def pass_on(self, item: Segment | bytes, place: int, data: bytes | bytearray) -> None:
        """Deliver `data`, the bytes of a range or a literal from offset `place` on.

        The bytes were passed to `feed` before.

        Returns when all bytes are delivered, or, before the last byte of an inflated object, when the thread
        has at most MOST_QUEUED of them left to inflate. Raises CorruptObject, ReaderGone, and SinkError if
        the spool file cannot be written.
        """
        if isinstance(item, bytes):
            await self.writer.write([bytes(data)])
            return
        ref, start = item.object, item.start + place
        if start == 0:
            await self._begin()
        last = start + len(data) == ref.size
        if not self._inflate:
            await self.writer.write_content(ref, [bytes(data)])
            if last:
                await self.writer.end(ref)
            return
        inflation = self._inflation
        if inflation is None:
            raise RuntimeError(f"byte {start} of {ref.key} was not fed")
        inflation.pass_on(len(data))
        await self._advance(inflation, 0 if last else MOST_QUEUED)
        if last:
            inflation.finish()
            if self._spool is not None:
                await self._spool.deliver(self.writer)
            await self.writer.end(ref)
            await self._drop_object()

    async def settle(self) -> None:
        """Wait until all bytes passed on are delivered. Raises as `pass_on`."""
        if self._inflation is not None:
            await self._advance(self._inflation, 0)

    async def close(self) -> None:
        """Wait for the thread's current piece, drop all state and end the thread.

        All bytes that the outlet has accepted are passed to `account` then. Further calls do nothing.
        """
        try:
            await self._drop_object()
        finally:
            try:
                if self._lookahead is not None:
                    await self._lookahead.close()
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
        self.writer.begin()
        if not self._inflate:
            return
        self._inflation = self._next.popleft()
        self._next_bytes -= self._inflation.waiting
        if self._wrap:
            self._spool = Spool(self._inflation.ref, self._thread)

    def _new_inflation(self, ref: ObjectRef) -> Inflation:
        return Inflation(
            ref,
            partial(Inflater, partial(not_inflatable, ref)),
            thread=self._thread,
            emit=partial(self._emit, ref),
            write=self.writer.drain,
            count=self.writer.count,
            timer=self._timer,
            lookahead=self._lookahead,
        )

    async def _advance(self, inflation: Inflation, most: int) -> None:
        """Inflate into outlet or spool until at most `most` bytes are queued; 0: until all are delivered."""
        while (left := await inflation.advance(most, in_memory=self._in_memory)) is not None:
            if self._spool is None:
                await self.writer.push(left)
            elif inflation.produced > LONGEST_RECORD:
                raise too_long(inflation.ref, LONGEST_RECORD)
            elif self.writer.reader_gone:
                raise ReaderGone("the reader closed the pipe")

    @property
    def _in_memory(self) -> bool:
        """Whether the next piece is not written to a file."""
        return self._spool is None or self._spool.in_memory

    def _emit(self, ref: ObjectRef, pieces: list[bytes]) -> ByteQueue:
        """Spool inflated pieces, or return what is to be written of them."""
        if self._spool is None:
            return self.writer.prepare(ref, pieces)
        self._spool.add(pieces)
        return ByteQueue([])
