"""Assigns the entries of an epoch to hosts, and a host's entries to its rank FIFOs (contract §3.3).

Shards divide the epoch's order after the shuffle, so a host gets different entries in each epoch. Hosts do
not communicate: equal plans and different indices give disjoint shards that together are the whole epoch.

    count   position p of the order goes to host p mod hosts: numbers of entries differ by at most one
    bytes   each entry goes to the host with the fewest bytes so far (of several, the lowest index): bytes
            differ by at most the largest entry. An empty entry counts as one byte.

A host may divide a channel over several FIFOs, its rank FIFOs, by the same rule: rank FIFO k of K of host h
of H is shard h + H·k of H·K. By count, the rank FIFOs together have exactly the host's entries. By bytes, the
rank FIFOs of all hosts are balanced, and not the hosts, so all hosts must have the same number of rank FIFOs.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from streamer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

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
