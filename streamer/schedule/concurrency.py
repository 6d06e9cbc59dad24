"""Adapts the concurrency limit and the part size to the timing of requests. Pure.

Concurrency limit. More requests help while delivery waits for storage and the limit is reached. If requests
spend most of their time before the first byte, as with small objects, the limit doubles at once; also before
any reader comes, so that it is high when the reader does. Otherwise it is raised on trial: if throughput does
not grow enough (`worth`), or first bytes arrive much later, the old limit is restored and the next trial
waits longer. Too many requests cost CPU, since staged bytes leave the processor's cache. SlowDown halves the
limit; without further SlowDown it is raised again in steps (additive increase, multiplicative decrease). No
trial begins while this process is the bottleneck: its thread has run, or waited for a processor, nearly all
the time.

Part size. The body of a request should take at least twice as long as its first byte, if the memory for the
part allows.

Callers pass the time, in seconds of a clock that never goes back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from streamer.units import MIB

MOST_REQUESTS = 256
WORTH = 0.25
"""Gain in throughput that keeps a raised limit, as a fraction of the gain in the limit."""
INFLATED = 4.0
"""Ratio of the time to first byte to the shortest seen, above which requests queue at the server."""
WAITING = 0.5
"""Fraction of a request's time before its first byte, above which the limit doubles."""
STARVED = 0.05
"""Fraction of the time that delivery waits for storage, above which more requests are useful."""
BUSY = 0.9
"""Fraction of the time that the loop's thread runs, above which this process is the bottleneck."""
INTERVAL = 0.1
"""Minimum seconds over which throughput is measured."""
LANDINGS = 2
"""Minimum number of ended requests, per request in flight, over which throughput is measured. Requests that
begin together end together, so a single round shows little."""
FIRST_HOLD, LONGEST_HOLD = 1.0, 60.0
"""Seconds between trials; doubled after each failed trial."""
QUIET = 0.5
"""Seconds without SlowDown before the limit is raised by a step."""
SMALLEST_PART, LARGEST_PART = 1 * MIB, 16 * MIB


@dataclass(slots=True)
class _Trial:
    limit: int
    """The limit before the trial."""
    rate: float
    """Bytes per second before the trial."""

    def due(self, limit: int, worth: float) -> float:
        """Return the factor by which throughput must have risen for `limit` to stay."""
        return 1 + worth * (limit / self.limit - 1)


