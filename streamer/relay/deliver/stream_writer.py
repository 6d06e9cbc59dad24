"""Writes an epoch's stream to its outlet, from the event loop or from the thread that inflates.

    content ─▶ Joiner ─▶ without bytes that were delivered before ─▶ outlet
    literals ───────────────┘

The thread calls `prepare` and `drain` during its turn, and the loop writes between two turns. So one of the
two writes at a time, and bytes stay in order. The loop accounts what the thread has written (`count`).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from streamer.formats.header_skipper import SKIP, HeaderSkipper
from streamer.formats.join import NotJoinable
from streamer.formats.line_joiner import LineJoiner
from streamer.formats.tar_joiner import TarJoiner
from streamer.relay.deliver.byte_queue import ByteQueue
from streamer.relay.deliver.object_errors import not_joinable
from streamer.sink.outlet import PipeOutlet

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from streamer.formats.join import Joiner
    from streamer.plan import ObjectRef
    from streamer.relay.statistics import StateTimer
    from streamer.sink.outlet import Outlet


class StreamWriter:
    """Writes one epoch's stream to `outlet`.

    `account` is called with the number of bytes that the outlet accepts. `again`: the first bytes of the
    stream to drop, because the outlet accepted them before a restart. `joiner`: joins the objects into one.
    `inflated`: content was inflated, so its offsets are not those of its object.
    """

    def __init__(
        self,
        outlet: Outlet,
        *,
        timer: StateTimer,
        account: Callable[[int], None],
        again: int = 0,
        joiner: Joiner | None = None,
        inflated: bool = False,
    ) -> None:
        self._outlet = outlet
        self._timer = timer
        self._account = account
        self.again = again
        """Bytes still to drop."""
        self._joiner = joiner
        self._inflated = inflated
        self._pipe = outlet if isinstance(outlet, PipeOutlet) else None
        """Outlet that the thread may write, too."""
        self._written = 0
        """Bytes that the outlet has accepted from `drain`; only the thread changes it during a turn."""
        self._counted = 0
        """Bytes of `_written` that `account` was called with."""

    def __repr__(self) -> str:
        return f"<StreamWriter {self._outlet}, {self.again} bytes to drop>"

    @property
    def reader_gone(self) -> bool:
        """Whether the outlet's reader has closed its end."""
        return self._outlet.reader_gone

    def begin(self) -> None:
        """Begin an object."""
        if self._joiner is not None:
            self._joiner.begin()

    async def end(self, ref: ObjectRef) -> None:
        """End an object, all of whose content was written.

        Raises CorruptObject if it cannot be joined, and ReaderGone.
        """
        if self._joiner is not None:
            try:
                mark = self._joiner.end()
            except NotJoinable as error:
                raise not_joinable(ref, error, inflated=self._inflated) from error
            await self._send([mark])

    def prepare(self, ref: ObjectRef, pieces: list[bytes]) -> ByteQueue:
        """Return what is to be written of an object's content, in the thread. Raises CorruptObject."""
        return ByteQueue(self._new(self._joined(ref, pieces)))

    def drain(self, left: ByteQueue) -> None:
        """Write what the outlet accepts now, in the thread."""
        with contextlib.suppress(OSError):  # the loop repeats a write that fails, and handles its error
            while left and self._pipe is not None:
                self._written += self._pipe.drain(left)

    def count(self) -> None:
        """Pass on to `account` what the outlet has accepted from `drain`."""
        count = self._written - self._counted
        self._counted += count
        self._account(count)

    async def write_content(self, ref: ObjectRef, pieces: Sequence[bytes]) -> None:
        """Write content of an object. Raises CorruptObject and ReaderGone."""
        await self.write(self._joined(ref, pieces))

    async def write(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Write bytes that are not joined, such as literals. Raises ReaderGone."""
        await self._send(pieces)

    async def finish(self) -> None:
        """Write the bytes that the joiner adds at the end. Raises ReaderGone."""
        if self._joiner is not None:
            await self._send([self._joiner.finish()])

    async def _send(self, pieces: Sequence[bytes | memoryview]) -> None:
        await self.push(ByteQueue(self._new(pieces)))

    async def push(self, left: ByteQueue) -> None:
        """Write what `drain` has left. Raises ReaderGone."""
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

    def _joined(self, ref: ObjectRef, pieces: Sequence[bytes]) -> Sequence[bytes | memoryview]:
        """Return the bytes of `pieces` that belong to the joined stream. Raises CorruptObject."""
        if self._joiner is None:
            return pieces
        try:
            return [part for piece in pieces for part in self._joiner.feed(piece)]
        except NotJoinable as error:
            raise not_joinable(ref, error, inflated=self._inflated) from error

    def _new(self, pieces: Sequence[bytes | memoryview]) -> Sequence[bytes | memoryview]:
        """Return the pieces without the bytes that the outlet accepted before a restart."""
        if not self.again:
            return pieces
        found: list[bytes | memoryview] = []
        for piece in pieces:
            dropped = min(self.again, len(piece))
            self.again -= dropped
            if dropped < len(piece):
                found.append(piece[dropped:])
        return found


def joiner_of(join: str | None) -> Joiner | None:
    """Return a joiner for one epoch, if any."""
    if join is None:
        return None
    if join.startswith(SKIP):
        return HeaderSkipper(int(join.removeprefix(SKIP)))
    return TarJoiner() if join == "tar" else LineJoiner()
