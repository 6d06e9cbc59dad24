"""State of a running channel, and the snapshot of it for status and metrics."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, Self

from streamer.plan import Position, ResumePoint
from streamer.relay.statistics import (
    ChannelCounters,
    ChannelStatistics,
    FetchTotals,
    FifoTotals,
    sum_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from streamer.errors import Shortage, SinkError, SourceError
    from streamer.plan import Plan
    from streamer.relay.channel_spec import ChannelEvents, WhenFailed
    from streamer.relay.deliver.delivery import Delivery
    from streamer.relay.deliver.shared_fifo import SharedFifo
    from streamer.schedule.budget import ChannelQuota
    from streamer.sink.outlet import PipeOutlet
    from streamer.trailer import Trailer

Phase = Literal["waiting", "streaming", "failed", "stopped"]
FifoFate = Literal["held", "closed"]
"""State that the FIFO of a failed epoch is brought into."""


def fifo_fate(when_failed: WhenFailed, *, local: bool, reader_came: bool) -> FifoFate:
    """Decide the state of a failed epoch's FIFO.

    `local`: this machine failed, not storage; the policy's own steps could fail too. `reader_came`: this
    process has the write end; before that, a sidecar with the right plan can still continue the epoch.
    """
    return "closed" if when_failed == "close" and reader_came and not local else "held"


@dataclass(frozen=True, slots=True)
class ChannelFailure:
    """Cause and time of a channel's final failure, and the state of its last FIFO."""

    error: SourceError | SinkError
    fifo: FifoFate
    """State that the FIFO is brought into; a restart can continue a held one."""
    at: float
    """Time of the failure, by time.monotonic()."""
    fifo_ended: bool = False
    """Whether the FIFO has been closed and the next epoch's FIFO exists; never so for a held FIFO."""


@dataclass(slots=True)
class ChannelState:
    """What a channel and its epochs share: counters, the current epoch, its FIFO's write end, the failure."""

    epoch: int
    start: Position
    """Position at which the channel began."""
    mark: tuple[int, ResumePoint]
    """An epoch and the last resume point in it."""
    counters: ChannelCounters
    events: ChannelEvents
    delivery: Delivery | SharedFifo | None = None
    """None before the channel runs."""
    phase: Phase = "waiting"
    outlet: PipeOutlet | None = None
    """Open write end; None before a reader opens the epoch's FIFO and after the epoch's end."""
    fifo_capacity: int = 0
    failure: ChannelFailure | None = None

    @classmethod
    def at(cls, start: Position, counters: ChannelCounters, events: ChannelEvents) -> Self:
        """Return the state of a channel that begins at `start`."""
        return cls(start.epoch, start, (start.epoch, start.mark), counters, events)

    def shortage(self, error: SinkError) -> None:
        """Count and report a step that this machine refuses, and that the channel does without for now."""
        self.counters.note("local", str(error))
        self.events.shortage(error)

    def refused(self, error: Shortage | None) -> None:
        """Count a step that this machine refuses, and report the first refusal; see `ChannelCounters`."""
        if error is not None and self.counters.refusal is None:
            self.events.shortage(error)
        self.counters.refused(error)

    def epoch_ended(self, trailer: Trailer) -> None:
        """Count and report the end of the epoch, and its requests."""
        self.counters.refused(None)
        self.counters.counts["epochs"][trailer.state] += 1
        fetched = ChannelCounters() if self.delivery is None else self.delivery.fetched
        self.events.epoch_ended(trailer, fetched.take_epoch(trailer.epoch))

    @property
    def delivered(self) -> int:
        """Offset in the epoch's stream."""
        return self.start.offset if self.delivery is None else self.delivery.delivered

    @property
    def position(self) -> Position:
        """Position of the next byte: in this epoch, or the next one if a failure has closed this FIFO."""
        if self.failure is not None and self.failure.fifo_ended:
            return Position(self.epoch + 1)
        marked, mark = self.mark
        return Position(
            self.epoch,
            self.delivered,
            skipped=self.start.skipped_in(self.epoch),
            mark=mark if marked == self.epoch else ResumePoint(),
        )


def snapshot(
    plan: Plan,
    state: ChannelState,
    *,
    fetched: ChannelCounters,
    quota: ChannelQuota | None,
    held_back_by: Sequence[str],
) -> ChannelStatistics:
    """Return one channel's current statistics.

    `fetched`: counters of its requests and parts. `quota`: None if another channel has them.
    """
    outlet, failure, delivery, counters = state.outlet, state.failure, state.delivery, state.counters
    sources = (counters,) if fetched is counters else (fetched, counters)
    return ChannelStatistics(
        **_totals(FifoTotals, counters),
        **_totals(FetchTotals, fetched),
        counts=sum_of(each.counts for each in sources),
        state=state.phase,
        epoch=state.epoch,
        bytes_total=plan.known_bytes(state.epoch),
        bytes_consumed=delivery.consumed if delivery else 0,
        bytes_delivered=delivery.delivered if delivery else 0,
        objects=plan.objects(state.epoch),
        listing=plan.open,
        records=counters.records if plan.framed or plan.steps is not None else None,
        seconds=counters.timer.seconds(),
        starved=counters.timer.starved(),
        reader_connected=outlet is not None and not outlet.reader_gone,
        fifo_capacity=state.fifo_capacity,
        fifo_bytes=0 if outlet is None else outlet.unread,
        reserved_bytes=0 if quota is None else quota.reserved_bytes,
        quota_bytes=0 if quota is None else quota.byte_limit,
        requests_in_flight=0 if quota is None else quota.requests_in_flight,
        requests_in_flight_limit=0 if quota is None else quota.requests_limit,
        bandwidth_limit=None if quota is None else quota.bandwidth.limit,
        errors=tuple(note for each in sources for note in each.notes),
        held_back_by=tuple(held_back_by),
        refused=counters.refusal,
        error=None if failure is None else str(failure.error),
        error_kind=None if failure is None else failure.error.kind,
    )


def _totals(kind: type[FifoTotals | FetchTotals], counters: ChannelCounters) -> dict[str, Any]:
    """Return a copy of the fields of `kind`."""
    return {each.name: copy(getattr(counters, each.name)) for each in fields(kind)}
