"""The window's async shell: requests for parts, ahead of delivery.

A request is a task in the caller's TaskGroup, one per part in flight. No scheduler task and no queue exist:
`start` admits what fits into the window, and is called after anything that may have freed memory (bytes
delivered, a request ended, an epoch dropped).

A part that fails for good does not stop the parts before it: its fetch keeps the error, and delivery raises
it at the first byte that is missing. So an epoch fails at the exact byte, and a later epoch's failure is its
own.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from streamer.errors import GaveUp, SourceError
from streamer.plan import START, Part, Plan, Position, Segment, cut
from streamer.relay.fetch.hedger import Hedger
from streamer.relay.fetch.part_fetch import PartFetch
from streamer.relay.staging.buffers import BufferStage
from streamer.retry import RetryPolicy
from streamer.schedule.window import Slot, Window

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from streamer.plan import ObjectRef
    from streamer.relay.staging.stage import Stages
    from streamer.relay.statistics import ChannelCounters
    from streamer.s3.checksums import ChecksumVerifier
    from streamer.s3.ranges import RangeSource


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """What is fetched, from where on, and how patiently."""

    plan: Plan
    retry: RetryPolicy
    start: Position = START
    """Where the first epoch begins."""


def all_epochs(plan: Plan, part_size: Callable[[], int], start: Position = START) -> Iterator[Part]:
    """Yield the parts of every epoch from `start` on, without end; none at all if no epoch can have bytes."""
    epoch, first = start.epoch, start.mark.fetched if plan.rewrites else start.offset
    while plan.streams:
        yield from cut(plan.segments(epoch), part_size=part_size, epoch=epoch, behind=first)
        epoch, first = epoch + 1, 0


class Prefetcher:
    """Fetches a plan's parts ahead of delivery, within a window, over object and epoch borders."""

    def __init__(
        self,
        stream: StreamSpec,
        source: RangeSource,
        stages: Stages,
        *,
        counters: ChannelCounters,
        requests: asyncio.TaskGroup,
        verifier: ChecksumVerifier | None = None,
    ) -> None:
        """Nothing is requested before `allow`; tasks are started in `requests`.

        `verifier`: compares whole objects with their checksums; it is given what leaves a stage.
        """
        self.stream = stream
        self.counters = counters
        self.verifier = verifier
        self.quota = stages.quota
        self.quota.on_available = self.start
        self.window = Window(
            all_epochs(stream.plan, stages.part_size, stream.start),
            stages.quota,
            reserved_bytes=stages.reserved_bytes,
        )
        self.fetches: dict[Slot, PartFetch] = {}
        """Every admitted part that is not delivered yet."""
        self.changed = asyncio.Event()
        """Set when the head of line has bytes or an error, is another part, or the reader has gone."""
        self.hedger = Hedger(self, source, quota=stages.quota, counters=counters, requests=requests)
        self._source = source
        self._stages = stages
        self._requests = requests

    def allow(self, epoch: int) -> None:
        """Let parts of epochs up to `epoch` be fetched from now on."""
        self.window.last_epoch = max(self.window.last_epoch, epoch)
        self.start()

    def activate(self, *, active: bool) -> None:
        """Set whether a reader is there: the channel's quota of memory and requests depends on it."""
        self.quota.activate(active=active)

    def wake(self) -> None:
        """Have a waiting delivery look again: its reader may have gone."""
        self.changed.set()

    def start(self) -> None:
        """Request all parts that the window admits now."""
        head = self.window.head_of_line
        if head is not None and not head.in_flight and head not in self.fetches:
            self.window.relaunch(head)  # the next part of a replacement
            self._stage(head)
        while admitted := self.window.admit():
            for slot in admitted:
                self._stage(slot)

    def retry_head(self, fetch: PartFetch) -> None:
        """Request the head of line again if it was given up while nobody waited for it.

        Raises any other failure. An outage in the night must not fail the epoch that a reader opens in the
        morning.
        """
        slot = self.window.head_of_line
        if slot is None or fetch.last_chance or not isinstance(fetch.error, GaveUp):
            raise fetch.error or RuntimeError("no failure to judge")
        fetch.last_chance, fetch.error = True, None
        self.window.relaunch(slot)
        self._launch(slot, fetch)

    def replace_head(self, part: Part, now: ObjectRef | None) -> int:
        """Drop the object at the head of line, whose part is `part`; return its bytes in the plan.

        `now` is fetched in its place, if it has any bytes. The caller calls `start` when its own counts are
        right.
        """
        parts: Iterator[Part] = iter(())
        reserved_bytes = 0
        if now and now.size:
            # Whatever the size of the old one, so that much is not asked for in little pieces.
            size = min(now.size, max(part.body, self._stages.part_size()))
            parts = cut([Segment(now, 0, now.size)], part_size=lambda: size, epoch=part.epoch)
            reserved_bytes = self._stages.reserved_bytes(Part(part.epoch, now, 0, size, 0))
        replaced, dropped = self.window.replace_head(parts, reserved_bytes=reserved_bytes)
        self._drop(dropped)
        return replaced

    def abandon(self, epoch: int) -> None:
        """Drop what is left of `epoch`: its bytes, its requests, its parts to come."""
        self._drop(self.window.abandon(epoch))
        self.start()

    def close(self) -> None:
        """Drop everything; nothing is requested any more."""
        self.quota.on_available = None
        self.quota.activate(active=False)
        self.hedger.close()
        self._drop(self.window.close())

    def _drop(self, slots: list[Slot]) -> None:
        for slot in slots:
            fetch = self.fetches.pop(slot)
            self.counters.wasted_bytes += fetch.stage.staged
            fetch.stage.discard()
            self.hedger.forget(slot)
            if fetch.task is not None:
                fetch.task.cancel()

    def _stage(self, slot: Slot) -> None:
        """Make a stage for an admitted part, and request it."""
        stage = self._stages.make(slot.part, on_change=self.changed.set, counters=self.counters)
        if self.verifier is not None and isinstance(stage, BufferStage):
            stage.on_leave = partial(self.verifier.update, slot.part)
        fetch = self.fetches[slot] = PartFetch(
            stage, self._source, policy=self.stream.retry, counters=self.counters, quota=self.quota
        )
        if slot is self.window.head_of_line:
            self.changed.set()  # a delivery may be waiting for want of any part at all
        if slot.part.body:
            self._launch(slot, fetch)
        else:
            self.window.landed(slot)  # literals alone: nothing to request, so no request

    def _launch(self, slot: Slot, fetch: PartFetch) -> None:
        name = f"GET {slot.part.object.key} {slot.part.start}-{slot.part.end}"
        fetch.task = self._requests.create_task(self.bring(slot, fetch), name=name)

    async def bring(self, slot: Slot, fetch: PartFetch, failed: SourceError | None = None) -> None:
        """As of `hedger.Owner`: bring what is missing of the part, or note why it cannot be had."""
        try:
            await fetch.run(failed)
        except SourceError as error:
            fetch.error, stage = error, fetch.stage
            if stage.awaited:
                fetch.last_chance, stage.awaited = True, False
                self.changed.set()
        self.landed(slot)

    def is_head(self, slot: Slot) -> bool:
        """As of `hedger.Owner`."""
        return slot is self.window.head_of_line

    def replace(self, slot: Slot, task: asyncio.Task[None]) -> None:
        """As of `hedger.Owner`."""
        fetch = self.fetches[slot]
        if fetch.task is not None:
            fetch.task.cancel()
        fetch.task = task

    def request_ended(self) -> None:
        """As of `hedger.Owner`."""
        self.start()

    def landed(self, slot: Slot) -> None:
        """As of `hedger.Owner`: the part's request has ended, with all its bytes or for good."""
        self.hedger.forget(slot)
        if (fetch := self.fetches.get(slot)) is not None:
            fetch.task = None
        self.window.landed(slot)
        self.start()
