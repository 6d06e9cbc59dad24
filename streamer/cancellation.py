"""Lets a long computation in a worker thread end when its task is cancelled.

    task ─ in_thread ─▶ thread, in a context with `set_cancelled`
    task is cancelled ─▶ the computation asks `cancelled()` now and then, and raises Cancelled

A thread cannot be ended from outside. Without this a process that is stopped would run until the sums of an
epoch are whole, which takes minutes for hundreds of millions of records.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Cancelled(Exception):
    """Nothing waits for the result of this computation any more."""


def _never() -> bool:
    return False


_cancelled: ContextVar[Callable[[], bool]] = ContextVar("cancelled", default=_never)


def set_cancelled(cancelled: Callable[[], bool]) -> None:
    """Set the function that returns whether the computation of the current context is cancelled."""
    _cancelled.set(cancelled)


def cancelled() -> Callable[[], bool]:
    """Return the function that returns whether the current computation is cancelled."""
    return _cancelled.get()
