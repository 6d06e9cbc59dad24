"""The global order of a channel's records in one epoch, and the share of each rank. Pure.

    objects, in plan order ─ cut ─▶ blocks of records ─ permute (seed, epoch) ─▶ runs ─ deal ─▶ runs of a rank

A block is a run of records of one object with about `block` bytes. Without a seed the records keep plan
order. The order depends on neither ranks nor hosts: global batch k is the records k·G … (k+1)·G-1 of the
order, and rank r of N has the records r·G/N … (r+1)·G/N-1 of every global batch. So any N that divides G
gives the same global batches, and all ranks have equal numbers of steps. A rank whose loader has w workers
has w FIFOs: that of worker i has the rank's records of the batches i, i + w, …, as the loader takes them.

An order of B blocks takes O(√B) memory while it is walked, and 16 bytes for each object. To walk it takes one
or two microseconds for each block and each slice of a batch.

docs/explanation/record-order.md specifies this for other languages, with a worked example.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from streamer.errors import ConfigError
from streamer.plan.shuffle import Permutation
from streamer.units import MIB

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Sequence

    from streamer.plan.split import Split

BLOCK = 1 * MIB
"""Default bytes of a block."""

Remainder = Literal["drop", "repeat", "pad"]
"""The last records of an epoch that fill no global batch: leave them out, or fill the batch with the order's
first records. With `pad` these are padding, which an evaluation leaves out."""


class Run(NamedTuple):
    """Consecutive records of one object."""

    entry: int
    """Number of the object in the plan."""
    first: int
    """Number of the first record in the object."""
    end: int
    """Number of the record after the last one."""


def records_per_block(records: int, size: int, block: int) -> int:
    """Return the records of each block of an object with `records` records in `size` bytes; at least 1."""
    return max(1, block * records // size) if size else 1


def records_of_blocks(counts: Sequence[int], sizes: Sequence[int], block: int) -> array[int]:
    """Return the records of each block of every object. Raises ValueError for a block of less than a byte."""
    if block < 1:
        raise ValueError(f"a block has at least one byte, not {block}")
    both = zip(counts, sizes, strict=True)
    return array("Q", [records_per_block(records, size, block) for records, size in both])


class SelectedRecords(NamedTuple):
    """The records of a channel that a split or a limit has selected."""

    counts: Sequence[int]
    """Records of each object."""
    each: array[int]
    """Records of each block, by object."""
    bounds: Sequence[int]
    """Number in each object of the first record from which on none is selected."""
    blocks: array[int] | None
    """Numbers of the selected blocks of all objects, ascending; None: all that the bounds allow."""
    split: Split | None

    @property
    def arranged(self) -> dict[str, Any]:
        """The inputs of the order's digest that a split adds."""
        if self.split is None:
            return {}
        take = [[folds.start, folds.stop - 1] for folds in self.split.take]
        return {"split": {"of": self.split.of, "take": take, "seed": self.split.seed}}

    def lines(self) -> Iterable[bytes]:
        """Yield the lines of the order's digest: the records of each object, and those up to its bound."""
        for records, bound in zip(self.counts, self.bounds, strict=True):
            if records:
                yield b"%d\n" % records if bound == records else b"%d %d\n" % (records, bound)


