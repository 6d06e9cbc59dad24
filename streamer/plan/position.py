"""A position in a channel's stream of epochs, from which it can be continued at the exact byte.

For a plan whose objects are sent as they are, epoch and offset are enough: `cut` leaves out the parts before
them. Where objects are inflated or joined, no offset in S3 corresponds to `offset`. There `mark` names the
first byte of an earlier object, in both counts: the parts from there on are fetched and delivered again, and
their bytes before `offset` are dropped. Without a mark, that is the whole epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class ResumePoint(NamedTuple):
    """The first byte of an object in an epoch whose objects are inflated or joined."""

    fetched: int = 0
    """Bytes of the epoch's parts before it."""
    streamed: int = 0
    """Bytes of the epoch's stream before it."""


BEGIN_OF_EPOCH = ResumePoint()

NOWHERE = 1 << 62
"""A mark's `fetched` after any epoch's end: the stream has left the plan, so it cannot be resumed."""


@dataclass(frozen=True, slots=True)
class Position:
    """An epoch, and an offset in its stream."""

    epoch: int = 0
    offset: int = 0
    skipped: int = 0
    """How many of these the epoch's FIFO never had, because a trainer resumed there."""
    mark: ResumePoint = BEGIN_OF_EPOCH

    def __post_init__(self) -> None:
        if (
            not 0 <= self.skipped <= self.offset
            or self.epoch < 0
            or not 0 <= self.mark.streamed <= self.offset
        ):
            raise ValueError(f"no such place: {self}")

    def skipped_in(self, epoch: int) -> int:
        """Return the bytes of `epoch` that its FIFO never has, because a trainer resumed here after them."""
        return self.skipped if epoch == self.epoch else 0


START = Position()
"""The first byte of the first epoch."""
