"""One part on its way into its stage: request, retry, resume, give up.

A training feed should wait for storage rather than fail fast, so a part is retried for as long as
`give_up_after` seconds without progress; arriving bytes start that clock, and the backoff, anew. Bytes that
arrived stay, so an attempt asks only for the rest. Every part has that time to itself: there is no quota
that parts share, so many that fail at once do not starve each other.

The last wait and the last request end when that time does: the transport bounds the first request by the
stall timeout, which is not longer, and `_first_byte_within` bounds each later one until its first byte. How
long a wait is: `RetryPolicy`.

    Transient, Throttled, Truncated, Expired,
    ClockSkew                                  may pass: waited out
    BadAnswer                                  a sick proxy or front end: asked again twice, then believed
    the others                                 certain: raised at once
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING

from streamer.errors import ErrorContext, Expired, SourceError, Throttled, Transient
from streamer.retry import PART_FAILED, Attempts, retry
from streamer.s3.ranges import RangeRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from streamer.relay.staging.stage import Stage
    from streamer.relay.statistics import ChannelCounters
    from streamer.retry import RetryPolicy
    from streamer.s3.ranges import Body, Phase, RangeSource
    from streamer.schedule.budget import ChannelQuota


class PartFetch:
    """Brings the body of one part into `stage`, by as many requests as it takes."""

    def __init__(
        self,
        stage: Stage,
        source: RangeSource,
        *,
        policy: RetryPolicy,
        counters: ChannelCounters,
        quota: ChannelQuota,
    ) -> None:
        self.stage = stage
        self.phase: Phase = "first_byte"
        """The phase of the last request."""
        self.on_phase: Callable[[Phase], None] | None = None
        """Called when the phase changes; set while delivery waits for this part."""
        self.request: RangeRequest | None = None
        """The request under way; None between two attempts."""
        self.error: SourceError | None = None
        """Why no further byte will come; set once, when retrying is over."""
        self.last_chance = False
        """Whether a part that is given up is lost: delivery waited for it, or has asked for it again."""
        self.task: asyncio.Task[None] | None = None
        """The task that runs this; its starter's to set."""
        self._attempts = 1
        """Requests sent, the first one included."""
        self._received = 0
        """Bytes in the stage when the last request failed."""
        self._source = source
        self._policy = policy
        self._counters = counters
        self._quota = quota

    def __repr__(self) -> str:
        return f"<PartFetch {self.phase}, {self.stage}>"

    def enter(self, phase: Phase) -> None:
        """The request is in this phase now."""
        self.phase = phase
        if self.on_phase is not None:
            self.on_phase(phase)

    async def run(self, failed: SourceError | None = None) -> None:
        """Bring the whole part. Raises SourceError: GaveUp, or one that retrying cannot mend.

        `failed`: how the first request ended, if it has been sent already.
        """
        since, self._received = time.monotonic(), self.stage.received
        if failed is None:
            try:
                await self._attempt(1)
            except SourceError as error:
                failed = error
            else:
                return  # nearly always: what repeats a request costs more than one for a small object
        if self._has_progressed():
            since = time.monotonic() - _silence_before(failed)
        attempts = Attempts(self._policy, PART_FAILED, what="a byte", since=since)
        await retry(partial(self._again, attempts), attempts, failed=failed, on_wait=self._note_wait)

    async def _again(self, attempts: Attempts[SourceError]) -> None:
        """Request what is still missing of the part. Raises SourceError."""
        self._attempts += 1
        try:
            async with _first_byte_within(attempts.left, self.stage):
                await self._attempt(self._attempts)
        except SourceError as error:
            if self._has_progressed():
                attempts.progressed(_silence_before(error))
            raise

    def _has_progressed(self) -> bool:
        """Return whether bytes have arrived since the last failure."""
        before, self._received = self._received, self.stage.received
        return self._received > before

    def _note_wait(self, error: SourceError) -> None:
        self._counters.retries[error.kind] += 1
        self.enter(_waiting_for(error))

    async def _attempt(self, attempt: int) -> None:
        stage = self.stage
        if attempt > 1 and stage.received:
            self._counters.resumes["part"] += 1
        self.enter("first_byte")
        first = stage.part.start + stage.received
        request = self.request = RangeRequest(stage.part, first, attempt, on_phase=self.enter)
        body, since, first_byte = await self.open(request)
        self._counters.first_byte.add(first_byte)
        self.enter("body")
        await self.receive(request, body, lambda: stage.attach(body), since, first_byte)

    async def open(self, request: RangeRequest) -> tuple[Body, float, float]:
        """Send the request. Returns its body, when it was sent (time.monotonic()), and seconds until then.

        Raises SourceError; the failure is counted.
        """
        since = time.monotonic()
        try:
            body = await self._source.open(request)
        except BaseException as error:
            self._ended(request, error)
            raise
        return body, since, time.monotonic() - since

    async def receive(
        self, request: RangeRequest, body: Body, begin: Callable[[], None], since: float, first_byte: float
    ) -> None:
        """Have `begin` attach the body, wait until all of it is taken, close it, and count the request.

        Raises SourceError.
        """
        try:
            begin()
            await body.taken()
        except BaseException as error:
            self._ended(request, error)
            raise
        finally:
            self.stage.detach(body)
            body.close()
        self._forget(request)
        now = time.monotonic()
        self._counters.requests["ok"] += 1
        self._counters.part.add(now - since)
        received = request.part.end - request.first
        self._quota.landed(now, received=received, first_byte=first_byte, seconds=now - since)

    def _forget(self, request: RangeRequest) -> None:
        """Drop an ended request: it refers to this object, and a cycle would keep both, and the stage."""
        if self.request is request:
            self.request = None

    def _ended(self, request: RangeRequest, error: BaseException) -> None:
        """Count a request that has failed or was cancelled, and heed S3 if it asked for less."""
        self._forget(request)
        if not isinstance(error, SourceError):
            self._counters.requests["cancelled"] += 1
            return
        self._counters.requests[error.kind] += 1
        self._counters.note(error.kind, error)
        if isinstance(error, Throttled):
            self._quota.concurrency.throttled(time.monotonic())


def _silence_before(error: SourceError) -> float:
    """Seconds since the last byte when the error came."""
    return error.silent if isinstance(error, Transient) else 0.0


def _waiting_for(error: SourceError) -> Phase:
    """What the wait after an error is for."""
    match error:
        case Throttled():
            return "throttled"
        case Expired():
            return "credentials"
        case _:
            return "retry"


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
        context = ErrorContext(stage.part.object.bucket, stage.part.object.key, stage.part.start + received)
        raise Transient(f"no byte for the last {seconds:.0f} s", context, silent=seconds) from error
    finally:
        timer.cancel()
