"""Delivers epochs: moves the parts of a prefetcher into an outlet, in order.

Delivery is one coroutine, and all decisions are made between its awaits. An epoch fails at its first missing
byte (`streamer.relay.fetch.prefetcher`). While the plan is open, the epoch has no end: delivery waits for the
listing after the last known byte, and raises there the error of a listing that has failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from streamer.errors import ReaderGone
from streamer.plan import Position, ResumePoint
from streamer.relay.deliver.epoch_writer import EpochWriter
from streamer.relay.deliver.object_ends import ObjectEnds, ResumePoints
from streamer.relay.deliver.taking import LESS_TAKEN, MOST_TAKEN, Taking
from streamer.relay.deliver.transform_runner import TransformRunner
from streamer.relay.deliver.wrap import transform_of
from streamer.relay.staging.stage import LEAST, TURN

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamer.plan.parts import Part
    from streamer.relay.deliver.object_ends import KeyList
    from streamer.relay.fetch.part_fetch import PartFetch
    from streamer.relay.fetch.prefetcher import Prefetcher
    from streamer.sink.outlet import Outlet

LONGEST_PAUSE = 0.5
"""Maximum seconds between two checks of a bandwidth limit, since it may change."""


class Delivery:
    """Moves the parts of `prefetcher` into outlets, one epoch at a time."""

    def __init__(
        self,
        prefetcher: Prefetcher,
        *,
        on_resume_point: Callable[[ResumePoint], None] | None = None,
    ) -> None:
        """`on_resume_point` is called with the start of an inflated or joined object (`ResumePoints`)."""
        self.prefetcher = prefetcher
        self.fetched = prefetcher.counters
        """Counters of the requests and parts."""
        self.settled, self.wake, self.close = prefetcher.settled, prefetcher.wake, prefetcher.close
        self._total: int | None = None
        """Bytes of the current epoch in the plan; None while the plan is open."""
        self.ends = ObjectEnds()
        self._plan = prefetcher.stream.plan
        self._first = prefetcher.stream.start
        self._window = prefetcher.window
        self._fetches = prefetcher.fetches
        self._quota = prefetcher.quota
        self._counters = prefetcher.counters
        self._changed = prefetcher.changed
        self._hedger = prefetcher.hedger
        self._taking: Taking | None = None
        """Bytes of the current or last epoch that are transformed; None if bytes are spliced or copied."""
        self._points = None if on_resume_point is None else ResumePoints(self._first, on_resume_point)
        self._ahead = self._quota.ahead if self._plan.inflate and not prefetcher.each_alone else 0
        """Bytes in which objects are inflated ahead of their turn."""
        self._keys: KeyList | None = None
        """Key list of the current epoch."""
        self._rewind(self._first)

    def _start(self, epoch: int) -> Position:
        return self._first if epoch == self._first.epoch else Position(epoch)

    def _rewind(self, start: Position) -> None:
        self.delivered = start.offset
        """Offset in the epoch's stream: bytes accepted by the outlet, plus bytes skipped by a resume."""
        self.consumed = start.mark.fetched if self._plan.rewrites else start.offset
        """Offset in the plan; equal to `delivered` unless objects are rewritten."""

    def begin(self, epoch: int) -> None:
        """Begin to fetch `epoch`; set the counts to its start position."""
        self._rewind(self._start(epoch))
        self.ends.clear()
        self.prefetcher.allow(epoch)

    async def deliver(
        self, epoch: int, outlet: Outlet, keys: KeyList | None = None, *, next_too: bool = True
    ) -> None:
        """Move all bytes of `epoch` into `outlet`.

        `keys`: the epoch's key list. `next_too`: fetch the epoch after it meanwhile.
        Raises ReaderGone if the outlet's reader closes before the last byte, SourceError if a part cannot be
        fetched or an object does not match its checksum; `delivered` is then the offset of the next byte.
        """
        self._keys = keys
        self.prefetcher.activate(active=True)
        self.prefetcher.allow(epoch + next_too)
        taking = self._taking = self._transforming(epoch, outlet) if self._plan.rewrites else None
        if taking is None:
            await self._deliver(epoch, outlet, None)
            return
        async with contextlib.aclosing(taking.runner):
            await self._deliver(epoch, outlet, taking)
            await taking.runner.finish()

    def _transforming(self, epoch: int, outlet: Outlet) -> Taking:
        writer = EpochWriter(
            outlet,
            timer=self._counters.timer,
            account=self._written,
            again=self.delivered - self._start(epoch).mark.streamed,
        )
        transform = transform_of(self._plan, outlet)
        runner = TransformRunner(writer, transform, inflate=self._plan.inflate, ahead=self._ahead)
        return Taking(self._window, self._fetches, runner)

    async def _deliver(self, epoch: int, outlet: Outlet, taking: Taking | None) -> None:
        timer = self._counters.timer
        self._total = self._plan.known_bytes(epoch)
        left = TURN
        # Bytes that the outlet holds count as delivered, and are not in every FIFO yet.
        while outlet.holding or not self._at_end(epoch):
            if left <= 0:  # other channels run, and this one's sockets are looked at
                left = TURN
                await asyncio.sleep(0)
                continue  # the listing may have ended, which `_wait` would not hear of any more
            # First: a channel whose storage is silent must notice that its reader has left, too.
            if outlet.reader_gone:
                raise ReaderGone("the reader closed the pipe")
            if outlet.holding:  # no further byte before these, which are earlier in the stream
                timer.enter("blocked")
                await outlet.writable()
                continue
            fetch = self._head_fetch(epoch)
            if fetch is None or not (fetch.stage.ready or taking):
                await self._wait(fetch)
                continue
            # After the wait: a limit does not count while storage is what the channel waits for.
            if self._quota.limited and (seconds := self._quota.wait(time.monotonic())):
                timer.enter("limited")
                await self._pause(seconds)
                continue
            timer.enter("moving")
            if taking is not None:
                left -= max(LEAST, await self._transform(taking, outlet))
                continue
            # The line of an object is in the key list before the object's first byte is in the FIFO.
            if (
                self._keys is not None
                and (slot := self._window.head_of_line) is not None
                and not self._lists(self._keys, slot.part.size - slot.delivered, self.delivered)
            ):
                timer.enter("blocked")
                await self._keys.writable(outlet)
                continue
            try:
                count = outlet.push(fetch.stage)
            except BlockingIOError:
                timer.enter("blocked")
                await outlet.writable()
                continue
            if count:  # 0: the socket is empty after all, so the next turn waits
                self._account(count)
                left -= max(LEAST, count)

    def _at_end(self, epoch: int) -> bool:
        """Return whether every byte of the epoch is delivered, and its plan has no further entry."""
        # Looked at again before the head of line, which may be of the next epoch.
        if self._total is None:
            self._total = self._plan.known_bytes(epoch)
        return self._total is not None and self.consumed >= self._total

    async def _wait(self, fetch: PartFetch | None) -> None:
        """Wait for the head of line, or for the listing if every known byte is delivered.

        Waits first for the bytes that are being inflated: they do not wait with those that have not arrived.
        Raises the error of the part, of the plan, or of the listing.
        """
        if self._taking is not None and self._taking.runner.busy:
            await self._taking.runner.settle()
            return
        timer = self._counters.timer
        if fetch is None:
            self.prefetcher.check_plan()
        elif fetch.error is not None:
            await self.prefetcher.retry_head(fetch)
        if fetch is None and self._total is None and self._window.dry:
            growth = self._plan.growth
            if growth is not None and growth.error is not None:
                raise growth.error
            timer.starve("listing")
            await self._news(None)
            return
        timer.starve("queued" if fetch is None else fetch.phase)
        if fetch is not None and self._window.head_of_line is not None:
            self._hedger.starving(self._window.head_of_line, fetch)
        since = time.monotonic()
        await self._news(fetch)
        waited = time.monotonic() - since
        self._counters.head_wait.add(waited)
        self._quota.starved(waited)

    def abandon(self, epoch: int) -> None:
        """End `epoch`: drop its staged bytes, requests in flight, and parts not yet admitted."""
        self.prefetcher.activate(active=False)
        slot = self._window.head_of_line
        if slot is not None and slot.part.epoch == epoch and self._taking is None:
            self._note_ends(slot.part, self.delivered - slot.delivered)
        if self._taking is not None:
            self._counters.wasted_bytes += self._taking.drop()
        self.prefetcher.abandon(epoch)

    async def _transform(self, taking: Taking, outlet: Outlet) -> int:
        """Move some bytes of the head of line through their transform into `outlet`; return how many."""
        limited = self._quota.limited
        most = LESS_TAKEN if limited or (self._plan.inflate and not self._ahead) else MOST_TAKEN
        if (piece := taking.take(most, ahead=not limited)) is None:
            return 0  # the socket is empty
        slot, data = piece.slot, piece.data
        points = self._points
        if points is not None and piece.begins_object:
            points.reach(slot.part.epoch, ResumePoint(self.consumed, self.delivered))
        if (keys := self._keys) is not None:
            while not self._lists(keys, len(data), self.delivered - taking.runner.writer.again):
                await keys.writable(outlet)
        await taking.runner.pass_on(piece.item, piece.place, data)
        if limited:
            await taking.runner.settle()  # the limit is of delivered bytes
        self._consumed(len(data))
        return len(data)

    def _lists(self, keys: KeyList, count: int, delivered: int) -> bool:
        """List the objects that begin in the next `count` bytes; return False if the machine refuses."""
        try:
            keys.reach(self.consumed, count, delivered)
        except BlockingIOError:
            return False
        return True

    async def _pause(self, seconds: float) -> None:
        """Wait at most `seconds` or LONGEST_PAUSE for a bandwidth limit, less if `changed` is set."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(seconds, LONGEST_PAUSE)):
                await self._changed.wait()

    async def _news(self, fetch: PartFetch | None) -> None:
        """Wait until the head of line has bytes or an error, or changes, or the reader leaves."""
        self._changed.clear()
        if fetch is not None:
            fetch.stage.awaited, fetch.waited_at = True, fetch.stage.proven
            fetch.on_phase = self._counters.timer.because
        await self._changed.wait()

    def _head_fetch(self, epoch: int) -> PartFetch | None:
        """Return the fetch of the head of line, or None. Raises RuntimeError if another byte is due."""
        slot = self._window.head_of_line
        if slot is None:
            return None
        if (slot.part.epoch, slot.part.offset + slot.delivered) != (epoch, self.consumed):
            raise RuntimeError(f"head of line is {slot}, but byte {self.consumed} of epoch {epoch} is due")
        return self._fetches[slot]

    def _account(self, count: int) -> None:
        self._written(count)
        self._consumed(count)

    def _written(self, count: int) -> None:
        self.delivered += count
        self._counters.written_bytes += count
        if self._quota.limited:
            self._quota.sent(count, time.monotonic())

    def _consumed(self, count: int) -> None:
        self._counters.consumed_bytes += count
        self.consumed += count
        begun = self._window.begun
        done = self._window.deliver(count)
        if done is None and not begun:
            self.prefetcher.start()
        if done is not None:
            if self._taking is not None:
                self._taking.part_delivered()
            self._note_ends(done.part, self.delivered - done.part.size)
            self._changed.set()
            # After all counts, because a tap may find a fault in an object that has been delivered.
            self.prefetcher.delivered(done)
            self.prefetcher.start()

    def _note_ends(self, part: Part, first: int) -> None:
        """Count and remember the objects that end in delivered bytes of `part`, which begins at `first`."""
        for end, size in part.ends():
            if first + end <= self.delivered:
                self._counters.objects_completed += 1
                self.ends.add(first + end, size)