class ConcurrencyController:
    """Concurrency limit and part size, for all channels together."""

    def __init__(
        self,
        limit: int,
        part_size: int,
        *,
        fixed_limit: bool = False,
        fixed_part: bool = False,
        most: int = MOST_REQUESTS,
        largest_part: int = LARGEST_PART,
        worth: float = WORTH,
        worked: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Start with `limit` requests and parts of `part_size` bytes.

        `worth`: gain in throughput that keeps a raised limit, as a fraction of the gain in the limit: at 0.4,
        twice the requests must bring 1.4 times the throughput. `worked` returns the total seconds for which
        the thread that moves the bytes has run, or waited for a processor.
        """
        self._most = most
        self.limit = limit
        """Maximum number of requests in flight."""
        self._part_size = part_size
        self._fixed_limit = fixed_limit
        self._fixed_part = fixed_part
        self._largest_part = max(largest_part, part_size)
        self._worth = worth
        self._worked = worked
        self._worked_before = 0.0
        """Result of `worked` at the last `_begin`."""
        self._trial: _Trial | None = None
        self._since: float | None = None
        self._bytes = 0
        self._landed = 0
        self._unsettled = 0
        """Requests still to end before throughput is measured under a trial's limit."""
        self._full = False
        self._unread = False
        """Whether the limit was reached, since `_begin`, while no channel had a reader."""
        self._starved = 0.0
        """Seconds that delivery has waited for storage since `_begin`."""
        self._hold = FIRST_HOLD
        self._hold_until = 0.0
        self._goal = 0
        """Limit before SlowDown, to return to; 0: the limit is not reduced."""
        self._slowed_at = float("-inf")
        self._first_byte = 0.0
        """Moving average of seconds to the first byte."""
        self._least_first_byte = float("inf")
        self._seconds = 0.0
        """Moving average of seconds of a whole request."""
        self._body_rate = 0.0
        """Moving average of bytes per second of one body."""

    def __repr__(self) -> str:
        return f"<ConcurrencyController {self.limit} requests, parts of {self._part_size}>"

    @property
    def largest_part(self) -> int:
        """Maximum part size, in bytes."""
        return self._part_size if self._fixed_part else self._largest_part

    @property
    def fixed(self) -> bool:
        """Whether the limit is fixed and does not adapt."""
        return self._fixed_limit

    def fix_limit(self, limit: int | None) -> None:
        """Fix the limit at `limit` requests; None: adapt it again, from the present limit."""
        self._fixed_limit = limit is not None
        self.limit = limit or self.limit
        self._trial, self._since, self._unsettled, self._goal = None, None, 0, 0
        self._hold, self._hold_until = FIRST_HOLD, 0.0

    def full(self, *, unread: bool = False) -> None:
        """Note that a part could not be requested because the limit was reached.

        `unread`: whether no channel has a reader, so that no delivery can wait.
        """
        self._full = True
        self._unread |= unread

    def starved(self, seconds: float) -> None:
        """Note that delivery waited for storage for `seconds`, averaged over channels."""
        self._starved += seconds

    def throttled(self, now: float) -> None:
        """Halve the limit because S3 answered SlowDown; once per burst of such answers."""
        if self._fixed_limit:
            return
        fresh = now - self._slowed_at >= QUIET
        self._slowed_at = now
        if fresh:
            self._goal = max(self._goal, self.limit if self._trial is None else self._trial.limit)
            self._trial = None
            self._unsettled = 0
            self.limit = max(1, self.limit // 2)
            self._begin(now)

    def landed(self, now: float, *, received: int, first_byte: float, seconds: float) -> None:
        """Note a successful request of `received` bytes: seconds to its first byte, and to its end."""
        self._first_byte += (first_byte - self._first_byte) * (0.1 if self._first_byte else 1)
        self._least_first_byte = min(self._least_first_byte, first_byte)
        self._seconds += (seconds - self._seconds) * (0.1 if self._seconds else 1)
        if seconds > first_byte:
            rate = received / (seconds - first_byte)
            self._body_rate += (rate - self._body_rate) * (0.1 if self._body_rate else 1)
        if self._unsettled:
            self._unsettled -= 1
            if not self._unsettled:
                self._begin(now)
            return
        if self._since is None:
            self._begin(now)
        self._bytes += received
        self._landed += 1
        if not self._fixed_limit and self._landed >= self.limit:
            self._consider(now, now - (self._since or 0))

    def _begin(self, now: float) -> None:
        self._since = now
        self._bytes = self._landed = 0
        self._full, self._unread, self._starved = False, False, 0.0
        self._worked_before = self._worked()

    def _consider(self, now: float, seconds: float) -> None:
        """Decide on the limit: as many requests as it allows have ended in `seconds`, since `_begin`."""
        useful = self._full and not self._inflated
        wanted = useful and self._starved >= STARVED * seconds
        grows = (
            (wanted or (useful and self._unread))
            and self._waiting
            and self._trial is None
            and not self._goal
            and now >= self._hold_until
        )
        if grows and self.limit < self._most:
            if not self._busy(seconds):
                self.limit = min(self._most, self.limit * 2)
            self._begin(now)
        elif seconds >= INTERVAL and self._landed >= LANDINGS * self.limit:
            self._judge(now, self._bytes / seconds, wanted=wanted and not self._busy(seconds))
            self._begin(now)

    def _busy(self, seconds: float) -> bool:
        """Return whether the thread has run nearly all of `seconds`.

        Responses that come at once keep it busy for a moment, which shows nothing.
        """
        worked = self._worked() - self._worked_before
        return seconds > self._first_byte / 2 and worked >= BUSY * seconds

    def _judge(self, now: float, rate: float, *, wanted: bool) -> None:
        trial, self._trial = self._trial, None
        if self._goal:
            self._return(now)
        elif trial is not None and (self._inflated or rate < trial.rate * trial.due(self.limit, self._worth)):
            self.limit = trial.limit
            self._hold_until = now + self._hold
            self._hold = min(LONGEST_HOLD, self._hold * 2)
        elif wanted and now >= self._hold_until:
            more = self.limit * 2 if self._hold == FIRST_HOLD else self.limit + max(1, self.limit // 4)
            if (more := min(self._most, more)) > self.limit:
                self._trial = _Trial(self.limit, rate)
                # Requests already in flight, and new connections, do not show what the new limit brings.
                self.limit = self._unsettled = more

    def _return(self, now: float) -> None:
        """Raise the limit by a step towards its value before SlowDown."""
        if now - self._slowed_at < QUIET:
            return
        self.limit = min(self._goal, self.limit + max(1, self._goal // 8))
        if self.limit == self._goal:
            self._goal = 0
            self._hold_until = now + self._hold

    @property
    def _waiting(self) -> bool:
        return self._first_byte > WAITING * self._seconds

    @property
    def _inflated(self) -> bool:
        return self._first_byte > INFLATED * self._least_first_byte and self._first_byte > 0.1

    @property
    def slowed(self) -> bool:
        """Whether the limit is still reduced because of SlowDown."""
        return self._goal > 0

    def part_size(self, staging: int) -> int:
        """Return the size of the next part, in bytes. `staging`: maximum bytes that its stage may hold."""
        size = self._part_size
        if self._fixed_part:
            return size
        wanted = 2 * self._first_byte * self._body_rate
        while size < wanted and size < self._largest_part:
            size *= 2
        while size > staging and size > SMALLEST_PART:
            size //= 2
        return size
