"""The trailers of one channel's epochs, from its spec and each epoch's end. Pure.

open       opening_trailer    written before the FIFO is made, and again as an open plan grows
others     last_trailer       replaces the opening trailer when the epoch ends
failed     successor_trailer  the next epoch's trailer, for a reader that left the failed epoch early
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from streamer.trailer import Trailer

if TYPE_CHECKING:
    from streamer.errors import SinkError, SourceError
    from streamer.relay.channel_spec import ChannelSpec
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
