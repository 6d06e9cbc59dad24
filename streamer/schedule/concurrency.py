"""Adapts the number of requests in flight and the size of parts to what requests show. Pure.

Requests in flight. More requests help while delivery waits for storage and the limit is reached. If requests
spend their time waiting for first bytes, as with small objects, the limit doubles at once. Otherwise it is
raised on trial: if throughput does not follow, or first bytes come much later, the limit goes back and the
next trial waits longer. SlowDown halves the limit; it returns in steps once S3 is quiet (additive increase,
multiplicative decrease). Too many requests cost CPU, since waiting bytes leave the processor's cache; `worth`
says how much a trial must gain. There is no trial while this process is the bottleneck: its thread has
worked, or waited for a processor, nearly all the time.

Parts. The body of a request should take at least twice as long as its first byte, and no longer than the
memory reserved for it allows.

Times are given by the caller, in seconds of a clock that never goes back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from streamer.units import MIB

MOST_REQUESTS = 256
WORTH = 0.25
"""Gain in throughput that keeps a raised limit, as a fraction of the gain in the limit."""
INFLATED = 4.0
"""First bytes that come this many times later than the earliest seen: requests queue at the server."""
WAITING = 0.5
"""Fraction of a request's time before its first byte, above which the limit doubles."""
STARVED = 0.05
"""Fraction of the time that delivery waits for storage, above which more requests are wanted."""
BUSY = 0.9
"""Fraction of the time that the loop's thread works, above which this process is the bottleneck."""
INTERVAL = 0.1
"""Minimum seconds over which throughput is compared."""
LANDINGS = 2
"""Minimum ended requests for each request in flight, over which throughput is compared. Requests that
begin together end together, and one such wave shows little."""
FIRST_HOLD, LONGEST_HOLD = 1.0, 60.0
"""Seconds between trials; doubled after each that failed."""
QUIET = 0.5
"""Seconds without SlowDown before each step back up."""
SMALLEST_PART, LARGEST_PART = 1 * MIB, 16 * MIB


@dataclass(slots=True)
class _Trial:
    limit: int
    """The limit before the trial."""
    rate: float
    """Bytes per second before the trial."""

    def due(self, limit: int, worth: float) -> float:
        """Factor by which throughput must have risen at this limit."""
        return 1 + worth * (limit / self.limit - 1)


class ConcurrencyController:
    """The number of requests in flight and the size of parts, of all channels of one endpoint."""

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
        """Begin with `limit` requests of `part_size` bytes; what is fixed stays so.

        `worth`: gain in throughput that keeps a raised limit, as a fraction of the gain in the limit: at 0.4,
        twice the requests must bring 1.4 times the throughput. `worked` returns the seconds so far that the
        thread which moves the bytes has run, or waited for a processor.
        """
        self._most = most
        self.limit = limit
        """Requests that may run at once."""
        self._part_size = part_size
        self._fixed_limit = fixed_limit
        self._fixed_part = fixed_part
        self._largest_part = max(largest_part, part_size)
        self._worth = worth
        self._worked = worked
        self._worked_before = 0.0
        """At the last `_begin`."""
        self._trial: _Trial | None = None
        self._since: float | None = None
        self._bytes = 0
        self._landed = 0
        self._unsettled = 0
        """Landings that still belong to the time before a trial began."""
        self._full = False
        self._starved = 0.0
        """Seconds."""
        self._hold = FIRST_HOLD
        self._hold_until = 0.0
        self._goal = 0
        """The limit before a storm of SlowDown, to return to; 0 in good weather."""
        self._slowed_at = float("-inf")
        self._first_byte = 0.0
        """Seconds, as of late."""
        self._least_first_byte = float("inf")
        self._seconds = 0.0
        """Of a whole request, as of late."""
        self._body_rate = 0.0
        """Bytes per second of one body, as of late."""

    def __repr__(self) -> str:
        return f"<ConcurrencyController {self.limit} requests, parts of {self._part_size}>"

    @property
    def largest_part(self) -> int:
        """Upper bound of a part, in bytes."""
        return self._part_size if self._fixed_part else self._largest_part

    @property
    def fixed(self) -> bool:
        """Whether the limit does not adapt."""
        return self._fixed_limit

    def fix_limit(self, limit: int | None) -> None:
        """Stop adapting, at `limit` requests; None resumes adapting from the present limit."""
        self._fixed_limit = limit is not None
        self.limit = limit or self.limit
        self._trial, self._since, self._unsettled, self._goal = None, None, 0, 0
        self._hold, self._hold_until = FIRST_HOLD, 0.0

    def full(self) -> None:
        """Note that a part waited because the limit was reached."""
        self._full = True

    def starved(self, seconds: float) -> None:
        """Note that delivery waited for storage; of several channels, their mean."""
        self._starved += seconds

    def throttled(self, now: float) -> None:
        """S3 asked for less: halve, once for all requests that were under way together."""
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
        """A request has ended well: so many bytes, the first after `first_byte` of its `seconds`."""
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
        self._full, self._starved = False, 0.0
        self._worked_before = self._worked()

    def _consider(self, now: float, seconds: float) -> None:
        """Every request has landed since `_begin`, so many seconds ago."""
        wanted = self._full and self._starved >= STARVED * seconds and not self._inflated
        grows = (
            wanted and self._waiting and self._trial is None and not self._goal and now >= self._hold_until
        )
        if grows and self.limit < self._most:
            if not self._busy(seconds):
                self.limit = min(self._most, self.limit * 2)
            self._begin(now)
        elif seconds >= INTERVAL and self._landed >= LANDINGS * self.limit:
            self._judge(now, self._bytes / seconds, wanted=wanted and not self._busy(seconds))
            self._begin(now)

    def _busy(self, seconds: float) -> bool:
        return self._worked() - self._worked_before >= BUSY * seconds

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
                # What is in flight, and connections still to be made, say nothing of what is tried.
                self.limit = self._unsettled = more

    def _return(self, now: float) -> None:
        """After a storm: a step back to where it began."""
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
        """Whether S3 has asked for less, and the limit has not come back yet."""
        return self._goal > 0

    def part_size(self, staging: int) -> int:
        """Bytes of the next part, if its stage may hold `staging` of them."""
        size = self._part_size
        if self._fixed_part:
            return size
        wanted = 2 * self._first_byte * self._body_rate
        while size < wanted and size < self._largest_part:
            size *= 2
        while size > staging and size > SMALLEST_PART:
            size //= 2
        return size
