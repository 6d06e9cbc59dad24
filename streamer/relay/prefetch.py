"""The window's async shell: requests ahead, delivery in order.

A request is a task in the caller's TaskGroup, one per part in flight. Delivery is one coroutine, and
all decisions are made between its awaits: after anything that may have freed room (bytes delivered, a
request ended, an epoch dropped) `_start` admits what fits now. There is no scheduler task and no queue.

A part that fails for good does not stop the parts before it: its stage keeps the error, and delivery
raises it on reaching the first byte that is missing. So an epoch fails at the exact byte, and a later
epoch's failure is its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from streamer.errors import GaveUp, ReaderGone, SourceError
from streamer.plan import Plan, cut
from streamer.relay.retry import RetryPolicy, fetch_part
from streamer.relay.stages import MemoryStage, Stage, Stages
from streamer.relay.unpack import MOST_TAKEN, Unpacker
from streamer.relay.window import Slot, Window

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from streamer.plan import Part
    from streamer.relay.statistics import Tally
    from streamer.sink.outlet import Outlet
    from streamer.source.ranges import RangeSource

LONGEST_PAUSE = 0.5
"""Seconds until a limit of bandwidth is looked at again: it may be another by then."""


def all_epochs(plan: Plan, part_size: Callable[[], int]) -> Iterator[Part]:
    """The parts of every epoch from 0 on, without end; none at all if no epoch can have bytes."""
    epoch = 0
    while plan.streams:
        yield from cut(plan.segments(epoch), part_size=part_size, epoch=epoch)
        epoch += 1


class Prefetcher:
    """Fetches a plan's parts ahead of delivery, within a window, over object and epoch borders."""

    def __init__(
        self,
        plan: Plan,
        source: RangeSource,
        *,
        stages: Stages,
        tally: Tally,
        requests: asyncio.TaskGroup,
        policy: RetryPolicy,
    ) -> None:
        """Nothing is requested before `allow`; tasks are started in `requests`."""
        self._plan = plan
        self._source = source
        self._share = stages.share
        self._share.on_room = self._start
        self._window = Window(all_epochs(plan, stages.part_size), stages.share, room=stages.room)
        self._tally = tally
        self._requests = requests
        self._policy = policy
        self._supply = stages
        self._stages: dict[Slot, Stage] = {}
        self._tasks: dict[Slot, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self.delivered = 0
        """Bytes of the epoch being delivered that its outlet has accepted."""
        self.consumed = 0
        """Bytes of the epoch's parts that are delivered: `delivered`, unless objects are inflated."""

    def allow(self, epoch: int) -> None:
        """Parts of epochs up to `epoch` may be fetched from now on."""
        self._window.last_epoch = max(self._window.last_epoch, epoch)
        self._start()

    def activate(self, *, active: bool) -> None:
        """The reader is there, or not: its channel's share of room and lanes depends on it."""
        self._share.activate(active=active)

    def wake(self) -> None:
        """Have a waiting delivery look again: its reader may have gone."""
        self._changed.set()

    async def deliver(self, epoch: int, outlet: Outlet) -> None:
        """Move all bytes of `epoch` into `outlet`.

        Raises ReaderGone if the outlet's reader closes before the last byte, SourceError if a part
        cannot be had. `delivered` then tells how far it came.
        """
        self.delivered = self.consumed = 0
        with contextlib.ExitStack() as stack:
            unpacker = None
            if self._plan.inflate:
                unpacker = Unpacker(
                    outlet, wrap=self._plan.entries.wrap, watch=self._tally.watch, account=self._written
                )
                stack.callback(unpacker.close)
            await self._deliver(epoch, outlet, unpacker)

    async def _deliver(self, epoch: int, outlet: Outlet, unpacker: Unpacker | None) -> None:
        watch, total = self._tally.watch, self._plan.total_bytes(epoch)
        while self.consumed < total:
            stage = self._head_stage(epoch)
            if outlet.reader_gone:
                raise ReaderGone("the reader closed the pipe")
            if stage is None or not stage.staged:
                if stage is not None and stage.error is not None:
                    self._second_chance(stage)
                watch.starve("queued" if stage is None else stage.phase)
                since = time.monotonic()
                await self._news(stage, outlet)
                waited = time.monotonic() - since
                self._tally.head_wait.add(waited)
                self._share.starved(waited)
                continue
            if self._share.limited and (seconds := self._share.wait(time.monotonic())):
                watch.enter("limited")
                await self._pause(seconds)
                continue
            watch.enter("moving")
            if unpacker is not None:
                await self._unpack(stage, unpacker)
                continue
            try:
                count = outlet.push(stage)
            except BlockingIOError:
                watch.enter("blocked")
                await outlet.writable()
                continue
            self._account(count)
            await asyncio.sleep(0)  # yield to sockets and other channels between writes

    async def _unpack(self, stage: Stage, unpacker: Unpacker) -> None:
        """Move some of the head of line through `unpacker`."""
        slot = self._window.head
        if slot is None or not isinstance(stage, MemoryStage):
            raise RuntimeError("what is inflated must be in memory: open the transport with inflate=True")
        data = stage.take(MOST_TAKEN)
        await unpacker.pass_on(slot.part, slot.delivered, data)
        self._consumed(len(data))
        await asyncio.sleep(0)

    def _second_chance(self, stage: Stage) -> None:
        """Ask again for a part that was given up while nobody waited for it; raise any other failure.

        An outage in the night must not fail the epoch that a reader opens in the morning.
        """
        slot = self._window.head
        if slot is None or stage.final or not isinstance(stage.error, GaveUp):
            raise stage.error or RuntimeError("no failure to judge")
        stage.final, stage.error = True, None
        self._window.relaunch(slot)
        self._launch(slot, stage)

    async def _pause(self, seconds: float) -> None:
        """Wait as a limit of bandwidth asks, but not beyond the next change of it or of the reader."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(seconds, LONGEST_PAUSE)):
                await self._changed.wait()

    async def _news(self, stage: Stage | None, outlet: Outlet) -> None:
        """Wait until the head of line has bytes or an error, is another, or the reader has gone."""
        self._changed.clear()
        if stage is not None:
            stage.awaited = True
            stage.on_phase = self._tally.watch.because
            if self._share.limited:
                stage.deliver_in_turn()
            else:
                stage.deliver_directly(outlet, self._passed)
        await self._changed.wait()

    def _head_stage(self, epoch: int) -> Stage | None:
        """The stage whose bytes come next, proven to be at this place of the stream."""
        slot = self._window.head
        if slot is None:
            return None
        if (slot.part.epoch, slot.part.offset + slot.delivered) != (epoch, self.consumed):
            raise RuntimeError(f"head of line is {slot}, but byte {self.consumed} of epoch {epoch} is due")
        return self._stages[slot]

    def _passed(self, count: int) -> None:
        """Bytes have gone from a socket to the outlet; no more shall once there is a limit of bandwidth."""
        self._account(count)
        if self._share.limited:
            self._changed.set()

    def _account(self, count: int) -> None:
        self._written(count)
        self._consumed(count)

    def _written(self, count: int) -> None:
        self.delivered += count
        self._tally.written_bytes += count
        if self._share.limited:
            self._share.sent(count, time.monotonic())

    def _consumed(self, count: int) -> None:
        self.consumed += count
        self._tally.consumed_bytes += count
        done = self._window.deliver(count)
        if done is not None:
            self._stages.pop(done).discard()
            self._tally.objects_completed += done.part.ends_object
            self._changed.set()
            self._start()

    def abandon(self, epoch: int) -> None:
        """Drop what is left of `epoch`: its bytes, its requests, its parts to come."""
        self._drop(self._window.abandon(epoch))
        self._start()

    def close(self) -> None:
        """Drop everything; nothing is requested any more."""
        self._share.on_room = None
        self._share.activate(active=False)
        self._drop(self._window.close())

    def _drop(self, slots: list[Slot]) -> None:
        for slot in slots:
            stage = self._stages.pop(slot)
            self._tally.wasted_bytes += stage.staged
            stage.discard()
            if task := self._tasks.pop(slot, None):
                task.cancel()

    def _start(self) -> None:
        while admitted := self._window.admit():
            for slot in admitted:
                stage = self._supply.make(
                    slot.part, on_change=self._changed.set, first_byte=self._tally.first_byte
                )
                self._stages[slot] = stage
                if slot is self._window.head:
                    self._changed.set()  # a delivery may be waiting for want of any part at all
                if slot.part.body:
                    self._launch(slot, stage)
                else:
                    self._window.landed(slot)  # literals alone: nothing to request, so no lane

    def _launch(self, slot: Slot, stage: Stage) -> None:
        name = f"GET {slot.part.object.key} {slot.part.start}-{slot.part.end}"
        self._tasks[slot] = self._requests.create_task(self._fetch(slot, stage), name=name)

    async def _fetch(self, slot: Slot, stage: Stage) -> None:
        try:
            await fetch_part(self._source, stage, self._policy, self._tally, self._share.pace)
        except SourceError as error:
            stage.fail(error)
        self._tasks.pop(slot, None)
        self._window.landed(slot)
        self._start()
