"""Publishes an epoch's failure to its readers: first in the trailer, then through the FIFO.

The trailer becomes `failed` before the FIFO is touched, so a reader that sees an end of file finds the reason
in the trailer. While this machine refuses to write a trailer or to make the next FIFO, the FIFO stays open.
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from streamer.aio import first_of
from streamer.errors import ReaderGone, Shortage, SinkError
from streamer.relay.channel_state import ChannelFailure, fifo_fate
from streamer.relay.epoch_trailers import last_trailer, successor_trailer
from streamer.retry import retry_while_refused

if TYPE_CHECKING:
    import asyncio

    from streamer.errors import SourceError
    from streamer.relay.channel_spec import ChannelSpec
    from streamer.relay.channel_state import ChannelState
    from streamer.sink.fifo import FifoDirectory


async def fail_epoch(
    spec: ChannelSpec,
    state: ChannelState,
    fifos: FifoDirectory,
    error: SourceError | SinkError,
    *,
    draining: asyncio.Event,
    next_known: bool,
) -> None:
    """Publish the failure of the current epoch, hold or end its FIFO by the policy, and wait for a drain.

    `next_known`: the next epoch's trailer needs no computation.
    """
    outlet = state.outlet
    fate = fifo_fate(spec.when_failed, local=isinstance(error, SinkError), reader_came=outlet is not None)
    failure = state.failure = ChannelFailure(error, fate, at=time.monotonic())
    state.counters.note(error.kind, str(error))
    state.phase = "failed"
    state.counters.timer.enter("idle")
    trailer = last_trailer(spec, state.epoch, "failed", delivered=state.delivered, error=error)
    trailers, successor = [trailer], spec.plan.has_epoch(state.epoch + 1)
    if outlet is not None and next_known and successor:  # a reader that left early may wait on the next FIFO
        trailers.append(successor_trailer(spec, trailer))
    published = False
    endless = replace(spec.retry, give_up_after=math.inf)

    async def publish() -> None:
        nonlocal published
        for each in trailers:
            fifos.publish(each)
        published = True

    async def conclude() -> None:
        fifos.conclude(trailer, successor=successor)

    try:
        await publish()
    except Shortage as shortage:
        state.shortage(shortage)
    # The log reports the failure even if the trailer cannot be written.
    state.epoch_ended(trailer)
    if state.delivery is not None:
        state.delivery.close()
    if not published:
        await first_of(retry_while_refused(publish, endless, lambda _: None), draining.wait())
    if published and outlet is not None and fate != "held":
        with contextlib.suppress(ReaderGone):
            await fifos.settle()
        await retry_while_refused(conclude, endless, state.refused)
        state.outlet, state.failure = None, replace(failure, fifo_ended=True)
        fifos.retire(state.epoch, outlet)
    await draining.wait()
