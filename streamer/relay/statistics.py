"""Counters of a channel, and frozen snapshots of them for metrics and status.

Delivery and fetches add to plain attributes, because this is the hot path. A metrics collector or the status
page takes a snapshot for each request. Nothing here depends on Prometheus.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from streamer.s3.ranges import PHASES, Phase

if TYPE_CHECKING:
    from collections.abc import Iterable

    from streamer.errors import Shortage

State = Literal["idle", "blocked", "held_back", "starved", "limited", "moving", "refused"]
STATES: tuple[State, ...] = ("idle", "blocked", "held_back", "starved", "limited", "moving", "refused")
"""idle: no reader. blocked: the FIFO is full, because the trainer is slower. starved: the next bytes have not
arrived, because storage is slower. limited: a bandwidth limit delays delivery. moving: nothing delays it.
held_back: another FIFO of a shared stream is full, or has no reader yet. refused: this machine refuses
a step, such as the write of a trailer, and the channel repeats it."""

Cause = Literal["queued", "inflate", "listing"] | Phase
CAUSES: tuple[Cause, ...] = ("queued", *PHASES, "inflate", "listing")
"""Causes of starvation: the phase of the request at the head of line; queued: that request has not begun;
inflate: the compressed bytes have arrived and are being inflated; listing: every listed object is delivered,
and the listing goes on."""

RESUMED = ("part", "epoch")
"""Kinds of resumes. part: a new request after a broken body. epoch: this process began inside the epoch."""

NOTES = 8
"""Recent errors kept for each channel."""
HEAD_WAIT_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 30.0)
FIRST_BYTE_BOUNDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
PART_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

Counts = defaultdict[str, Counter[str]]
"""Counters of one channel that have a label: by their name in `METRICS`, then by the label's value."""


def no_counts() -> Counts:
    """Return counters at zero."""
    return defaultdict(Counter)


def sum_of(added: Iterable[Counts]) -> Counts:
    """Return the sums of these counters."""
    total = no_counts()
    for counts in added:
        for name, values in counts.items():
            total[name].update(values)
    return total


class StateTimer:
    """Seconds spent in each state, and starved seconds by cause. Exactly one state is current."""

    def __init__(self) -> None:
        self._state: State = "idle"
        self._cause: Cause = "queued"
        self._refused = False
        self._since = time.monotonic()
        self._seconds: dict[str, float] = dict.fromkeys(STATES, 0.0)
        self._starved: dict[str, float] = dict.fromkeys(CAUSES, 0.0)

    @property
    def state(self) -> State:
        """The current state."""
        return self._state

    def enter(self, state: State) -> None:
        if state != self._state:
            self._settle()
            self._state = state

    def starve(self, cause: Cause) -> None:
        """Enter the state `starved`, with this cause."""
        self._settle()
        self._state, self._cause = "starved", cause

    def because(self, cause: Cause) -> None:
        """Change the cause of starvation; has no effect in other states."""
        if self._state == "starved":
            self.starve(cause)

    def refuse(self, *, refused: bool) -> None:
        """Count the time from now on as `refused`, or again as the current state."""
        self._settle()
        self._refused = refused

    def _settle(self) -> None:
        now = time.monotonic()
        spent, self._since = now - self._since, now
        if self._refused:
            self._seconds["refused"] += spent
            return
        self._seconds[self._state] += spent
        if self._state == "starved":
            self._starved[self._cause] += spent

    def seconds(self) -> dict[str, float]:
        """Return total seconds by state up to now, the current state included."""
        self._settle()
        return dict(self._seconds)

    def starved(self) -> dict[str, float]:
        """Return starved seconds by cause, up to now."""
        self._settle()
        return dict(self._starved)


class Durations:
    """A histogram of seconds over fixed upper bounds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Counts per bucket, not cumulative; the last bucket has no bound."""
        self.sum = 0.0
        """Sum of the durations."""

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds

    def __copy__(self) -> Durations:
        copied = Durations(self.bounds)
        copied.counts, copied.sum = self.counts.copy(), self.sum
        return copied


@dataclass(frozen=True, slots=True)
class RecentError:
    """Time, kind and text of an error."""

    at: float
    """Unix time in seconds."""
    kind: str
    text: str


@dataclass(slots=True)
class EpochRequests:
    """Requests for the parts of an epoch, whenever they were sent."""

    ended: int = 0
    """Requests that have ended, with any outcome."""
    repeated: int = 0
    """Failed requests of these that were sent again."""


@dataclass(kw_only=True)
class FifoTotals:
    """Totals of one FIFO since the start of the process."""

    written_bytes: int = 0
    consumed_bytes: int = 0
    """Bytes of parts delivered; equal to `written_bytes` unless objects are inflated."""
    readers_come: int = 0
    readers_gone: int = 0
    """Readers that closed the FIFO before the sidecar did."""
    readers_at_ends: int = 0
    """Those of `readers_gone` that stopped at the end of an object."""


