"""Which entries of an epoch are this host's, and which of them are for one of its FIFOs (contract §3.3).

Shards are taken of the epoch's order, after the shuffle, so every host gets other entries in another
epoch. Nothing is agreed between hosts: equal plans and different indices make shards that are disjoint
and together whole.

    count   position p of the order goes to host p mod hosts: numbers of entries differ by at most one
    bytes   each entry in turn goes to the host with the fewest bytes so far (of several, the lowest
            index): bytes differ by at most the largest entry. An empty entry counts as one byte.

A channel may be dealt over several FIFOs of its host, its rank FIFOs. That is a finer division by the same
rule: rank FIFO k of K of host h of H is shard h + H·k of H·K. By count this deals out, one by one, just what
the host has without rank FIFOs; by bytes it balances rank FIFOs, not hosts, so all hosts must have as many.
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
    """One host's part of every epoch; by default there is one host, which gets all."""

    index: int = 0
    count: int = 1
    by: Balance = "count"

    def __post_init__(self) -> None:
        """Raises ConfigError for an index that is none of `count` hosts."""
        if not 0 <= self.index < self.count:
            raise ConfigError(f"host {self.index} of {self.count}: the index must be 0 to {self.count - 1}")

    def rank(self, index: int, count: int) -> Shard:
        """The part for FIFO `index` of the `count` of this host. Raises ConfigError for one that is none."""
        if not 0 <= index < count:
            raise ConfigError(f"rank {index} of {count}: the index must be 0 to {count - 1}")
        return Shard(self.index + self.count * index, self.count * count, self.by)


def lightest(order: Iterable[int], sizes: Sequence[int], shard: Shard) -> Iterator[int]:
    """The entries that balancing by bytes gives to the shard, in order; O(hosts) memory."""
    heap = [(0, host) for host in range(shard.count)]
    for entry in order:
        load, host = heap[0]
        if host == shard.index:
            yield entry
        heapq.heapreplace(heap, (load + max(1, sizes[entry]), host))
