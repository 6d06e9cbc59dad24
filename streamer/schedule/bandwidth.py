"""Limit of bytes per second: a token bucket that may be overdrawn. Pure.

The size of one write, from some KiB to a MiB, is known only after the write. So a write is allowed whenever
the bucket is not overdrawn, and is then charged in full; delivery waits until an overdraft is refilled. On
average the limit holds exactly; a burst is at most a tenth of a second of the limit, and one write.

Callers pass the time, in seconds of a clock that never goes back.
"""

from __future__ import annotations

BURST = 0.1
"""Size of the bucket, in seconds of the limit."""


class Bandwidth:
    """Limits delivery to `limit` bytes per second; None: no limit."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        """Bytes per second; `change` sets it."""
        self._level = 0.0
        """Bytes that may be sent now; negative if overdrawn."""
        self._at = 0.0

    def __repr__(self) -> str:
        return f"<Bandwidth {self.limit or 'no limit'}, {self._level:.0f} bytes>"

    def change(self, limit: int | None, now: float) -> None:
        """Set another limit and forgive an overdraft. Raises ValueError for a limit of 0 or less."""
        if limit is not None and limit <= 0:
            raise ValueError("a limit is more than 0 bytes per second")
        self.limit, self._level, self._at = limit, 0.0, now

    def wait(self, now: float) -> float:
        """Return the seconds until bytes may be sent; 0: now."""
        if self.limit is None:
            return 0.0
        self._fill(self.limit, now)
        return max(0.0, -self._level / self.limit)

    def sent(self, count: int, now: float) -> None:
        """Charge `count` bytes that have been sent."""
        if self.limit is not None:
            self._fill(self.limit, now)
            self._level -= count

    def _fill(self, limit: int, now: float) -> None:
        self._level = min(BURST * limit, self._level + limit * (now - self._at))
        self._at = now
