"""Policy for the FIFO of a failed epoch: the job file's `WhenFailed`, as one value.

    WhenFailed    FIFO of the failed epoch
    hold          stays open, so its reader waits
    close         is closed: an end of file that only the trailer contradicts
    poison        is closed after bytes that every reader of the framing refuses

Two failures always hold the FIFO: one of this machine, because the policy's own steps could fail too; and one
before this process has the write end, because a sidecar with the right plan can still continue the epoch.
Poison needs a record border, so the FIFO is also held if delivery may be inside a record.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from streamer.relay.deliver.frame_aligner import POISON, FrameAligner, Framing, WhenFailed

FifoFate = Literal["held", "closed", "poisoned"]
"""State that the FIFO of a failed epoch is brought into."""


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """Decides what happens to the FIFO of a failed epoch."""

    when_failed: WhenFailed = "hold"
    framing: Framing | None = None
    """Format of the stream's records; required for `poison`, refused otherwise."""

    def __post_init__(self) -> None:
        if (self.when_failed == "poison") != (self.framing is not None):
            raise ValueError("poison needs a framing, and nothing else does")

    @property
    def poison(self) -> bytes:
        """Bytes that end a poisoned FIFO; empty under the other policies."""
        return b"" if self.framing is None else POISON[self.framing]

    @property
    def needs_records(self) -> bool:
        """Whether delivery must separate records, for which bytes must be read into memory."""
        return self.framing is not None

    def aligner(self, *, at_record: bool) -> FrameAligner | None:
        """Return an aligner that passes only whole records, or None if the policy needs no records.

        `at_record`: whether the next byte of the stream is the first byte of a record.
        """
        return None if self.framing is None else FrameAligner(self.framing, at_record=at_record)

    def fifo_fate(self, *, local: bool, reader_came: bool, at_border: bool) -> FifoFate:
        """Decide the state of a failed epoch's FIFO.

        `local`: this machine failed, not storage. `reader_came`: this process has the write end.
        `at_border`: the delivered bytes end with a whole record.
        """
        if local or not reader_came:
            return "held"
        if self.when_failed == "close":
            return "closed"
        if self.poison and at_border:
            return "poisoned"
        return "held"


HOLD = FailurePolicy()
