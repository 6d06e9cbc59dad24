"""Trailers of one channel's epochs, from the spec and from how an epoch ended. Pure.

open       opening(epoch)      written before the FIFO is offered
others     ended(epoch, state) replaces it when the epoch ends
failed     successor(failed)   the next epoch's, for a reader that left the failed one early
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from streamer.trailer import Trailer

if TYPE_CHECKING:
    from streamer.errors import SinkError, SourceError
    from streamer.relay.channel_spec import ChannelSpec
    from streamer.relay.deliver.object_changes import Changes
    from streamer.trailer import TrailerState


@dataclass(frozen=True, slots=True)
class EpochTrailers:
    """Makes the trailers of the channel that `spec` describes."""

    spec: ChannelSpec
    digest: str
    """Digest of the plan, which takes seconds to compute for a large one."""

    @property
    def _length_unknown(self) -> bool:
        """Whether an epoch's length is known at its end only."""
        return self.spec.plan.rewrites or self.spec.when_changed.when_changed != "fail"

    def opening(self, epoch: int) -> Trailer:
        """Return the trailer that the epoch begins with."""
        plan = self.spec.plan
        return Trailer(
            channel=self.spec.name,
            epoch=epoch,
            state="open",
            bytes_total=None if self._length_unknown else plan.total_bytes(epoch),
            bytes_skipped=self.spec.start.position.skipped_in(epoch),
            objects=plan.objects(epoch),
            digest=self.digest,
            poison=len(self.spec.when_failed.poison),
        )

    def ended(
        self,
        epoch: int,
        state: TrailerState,
        *,
        delivered: int,
        changes: Changes,
        error: SourceError | SinkError | None = None,
        poison: bytes = b"",
    ) -> Trailer:
        """Return the trailer that the epoch ends with.

        `delivered`: offset in the epoch's stream. `error`: cause of a failure. `poison`: bytes that are to
        follow the delivered ones.
        """
        reasons = {"failed": str(error), "stopped": "the sidecar was stopped in mid-epoch"}
        opening = self.opening(epoch)
        total = opening.bytes_total
        return replace(
            opening,
            state=state,
            bytes_total=delivered if state == "complete" and total is None else total,
            bytes_delivered=max(0, delivered - opening.bytes_skipped),
            error=reasons.get(state),
            changed=changes.count,
            changes=tuple(changes.listed),
            poison=len(poison),
        )

    def successor(self, failed: Trailer) -> Trailer:
        """Return the trailer of the epoch after a failed one: it fails too, before its first byte."""
        return replace(self.opening(failed.epoch + 1), state="failed", error=failed.error, poison=0)
