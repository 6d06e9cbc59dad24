"""Caches a value for each of the last few orders of an epoch of a plan. Threads may share it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable

MOST_EPOCHS = 4
"""Epochs whose values are cached: the current one, the next one, and their neighbours."""

Value = TypeVar("Value")


class EpochCache(Generic[Value]):
    """Values of the epochs that were added last. Their keys are epochs, or `Order.key`."""

    def __init__(self) -> None:
        self._values: dict[Hashable, Value] = {}
        """Values by key. Insertion order is age."""

    def get(self, key: Hashable) -> Value | None:
        """Return the epoch's value; None if it is not cached."""
        return self._values.get(key)

    def put(self, key: Hashable, value: Value) -> Value:
        """Add the value of an epoch, and return it. Removes the oldest one if there are too many."""
        # A new dict, because another thread may read the value of another epoch.
        latest = list(self._values.items())[1 - MOST_EPOCHS :]
        self._values = dict([*latest, (key, value)])
        return value
