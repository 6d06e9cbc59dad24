"""What the relay knows about itself, as value objects that others read.

The hot path adds to plain attributes; a metrics collector or status page takes a frozen snapshot when
it is asked. Nothing here knows Prometheus.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Literal

from streamer.s3.ranges import PHASES, Phase

State = Literal["idle", "blocked", "starved", "limited", "moving"]
STATES: tuple[State, ...] = ("idle", "blocked", "starved", "limited", "moving")
"""idle: no reader. blocked: the pipe is full, the trainer is slower. starved: nothing has arrived yet,
storage is slower. limited: a bandwidth limit holds the channel back. moving: nothing waits."""

Cause = Literal["queued", "inflate"] | Phase
CAUSES: tuple[Cause, ...] = ("queued", *PHASES, "inflate")
"""What a starved delivery waits for: what the request of the head of line is at; queued: it has not begun;
inflate: compressed bytes are here, their content not yet."""

RESUMED = ("part", "epoch")
"""What may be gone on with: a part whose body broke off, an epoch in whose middle this process began."""

NOTES = 8
"""Errors that a channel remembers."""
HEAD_WAIT_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 30.0)
FIRST_BYTE_BOUNDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
PART_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class StateTimer:
    """Seconds spent in each state, and starved for each cause; always in exactly one of them."""

    def __init__(self) -> None:
        self._state: State = "idle"
        self._cause: Cause = "queued"
        self._since = time.monotonic()
        self._seconds: dict[str, float] = dict.fromkeys(STATES, 0.0)
        self._starved: dict[str, float] = dict.fromkeys(CAUSES, 0.0)

    def enter(self, state: State) -> None:
        if state != self._state:
            self._settle()
            self._state = state

    def starve(self, cause: Cause) -> None:
        """Enter `starved`, for this cause."""
        self._settle()
        self._state, self._cause = "starved", cause

    def because(self, cause: Cause) -> None:
        """What a starved delivery waits for is another thing now; means nothing in other states."""
        if self._state == "starved":
            self.starve(cause)

    def _settle(self) -> None:
        now = time.monotonic()
        spent, self._since = now - self._since, now
        self._seconds[self._state] += spent
        if self._state == "starved":
            self._starved[self._cause] += spent

    def seconds(self) -> dict[str, float]:
        """Totals by state up to now, the running one included."""
        self._settle()
        return dict(self._seconds)

    def starved(self) -> dict[str, float]:
        """Totals of `starved` by cause, up to now."""
        self._settle()
        return dict(self._starved)


class Durations:
    """A histogram of seconds over fixed upper bounds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(self.bounds, seconds)] += 1
        self._sum += seconds

    def snapshot(self) -> DurationsSnapshot:
        return DurationsSnapshot(self.bounds, tuple(self._counts), self._sum)


@dataclass(frozen=True, slots=True)
class DurationsSnapshot:
    """Counts per bucket (not cumulative; the last is above every bound) and their sum in seconds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


@dataclass(frozen=True, slots=True)
class RecentError:
    """An error that has occurred."""

    at: float
    """Seconds since the epoch."""
    kind: str
    text: str


@dataclass(slots=True)
class ChannelCounters:
    """A channel's running counters; one per channel, kept across epochs."""

    timer: StateTimer = field(default_factory=StateTimer)
    first_byte: Durations = field(default_factory=lambda: Durations(FIRST_BYTE_BOUNDS))
    part: Durations = field(default_factory=lambda: Durations(PART_BOUNDS))
    head_wait: Durations = field(default_factory=lambda: Durations(HEAD_WAIT_BOUNDS))
    """Delivery's waits for the head of line."""
    written_bytes: int = 0
    consumed_bytes: int = 0
    """Of parts, delivered: `written_bytes`, unless objects are inflated."""
    received_bytes: int = 0
    wasted_bytes: int = 0
    """Received and thrown away: their epoch ended before, their object was replaced, or both requests for a
    part brought them."""
    objects_completed: int = 0
    records: int = 0
    """Of complete epochs, where the plan frames them."""
    readers_come: int = 0
    readers_gone: int = 0
    """Those that closed the FIFO before we did."""
    readers_at_ends: int = 0
    """Of those, readers that had read to the end of an object, and no further."""
    requests: Counter[str] = field(default_factory=Counter)
    """By outcome: `ok`, `cancelled`, or the kind of the error."""
    retries: Counter[str] = field(default_factory=Counter)
    """By the kind of the error that was retried."""
    resumes: Counter[str] = field(default_factory=Counter)
    """By `RESUMED`: what was gone on with in the middle."""
    hedges: Counter[str] = field(default_factory=Counter)
    """Second requests for a part that was late: `issued`, and then `won` or `lost`."""
    epochs: Counter[str] = field(default_factory=Counter)
    """Epochs ended, by trailer state."""
    checked: Counter[str] = field(default_factory=Counter)
    """Objects compared with S3's checksums, by outcome."""
    notes: deque[RecentError] = field(default_factory=lambda: deque(maxlen=NOTES))
    """The last errors, the newest at the end."""

    def note(self, kind: str, error: Exception) -> None:
        self.notes.append(RecentError(time.time(), kind, str(error)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelStatistics:
    """One channel as it stands: what `/status` shows and what the metrics export."""

    state: str
    """waiting (for a reader), streaming, failed, or stopped."""
    epoch: int
    bytes_total: int
    """Bytes of one epoch, compressed where objects are."""
    bytes_consumed: int
    """Of those, the bytes that have been delivered in the current epoch."""
    bytes_delivered: int
    """Bytes of the current epoch that the FIFO has accepted: `bytes_consumed`, unless they are inflated."""
    objects: int
    written_bytes: int
    consumed_bytes: int
    """Bytes of parts delivered, in all epochs: `written_bytes`, unless they are inflated."""
    received_bytes: int
    wasted_bytes: int
    objects_completed: int
    records: int | None
    """Records of complete epochs; None where the sidecar does not make them, and so cannot know."""
    epochs: dict[str, int]
    """Epochs ended, by trailer state."""
    seconds: dict[str, float]
    """Time in each of `STATES`."""
    starved: dict[str, float]
    """Time starved for each of `CAUSES`."""
    reader_connected: bool
    readers_come: int
    readers_gone: int
    """Readers that closed the FIFO before we did."""
    readers_at_ends: int
    """Of those, readers that had read to the end of an object, and no further."""
    fifo_capacity: int
    fifo_bytes: int
    """Bytes that wait in the FIFO for the reader."""
    reserved_bytes: int
    """Bytes reserved for parts admitted and not yet delivered."""
    quota_bytes: int
    requests_in_flight: int
    requests_in_flight_limit: int
    bandwidth_limit: int | None
    """Bytes per second that the channel may deliver, if it has a limit of its own."""
    requests: dict[str, int]
    retries: dict[str, int]
    resumes: dict[str, int]
    hedges: dict[str, int]
    first_byte: DurationsSnapshot
    part: DurationsSnapshot
    head_wait: DurationsSnapshot
    errors: tuple[RecentError, ...]
    """The last ones, the newest at the end."""
    changed: dict[str, int]
    """Objects that were not as listed, by what was done: failed, refetched, skipped."""
    checked: dict[str, int]
    """Objects compared with S3's checksums, by outcome: verified, unverifiable, mismatch."""
    error: str | None
    """Why the channel failed, if it has."""
    error_kind: str | None
