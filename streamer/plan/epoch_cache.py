"""Caches a value for each of the last few orders of an epoch of a plan. Threads may share it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable

MOST_EPOCHS = 4
"""Epochs whose values are cached: the current one, the next one, and their neighbours."""

Value = TypeVar("Value")


class EpochCache(Generic[Value]):
    """Values of the epochs that were used last. Their keys are epochs, or `Order.key`."""

    def __init__(self) -> None:
        self._values: dict[Hashable, Value] = {}
        """Values by key, from the one that was used first to the one that was used last."""
        self._lock = threading.Lock()
        """Held while the order of the values changes."""

    def get(self, key: Hashable) -> Value | None:
        """Return the epoch's value; None if it is not cached."""
        with self._lock:
            value = self._values.pop(key, None)
            if value is not None:
                self._values[key] = value
        return value

    def put(self, key: Hashable, value: Value) -> Value:
        """Add the value of an epoch, and return it. Removes the value that was used first, if too many."""
        with self._lock:
            self._values.pop(key, None)
            self._values[key] = value
            if len(self._values) > MOST_EPOCHS:
                del self._values[next(iter(self._values))]
        return value
