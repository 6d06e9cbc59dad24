"""Caches a value for each of the last few epochs of a plan. Threads may share it."""

from __future__ import annotations

from typing import Generic, TypeVar

MOST_EPOCHS = 4
"""Epochs whose values are cached: the current one, the next one, and their neighbours."""

Value = TypeVar("Value")


class EpochCache(Generic[Value]):
    """Values of the epochs that were added last."""

    def __init__(self) -> None:
        self._values: dict[int, Value] = {}
        """Values by epoch. Insertion order is age."""

    def get(self, epoch: int) -> Value | None:
        """Return the epoch's value; None if it is not cached."""
        return self._values.get(epoch)

    def put(self, epoch: int, value: Value) -> Value:
        """Add the value of an epoch, and return it. Removes the oldest one if there are too many."""
        # A new dict, because another thread may read the value of another epoch.
        latest = list(self._values.items())[1 - MOST_EPOCHS :]
        self._values = dict([*latest, (epoch, value)])
        return value
