"""Fetches one part into its stage: request, retry, resume, give up.

A training feed should wait for storage and not fail fast, so a part is retried until `give_up_after` seconds
pass without progress. A byte of the part that arrives for the first time restarts that time and the backoff.
The stage keeps the bytes that have arrived, so an attempt requests only the rest, and some of those in doubt.
Each part has a time limit of its own, so many parts that fail at once do not use up each other's retries.

The last wait and the last request end with that time: the transport bounds the first request by the stall
timeout, which is not longer, and `_first_byte_within` bounds each later request until its first byte.
`RetryPolicy` sets the length of a wait.

    Transient, Throttled, Truncated, Expired,
    ClockSkew                                  may pass: retried until `give_up_after`
    BadAnswer                                  perhaps a faulty proxy: retried twice, then raised
    the others                                 certain: raised at once
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING

from streamer.errors import (
    ErrorContext,
    Expired,
    InvalidResponse,
    SourceError,
    Throttled,
    Transient,
    Truncated,
)
from streamer.relay.fetch.successor import Successor
from streamer.retry import PART_FAILED, Attempts, retry
from streamer.s3.client.doubt import FOREIGN, overlap
from streamer.s3.ranges import RangeRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from streamer.relay.staging.stage import Stage
    from streamer.relay.statistics import ChannelCounters
    from streamer.retry import RetryPolicy
    from streamer.s3.ranges import Body, Outcome, Phase, RangeSource
    from streamer.schedule.budget import ChannelQuota


class PartFetch:
    """Fetches the body of one part into `stage`, with as many requests as necessary."""

    def __init__(
        self,
        stage: Stage,
        source: RangeSource,
        *,
        policy: RetryPolicy,
        counters: ChannelCounters,
        quota: ChannelQuota,
        requests: int = 1,
    ) -> None:
        """`requests`: see `RangeRequest.requests`."""
        self.stage = stage
        self.phase: Phase = "first_byte"
        """Phase of the last request."""
        self.on_phase: Callable[[Phase], None] | None = None
        """Called when the phase changes; set while delivery waits for this part."""
        self.request: RangeRequest | None = None
        """Request in flight; None between two attempts."""
        self.on_spare: Callable[[int], None] | None = None
        """Called with a number of several requests at once that are not needed any more."""
        self.error: SourceError | None = None
        """Final error, set once when retrying has ended: no further byte will arrive."""
        self.last_chance = False
        """Whether giving up is final: delivery was waiting for the part, or has had it requested again."""
        self.waited_at = -1
        """`Stage.proven` when delivery last began to wait for more."""
        self.task: asyncio.Task[None] | None = None
        """Task that runs this fetch; set by whoever starts it."""
        self._attempts = 1
        """Requests sent, the first one included."""
        self._received = 0
        """Most bytes that the stage has had when a request failed."""
        self._misses = 0
        """Responses in a row with fewer new bytes than those that they were to repeat."""
        self._source = source
        self._policy = policy
        self._counters = counters
        self._quota = quota
        self._requests = requests

    def __repr__(self) -> str:
        return f"<PartFetch {self.phase}, {self.stage}>"

    @property
    def name(self) -> str:
        """Name of the task."""
        part = self.stage.part
        return f"GET {part.object.key} at {part.offset}, {part.size} bytes"

    def enter(self, phase: Phase) -> None:
        """Set the phase of the request, and report it to `on_phase`."""
        self.phase = phase
        if self.on_phase is not None:
            self.on_phase(phase)

    async def run(self, failed: SourceError | None = None) -> None:
        """Fetch the whole part. Raises SourceError: GaveUp, or an error that a retry cannot cure.

        `failed`: error of the first request, if that has been sent already.
        """
        since, self._received = time.monotonic(), self.stage.received
        if failed is None:
            try:
                await self._attempt(1)
            except SourceError as error:
                failed = error
            else:
                return  # the usual case; setting up retries costs more than a small object's request
        if self._has_progressed():
            since = time.monotonic() - _silence_before(failed)
        attempts = Attempts(self._policy, PART_FAILED, what="a byte", since=since)
        attempts.worked = self._counters.counts["requests"]["ok"] > 0
        await retry(partial(self._again, attempts), attempts, failed=failed, on_wait=self._note_wait)

    async def _again(self, attempts: Attempts[SourceError]) -> None:
        """Request the missing rest of the part. Raises SourceError."""
        self._attempts += 1
        try:
            async with _first_byte_within(attempts, self.stage):
                await self._attempt(self._attempts)
        except SourceError as error:
            if self._has_progressed():
                attempts.progressed(_silence_before(error))
            raise

    def _note_spare(self, count: int) -> None:
        self._requests -= count
        if self.on_spare is not None:
            self.on_spare(count)

    def _has_progressed(self) -> bool:
        """Return whether bytes have arrived since the last failure."""
        before, self._received = self._received, max(self._received, self.stage.received)
        return self._received > before

    def _note_wait(self, error: SourceError) -> None:
        self._counters.retried(self.stage.part.epoch, error.kind)
        self.enter(_waiting_for(error))

    async def _attempt(self, attempt: int) -> None:
        stage = self.stage
        if attempt > 1 and stage.received:
            self._counters.counts["resumes"]["part"] += 1
        self.enter("first_byte")
        repeated = overlap(stage.in_doubt, self._misses) if stage.in_doubt else 0
        request = RangeRequest(
            stage.part,
            stage.received - repeated,
            attempt,
            on_phase=self.enter,
            requests=self._requests,
            on_request_ended=self.note_request,
            on_whole=stage.on_whole,
            on_spare=self._note_spare,
        )
        for tap in stage.taps:
            await tap.before(stage.part, attempt)
        self.request = request
        try:
            body = await self._source.open(request)
            self.enter("body")
            if repeated:
                await self._take_over(request, body, repeated)
            else:
                self._misses = 0
                await self.receive(body, partial(stage.attach, body))
        finally:
            if self.request is request:
                self.request = None  # it refers to this object, and the cycle would keep both and the stage

    async def _take_over(self, request: RangeRequest, body: Body, repeated: int) -> None:
        """As `receive`, for a body that repeats bytes in doubt. Raises SourceError also if they differ."""
        stage, loop = self.stage, asyncio.get_running_loop()
        before = stage.received
        successor = None
        try:
            async with asyncio.timeout(None) as limit:
                successor = Successor(
                    body,
                    stage,
                    before - repeated,
                    on_won=lambda: None,
                    on_differs=lambda: limit.reschedule(loop.time()),
                    # Another request may have taken over, whose body this one would replace unread.
                    wanted=lambda: self.request is request,
                )
                await self.receive(body, successor.advance)
        except TimeoutError as ended:
            error = self._contradicted(request, successor.again if successor else b"")
            self._counters.note(error.kind, str(error))
            raise error from ended
        finally:
            if successor is not None:
                self._counters.wasted_bytes += successor.thrown_away
                few = not successor.differs and stage.received - before < repeated
                self._misses = self._misses + 1 if few else 0

    def _contradicted(self, request: RangeRequest, again: bytes) -> SourceError:
        """Drop the bytes in doubt, which another response has sent otherwise; return the error of that."""
        if self.stage.drop_doubted(again):
            return Truncated(FOREIGN, request.context)
        return InvalidResponse(f"{FOREIGN}; others of them may be delivered", request.context)

    async def receive(self, body: Body, begin: Callable[[], None]) -> None:
        """Attach the body with `begin`, wait until all of it is taken, and close it. Raises SourceError."""
        try:
            begin()
            if body.left:  # most small bodies are taken at once
                await body.taken()
        finally:
            self.stage.detach(body)
            body.close()

    def note_request(
        self,
        outcome: Outcome,
        received: int,
        first_byte: float,
        seconds: float,
        header: Mapping[str, str],  # noqa: ARG002 - for counters of what responses say
    ) -> None:
        """Count a request that has ended (`RangeRequest.on_request_ended`)."""
        counters, epoch = self._counters, self.stage.part.epoch
        if not isinstance(outcome, SourceError):
            counters.request_ended(epoch, outcome)
            if outcome == "ok":
                counters.first_byte.add(first_byte)
                counters.part.add(seconds)
                self._quota.landed(
                    time.monotonic(), received=received, first_byte=first_byte, seconds=seconds
                )
            return
        counters.request_ended(epoch, outcome.kind)
        counters.note(outcome.kind, str(outcome))
        if isinstance(outcome, Throttled):
            self._quota.throttled(time.monotonic())


def _silence_before(error: SourceError) -> float:
    """Return the seconds between the last byte and the error."""
    return error.silent if isinstance(error, Transient) else 0.0


def _waiting_for(error: SourceError) -> Phase:
    """Return the phase of a wait after this error."""
    match error:
        case Throttled():
            return "throttled"
        case Expired():
            return "credentials"
        case _:
            return "retry"


@contextlib.asynccontextmanager
async def _first_byte_within(attempts: Attempts[SourceError], stage: Stage) -> AsyncIterator[None]:
    """Cancel the block if the stage has no new byte in the time that is left. Raises SourceError."""
    loop, received, seconds = asyncio.get_running_loop(), stage.received, attempts.left

    def look() -> None:
        if stage.received == received:
            limit.reschedule(loop.time())

    timer = loop.call_later(seconds, look)
    try:
        with attempts.noting():
            async with asyncio.timeout(None) as limit:
                yield
    except TimeoutError as error:
        ref, offset = stage.part.at(received)
        context = ErrorContext(ref.bucket, ref.key, offset)
        late = f"no byte for the last {seconds:.0f} s"
        raise attempts.timed_out(late, context, silent=seconds) from error
    finally:
        timer.cancel()
