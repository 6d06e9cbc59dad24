"""Fetching one part until it is whole: resume, wait, give up.

A training feed should wait for storage rather than fail fast, so a part is retried for as long as
`give_up_after` seconds without progress; arriving bytes start that clock, and the backoff, anew. What
arrived stays, so an attempt asks only for the rest. Every part has that time to itself: there is no quota
that parts share, so many that fail at once do not starve each other.

The last wait and the last request end when that time does: the transport bounds the first request by the
stall timeout, which is not longer, and `_first_byte_within` bounds each later one until its first byte. How
long a wait is: `RetryPolicy`.

    Transient, Throttled, Truncated, Expired,
    Skewed                                     may pass: waited out
    BadAnswer                                  a sick proxy or front end: asked again twice, then believed
    the others                                 certain: raised at once
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

import stamina

from streamer.errors import BadAnswer, Expired, GaveUp, SourceError, Throttled, Transient, Where
from streamer.source.retry import LAST_REQUEST

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from streamer.relay.allotment import Share
    from streamer.relay.stages import Stage
    from streamer.relay.statistics import Tally
    from streamer.source.ranges import Phase, RangeSource
    from streamer.source.retry import RetryPolicy


class _Backoff:
    """stamina's hook: whether to retry an error, and after how many seconds."""

    def __init__(self, stage: Stage, policy: RetryPolicy, tally: Tally) -> None:
        self._stage = stage
        self._policy = policy
        self._tally = tally
        self._failures = 0
        self._wrong = 0
        self._received = stage.received
        self.since = time.monotonic()
        """When the part last made progress, as far as a failure has shown."""
        self.first_error: Exception | None = None

    def __call__(self, error: Exception) -> bool | float:
        if not isinstance(error, SourceError):
            return False
        now = time.monotonic()
        if self._stage.received > self._received:
            self._received = self._stage.received
            silent = error.silent if isinstance(error, Transient) else 0.0
            self._failures, self._wrong, self.since, self.first_error = 0, 0, now - silent, None
        if isinstance(error, BadAnswer):
            self._wrong += 1
            if self._wrong >= self._policy.wrong_answers:
                return False
        elif not error.retryable:
            return False
        self.first_error = self.first_error or error
        if now - self.since >= self._policy.give_up_after:
            return False
        self._tally.retries[error.kind] += 1
        self._stage.doing(_waiting_for(error))
        self._failures += 1
        return self._policy.wait(self._failures - 1, error.retry_after, spent=now - self.since)

    @property
    def left(self) -> float:
        """Seconds that the next request has until its first byte."""
        return max(LAST_REQUEST, self._policy.give_up_after - (time.monotonic() - self.since))


def _waiting_for(error: SourceError) -> Phase:
    """What the wait after an error is for."""
    match error:
        case Throttled():
            return "throttled"
        case Expired():
            return "credentials"
        case _:
            return "retry"


async def fetch_part(
    source: RangeSource, stage: Stage, policy: RetryPolicy, tally: Tally, share: Share
) -> None:
    """Bring the whole part into `stage`. Raises SourceError: GaveUp, or one that retrying cannot mend."""
    backoff = _Backoff(stage, policy, tally)
    failed: SourceError | None = None
    try:
        await _request(source, stage, tally, share, attempt=1)
    except SourceError as error:
        failed = error
    else:
        return  # nearly always: the retry machinery costs more than a small object's request
    try:
        async for turn in stamina.retry_context(on=backoff, attempts=None, timeout=None):
            with turn:
                if turn.num == 1:
                    raise failed
                async with _first_byte_within(backoff.left, stage):
                    await _request(source, stage, tally, share, attempt=turn.num)
    except SourceError as error:
        if not error.retryable:
            raise
        spent = time.monotonic() - backoff.since
        raise GaveUp(
            f"gave up after {spent:.0f} s without a byte; first error: {backoff.first_error}; "
            f"last error: {error}",
            error.where,
        ) from error


@contextlib.asynccontextmanager
async def _first_byte_within(seconds: float, stage: Stage) -> AsyncIterator[None]:
    """Cut a request off that has brought no byte by then, whatever it waits for. Raises Transient."""
    loop, received = asyncio.get_running_loop(), stage.received

    def look() -> None:
        if stage.received == received:
            limit.reschedule(loop.time())

    timer = loop.call_later(seconds, look)
    try:
        async with asyncio.timeout(None) as limit:
            yield
    except TimeoutError as error:
        where = Where(stage.part.object.bucket, stage.part.object.key, stage.part.start + received)
        raise Transient(f"no byte for the last {seconds:.0f} s", where, silent=seconds) from error
    finally:
        timer.cancel()


async def _request(source: RangeSource, stage: Stage, tally: Tally, share: Share, *, attempt: int) -> None:
    """One request, counted by its outcome, which sets the pace of those to come."""
    before, outcome = stage.received, "cancelled"
    if attempt > 1 and before:
        tally.resumes["part"] += 1
    stage.asked()
    stage.asking = True
    try:
        await source.fetch(stage, attempt=attempt)
        outcome = "ok"
        seconds = stage.seconds_since_asked()
        tally.part.add(seconds)
        share.landed(
            time.monotonic(),
            received=stage.received - before,
            first_byte=stage.first_byte_after,
            seconds=seconds,
        )
    except SourceError as error:
        outcome = error.kind
        stage.asking = False
        tell_failure(error, tally, share)
        raise
    finally:
        tally.requests[outcome] += 1


def tell_failure(error: SourceError, tally: Tally, share: Share) -> None:
    """A request has failed: remember why, and heed S3 if it asked for less."""
    tally.note(error.kind, error)
    if isinstance(error, Throttled):
        share.pace.throttled(time.monotonic())
