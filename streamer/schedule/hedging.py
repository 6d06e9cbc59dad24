"""Decides when a second request for a part is worth its bytes. Pure.

S3 answers from many machines, and about one request in a hundred meets a slow one. For a part that is not yet
due this costs nothing; at the head of line it stops the trainer. So while delivery waits for the head of
line, the part is examined every `patience` seconds. If, by the speed of recent requests, a new request would
bring the missing bytes much sooner than the present one, the part is hedged: requested a second time, on
another connection and address. The second request brings the rest if it answers first; only bytes that the
other had in transit are fetched twice.

`patience` is computed as TCP computes its timeout (RFC 6298 §2): the mean time to first byte plus four times
its mean deviation, at least `LEAST_PATIENCE`. Hedges may fetch only a small fraction of all bytes again, so
they add little load when all of S3 is slow.
"""

from __future__ import annotations

from dataclasses import dataclass

from streamer.units import MIB

LEAST_PATIENCE = 0.1
"""Seconds; a shorter wait may be this process's own work."""
MOST_PATIENCE = 5.0
MUCH_SOONER = 3.0
"""Minimum ratio of the present request's expected time to a new request's for a hedge."""
STARVED = 0.8
"""Minimum fraction of the time that delivery has waited for storage; below it, the reader is slow."""
CREDIT = 32 * MIB
"""Bytes that hedges may fetch before any bytes have arrived."""


@dataclass(frozen=True, slots=True)
class HeadSample:
    """State of the head of line at one time."""

    at: float
    """Seconds of a clock that never goes back."""
    delivered: int
    """Bytes of the part that have been delivered."""
    starved: float
    """Total seconds that the channel has waited for storage."""


class Hedging:
    """Timing of recent requests, and the bytes that hedges may still fetch."""

    def __init__(self, part: float) -> None:
        """`part`: fraction of all received bytes that hedges may fetch again; 0: no hedges."""
        self._part = part
        self._credit = float(CREDIT) if part else 0.0
        self._first_byte = 0.0
        self._deviation = 0.0
        self._body_rate = 0.0

    def __repr__(self) -> str:
        return f"<Hedging after {self.patience:.2f} s, {self._credit / MIB:.0f} MiB left>"

    @property
    def enabled(self) -> bool:
        return self._part > 0

    @property
    def patience(self) -> float:
        """Seconds between two examinations of the head of line while delivery waits for it."""
        return min(MOST_PATIENCE, max(LEAST_PATIENCE, self._first_byte + 4 * self._deviation))

    def landed(self, *, received: int, first_byte: float, seconds: float) -> None:
        """Note a successful request of `received` bytes: seconds to its first byte, and to its end."""
        self._credit = min(self._credit + self._part * received, 2.0 * CREDIT)
        if not self._first_byte:
            self._first_byte, self._deviation = first_byte, first_byte / 2
        else:
            self._deviation += (abs(first_byte - self._first_byte) - self._deviation) / 4
            self._first_byte += (first_byte - self._first_byte) / 8
        if seconds > first_byte:
            rate = received / (seconds - first_byte)
            self._body_rate += (rate - self._body_rate) * (0.1 if self._body_rate else 1)

    def worth(self, before: HeadSample, now: HeadSample, missing: int) -> bool:
        """Return whether to hedge the `missing` bytes of a part that has been head of line since `before`.

        If so, charge them to the bytes that hedges may fetch.
        """
        seconds = now.at - before.at
        if missing > self._credit or not self._body_rate or now.starved - before.starved < STARVED * seconds:
            return False
        again = self._first_byte + missing / self._body_rate
        came = now.delivered - before.delivered
        if came and seconds * missing / came < MUCH_SOONER * again:
            return False
        self._credit -= missing
        return True
