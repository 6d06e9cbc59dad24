"""Decides when a second request for a part is worth its bytes. Pure.

S3 answers from many machines, and about one request in a hundred meets a slow one. Ahead of delivery that
costs nothing; at the head of line it stops the trainer. So while delivery waits for the head of line, and
only then, the part is examined every `patience` seconds. If a new request would bring the missing bytes much
sooner than the present one, judged by recent requests, the part is hedged: requested a second time, on
another connection and address. The first of the two to answer goes on, from the next missing byte; only what
the other had under way is fetched twice.

`patience` is learned as TCP learns its timeout (RFC 6298 §2): the mean of first bytes plus four times their
mean deviation, at least `LEAST_PATIENCE`. Hedges may fetch a small fraction of all bytes again, so they do
not add load when the whole store is slow.
"""

from __future__ import annotations

from dataclasses import dataclass

from streamer.units import MIB

LEAST_PATIENCE = 0.1
"""Seconds; a shorter wait may be this process's own work."""
MOST_PATIENCE = 5.0
MUCH_SOONER = 3.0
"""A hedge is worth it if the present request is about to take this many times longer than a new one."""
STARVED = 0.8
"""Fraction of the time that delivery must have waited for storage; otherwise the reader is slow."""
CREDIT = 32 * MIB
"""Bytes that may be hedged before any have arrived."""


@dataclass(frozen=True, slots=True)
class HeadSample:
    """The head of line at one moment."""

    at: float
    """Seconds of a clock that never goes back."""
    delivered: int
    """Bytes of the part that have been delivered."""
    starved: float
    """Seconds that the channel has waited for storage, in all."""


class Hedging:
    """Recent requests of one endpoint, and the bytes that hedges may still fetch."""

    def __init__(self, part: float) -> None:
        """`part`: fraction of all received bytes that hedges may fetch again; 0 for no hedges."""
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
        """Seconds between two examinations of a head of line that delivery waits for."""
        return min(MOST_PATIENCE, max(LEAST_PATIENCE, self._first_byte + 4 * self._deviation))

    def landed(self, *, received: int, first_byte: float, seconds: float) -> None:
        """Note a request that has ended well."""
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
        """Whether to hedge the `missing` bytes of a part that has been head of line since `before`.

        If so, they are charged to the bytes that hedges may fetch.
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
