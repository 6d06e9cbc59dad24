"""One epoch of a plan into one outlet: what `penstock cat` does."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from streamer.relay.prefetch import Prefetcher, all_epochs
from streamer.relay.window import Window

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamer.plan import Plan
    from streamer.relay.channel import ChannelLimits
    from streamer.relay.stages import Stages
    from streamer.relay.statistics import Tally
    from streamer.sink.outlet import Outlet
    from streamer.source.ranges import RangeSource


async def stream_once(
    plan: Plan,
    source: RangeSource,
    stages: Stages,
    *,
    limits: ChannelLimits,
    tally: Tally,
    open_outlet: Callable[[Callable[[], None]], Outlet],
) -> None:
    """Stream the plan once, in order. `open_outlet` is given what to call when the reader goes.

    Raises SourceError or ReaderGone; `tally.written_bytes` tells how far it came.
    """
    window = Window(
        all_epochs(plan, limits.part_size), budget=stages.budget, lanes=limits.connections, room=stages.room
    )
    failure: BaseException | None = None
    async with asyncio.TaskGroup() as requests:
        prefetcher = Prefetcher(
            plan, source, stages=stages, window=window, tally=tally, requests=requests, policy=limits.policy
        )
        outlet = open_outlet(prefetcher.wake)
        try:
            prefetcher.allow(0)
            await prefetcher.deliver(0, outlet)
        except Exception as error:  # noqa: BLE001 - raised below, bare instead of in a group
            failure = error
        finally:
            prefetcher.close()
            outlet.close()
    if failure is not None:
        raise failure
