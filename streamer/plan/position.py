"""Position in a channel's stream of epochs, from which a sidecar can continue at the exact byte.

If objects are streamed unchanged, epoch and offset are enough: `cut` leaves out the parts before them. If
objects are inflated or joined, no offset in S3 corresponds to `offset`. Then `mark` is the first byte of an
earlier object, in both counts: the parts from there on are fetched and transformed again, and their bytes
before `offset` are dropped. Without a mark, the whole epoch is fetched again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class ResumePoint(NamedTuple):
    """First byte of an object, in an epoch whose objects are inflated or joined."""

    fetched: int = 0
    """Bytes of the epoch's parts before that byte."""
    streamed: int = 0
    """Bytes of the epoch's stream before that byte."""


BEGIN_OF_EPOCH = ResumePoint()


@dataclass(frozen=True, slots=True)
class Position:
    """An epoch, and an offset in its stream."""

    epoch: int = 0
    offset: int = 0
    skipped: int = 0
    """Bytes at the epoch's start that its FIFO never had, because a trainer resumed after them."""
    mark: ResumePoint = BEGIN_OF_EPOCH

    def __post_init__(self) -> None:
        if (
            not 0 <= self.skipped <= self.offset
            or self.epoch < 0
            or not 0 <= self.mark.streamed <= self.offset
        ):
            raise ValueError(f"no such position: {self}")

    def skipped_in(self, epoch: int) -> int:
        """Return the bytes at the start of `epoch` that its FIFO never has."""
        return self.skipped if epoch == self.epoch else 0


START = Position()
"""First byte of the first epoch."""
