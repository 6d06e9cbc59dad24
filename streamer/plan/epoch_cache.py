"""Caches a value for each of the last few orders of an epoch of a plan. Threads may share it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

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
        self._making = threading.Lock()
        """Held by the thread that makes a value, so that others do not make it too."""

    def of(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """Return the epoch's value, made by `make` if it is not cached. Raises as `make`."""
        value = self._get(key)  # before the lock: a cached value does not wait while another one is made
        if value is None:
            with self._making:
                value = self._get(key)
                if value is None:
                    value = make()
                    self._put(key, value)
        return value

    def _get(self, key: Hashable) -> Value | None:
        with self._lock:
            value = self._values.pop(key, None)
            if value is not None:
                self._values[key] = value
        return value

    def _put(self, key: Hashable, value: Value) -> None:
        """Add the value of an epoch. Removes the value that was used first, if too many."""
        with self._lock:
            self._values[key] = value
            if len(self._values) > MOST_EPOCHS:
                del self._values[next(iter(self._values))]
