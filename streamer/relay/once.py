"""Streams one epoch of a plan into one outlet, for `penstock cat` and File channels."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from streamer.aio import task_group
from streamer.plan import START
from streamer.relay.deliver.delivery import Delivery
from streamer.relay.fetch.prefetcher import Prefetcher, StreamSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from streamer.plan import Plan, Position
    from streamer.relay.staging.stage import Stages
    from streamer.relay.statistics import ChannelCounters
    from streamer.retry import RetryPolicy
    from streamer.s3.ranges import RangeSource
    from streamer.sink.outlet import Outlet


async def stream_once(
    plan: Plan,
    source: RangeSource,
    stages: Stages,
    *,
    policy: RetryPolicy,
    counters: ChannelCounters,
    open_outlet: Callable[[Callable[[], None]], Outlet],
    start: Position = START,
    listing: Coroutine[Any, Any, None] | None = None,
) -> None:
    """Stream the plan's first epoch once from `start` on, in order.

    `listing` runs meanwhile and extends the plan, if that is open.
    `open_outlet` opens the outlet; its argument is a callback for the reader's departure. Raises SourceError
    or ReaderGone; `counters.written_bytes` then has the bytes written before the error.
    """
    async with task_group() as requests:
        listed = None if listing is None else requests.create_task(listing, name="listing")
        prefetcher = Prefetcher(
            StreamSpec(plan, policy, start),
            source,
            stages,
            counters=counters,
            requests=requests,
        )
        if plan.growth is not None:
            plan.growth.watch(prefetcher.wake)
        try:
            with contextlib.closing(open_outlet(prefetcher.wake)) as outlet:
                await Delivery(prefetcher).deliver(0, outlet, next_too=False)
        finally:
            if listed is not None:
                listed.cancel()
            prefetcher.close()
