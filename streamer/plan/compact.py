"""Compact columns of numbers below 2^64: 4 bytes a number.

Nearly all objects have less than 4 GiB: `Sizes` keeps the upper bits of a size apart if there are any.
Offsets never descend: `Offsets` keeps the indices at which their upper bits grow, one for each 4 GiB of keys.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    from collections.abc import Iterator

_BITS = 32
_LOWER = (1 << _BITS) - 1
LARGE = 200
"""Most bytes of memory of a size from 2^32 on, besides its lower bits."""


class Sizes(Sequence[int]):
    """Numbers in any order."""

    def __init__(self) -> None:
        self._lower = array("I")
        """The lower 32 bits of each number."""
        self._upper: dict[int, int] = {}
        """The other bits, by index, of the numbers that have any."""

    def __len__(self) -> int:
        return len(self._lower)

    @property
    def memory_of_large(self) -> int:
        """Bytes of memory that the sizes from 2^32 on take besides their lower bits, at most."""
        return LARGE * len(self._upper)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            if self._upper:
                return [self[each] for each in range(*index.indices(len(self)))]
            return self._lower[index].tolist()
        if self._upper:
            return self._lower[index] | self._upper.get(index % len(self), 0)
        return self._lower[index]

    def __iter__(self) -> Iterator[int]:
        return map(self.__getitem__, range(len(self))) if self._upper else iter(self._lower)

    def join(self, other: Sizes) -> None:
        """Append the numbers of `other`."""
        base, lower, upper = len(self), other._lower, other._upper
        self._lower.extend(lower)
        self._upper.update((base + index, bits) for index, bits in upper.items())

    def extend(self, numbers: Sequence[int]) -> None:
        """Append numbers."""
        if max(numbers, default=0) <= _LOWER:
            self._lower.extend(array("I", numbers))
        else:
            for number in numbers:
                if upper := number & ~_LOWER:
                    self._upper[len(self)] = upper
                self._lower.append(number & _LOWER)


class Offsets:
    """Numbers that never descend; the first is 0."""

    def __init__(self) -> None:
        self.last = 0
        """The last number."""
        self._lower = array("I", (0,))
        """The lower 32 bits of each number."""
        self._growth: list[int] = []
        """The indices from which the upper bits are greater by one; an index several times if by more."""

    def __getitem__(self, index: int) -> int:
        """Return the number at an index from 0."""
        return self._lower[index] + (bisect_right(self._growth, index) << _BITS if self._growth else 0)

    def span(self, index: int) -> tuple[int, int]:
        """Return the numbers at `index` and after it."""
        if self._growth:
            return self[index], self[index + 1]
        return self._lower[index], self._lower[index + 1]

    def between(self, start: int, stop: int) -> list[int]:
        """Return the numbers from index `start` up to `stop`."""
        if self._growth:
            return [self[index] for index in range(start, stop)]
        return self._lower[start:stop].tolist()

    def extend(self, numbers: Sequence[int]) -> None:
        """Append numbers, the first not below `last`."""
        if not numbers:
            return
        if numbers[-1] <= _LOWER:
            self._lower.extend(array("I", numbers))
        else:
            for number in numbers:
                self._growth += [len(self._lower)] * ((number >> _BITS) - len(self._growth))
                self._lower.append(number & _LOWER)
        self.last = numbers[-1]

    def join(self, other: Offsets) -> None:
        """Append the numbers of `other` but its first, each greater by `last`."""
        base = self.last
        self.extend([base + number for number in other.between(1, len(other._lower))])