class RecordOrder:
    """The order of all records of some objects, in every epoch."""

    def __init__(
        self,
        counts: Sequence[int],
        sizes: Sequence[int],
        *,
        seed: int | None = None,
        block: int = BLOCK,
        selected: SelectedRecords | None = None,
        in_blocks: bool = False,
    ) -> None:
        """`counts`, `sizes`: records and bytes of every object, in plan order. `seed`: None keeps that order.

        Both sequences must not change. `selected`: None: all records. `in_blocks`: runs are blocks without a
        seed, too. Raises ValueError for a block of less than a byte.
        """
        self.seed = seed
        self.block = block
        self._counts = self.bounds = counts
        self._selected = selected
        self.firsts: Sequence[int] | None = None
        """Number of the first block of each object, and of the end; None: runs are whole objects."""
        self.each = array("Q")
        """Records of each block, by object."""
        self.blocks: Sequence[int] | None = None
        """Numbers of the blocks of the order; None: all."""
        if selected is not None:
            self.each, self.bounds, self.blocks = selected.each, selected.bounds, selected.blocks
        elif seed is not None or in_blocks:
            self.each = records_of_blocks(counts, sizes, block)
        if seed is not None or self.blocks is not None or in_blocks:
            cut = zip(self.bounds if self.blocks is None else counts, self.each, strict=True)
            self.firsts = array("Q", accumulate((-(-records // size) for records, size in cut), initial=0))
        self.records = (
            sum(self.bounds)
            if self.firsts is None or self.blocks is None
            else sum(run.end - run.first for run in self._of_blocks(self.firsts, self.blocks))
        )
        """Number of records of an epoch."""

    @property
    def varies(self) -> bool:
        """Whether epochs have different orders."""
        return self.seed is not None

    def key(self, epoch: int) -> Hashable:
        """Return a key of the epoch's order: epochs with equal keys have equal orders."""
        return None if self.seed is None else epoch

    @property
    def arranged(self) -> dict[str, Any]:
        """The inputs of the digest that the order adds."""
        arranged = {} if self.seed is None else {"seed": self.seed, "block": self.block}
        return arranged if self._selected is None else arranged | self._selected.arranged

    def lines(self) -> Iterable[bytes]:
        """Yield the lines of the digest."""
        if self._selected is not None:
            return self._selected.lines()
        return (b"%d\n" % records for records in self._counts if records)

    @property
    def blocks_each(self) -> int:
        """Blocks of an epoch; 0 if runs are whole objects."""
        if self.firsts is None:
            return 0
        return self.firsts[-1] if self.blocks is None else len(self.blocks)

    def runs(self, epoch: int, first: int = 0) -> Iterator[Run]:
        """Yield the epoch's order as runs, from number `first` on; none is empty."""
        if self.firsts is None:
            whole = (Run(entry, 0, records) for entry, records in enumerate(self.bounds) if records)
            return islice(whole, first, None)
        numbers: Iterable[int] = range(first, self.blocks_each)
        if self.seed is not None:
            numbers = Permutation(self.blocks_each, seed=self.seed, epoch=epoch).over(numbers)
        if self.blocks is not None:
            numbers = map(self.blocks.__getitem__, numbers)
        return self._of_blocks(self.firsts, numbers)

    def _of_blocks(self, firsts: Sequence[int], numbers: Iterable[int]) -> Iterator[Run]:
        """Yield the records of the blocks with these numbers."""
        each, bounds = self.each, self.bounds
        for number in numbers:
            entry = bisect_right(firsts, number) - 1
            size, bound = each[entry], bounds[entry]
            first = (number - firsts[entry]) * size
            end = first + size
            yield Run(entry, first, min(end, bound))


@dataclass(frozen=True, slots=True)
class Deal:
    """Division of the global batches over ranks and their workers, and whose records this deal is for.

    These are the ranks `first` up to `end`, with all of their workers or with one.
    """

    global_batch: int
    """Records of a global batch; a multiple of `ranks`."""
    ranks: int
    """Number of ranks of all hosts."""
    first: int
    end: int
    remainder: Remainder = "drop"
    workers: int = 1
    """FIFOs of each rank, which take turns: FIFO i has the global batches i, i + `workers`, …"""
    worker: int | None = None
    """Number of the FIFO of each rank that this deal is for; None: all."""

    def __post_init__(self) -> None:
        """Raise ConfigError if ranks would get unequal slices, ValueError for ranks that do not exist."""
        if self.global_batch < 1 or self.ranks < 1 or self.global_batch % self.ranks:
            raise ConfigError(
                f"a global batch of {self.global_batch} records cannot be divided over {self.ranks} ranks in "
                "equal slices; make GlobalBatch a multiple of Count times the hosts of the channel"
            )
        if not 0 <= self.first < self.end <= self.ranks or not 0 <= (self.worker or 0) < self.workers:
            raise ValueError(f"no such ranks: {self}")

    @property
    def slice(self) -> int:
        """Records of one rank in one global batch."""
        return self.global_batch // self.ranks

    def steps(self, records: int) -> int:
        """Return the number of global batches of an epoch with so many records."""
        return records // self.global_batch if self.remainder == "drop" else -(-records // self.global_batch)

    @property
    def fifos(self) -> int:
        """Number of FIFOs of this deal, of which those of every rank's worker 0 come first."""
        return (self.end - self.first) * (self.workers if self.worker is None else 1)

    @property
    def stride(self) -> int:
        """Global batches from one of which this deal has records to the next one."""
        return 1 if self.worker is None else self.workers

    def before(self, step: int) -> int:
        """Return how many records this deal has in the global batches before a step."""
        steps = len(range(self.worker or 0, step, self.stride))
        return steps * self.slice * (self.end - self.first)

    def records(self, records: int) -> int:
        """Return how many of an epoch's records this deal has, repeated ones included."""
        return self.before(self.steps(records))

    def padding(self, records: int) -> int:
        """Return how many of the records of this deal are padding: the last ones of each FIFO's epoch."""
        last = self.steps(records) - 1
        if self.remainder != "pad" or (last - (self.worker or 0)) % self.stride:
            return 0
        end = last * self.global_batch + self.end * self.slice
        return max(0, min(end - records, self.slice * (self.end - self.first))) if records else 0
