"""Retries failed requests and steps, with exponential waits and a time limit.

    retry ── attempt ──▶ result
      │ failed
      ├── Attempts.wait_after: seconds ──▶ sleep, and repeat
      └── Attempts.wait_after: raises

`Attempts` decides and `retry` waits: for parts, plans, HEADs, and resources that this machine refuses.
botocore repeats a control call a few times itself before it raises an error. The keeper has its own loop.

Waits are exponential with full jitter (uniform between 0 and the step), so that many requests that failed
together do not return together. A server's Retry-After, up to the policy's limit, is a lower bound. The
jitter added to it is up to as long again, since the server sent it to many requests at once.

No wait outlasts `give_up_after`. No request that `bounded` runs does either, except the last one, which has
at least `LAST_REQUEST` seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from streamer.errors import (
    BadAnswer,
    BarredNow,
    ClockSkew,
    ErrorContext,
    Expired,
    ForeignAnswer,
    GaveUp,
    InvalidResponse,
    PenstockError,
    Shortage,
    SourceError,
    Transient,
    WrongEndpoint,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

LAST_REQUEST = 1.0
"""Minimum seconds for a request, even if `give_up_after` passes meanwhile."""
SILENCE = 5.0
"""Seconds without an answer after which whoever waits is told for whom."""
UNAVAILABLE: tuple[type[SourceError], ...] = (Transient, ClockSkew, Expired)
"""Errors that mean that storage or credentials are unavailable, or that this machine's clock is wrong."""
ANSWER_FAILED: tuple[type[SourceError], ...] = (*UNAVAILABLE, InvalidResponse)
"""Errors after which a page of a listing or a HEAD is requested again."""
PART_FAILED: tuple[type[SourceError], ...] = (*UNAVAILABLE, BadAnswer)
"""Errors after which a part is requested again."""
T = TypeVar("T")
E = TypeVar("E", bound=PenstockError)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits and waits of retries, in seconds."""

    give_up_after: float = 300.0
    """Maximum time without progress."""
    first_wait: float = 0.1
    """Maximum of the first wait; doubled for each further one."""
    longest_wait: float = 4.0
    """Maximum of every wait. After an outage the head of line may still wait so long, and full speed must
    return within ten seconds; 64 parts with such waits send 32 requests per second, which is little."""
    longest_retry_after: float = 60.0
    """Maximum of a server's Retry-After; longer values count as this."""
    wrong_answers: int = 3
    """Number of `BadAnswer` errors without progress after which the error is raised."""

    def wait(self, failures: int, retry_after: float | None, *, spent: float = 0.0) -> float:
        """Return the seconds before the next request. `failures`: failures before the last one.

        `spent`: seconds without progress so far; the wait ends at `give_up_after` at the latest.
        """
        step = min(self.longest_wait, self.first_wait * 2 ** min(failures, 32))
        asked = min(max(retry_after or 0.0, 0.0), self.longest_retry_after)
        wanted = asked + random.uniform(0, max(step, asked))  # noqa: S311 - jitter, not a secret
        return max(0.0, min(wanted, self.give_up_after - spent))


_around: ContextVar[Attempts[Any] | None] = ContextVar("attempts", default=None)
"""Attempts within which the current code runs."""


def note_failure(error: PenstockError) -> None:
    """Note a failure inside an attempt, even one that is retried there; a timeout's error names the first."""
    if (attempts := _around.get()) is not None and isinstance(error, UNAVAILABLE):
        attempts.note(error)


@contextlib.contextmanager
def noting_silence(late: Callable[[], SourceError]) -> Iterator[Callable[[], None]]:
    """Note the error that `late` returns (`note_failure`) if the block takes longer than `SILENCE`.

    Yields what restarts the time.
    """

    def start() -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(SILENCE, lambda: note_failure(late()))

    timer = start()

    def restart() -> None:
        nonlocal timer
        timer.cancel()
        timer = start()

    try:
        yield restart
    finally:
        timer.cancel()


