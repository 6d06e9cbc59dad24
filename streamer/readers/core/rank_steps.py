"""Steps of one FIFO of a channel that is shared by record, and the state of the job after some of them.

The FIFOs of a rank take turns (`Ranks.Workers`): that of worker i of w has the steps i, i + w, …, in which
the workers of a DataLoader return their batches. With one worker a FIFO has all steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamer.step_state import StepState
from streamer.trailer import channel_of_rank

if TYPE_CHECKING:
    from collections.abc import Mapping

    from streamer.readers.core.shuffle import Shuffle
    from streamer.trailer import Trailer


@dataclass(frozen=True, slots=True)
class RankSteps:
    """Steps of one FIFO of a channel that is shared by record, by the trailer of an epoch."""

    channel: str
    """The channel that the ranks share."""
    steps: int
    """Global batches of an epoch, those of other workers too."""
    records: int
    """Records of this rank in a global batch."""
    first: int
    """Number of the FIFO's first record in the epoch; not 0 if the sidecar resumed."""
    order: Mapping[str, Any]
    padding: int = 0
    """Records at the end of the epoch that are padding."""
    workers: int = 1
    """FIFOs of the rank."""
    worker: int = 0
    """Number of this one."""

    @classmethod
    def of(cls, trailer: Trailer | None) -> RankSteps | None:
        """Return the steps in a trailer; None if ranks do not share the channel by record."""
        if trailer is None or trailer.order is None or not trailer.steps or trailer.records is None:
            return None
        channel, first, padding = channel_of_rank(trailer.channel), trailer.records_skipped, trailer.padding
        own = len(range(trailer.worker, trailer.steps, trailer.workers))
        records = max(1, trailer.records // max(1, own))  # without a step of its own any number will do
        turn = trailer.workers, trailer.worker
        return cls(channel, trailer.steps, records, first, trailer.order, padding, *turn)

    def before(self, step: int) -> int:
        """Return how many records of the epoch this FIFO has before a step."""
        return len(range(self.worker, step, self.workers)) * self.records

    def padding_of(self, first: int, end: int) -> int:
        """Return how many of the records `first` up to `end` of the epoch are padding; they are the last."""
        return max(0, min(end - first, end + self.padding - self.before(self.steps)))

    def state(
        self, epoch: int, records: int, shuffle: Shuffle | None = None, window: int | None = None
    ) -> StepState:
        """Return the state after `records` records of this FIFO. A step counts when it is whole.

        `window`: number of the first record of the present window, if `shuffle` permutes the records, which
        a worker's never does.
        """
        last = self.worker + (records // self.records - 1) * self.workers
        reached, step = self.following(epoch, max(-1, last))
        inside = None
        if shuffle is not None and window is not None and reached == epoch:
            inside = shuffle.inside(step, first=window // self.records, batch=self.records)
        return StepState(self.channel, reached, step, self.order, inside)

    def next_step(self, epoch: int, records: int) -> tuple[int, int]:
        """Return epoch and number of this FIFO's step after `records` of its records."""
        step = self.worker + records // self.records * self.workers
        return (epoch, step) if step < self.steps else (epoch + 1, self.worker)

    def following(self, epoch: int, step: int) -> tuple[int, int]:
        """Return epoch and number of the step after this one."""
        return (epoch, step + 1) if step + 1 < self.steps else (epoch + 1, 0)


def step_records(rank: RankSteps | None) -> int:
    """Return the records of a rank in a step; 1 if ranks do not share the channel by record."""
    return 1 if rank is None else rank.records
