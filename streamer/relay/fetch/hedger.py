"""Sends a second request for a late head of line; async shell of `streamer.schedule.hedging`.

    first request    its body ──────────────→ stage      until the second body has more; then it is cancelled
    second request   its body → `Successor` → stage      another connection and address

The second body takes over at the first byte that the stage lacks (`successor`). Then the first body is
detached, so none of its bytes reach the stage any more. A second request that fails before it takes over, or
that differs from what the stage has, is dropped; one that fails later is retried like any other.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Protocol

from streamer.aio import TaskGroup
from streamer.errors import SourceError
from streamer.relay.fetch.successor import Successor
from streamer.s3.client.doubt import overlap
from streamer.s3.ranges import RangeRequest
from streamer.schedule.hedging import HeadSample

if TYPE_CHECKING:
    from streamer.relay.fetch.part_fetch import PartFetch
    from streamer.relay.statistics import ChannelCounters
    from streamer.s3.ranges import RangeSource
    from streamer.schedule.budget import ChannelQuota
    from streamer.schedule.window import Slot

WAITS = ("credentials", "throttled", "retry")
"""Phases in which no request has been sent: a second request would do no better than the awaited one."""


class Owner(Protocol):
    """Owner of the slots and of their tasks: the prefetcher."""

    def is_head(self, slot: Slot) -> bool:
        """Return whether the slot is still the head of line."""

    def landed(self, slot: Slot) -> None:
        """Note that the second request has taken over and brought the rest of the part."""

    async def bring(self, slot: Slot, fetch: PartFetch, failed: SourceError | None = None) -> None:
        """Fetch the rest of the part. `failed`: error of the second request after it took over."""

    def replace(self, slot: Slot, task: asyncio.Task[None]) -> None:
        """Cancel the task of the slot's first request, and make `task` the slot's task."""

    def request_ended(self) -> None:
        """Note that a second request has ended, with or without success."""

    def ending(self, task: asyncio.Task[None]) -> None:
        """Note that the requests of this task end without a further byte."""


class Hedger:
    """Second requests of one channel: at most one for a part at a time."""

    def __init__(
        self,
        owner: Owner,
        source: RangeSource,
        *,
        quota: ChannelQuota,
        counters: ChannelCounters,
        requests: TaskGroup,
    ) -> None:
        self._owner = owner
        self._source = source
        self._quota = quota
        self._counters = counters
        self._requests = requests
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._awaited: tuple[Slot, PartFetch] | None = None
        """Part for which delivery last began to wait."""
        self._tasks: dict[Slot, asyncio.Task[None]] = {}

    def starving(self, slot: Slot, fetch: PartFetch) -> None:
        """Note that delivery begins to wait for this head of line; start to watch it."""
        self._awaited = (slot, fetch)
        if self._timer is None and self._quota.hedging.enabled and slot.part.requests:
            self._look_later(slot, fetch)

    def _look_later(self, slot: Slot, fetch: PartFetch) -> None:
        self._timer = self._loop.call_later(
            self._quota.hedging.patience, self._look, slot, fetch, self._seen(slot)
        )

    def _seen(self, slot: Slot) -> HeadSample:
        return HeadSample(time.monotonic(), slot.delivered, self._counters.timer.seconds()["starved"])

    def _look(self, slot: Slot, fetch: PartFetch, before: HeadSample) -> None:
        self._timer = None
        if not self._owner.is_head(slot) and self._awaited is not None:
            slot, fetch = self._awaited
            if self._owner.is_head(slot) and slot.part.requests:
                self._look_later(slot, fetch)
            return
        stage = fetch.stage
        missing = slot.part.size - stage.received
        if not missing:
            return
        asked = fetch.request is not None and fetch.phase not in WAITS
        if (
            asked
            and not stage.ready
            and slot not in self._tasks
            and not self._quota.concurrency.slowed
            and self._quota.hedging.worth(before, self._seen(slot), missing)
        ):
            name = f"{fetch.name}, again from byte {stage.received}"
            self._tasks[slot] = self._requests.create_task(self._ask(slot, fetch), name=name)
        self._look_later(slot, fetch)

    async def _ask(self, slot: Slot, fetch: PartFetch) -> None:
        """Send the second request; return when it has lost or the part is complete."""
        stage, counters = fetch.stage, self._counters
        counters.counts["hedges"]["issued"] += 1
        at = stage.received - overlap(stage.in_doubt, 0)
        avoid = fetch.request.peer if fetch.request is not None else None
        request = RangeRequest(
            slot.part,
            at,
            attempt=2,
            avoid=avoid,
            requests=slot.requests,
            on_request_ended=fetch.note_request,
            on_whole=stage.on_whole,
        )
        hedge: Successor | None = None
        failed: SourceError | None = None
        self._quota.begin()
        try:
            body = await self._source.open(request)
            hedge = Successor(body, stage, at, on_won=lambda: self._won(slot, fetch, request))
            await fetch.receive(body, hedge.advance)
        except SourceError as error:
            failed = error
        finally:
            self._quota.end()
            if hedge is not None:
                counters.wasted_bytes += hedge.thrown_away
            if hedge is None or not hedge.won:
                self._tasks.pop(slot, None)
                counters.counts["hedges"]["lost"] += 1
            self._owner.request_ended()
        if hedge is None or not hedge.won:
            return  # the first request goes on in any case
        if failed is not None:
            await self._owner.bring(slot, fetch, failed)
        else:
            self._owner.landed(slot)

    def _won(self, slot: Slot, fetch: PartFetch, request: RangeRequest) -> None:
        self._counters.counts["hedges"]["won"] += 1
        self._owner.replace(slot, self._tasks.pop(slot))
        fetch.request = request
        fetch.enter("body")

    def forget(self, slot: Slot) -> None:
        """Cancel the slot's second request: the first has ended, or the slot is dropped."""
        if task := self._tasks.pop(slot, None):
            task.cancel()
            self._owner.ending(task)

    def close(self) -> None:
        """Stop watching; second requests are cancelled with their slots."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._awaited = None
