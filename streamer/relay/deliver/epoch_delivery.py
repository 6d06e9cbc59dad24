"""What a channel needs of the object that fills its FIFOs, one epoch at a time.

`Delivery` fetches and delivers one channel's plan. `SharedFifo` is one FIFO of a stream that several channels
share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from streamer.relay.deliver.object_ends import ObjectEnds
    from streamer.relay.statistics import EpochRequests
    from streamer.sink.outlet import PipeOutlet


class EpochDelivery(Protocol):
    """Fills the FIFOs of one channel."""

    ends: ObjectEnds

    @property
    def delivered(self) -> int:
        """Offset in the epoch's stream: bytes that the FIFO has accepted, plus bytes skipped by a resume."""

    @property
    def consumed(self) -> int:
        """Offset in the plan; equal to `delivered` unless objects are rewritten."""

    def allow(self, epoch: int) -> None:
        """Allow fetching of the epochs up to `epoch`."""

    def begin(self, epoch: int) -> None:
        """Set the counts to the epoch's start position."""

    def activate(self, *, active: bool) -> None:
        """Set whether the channel has a reader; the channel quota depends on it."""

    async def deliver(self, epoch: int, outlet: PipeOutlet) -> None:
        """Move all bytes of `epoch` into `outlet`.

        Raises ReaderGone if the outlet's reader closes before the last byte, SourceError if a part cannot be
        fetched; `delivered` is then the offset of the next byte.
        """

    def wake(self) -> None:
        """Go on, because the reader may have left."""

    def plan_grew(self) -> None:
        """Go on, because entries have become known, or the listing has ended."""

    def abandon(self, epoch: int) -> None:
        """Drop the rest of `epoch`."""

    async def settled(self) -> None:
        """Wait until the requests of all delivered and dropped parts are counted."""

    def take_requests(self, epoch: int) -> EpochRequests:
        """Return the requests of an epoch that have ended; as `ChannelCounters.take_epoch`."""

    def close(self) -> None:
        """Drop all parts and cancel their requests; no further epoch is delivered."""
