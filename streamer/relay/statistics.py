"""What the relay knows about itself, as value objects that others read.

The hot path adds to plain attributes; a metrics collector or status page takes a frozen snapshot when
it is asked. Nothing here knows Prometheus.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

State = Literal["idle", "blocked", "starved", "moving"]
STATES: tuple[State, ...] = ("idle", "blocked", "starved", "moving")
"""idle: no reader. blocked: the pipe is full, the trainer is slower. starved: nothing has arrived yet,
storage is slower. moving: neither waits."""

FIRST_BYTE_BOUNDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
PART_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Stopwatch:
    """Seconds spent in each state; always in exactly one."""

    def __init__(self) -> None:
        self._state: State = "idle"
        self._since = time.monotonic()
        self._seconds: dict[State, float] = dict.fromkeys(STATES, 0.0)

    def enter(self, state: State) -> None:
        if state == self._state:
            return
        now = time.monotonic()
        self._seconds[self._state] += now - self._since
        self._state, self._since = state, now

    def seconds(self) -> dict[str, float]:
        """Totals up to now, the running state included."""
        running = time.monotonic() - self._since
        return {
            state: spent + (running if state == self._state else 0) for state, spent in self._seconds.items()
        }


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


@dataclass(slots=True)
class Tally:
    """A channel's running counters; one per channel, kept across epochs."""

    watch: Stopwatch = field(default_factory=Stopwatch)
    first_byte: Durations = field(default_factory=lambda: Durations(FIRST_BYTE_BOUNDS))
    part: Durations = field(default_factory=lambda: Durations(PART_BOUNDS))
    written_bytes: int = 0
    received_bytes: int = 0
    objects_completed: int = 0
    requests: Counter[str] = field(default_factory=Counter)
    """By outcome: `ok`, `cancelled`, or the kind of the error."""
    retries: Counter[str] = field(default_factory=Counter)
    """By the kind of the error that was retried."""
    hedges: Counter[str] = field(default_factory=Counter)
    """Second requests for a part that was late: `issued`, and then `won` or `lost`."""
    wasted_bytes: int = 0
    """Received and thrown away: what both requests for a part had brought."""


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
    received_bytes: int
    objects_completed: int
    epochs: dict[str, int]
    """Epochs ended, by verdict."""
    seconds: dict[str, float]
    reader_connected: bool
    fifo_capacity: int
    staged_bytes: int
    """Bytes reserved for parts admitted and not yet delivered."""
    budget_bytes: int
    inflight: int
    limit: int
    requests: dict[str, int]
    retries: dict[str, int]
    hedges: dict[str, int]
    wasted_bytes: int
    first_byte: DurationsSnapshot
    part: DurationsSnapshot
    changed: dict[str, int]
    """Objects that were not as listed, by what was done: failed, refetched, skipped."""
    checked: dict[str, int]
    """Objects compared with S3's checksums, by outcome: verified, unverifiable, mismatch."""
    error: str | None
