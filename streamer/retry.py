"""How long a request or a step that failed is repeated, and with which waits.

    retry ── attempt ──▶ result
      │ failed
      ├── Attempts.wait_after: seconds ──▶ sleep, and repeat
      └── Attempts.wait_after: raises

`Attempts` decides and `retry` waits, for parts, plans, HEADs and what this machine refuses. botocore repeats
a control call a few times by itself before an error arrives here. The keeper runs alone and has its own loop.

Waits are exponential with full jitter (uniform between 0 and the step), which keeps many requests that failed
together from returning together. A server's Retry-After is a lower bound, as far as the policy believes it,
and the jitter on top of it is at least as long, since the server told all of them at once.

No wait outlasts `give_up_after`. A request that `bounded` runs does not either, but for the last one, which
has `LAST_REQUEST` seconds at least.
"""

from __future__ import annotations

import asyncio
import random
import time
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from streamer.errors import (
    BadAnswer,
    ClockSkew,
    Expired,
    GaveUp,
    PenstockError,
    Shortage,
    SourceError,
    Transient,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

LAST_REQUEST = 1.0
"""Seconds that the last request has, after `give_up_after` has passed."""
UNAVAILABLE: tuple[type[SourceError], ...] = (Transient, ClockSkew)
"""Storage is away, or this machine's clock is wrong."""
PART_FAILED: tuple[type[SourceError], ...] = (Transient, ClockSkew, Expired, BadAnswer)
"""Errors after which a part is requested again."""
T = TypeVar("T")
E = TypeVar("E", bound=PenstockError)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long and how eagerly to retry; all in seconds."""

    give_up_after: float = 300.0
    first_wait: float = 0.1
    """Upper end of the first wait; doubles with each further one."""
    longest_wait: float = 4.0
    """Upper end of every later one. After a storm the head of line may still wait for so long, and full speed
    must be back within ten seconds; 64 parts that wait so long ask 32 times a second, which hurts nobody."""
    longest_retry_after: float = 60.0
    """What a server may ask us to wait; more counts as this."""
    wrong_answers: int = 3
    """So many wrong answers in a row are believed."""

    def wait(self, failures: int, retry_after: float | None, *, spent: float = 0.0) -> float:
        """Seconds before the next request, `failures` having gone before the one that failed.

        `spent`: seconds without progress so far; the wait ends with `give_up_after` at the latest.
        """
        step = min(self.longest_wait, self.first_wait * 2 ** min(failures, 32))
        asked = min(max(retry_after or 0.0, 0.0), self.longest_retry_after)
        wanted = asked + random.uniform(0, max(step, asked))  # noqa: S311 - jitter, not a secret
        return max(0.0, min(wanted, self.give_up_after - spent))


_around: ContextVar[Attempts[Any] | None] = ContextVar("attempts", default=None)
"""The attempts that the running code is part of."""


def note_failure(error: PenstockError) -> None:
    """Note a failure inside an attempt, even one repeated there; an attempt out of time raises the first."""
    if (attempts := _around.get()) is not None and isinstance(error, UNAVAILABLE):
        attempts.note(error)


class Attempts(Generic[E]):
    """The attempts at one thing: how long they have gone on without progress, and the first error since."""

    def __init__(
        self, policy: RetryPolicy, passing: tuple[type[E], ...], *, what: str, since: float | None = None
    ) -> None:
        """`passing`: the errors that are waited out. `what`: what is missing, for the text of GaveUp.

        `since`: time.monotonic() when the first attempt began, if it began before this call.
        """
        self.passing = passing
        self.failures = 0
        """Failures since the last progress."""
        self.since = time.monotonic() if since is None else since
        """time.monotonic() of the last progress."""
        self._policy = policy
        self._what = what
        self._wrong = 0
        """Wrong answers since the last progress."""
        self._first: E | None = None
        self._limit: asyncio.Timeout | None = None
        self._noted: SourceError | None = None
        """The first failure inside the running attempt, since its last progress."""

    def note(self, error: SourceError) -> None:
        """Note the error of a request inside the running attempt."""
        self._noted = self._noted or error

    def progressed(self, silent: float = 0.0) -> None:
        """Restart the clock: something of what is wanted arrived `silent` seconds ago."""
        self.since, self.failures, self._wrong = time.monotonic() - silent, 0, 0
        self._first = self._noted = None
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time() + self.left)

    @property
    def left(self) -> float:
        """Seconds that the next request has."""
        return max(self._policy.give_up_after - (time.monotonic() - self.since), LAST_REQUEST)

    async def bounded(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Run one attempt, cut off where the time without progress ends. Raises Transient for that."""
        self._noted = None
        around = _around.set(self)
        try:
            async with asyncio.timeout(self.left) as self._limit:
                return await ask()
        except TimeoutError as error:
            spent = time.monotonic() - self.since
            late = f"no answer came in the {spent:.0f} s that were left"
            if (noted := self._noted) is not None:
                raise Transient(f"{noted.message}; {late}", noted.context) from error
            raise Transient(late) from error
        finally:
            self._limit = None
            _around.reset(around)

    def wait_after(self, error: E) -> float:
        """Return the seconds to wait before the next attempt.

        Raises GaveUp when the time is over, and `error` itself if that is a shortage of this machine, or a
        wrong answer that came as often as the policy doubts it.
        """
        note_failure(error)
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
            raise GaveUp(
                f"gave up after {spent:.0f} s without {self._what}; "
                f"first error: {first.message if first.context == context else first}; "
                f"last error: {error.message}",
                context,
            ) from error
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
    """Return what `attempt` returns, repeated as `attempts` decides.

    `failed`: the error of an attempt that the caller has made. `on_wait` gets every error that is waited out.
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


async def retry_while_refused(
    step: Callable[[], Awaitable[T]], policy: RetryPolicy, on_wait: Callable[[Shortage], None]
) -> T:
    """Return what `step` returns, repeated while this machine refuses it: space, a descriptor, a file system.

    Such a refusal passes: files are removed, connections close, a permission is given back. A FIFO stays as
    it is until then, since closing it would look like an end to its reader. `on_wait` gets the first such
    failure. Raises SinkError.
    """
    attempts = Attempts(policy, (Shortage,), what="success")

    def note(shortage: Shortage) -> None:
        if attempts.failures == 1:
            on_wait(shortage)

    return await retry(step, attempts, on_wait=note)


async def retry_while_unavailable(
    make: Callable[[Callable[[], None]], Awaitable[T]],
    policy: RetryPolicy,
    *,
    on_wait: Callable[[SourceError], None] | None = None,
) -> T:
    """Return what `make` returns, repeated while storage is unavailable or this machine's clock is wrong.

    `make` calls its argument for each further page, row or piece that arrives; `give_up_after` is the time
    without one that an earlier attempt did not have. `on_wait` gets every error that is waited out. Raises
    SourceError: the first one, if the policy allows no time.
    """
    if policy.give_up_after <= 0:
        return await make(lambda: None)
    attempts, furthest = Attempts(policy, UNAVAILABLE, what="a listing"), 0

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
