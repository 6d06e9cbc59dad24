"""Requests parts before delivery needs them; async shell of the window.

Each part in flight has one task in the caller's TaskGroup. There is no scheduler task and no queue: `start`
admits the parts that fit into the window, and is called after every event that may have freed memory (bytes
delivered, a request ended, an epoch dropped), and after an open plan has grown.

A part that fails for good does not stop the parts before it: its fetch keeps the error, and delivery raises
the error at the first missing byte. So an epoch fails at the exact byte, and a failed part of a later epoch
does not fail this one. An error of the plan itself, such as a changed record index, is kept likewise.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from streamer.aio import TaskGroup
from streamer.errors import GaveUp, SinkError, SourceChanged, SourceError
from streamer.plan import START, Part, Plan, Position, cut
from streamer.relay.fetch.hedger import Hedger
from streamer.relay.fetch.part_fetch import PartFetch
from streamer.relay.fetch.second_look import explained
from streamer.retry import RetryPolicy
from streamer.schedule.window import Slot, Window

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from streamer.relay.staging.stage import Stages
    from streamer.relay.statistics import ChannelCounters
    from streamer.s3.ranges import RangeSource


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """Plan to fetch, start position, and retry policy."""

    plan: Plan
    retry: RetryPolicy
    start: Position = START
    """Position at which the first epoch begins."""


def all_epochs(
    plan: Plan,
    part_size: Callable[[], int],
    start: Position = START,
    *,
    together: Callable[[], tuple[int, int]] = lambda: (0, 0),
    on_batch: Callable[[], None] = lambda: None,
) -> Iterator[Part | None]:
    """Yield the parts of all epochs from `start` on; none after the first if all are empty.

    While the plan is open and its next entry is unknown, yields None, and goes on later; `on_batch` is called
    before the parts of entries that have become known. `part_size`, `together`: as for `cut`.
    """
    epoch, skip = start.epoch, start.mark.fetched if plan.rewrites else start.offset
    while plan.has_epoch(epoch) and (plan.open or plan.streams):
        drawn = offset = 0
        while plan.open or drawn < plan.known:
            if drawn == plan.known:
                yield None
                continue
            if plan.open:
                on_batch()
            first, drawn = drawn, plan.known
            if skip and not first and not plan.open:
                offset, segments = plan.segments_near(epoch, skip)
                skip -= offset
            else:
                segments = plan.segments(epoch, first, drawn)
            for part in cut(
                segments, part_size=part_size, epoch=epoch, skip=skip, base=offset, together=together
            ):
                yield part
                offset = part.offset + part.size
            skip = 0
        epoch += 1


class Prefetcher:
    """Fetches a plan's parts before delivery needs them, within a window, across object and epoch borders."""

    def __init__(
        self,
        stream: StreamSpec,
        source: RangeSource,
        stages: Stages,
        *,
        counters: ChannelCounters,
        requests: TaskGroup,
        each_alone: bool = False,
        on_batch: Callable[[], None] = lambda: None,
        large_together: bool = False,
    ) -> None:
        """`requests` runs the tasks of parts; none starts before `allow`.

        `large_together`: a part may also be a few ranges with the bytes of a large part together. They
        wait in their sockets and not in pipes, so a slow reader keeps more connections: this is for a stream
        that has all requests to itself.
        `each_alone`: no part has ranges of two objects, and no object is inflated before its turn, because
        an object's checksum is compared when its last part is delivered.
        `on_batch`: as for `all_epochs`.
        """
        self.stream = stream
        self.counters = counters
        self.each_alone = each_alone
        self.quota = stages.quota
        self.quota.on_available = self.start
        many = min(source.together, stages.part_size())
        if stream.plan.rewrites or each_alone:
            many = 0

        def together() -> tuple[int, int]:
            return max(many, stages.part_size()) if large_together and many else many, many

        parts = all_epochs(stream.plan, stages.part_size, stream.start, together=together, on_batch=on_batch)
        self.window = Window(self._known(parts), stages.quota, reserved_bytes=stages.reserved_bytes)
        self.fetches: dict[Slot, PartFetch] = {}
        """Fetches of the admitted parts that are not delivered."""
        self.changed = asyncio.Event()
        """Set when the head of line gets bytes or an error, when it changes, or when the reader leaves."""
        self._ending: set[asyncio.Task[None]] = set()
        """Tasks of parts that are delivered or dropped, whose requests are still to be counted."""
        self._plan_error: SourceError | SinkError | None = None
        """Error of the plan, which ends the parts."""
        self.hedger = Hedger(self, source, quota=stages.quota, counters=counters, requests=requests)
        self._source = source
        self._stages = stages
        self._requests = requests

    def _known(self, parts: Iterator[Part | None]) -> Iterator[Part | None]:
        """Yield the parts before the first error of the plan, and keep that."""
        try:
            yield from parts
        except (SourceError, SinkError) as error:
            self._plan_error = error
            self.changed.set()

    def check_plan(self) -> None:
        """Raise the error of the plan, if the part to deliver next is the one that it does not have."""
        if self._plan_error is not None and self.window.dry:
            raise self._plan_error

    def allow(self, epoch: int) -> None:
        """Allow fetching of the epochs up to `epoch`."""
        self.window.last_epoch = max(self.window.last_epoch, epoch)
        self.start()

    def activate(self, *, active: bool) -> None:
        """Set whether the channel has a reader; the channel quota depends on it."""
        self.quota.activate(active=active)

    def wake(self) -> None:
        """Go on, because the reader may have left, or entries may have become known, or the listing ended."""
        self.start()
        self.changed.set()

    def start(self) -> None:
        """Request the parts that the window admits now."""
        while admitted := self.window.admit():
            for slot in admitted:
                self._stage(slot)
            if all(slot.part.requests for slot in admitted):
                break  # nothing has landed, so the window would refuse again

    async def retry_head(self, fetch: PartFetch) -> None:
        """Request the head of line again if its fetch gave up while delivery did not wait for it.

        Raises the fetch's error in all other cases. So an outage at night does not fail the epoch that a
        reader opens in the morning.
        """
        slot = self.window.head_of_line
        if isinstance(fetch.error, SourceChanged):
            ref, _ = fetch.stage.part.at(fetch.stage.received)
            raise await explained(fetch.error, ref, self.stream.plan, self._source)
        if slot is None or fetch.last_chance or not isinstance(fetch.error, GaveUp):
            raise fetch.error or RuntimeError("no failure to judge")
        fetch.last_chance, fetch.error = True, None
        self.window.relaunch(slot)
        self._launch(slot, fetch)

    def abandon(self, epoch: int) -> None:
        """Drop the rest of `epoch`: staged bytes, requests in flight, and parts not yet admitted."""
        self._drop(self.window.abandon(epoch))
        self.start()

    def delivered(self, slot: Slot) -> None:
        """Drop a part of which delivery has taken the last byte. Raises the SourceError of a tap."""
        fetch = self.fetches.pop(slot)
        fetch.stage.discard()
        if fetch.task is not None:
            self.ending(fetch.task)
        for tap in fetch.stage.taps:
            tap.delivered(slot.part)

    def ending(self, task: asyncio.Task[None]) -> None:
        """As `hedger.Owner`."""
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def settled(self) -> None:
        """Wait until the requests of all delivered and dropped parts are counted."""
        while self._ending:
            await asyncio.wait(self._ending)

    def close(self) -> None:
        """Drop all parts and cancel their requests; no further part is requested."""
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
                self.ending(fetch.task)

    def _stage(self, slot: Slot) -> None:
        """Make the stage of an admitted part, and request the part."""
        stage = self._stages.make(slot.part, on_change=self.changed.set, counters=self.counters)
        fetch = self.fetches[slot] = PartFetch(
            stage,
            self._source,
            policy=self.stream.retry,
            counters=self.counters,
            quota=self.quota,
            requests=slot.requests,
        )
        if slot.requests > 1:
            fetch.on_spare = partial(self._requests_ended, slot)
        if slot is self.window.head_of_line:
            self.changed.set()  # delivery may be waiting for a part to be admitted
        if slot.part.requests:
            self._launch(slot, fetch)
        else:
            self.window.landed(slot)  # only literals: nothing to request

    def _launch(self, slot: Slot, fetch: PartFetch) -> None:
        fetch.task = self._requests.create_task(self.bring(slot, fetch), name=fetch.name)

    async def bring(self, slot: Slot, fetch: PartFetch, failed: SourceError | None = None) -> None:
        """As `hedger.Owner`: fetch the missing rest of the part, or keep the final error."""
        try:
            await fetch.run(failed)
        except SourceError as error:
            fetch.error, stage = error, fetch.stage
            if fetch.waited_at == stage.proven:
                fetch.last_chance = True
            if stage.awaited:
                stage.awaited = False
                self.changed.set()
        self.landed(slot)

    def _requests_ended(self, slot: Slot, count: int) -> None:
        self.window.requests_ended(slot, count)
        self.start()

    def is_head(self, slot: Slot) -> bool:
        """As `hedger.Owner`."""
        return slot is self.window.head_of_line

    def replace(self, slot: Slot, task: asyncio.Task[None]) -> None:
        """As `hedger.Owner`."""
        fetch = self.fetches[slot]
        if fetch.task is not None:
            fetch.task.cancel()
            self.ending(fetch.task)
        fetch.task = task

    def request_ended(self) -> None:
        """As `hedger.Owner`."""
        self.start()

    def landed(self, slot: Slot) -> None:
        """As `hedger.Owner`: the part's last request has ended, with all bytes or with a final error."""
        self.hedger.forget(slot)
        if (fetch := self.fetches.get(slot)) is not None:
            fetch.task = None
        self.window.landed(slot)
        self.start()
