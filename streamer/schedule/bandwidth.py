"""A limit of bytes per second, as a bucket that may be overdrawn. Pure.

Delivery moves what a pipe takes at once, some KiB or a MiB, and cannot move half of it; so a write is
allowed whenever the bucket is not empty, is charged in full, and what it overdraws is waited for. On
average the limit holds exactly; a burst is a tenth of a second of it, and one write. Where the kernel moves
bytes from a socket straight into the FIFO they are charged afterwards.

Time is what callers say it is: seconds of a clock that never goes back.
"""

from __future__ import annotations

BURST = 0.1
"""Seconds of the limit that may be saved up."""


class Bandwidth:
    """At most `limit` bytes per second; None for no limit."""

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._level = 0.0
        """Bytes that may be sent now; below 0 what has been sent too early."""
        self._at = 0.0

    def __repr__(self) -> str:
        return f"<Bandwidth {self._limit or 'no limit'}, {self._level:.0f} bytes>"

    @property
    def limit(self) -> int | None:
        """Bytes per second."""
        return self._limit

    def change(self, limit: int | None, now: float) -> None:
        """Another limit from now on; debts are forgiven, since they were made under the old one."""
        if limit is not None and limit <= 0:
            raise ValueError("a limit is more than 0 bytes per second")
        self._limit, self._level, self._at = limit, 0.0, now

    def wait(self, now: float) -> float:
        """Seconds until something may be sent; 0 for now."""
        if self._limit is None:
            return 0.0
        self._fill(self._limit, now)
        return max(0.0, -self._level / self._limit)

    def sent(self, count: int, now: float) -> None:
        """So many bytes have been sent."""
        if self._limit is not None:
            self._fill(self._limit, now)
            self._level -= count

    def _fill(self, limit: int, now: float) -> None:
        self._level = min(BURST * limit, self._level + limit * (now - self._at))
        self._at = now
