"""How long requests that may pass are repeated, and with which waits.

Waits are exponential with full jitter (uniform between 0 and the step), which keeps many requests that failed
together from returning together. A server's Retry-After is a lower bound, as far as the policy believes it,
and the jitter on top of it is at least as long, since the server told all of them at once.

No wait and no request outlasts `give_up_after`, but for the last request, which has `LAST_REQUEST` seconds at
least.
"""

from __future__ import annotations

import asyncio
import random
import time
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from streamer.errors import ClockSkew, GaveUp, SourceError, Transient

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

LAST_REQUEST = 1.0
"""Seconds that the last request has, after `give_up_after` has passed."""
T = TypeVar("T")


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


_around: ContextVar[Attempts | None] = ContextVar("attempts", default=None)
"""The attempts that the running code is part of."""


def note_failure(error: SourceError) -> None:
    """Note a failure inside an attempt, even one repeated there; an attempt out of time raises the first."""
    if (attempts := _around.get()) is not None and isinstance(error, (Transient, ClockSkew)):
        attempts.note(error)


class Attempts:
    """The attempts at one thing: how long they have gone on without progress, and the first error since."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self.failures = 0
        self.since = time.monotonic()
        """When the last progress was."""
        self.first: SourceError | None = None
        self._limit: asyncio.Timeout | None = None
        self._noted: SourceError | None = None
        """The first failure inside the running attempt, since its last progress."""

    def note(self, error: SourceError) -> None:
        """Note the error of a request inside the running attempt."""
        self._noted = self._noted or error

    def progressed(self) -> None:
        """Something of what is wanted has arrived: all time is there again."""
        self.since, self.failures, self.first, self._noted = time.monotonic(), 0, None, None
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(self._deadline())

    def _deadline(self) -> float:
        left = self._policy.give_up_after - (time.monotonic() - self.since)
        return asyncio.get_running_loop().time() + max(left, LAST_REQUEST)

    async def one(self, ask: Callable[[], Awaitable[T]]) -> T:
        """One attempt, cut off where the time without progress ends. Raises Transient for that."""
        self._noted = None
        around = _around.set(self)
        try:
            async with asyncio.timeout_at(self._deadline()) as self._limit:
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

    def wait_after(self, error: SourceError, what: str) -> float:
        """Seconds to wait before the next attempt. Raises GaveUp when the time is over."""
        spent = time.monotonic() - self.since
        self.first = self.first or error
        note_failure(error)
        if spent >= self._policy.give_up_after:
            raise GaveUp(
                f"gave up after {spent:.0f} s without {what}; first error: {self.first.message}; "
                f"last error: {error.message}",
                self.first.context if error.context.bucket is None else error.context,
            ) from error
        self.failures += 1
        return self._policy.wait(self.failures - 1, error.retry_after, spent=spent)


async def retry_while_unavailable(
    ask: Callable[[], Awaitable[T]],
    attempts: Attempts,
    *,
    what: str,
    on_wait: Callable[[SourceError], None] | None = None,
) -> T:
    """What `ask` returns, asked again while storage is away or this machine's clock is wrong.

    `what`: what is missing, for the error. `on_wait` is told why, at every attempt. Raises SourceError.
    """
    while True:
        try:
            return await attempts.one(ask)
        except (Transient, ClockSkew) as error:
            pause = attempts.wait_after(error, what)
            if on_wait is not None:
                on_wait(error)
        await asyncio.sleep(pause)
