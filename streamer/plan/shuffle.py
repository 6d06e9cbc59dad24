"""Order of an epoch: a permutation of 0 … n-1 that any language can reproduce, in O(√n) memory.

Indices are written as two digits, x = left · b + right with a = ⌈√n⌉, b = ⌈n/a⌉. Each of six rounds looks up
one digit in a table and adds the result to the other digit, modulo its base (a Feistel network over mixed
bases). Each round is invertible, so all six are a permutation of 0 … a·b-1. A result of n or more is permuted
again until it is smaller (cycle walking), which happens at most once in √n times. The tables are SHAKE-256 of
seed, epoch and round. So an epoch's order starts at once and is never held in memory, and each position can
be computed alone, as shards need it.

docs/explanation/semantics.md specifies this for other languages, with a test vector.

Shards divide the epoch's order after the shuffle (contract §3.3), so a host gets different entries in each
epoch. Hosts do not communicate: equal plans and different indices give disjoint shards that together are the
whole epoch.

    count   position p of the order goes to host p mod hosts: numbers of entries differ by at most one
    bytes   each entry goes to the host with the fewest bytes so far (of several, the lowest index): bytes
            differ by at most the largest entry. An empty entry counts as one byte.

A host may divide a channel over several FIFOs, its rank FIFOs, by the same rule: rank FIFO k of K of host h
of H is shard h + H·k of H·K. By count, the rank FIFOs together have exactly the host's entries. By bytes, the
rank FIFOs of all hosts are balanced, and not the hosts, so all hosts must have the same number of rank FIFOs.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from dataclasses import dataclass
from math import isqrt
from sys import byteorder
from typing import TYPE_CHECKING, Any, Literal, cast

from streamer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy import int64
    from numpy.typing import NDArray


ROUNDS = 6


class Permutation:
    """Order of `n` entries in one epoch; equal for equal arguments."""

    def __init__(self, n: int, *, seed: int, epoch: int) -> None:
        """Compute the tables. Raises ValueError for a negative `n`."""
        if n < 0:
            raise ValueError("a permutation has no negative length")
        self._n = n
        self._a = isqrt(n - 1) + 1 if n else 1
        self._b = max(1, -(-n // self._a))
        bases = (self._a, self._b) * (ROUNDS // 2)
        others = (self._b, self._a) * (ROUNDS // 2)
        self._tables = [
            _table(f"penstock shuffle 1 {seed} {epoch} {number}", entries=other, base=base)
            for number, (base, other) in enumerate(zip(bases, others, strict=True))
        ]

    def over(self, positions: Iterable[int]) -> Iterator[int]:
        """Yield the entries at these positions, each in 0 … n-1."""
        n, a, b = self._n, self._a, self._b
        t0, t1, t2, t3, t4, t5 = self._tables
        for position in positions:
            x = position
            while True:
                left, right = divmod(x, b)
                left = (left + t0[right]) % a
                right = (right + t1[left]) % b
                left = (left + t2[right]) % a
                right = (right + t3[left]) % b
                left = (left + t4[right]) % a
                right = (right + t5[left]) % b
                x = left * b + right
                if x < n:
                    break
            yield x

    def over_array(self, np: Any, positions: NDArray[int64]) -> NDArray[int64]:
        """Return the entries at these positions. `np`: NumPy."""
        tables = [np.array(each, np.int64) for each in self._tables]

        def permuted(x: NDArray[int64]) -> Any:
            left, right = np.divmod(x, self._b)
            for to_left, to_right in zip(tables[::2], tables[1::2], strict=True):
                left = (left + to_left[right]) % self._a
                right = (right + to_right[left]) % self._b
            return left * self._b + right

        found = permuted(positions)
        while len(beyond := np.flatnonzero(found >= self._n)):
            found[beyond] = permuted(found[beyond])
        return cast("NDArray[int64]", found)


def _table(name: str, *, entries: int, base: int) -> list[int]:
    """Return `entries` numbers below `base`: 64-bit little-endian words of SHAKE-256(name), modulo `base`."""
    words = array("Q", hashlib.shake_256(name.encode("ascii")).digest(8 * entries))
    if byteorder == "big":
        words.byteswap()
    return [word % base for word in words]


Balance = Literal["count", "bytes"]


@dataclass(frozen=True, slots=True)
class Shard:
    """One host's part of every epoch; by default one host gets all entries."""

    index: int = 0
    count: int = 1
    by: Balance = "count"

    def __post_init__(self) -> None:
        """Raise ConfigError for an index outside `count`."""
        if not 0 <= self.index < self.count:
            raise ConfigError(f"host {self.index} of {self.count}: the index must be 0 to {self.count - 1}")

    def rank(self, index: int, count: int) -> Shard:
        """Return the shard of rank FIFO `index` of `count`. Raises ConfigError for a wrong index."""
        if not 0 <= index < count:
            raise ConfigError(f"rank {index} of {count}: the index must be 0 to {count - 1}")
        return Shard(self.index + self.count * index, self.count * count, self.by)


def lightest(order: Iterable[int], sizes: Sequence[int], shard: Shard) -> Iterator[int]:
    """Yield the entries of `order` that balancing by bytes assigns to the shard; O(hosts) memory."""
    heap = [(0, host) for host in range(shard.count)]
    for entry in order:
        load, host = heap[0]
        if host == shard.index:
            yield entry
        heapq.heapreplace(heap, (load + max(1, sizes[entry]), host))
