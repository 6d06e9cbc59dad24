"""A place in a channel's stream of epochs, from which it can be continued at the exact byte.

Of a plan whose objects are sent as they are, the place says all: `cut` leaves out what lies before it. Where
objects are inflated or joined nobody can tell which byte of S3 gave the byte at `offset`. There `mark` names
an object's first byte before it, in both counts: the parts from there on are fetched and delivered again, and
what comes of them up to `offset` is dropped. Without a mark that is the epoch from its begin.
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
"""A mark's `fetched` behind any epoch's end: what was streamed since is not as planned."""


@dataclass(frozen=True, slots=True)
class Position:
    """Epoch, and how many bytes of its stream lie behind."""

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