class Attempts(Generic[E]):
    """Attempts at one request or step: the time without progress, and the first error since then."""

    def __init__(
        self,
        policy: RetryPolicy,
        passing: tuple[type[E], ...],
        *,
        what: str,
        since: float | None = None,
        context: ErrorContext | None = None,
    ) -> None:
        """`passing`: errors that are retried. `what`: the missing result, for the text of GaveUp.

        `context`: of the error of an attempt that `bounded` ends before any of its requests has failed.
        `since`: start of the first attempt, by time.monotonic(), if it began before this call.
        """
        self.passing = passing
        self.failures = 0
        """Failures since the last progress."""
        self.since = time.monotonic() if since is None else since
        """Time of the last progress, by time.monotonic()."""
        self._policy = policy
        self._what = what
        self._context = context
        self.worked = False
        """Whether S3 has answered such a request in this run; then a ForeignAnswer is waited for."""
        self._wrong = 0
        """`BadAnswer` errors since the last progress."""
        self._first: E | None = None
        self._limit: asyncio.Timeout | None = None
        self.on_noted: Callable[[SourceError], None] | None = None
        """Called with each failure inside an attempt, which may repeat a request by itself for long."""
        self._noted: SourceError | None = None
        """First failure inside the running attempt, since the last progress."""

    def note(self, error: SourceError) -> None:
        """Note the error of a request inside the running attempt."""
        self._noted = self._noted or error
        if self.on_noted is not None:
            self.on_noted(error)

    def progressed(self, silent: float = 0.0) -> None:
        """Restart the time limit: the last progress was `silent` seconds ago."""
        self.since, self.failures, self._wrong = time.monotonic() - silent, 0, 0
        self._first = self._noted = None
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time() + self.left)

    @property
    def left(self) -> float:
        """Seconds for the next request."""
        return max(self._policy.give_up_after - (time.monotonic() - self.since), LAST_REQUEST)

    async def bounded(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Run one attempt until the time without progress is over. Raises Transient on that timeout."""
        try:
            with self.noting():
                async with asyncio.timeout(self.left) as self._limit:
                    return await ask()
        except TimeoutError as error:
            spent = time.monotonic() - self.since
            raise self.timed_out(
                f"no answer came in the {spent:.0f} s that were left", self._context
            ) from error
        finally:
            self._limit = None

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Collect the failures inside one attempt, which the block makes (`note_failure`)."""
        self._noted = None
        around = _around.set(self)
        try:
            yield
        finally:
            _around.reset(around)

    def timed_out(self, late: str, context: ErrorContext | None, *, silent: float = 0.0) -> SourceError:
        """Return the error of an attempt that had no time left; it names the first failure inside it.

        `late`: text of the timeout. `context`: if that failure has none. `silent`: see `Transient`.
        """
        if (noted := self._noted) is None:
            if isinstance(self._first, Expired):
                return Expired(late, context)
            return Transient(late, context, silent=silent)
        text = f"{noted.message}; {late}"
        if noted.context != ErrorContext():
            context = noted.context
        if isinstance(noted, Expired):
            return Expired(text, context)
        return Transient(text, context, silent=silent)

    def wait_after(self, error: E) -> float:
        """Return the seconds to wait before the next attempt.

        Raises GaveUp when the time is over, or then `error` itself if it is a failure of this machine. Raises
        `error` also if it is the last `BadAnswer` that the policy allows.
        """
        note_failure(error)
        if self.worked and isinstance(error, ForeignAnswer | WrongEndpoint):
            error = cast("E", BarredNow(error.message, error.context))
        if isinstance(error, BadAnswer):
            self._wrong += 1
            if self._wrong >= self._policy.wrong_answers:
                raise error
        first = self._first = self._first or error
        spent = time.monotonic() - self.since
        if spent >= self._policy.give_up_after:
            if (
                not isinstance(error, SourceError)
                or not isinstance(first, SourceError)
                or not error.retryable
            ):
                raise error
            context = first.context if error.context.bucket is None else error.context
            if error.message.startswith(first.message) and first.context.request_id is None:
                errors = f"first and last error: {error.message}"
            else:
                before = first.message if first.context == context else first
                errors = f"first error: {before}; last error: {error.message}"
            raise GaveUp(f"gave up after {spent:.0f} s without {self._what}; {errors}", context) from error
        self.failures += 1
        retry_after = error.retry_after if isinstance(error, SourceError) else None
        return self._policy.wait(self.failures - 1, retry_after, spent=spent)


async def retry(
    attempt: Callable[[], Awaitable[T]],
    attempts: Attempts[E],
    *,
    failed: E | None = None,
    on_wait: Callable[[E], None] | None = None,
) -> T:
    """Repeat `attempt` as `attempts` decides, and return its result.

    `failed`: error of an attempt that the caller has made. `on_wait` is called with each retried error.
    """
    while True:
        try:
            if failed is not None:
                raise failed
            return await attempt()
        except attempts.passing as error:
            failed = None
            pause = attempts.wait_after(error)
            if on_wait is not None:
                on_wait(error)
        await asyncio.sleep(pause)


@contextlib.contextmanager
def raising_the_last() -> Iterator[None]:
    """Raise the last error in place of GaveUp, with the cause that it has; the caller may wait longer."""
    try:
        yield
    except GaveUp as error:
        last = error.__cause__ or error
    else:
        return
    raise last


async def retry_while_refused(
    step: Callable[[], Awaitable[T]], policy: RetryPolicy, on_wait: Callable[[Shortage | None], None]
) -> T:
    """Repeat `step` while this machine refuses it (Shortage); return its result. Raises SinkError.

    A shortage may pass: files are removed, connections close, a permission is restored. Until then the caller
    keeps a FIFO open, since closing it would look like an end to its reader. `on_wait` is called with each
    Shortage, and with None after the last one.
    """
    attempts = Attempts(policy, (Shortage,), what="success")
    try:
        return await retry(step, attempts, on_wait=on_wait)
    finally:
        if attempts.failures:
            on_wait(None)


async def retry_while_unavailable(
    make: Callable[[Callable[[], None]], Awaitable[T]],
    policy: RetryPolicy,
    *,
    on_wait: Callable[[SourceError], None] | None = None,
    what: str = "a listing",
) -> T:
    """Repeat `make` while its errors are those of `UNAVAILABLE`; return its result.

    `make` calls its argument for each page, row or piece that arrives. `give_up_after` limits the time until
    more of these arrive than in any attempt before. `what`: the missing result, for the text of GaveUp.
    `on_wait` is called with each retried error, also with those that `make` retries. Raises SourceError: the
    first one, if the policy allows no time.
    """
    if policy.give_up_after <= 0:
        return await make(lambda: None)
    attempts, furthest = Attempts(policy, UNAVAILABLE, what=what), 0
    attempts.on_noted = on_wait

    async def anew() -> T:
        reached = 0

        def progressed() -> None:
            nonlocal reached, furthest
            reached += 1
            if reached > furthest:
                furthest = reached
                attempts.progressed()

        return await make(progressed)

    async def bounded() -> T:
        return await attempts.bounded(anew)

    return await retry(bounded, attempts, on_wait=on_wait)