@dataclass(kw_only=True)
class FetchTotals:
    """Totals of the requests of one channel; for a shared stream, those of its first FIFO."""

    received_bytes: int = 0
    wasted_bytes: int = 0
    """Bytes thrown away: their epoch ended, their object was replaced, or a hedge fetched them again."""
    objects_completed: int = 0
    first_byte: Durations = field(default_factory=lambda: Durations(FIRST_BYTE_BOUNDS))
    part: Durations = field(default_factory=lambda: Durations(PART_BOUNDS))
    head_wait: Durations = field(default_factory=lambda: Durations(HEAD_WAIT_BOUNDS))
    """Durations of delivery's waits for the head of line."""


@dataclass(kw_only=True)
class ChannelCounters(FifoTotals, FetchTotals):
    """Running counters of one channel, kept across epochs."""

    counts: Counts = field(default_factory=no_counts)
    timer: StateTimer = field(default_factory=StateTimer)
    records: int = 0
    """Records of complete epochs, if the plan frames them."""
    by_epoch: defaultdict[int, EpochRequests] = field(default_factory=lambda: defaultdict(EpochRequests))
    """Requests and retries by the epoch of the part, of epochs that are not reported."""
    notes: deque[RecentError] = field(default_factory=lambda: deque(maxlen=NOTES))
    """Last errors, the newest at the end."""
    refusal: str | None = None
    """Error of the step that this machine refuses, while the channel repeats it."""

    def refused(self, error: Shortage | None) -> None:
        """Note that this machine refuses a step, which the channel repeats; None: the step has succeeded."""
        if error is not None and self.refusal is None:
            self.note(error.kind, str(error))
        self.refusal = None if error is None else str(error)
        self.timer.refuse(refused=error is not None)

    def note(self, kind: str, text: str) -> None:
        self.notes.append(RecentError(time.time(), kind, text))

    def request_ended(self, epoch: int, outcome: str) -> None:
        """Count a request for a part of `epoch` that has ended."""
        self.counts["requests"][outcome] += 1
        self.by_epoch[epoch].ended += 1

    def retried(self, epoch: int, kind: str) -> None:
        """Count a request for a part of `epoch` that is sent again after an error of this kind."""
        self.counts["retries"][kind] += 1
        self.by_epoch[epoch].repeated += 1

    def take_epoch(self, epoch: int) -> EpochRequests:
        """Return the requests for `epoch`, and those for earlier epochs that ended after these were taken."""
        taken = EpochRequests()
        for number in [each for each in self.by_epoch if each <= epoch]:
            found = self.by_epoch.pop(number)
            taken.ended += found.ended
            taken.repeated += found.repeated
        return taken


@dataclass(kw_only=True)
class ChannelStatistics(FifoTotals, FetchTotals):
    """Snapshot of one channel, for `/status` and the metrics."""

    counts: Counts
    state: str
    """waiting (for a reader), streaming, failed, or stopped."""
    epoch: int
    bytes_total: int | None
    """Bytes of one epoch in the plan; compressed bytes if objects are compressed. None while `listing`."""
    bytes_consumed: int
    """Those of `bytes_total` that are delivered in the current epoch."""
    bytes_delivered: int
    """Bytes of the current epoch that the FIFO has accepted; equal to `bytes_consumed` unless inflated."""
    objects: int
    """Objects of one epoch; while `listing`, those that are listed."""
    listing: bool
    """Whether the prefix is still being listed."""
    records: int | None
    """Records of complete epochs; None if the sidecar does not frame records, and so cannot count them."""
    seconds: dict[str, float]
    """Seconds in each of `STATES`."""
    starved: dict[str, float]
    """Seconds starved for each of `CAUSES`."""
    reader_connected: bool
    fifo_capacity: int
    """Bytes that the FIFO can hold."""
    fifo_bytes: int
    """Bytes in the FIFO that the reader has not read."""
    reserved_bytes: int
    """Bytes reserved for parts that are admitted and not yet delivered."""
    quota_bytes: int
    requests_in_flight: int
    requests_in_flight_limit: int
    bandwidth_limit: int | None
    """Bytes per second that the channel may deliver; None: no limit for this channel."""
    held_back_by: tuple[str, ...]
    """FIFOs of a shared stream that this one waits for now: they are full, or have no reader yet."""
    errors: tuple[RecentError, ...]
    """Last errors, the newest at the end."""
    refused: str | None
    """Error of the step that this machine refuses, while the channel repeats it; None: it refuses none."""
    error: str | None
    """Text of the error that failed the channel; None: the channel has not failed."""
    error_kind: str | None
