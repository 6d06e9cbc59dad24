"""The trailers of one channel's epochs, from its spec and each epoch's end.

open       opening_trailer    written before the FIFO is made, and again as an open plan grows
others     last_trailer       replaces the opening trailer when the epoch ends
failed     successor_trailer  the next epoch's trailer, for a reader that left the failed epoch early

`FailedEpoch` publishes an epoch's failure. The trailer becomes `failed` before the FIFO is touched, so a
reader that sees an end of file finds the reason in the trailer. While this machine refuses to write a trailer
or to make the next FIFO, the FIFO stays open.
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
from streamer.retry import retry_while_refused
from streamer.trailer import Trailer

if TYPE_CHECKING:
    import asyncio

    from streamer.errors import SourceError
    from streamer.relay.channel_spec import ChannelSpec
    from streamer.relay.channel_state import ChannelState
    from streamer.sink.fifo import FifoDirectory
    from streamer.trailer import TrailerState


def opening_trailer(spec: ChannelSpec, epoch: int) -> Trailer:
    """Return the epoch's first trailer, in state `open`."""
    plan, start = spec.plan, spec.start
    begun = epoch == start.position.epoch
    return Trailer(
        channel=spec.name,
        epoch=epoch,
        state="open",
        bytes_total=None if plan.open or plan.rewrites else plan.total_bytes(epoch),
        bytes_skipped=start.position.skipped_in(epoch),
        objects=plan.objects(epoch),
        records=None if plan.steps is None else plan.records(epoch),
        steps=plan.steps,
        padding=plan.padding,
        workers=plan.workers,
        worker=plan.worker,
        records_skipped=start.records_skipped if begun else 0,
        order=plan.record_order,
        digest=plan.digest,
        resumed=start.digest if begun else "",
        epochs=plan.epochs,
    )


def last_trailer(
    spec: ChannelSpec,
    epoch: int,
    state: TrailerState,
    *,
    delivered: int,
    error: SourceError | SinkError | None = None,
) -> Trailer:
    """Return the epoch's last trailer.

    `delivered`: offset in the epoch's stream. `error`: cause of a failure. Raises ValueError for `complete`
    while the plan is open.
    """
    if state == "complete" and spec.plan.open:
        raise ValueError(f"epoch {epoch} cannot be complete: its objects are not all listed")
    reasons = {"failed": str(error), "stopped": "the sidecar was stopped in mid-epoch"}
    opening = opening_trailer(spec, epoch)
    total = opening.bytes_total
    return replace(
        opening,
        state=state,
        bytes_total=delivered if state == "complete" and total is None else total,
        bytes_delivered=max(0, delivered - opening.bytes_skipped),
        error=reasons.get(state),
    )


def successor_trailer(spec: ChannelSpec, failed: Trailer) -> Trailer:
    """Return the trailer of the epoch after a failed one: that epoch fails before its first byte."""
    return replace(opening_trailer(spec, failed.epoch + 1), state="failed", error=failed.error)


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
