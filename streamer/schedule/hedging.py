"""When a second request is worth its bytes: the head of line is held up by one slow connection. Pure.

S3 answers from many machines, and one in some hundred requests meets a slow one. Ahead of delivery that
costs nothing. At the head of line it stops the trainer, so there, and only while the pipe is empty and
delivery waits, the part is looked at again every `patience` seconds: if what is missing would come much
sooner by a request made now, as those of late have gone, that request is made as well, on another
connection and address. The first of the two to answer goes on, from the next byte that is missing; nothing
is fetched twice but what the loser had under way.

Patience is learned as TCP learns its timeout (RFC 6298 §2): the mean of first bytes and four times their
mean deviation, never less than `LEAST_PATIENCE`. Hedges may fetch a small part of all bytes again, so that
a slow day of the whole store is not made worse.
"""

from __future__ import annotations

from dataclasses import dataclass

from streamer.units import MIB

LEAST_PATIENCE = 0.1
"""Seconds; below that our own work would be taken for the server's."""
MOST_PATIENCE = 5.0
MUCH_SOONER = 3.0
"""How many times longer than a new request the present one must be about to take."""
STARVED = 0.8
"""Part of the time looked at that delivery must have waited for storage: else its reader is the slow one."""
CREDIT = 32 * MIB
"""Bytes that may be hedged before anything has arrived."""


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
    """What requests of late have shown, and the bytes left for hedges, for all that shares one endpoint."""

    def __init__(self, part: float) -> None:
        """`part`: of all bytes received, those that hedges may fetch once more; 0 for no hedges."""
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
        """Seconds after which a head of line that delivery waits for is looked at (again)."""
        return min(MOST_PATIENCE, max(LEAST_PATIENCE, self._first_byte + 4 * self._deviation))

    def landed(self, *, received: int, first_byte: float, seconds: float) -> None:
        """A request has ended well, as told to `ConcurrencyController.landed`."""
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
        """Whether to ask again for the `missing` bytes of a part that has been head of line since `before`.

        If so, they are taken from what hedges may fetch.
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
