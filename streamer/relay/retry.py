"""Fetching one part until it is whole: resume, wait, give up.

A training feed should wait for storage rather than fail fast, so a part is retried for as long as
`give_up_after` seconds without progress; arriving bytes start that clock, and the backoff, anew. What
arrived stays, so an attempt asks only for the rest. Waits are exponential with full jitter (uniform
between 0 and the step), which keeps many parts that failed together from returning together; a
server's Retry-After is a lower bound.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import stamina

from streamer.errors import GaveUp, SourceError, Throttled

if TYPE_CHECKING:
    from streamer.relay.pace import Pace
    from streamer.relay.stages import Stage
    from streamer.relay.statistics import Tally
    from streamer.source.ranges import RangeSource


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long and how eagerly to retry; all in seconds."""

    give_up_after: float = 300.0
    first_wait: float = 0.1
    """Upper end of the first wait; doubles with each further one."""
    longest_wait: float = 20.0


class _Backoff:
    """stamina's hook: whether to retry an error, and after how many seconds."""

    def __init__(self, stage: Stage, policy: RetryPolicy, tally: Tally) -> None:
        self._stage = stage
        self._policy = policy
        self._tally = tally
        self._failures = 0
        self._received = stage.received
        self.since = time.monotonic()
        """When the part last made progress, as far as a failure has shown."""
        self.first_error: Exception | None = None

    def __call__(self, error: Exception) -> bool | float:
        if not (isinstance(error, SourceError) and error.retryable):
            return False
        now = time.monotonic()
        if self._stage.received > self._received:
            self._received = self._stage.received
            self._failures, self.since, self.first_error = 0, now, None
        self.first_error = self.first_error or error
        if now - self.since >= self._policy.give_up_after:
            return False
        self._tally.retries[error.kind] += 1
        self._stage.doing("throttled" if isinstance(error, Throttled) else "retry")
        step = min(self._policy.longest_wait, self._policy.first_wait * 2**self._failures)
        self._failures += 1
        return (error.retry_after or 0.0) + random.uniform(0, step)  # noqa: S311 - jitter, not a secret


async def fetch_part(
    source: RangeSource, stage: Stage, policy: RetryPolicy, tally: Tally, pace: Pace
) -> None:
    """Bring the whole part into `stage`. Raises SourceError: GaveUp, or one that retrying cannot mend."""
    backoff = _Backoff(stage, policy, tally)
    failed: SourceError | None = None
    try:
        await _request(source, stage, tally, pace, attempt=1)
    except SourceError as error:
        failed = error
    else:
        return  # nearly always: the retry machinery costs more than a small object's request
    try:
        async for turn in stamina.retry_context(on=backoff, attempts=None, timeout=None):
            with turn:
                if turn.num == 1:
                    raise failed
                await _request(source, stage, tally, pace, attempt=turn.num)
    except SourceError as error:
        if not error.retryable:
            raise
        spent = time.monotonic() - backoff.since
        raise GaveUp(
            f"gave up after {spent:.0f} s without a byte; first error: {backoff.first_error}; "
            f"last error: {error}",
            error.where,
        ) from error


async def _request(source: RangeSource, stage: Stage, tally: Tally, pace: Pace, *, attempt: int) -> None:
    """One request, counted by its outcome, which sets the pace of those to come."""
    before, outcome = stage.received, "cancelled"
    stage.asked()
    try:
        await source.fetch(stage, attempt=attempt)
        outcome = "ok"
        seconds = stage.seconds_since_asked()
        tally.part.add(seconds)
        pace.landed(
            time.monotonic(),
            received=stage.received - before,
            first_byte=stage.first_byte_after,
            seconds=seconds,
        )
    except SourceError as error:
        outcome = error.kind
        tally.note(outcome, error)
        if isinstance(error, Throttled):
            pace.throttled(time.monotonic())
        raise
    finally:
        tally.requests[outcome] += 1
        tally.received_bytes += stage.received - before
