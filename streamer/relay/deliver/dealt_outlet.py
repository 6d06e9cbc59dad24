"""The outlet of a shared stream: moves its bytes into the FIFOs of one rank after the other.

    stage ── splice of an exact length ──▶ FIFO              a rank with one FIFO
    stage ──▶ pipe ── tee ──▶ FIFO, FIFO, … ── drop          a rank with copies (tee(2) copies no page)
    stage ──▶ pipe ── drop                                   a rank whose readers have left its epoch
    zeros, as those of a stage                               an end mark of tar samples

A full FIFO blocks the stream: the ranks after it get their bytes in stream order. Copies may differ by what
the pipe holds. End marks are not in the stream, and go into their FIFO before the next byte of the stream.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from streamer.linux import ALL, SPLICE_FLAGS, tee
from streamer.plan.record_table import END_MARK
from streamer.sink.outlet import PipeOutlet

if TYPE_CHECKING:
    from collections.abc import Iterator

    from streamer.errors import Shortage
    from streamer.plan.dealing import DealtEpoch, Turn
    from streamer.relay.deliver.shared_fifo import SharedFifo, SharedGroup
    from streamer.sink.outlet import Drainable


class DealtOutlet:
    """An `Outlet` whose bytes go to the FIFOs of several ranks; its owner closes it once."""

    def __init__(self, group: SharedGroup, *, give_up_after: float) -> None:
        """`give_up_after`: seconds for which the kernel may refuse writes to the pipe.

        Raises OSError if a pipe cannot be made.
        """
        self._dropped = 0
        self._group = group
        self._ranks = group.ranks
        self._fifos = group.fifos
        self._turns: Iterator[Turn] = iter(())
        self._rank = self._left = 0
        """Rank whose turn it is, and its bytes that are still to come."""
        self._mark = False
        """Whether the turn is of an end mark, which is not in the stream."""
        self._copied = 0
        """Bytes in the pipe: not every copy of the rank has them."""
        self._ahead: dict[SharedFifo, int] = {}
        """Bytes of the pipe that each copy has."""
        with contextlib.ExitStack() as stack:
            self._null = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
            stack.callback(os.close, self._null)
            self._pipe, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            stack.callback(os.close, self._pipe)
            with contextlib.ExitStack() as failed:
                failed.callback(os.close, write_end)
                self._into = PipeOutlet(write_end, on_gone=lambda: None)
                failed.pop_all()
            stack.callback(self._into.close)
            self._into.give_up_after = give_up_after
            self._into.on_short = self._refused
            self._opened = stack.pop_all()

    def __repr__(self) -> str:
        return f"<DealtOutlet epoch {self._group.epoch}, {self._left} bytes for rank {self._rank}>"

    def _refused(self, shortage: Shortage | None) -> None:
        for fifo in self._group.fifos:
            fifo.counters.refused(shortage)

    def begin(self, dealt: DealtEpoch) -> None:
        """Begin the group's epoch."""
        self._empty(self._copied)  # the last copies may have left the epoch before with bytes in the pipe
        self._turns, self._left, self._mark, self._copied = dealt.turns, 0, False, 0
        for before, fifos in zip(dealt.before, self._ranks, strict=True):
            for fifo in fifos:
                if fifo.takes(self._group.epoch):
                    fifo.begin_stream(before)
        self._move_marks()

    def end(self) -> None:
        """End the epoch. Raises RuntimeError if a FIFO lacks bytes of it, or a turn is left."""
        if self._left or self.holding or not self.reader_gone or next(self._turns, None) is not None:
            raise RuntimeError(f"the stream of epoch {self._group.epoch} has ended early: {self!r}")

    def _takers(self) -> list[SharedFifo]:
        """Return the FIFOs of the rank whose turn it is that take bytes of the epoch."""
        epoch = self._group.epoch
        return [fifo for fifo in self._ranks[self._rank] if fifo.takes(epoch)]

    @property
    def reader_gone(self) -> bool:
        """Whether no FIFO takes bytes of the epoch any more."""
        epoch = self._group.epoch
        if self._ranks[self._rank][0].takes(epoch):  # almost always, and looked at for each turn
            return False
        return not any(fifo.takes(epoch) for fifo in self._fifos)

    @property
    def holding(self) -> bool:
        """Whether a copy lacks bytes that are in the pipe, or an end mark is next; see `Outlet`."""
        return self._copied > 0 or self._mark

    def push(self, source: Drainable) -> int:
        """Move bytes of one turn, at most to its end, then the end marks after it; see `Outlet`.

        Raises Shortage, as a FIFO's outlet does.
        """
        if not self._left and not self._next_turn():
            raise RuntimeError(f"the stream of epoch {self._group.epoch} is longer than its turns")
        count = self._move(source)
        if not self._left:
            self._move_marks()
        return count

    def _next_turn(self) -> bool:
        """Begin the next turn; return False if there is none."""
        turn = next(self._turns, None)
        self._rank, self._left, self._mark = turn or (self._rank, 0, False)
        return turn is not None

    def _move_marks(self) -> None:
        """Move the end marks that are next, until a FIFO is full."""
        while not self._copied and (self._mark if self._left else self._next_turn()):
            if self._mark:
                try:
                    self._move(_END_MARK)
                except BlockingIOError:
                    return

    def _move(self, source: Drainable) -> int:
        """Move bytes of the current turn; return how many."""
        takers = self._takers()
        if not takers:
            count = self._drop(source, self._left)
        elif len(self._ranks[self._rank]) > 1:
            count = self._copied = self._into.push(source, self._left)
            self._ahead = dict.fromkeys(takers, 0)
            self._copy()
        elif takers[0].lead:
            count = self._drop(source, min(self._left, takers[0].lead))
            takers[0].lead -= count
        else:
            count = takers[0].take(source, self._left)
        self._left -= count
        return count

    def _drop(self, source: Drainable, most: int) -> int:
        """Discard bytes of `source`; by a pipe, which splice(2) needs at one end."""
        if self._mark:
            return most
        count = self._into.push(source, most)
        self._empty(count)
        self._dropped += count
        return count

    def _empty(self, count: int) -> None:
        """Discard `count` bytes that are in the pipe."""
        while count:
            count -= os.splice(self._pipe, self._null, count, flags=SPLICE_FLAGS)

    def take_dropped(self) -> int:
        """Return the bytes that no FIFO took since the last call."""
        dropped, self._dropped = self._dropped, 0
        return dropped

    def _copy(self) -> None:
        """Move the bytes in the pipe to all copies, until one is full."""
        while self._copied:
            takers = [fifo for fifo in self._takers() if fifo in self._ahead]
            for fifo in takers:
                if not self._ahead[fifo]:
                    self._tee(fifo)
            least = min((self._ahead[fifo] for fifo in takers if fifo.takes(self._group.epoch)), default=ALL)
            if not (least := min(least, self._copied)):
                return
            self._empty(least)
            self._copied -= least
            for fifo in takers:
                self._ahead[fifo] -= least

    def _tee(self, fifo: SharedFifo) -> None:
        """Give a copy the bytes from the start of the pipe on, as many as it takes."""
        if lead := min(fifo.lead, self._copied):
            fifo.lead -= lead
            self._ahead[fifo] = lead
            return
        with contextlib.suppress(BlockingIOError):
            self._ahead[fifo] = fifo.take(_Copied(self._pipe), self._copied)

    async def writable(self) -> None:
        """Wait for a FIFO that is full, and move what the pipe holds; see `Outlet`."""
        if self._into.refused:
            await self._into.writable()
            return
        full = [fifo for fifo in self._takers() if not self._copied or not self._ahead.get(fifo, 1)]
        if full:
            self._group.timer.block(full)
            await full[0].writable()
        if self._copied:
            self._copy()
        self._move_marks()

    def close(self) -> None:
        """Release the pipe; the FIFOs have other owners. See `Outlet`."""
        self._opened.close()


class _Copied:
    """Bytes in a pipe that stay there; a `Drainable`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def drain_into(self, fd: int, most: int = ALL) -> int:
        return tee(self._fd, fd, most)


class _EndMark:
    """The zeros of an end mark; a `Drainable`."""

    def drain_into(self, fd: int, most: int = ALL) -> int:
        return os.write(fd, END_MARK[:most])


_END_MARK = _EndMark()
