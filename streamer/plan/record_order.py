"""The global order of a channel's records in one epoch, and the share of each rank. Pure.

    objects, in plan order ─ cut ─▶ blocks of records ─ permute (seed, epoch) ─▶ runs ─ deal ─▶ runs of a rank

A block is a run of records of one object with about `block` bytes. Without a seed the records keep plan
order. The order depends on neither ranks nor hosts: global batch k is the records k·G … (k+1)·G-1 of the
order, and rank r of N has the records r·G/N … (r+1)·G/N-1 of every global batch. So any N that divides G
gives the same global batches, and all ranks have equal numbers of steps.

An order of B blocks takes O(√B) memory while it is walked, and 16 bytes for each object. To walk it takes one
or two microseconds for each block and each slice of a batch.

docs/explanation/record-order.md specifies this for other languages, with a worked example.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate, chain, count, islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from streamer.errors import ConfigError
from streamer.plan.shuffle import Permutation
from streamer.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

    from streamer.plan.selected_records import SelectedRecords

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


class Order(Protocol):
    """The order of all records of a channel, for every epoch: a `RecordOrder`, or a mix of several."""

    @property
    def varies(self) -> bool:
        """Whether epochs have different orders."""
        ...

    def key(self, epoch: int) -> Hashable:
        """Return a key of the epoch's order: epochs with equal keys have equal orders."""
        ...

    @property
    def records(self) -> int:
        """Number of records of an epoch."""
        ...

    @property
    def arranged(self) -> dict[str, Any]:
        """The inputs of the digest that the order adds."""
        ...

    def lines(self) -> Iterable[bytes]:
        """Yield the lines of the digest."""
        ...

    def runs(self, epoch: int, first: int = 0) -> Iterator[Run]:
        """Yield the epoch's order as runs, from number `first` on; none is empty."""
        ...


class BlockLayout(NamedTuple):
    """The blocks of an order, in plan order."""

    firsts: Sequence[int]
    """Number of the first block of each object, and one more for the end."""
    each: Sequence[int]
    """Records of each block, by object."""
    bounds: Sequence[int]
    """Number of the record after the last one of the order, by object."""
    blocks: Sequence[int] | None
    """Numbers of the blocks of the order; None: all."""

    @property
    def number(self) -> int:
        """Number of blocks of the order."""
        return self.firsts[-1] if self.blocks is None else len(self.blocks)

    def runs(self, numbers: Iterable[int]) -> Iterator[Run]:
        """Yield the records of each of these blocks."""
        firsts, each, bounds = self.firsts, self.each, self.bounds
        for number in numbers:
            entry = bisect_right(firsts, number) - 1
            size, bound = each[entry], bounds[entry]
            first = (number - firsts[entry]) * size
            end = first + size
            yield Run(entry, first, min(end, bound))


class RecordOrder:
    """The `Order` of all records of some objects."""

    def __init__(
        self,
        counts: Sequence[int],
        sizes: Sequence[int],
        *,
        seed: int | None = None,
        block: int = BLOCK,
        select: Callable[[Sequence[int]], SelectedRecords] | None = None,
        in_blocks: bool = False,
    ) -> None:
        """`counts`, `sizes`: records and bytes of every object, in plan order. `seed`: None keeps that order.

        Both sequences must not change. `select` returns the selected records, and gets the records of each
        block by object; None: all are selected. `in_blocks`: runs are blocks without a seed, too. Raises
        ValueError for a block of less than a byte.
        """
        if block < 1:
            raise ValueError(f"a block has at least one byte, not {block}")
        self.seed = seed
        self.block = block
        self._counts = self._bounds = counts
        self._selected: SelectedRecords | None = None
        self.layout: BlockLayout | None = None
        """The blocks of the order; None: runs are whole objects."""
        each, blocks = array("Q"), None
        if seed is not None or select is not None or in_blocks:
            both = zip(counts, sizes, strict=True)
            each.extend(records_per_block(records, size, block) for records, size in both)
        if select is not None:
            self._selected = select(each)
            self._bounds, blocks = self._selected.bounds, self._selected.blocks
        if seed is not None or blocks is not None or in_blocks:
            cut = zip(self._bounds if blocks is None else counts, each, strict=True)
            firsts = array("Q", accumulate((-(-records // size) for records, size in cut), initial=0))
            self.layout = BlockLayout(firsts, each, self._bounds, blocks)
        self.records = (
            sum(self._bounds)
            if self.layout is None or blocks is None
            else sum(run.end - run.first for run in self.layout.runs(blocks))
        )
        """Number of records of an epoch."""

    @property
    def varies(self) -> bool:
        return self.seed is not None

    def key(self, epoch: int) -> Hashable:
        return None if self.seed is None else epoch

    @property
    def arranged(self) -> dict[str, Any]:
        arranged = {} if self.seed is None else {"seed": self.seed, "block": self.block}
        return arranged if self._selected is None else arranged | self._selected.arranged

    def lines(self) -> Iterable[bytes]:
        if self._selected is not None:
            return self._selected.lines()
        return (b"%d\n" % records for records in self._counts if records)

    def runs(self, epoch: int, first: int = 0) -> Iterator[Run]:
        layout = self.layout
        if layout is None:
            whole = (Run(entry, 0, records) for entry, records in enumerate(self._bounds) if records)
            return islice(whole, first, None)
        numbers: Iterable[int] = range(first, layout.number)
        if self.seed is not None:
            numbers = Permutation(layout.number, seed=self.seed, epoch=epoch).over(numbers)
        if layout.blocks is not None:
            numbers = map(layout.blocks.__getitem__, numbers)
        return layout.runs(numbers)


@dataclass(frozen=True, slots=True)
class Deal:
    """Division of every global batch over ranks, and the ranks that this deal is for: `first` up to `end`."""

    global_batch: int
    """Records of a global batch; a multiple of `ranks`."""
    ranks: int
    """Number of ranks of all hosts."""
    first: int
    end: int
    remainder: Remainder = "drop"

    def __post_init__(self) -> None:
        """Raise ConfigError if ranks would get unequal slices, ValueError for ranks that do not exist."""
        if self.global_batch < 1 or self.ranks < 1 or self.global_batch % self.ranks:
            raise ConfigError(
                f"a global batch of {self.global_batch} records cannot be divided over {self.ranks} ranks in "
                "equal slices; make GlobalBatch a multiple of Count times the hosts of the channel"
            )
        if not 0 <= self.first < self.end <= self.ranks:
            raise ValueError(f"no such ranks: {self.first} to {self.end} of {self.ranks}")

    @property
    def slice(self) -> int:
        """Records of one rank in one global batch."""
        return self.global_batch // self.ranks

    def steps(self, records: int) -> int:
        """Return the number of global batches of an epoch with so many records."""
        return records // self.global_batch if self.remainder == "drop" else -(-records // self.global_batch)

    def records(self, records: int) -> int:
        """Return how many of an epoch's records the ranks of this deal get, repeated ones included."""
        return self.steps(records) * self.slice * (self.end - self.first)

    def padding(self, records: int) -> int:
        """Return how many of the records of these ranks are padding: the last ones of each rank's epoch."""
        if self.remainder != "pad":
            return 0
        end = (self.steps(records) - 1) * self.global_batch + self.end * self.slice
        return max(0, min(end - records, self.slice * (self.end - self.first))) if records else 0

    def deal(self, walk: Walk, first: int = 0) -> Iterator[tuple[int, Run]]:
        """Yield the runs of these ranks, each with its rank: batch by batch, and in a batch rank by rank.

        `first`: the first step; `walk` must not be after it.
        """
        for step in range(first, self.steps(walk.records)):
            yield from self.step(walk, step)

    def step(self, walk: Walk, step: int) -> Iterator[tuple[int, Run]]:
        """Yield the same for one step. Steps must not decrease."""
        start = step * self.global_batch
        return walk.cut(start, self.slice, range(self.first, self.end))

    def together(self, walk: Walk, first: int = 0) -> Iterator[Run]:
        """Yield the runs of these ranks as `deal` does, but without cutting them at the borders of ranks."""
        size, ranks = self.slice, self.end - self.first
        steps, at_once = self.steps(walk.records), 1
        if ranks == self.ranks:  # the steps follow each other in the order
            at_once = max(1, steps - first)
        for step in range(first, steps, at_once):
            start = step * self.global_batch + self.first * size
            for _, run in walk.cut(start, size * ranks * at_once, range(1)):
                yield run


class WalkPosition(NamedTuple):
    """Position in an epoch's order at which a walk may start."""

    run: int = 0
    """Number of the run."""
    record: int = 0
    """Number, in the order, of the run's first record."""


START = WalkPosition()


class Walk:
    """One walk over an epoch's order, which starts again at its end."""

    def __init__(self, order: Order, epoch: int, position: WalkPosition = START) -> None:
        """`position`: start of the walk; earlier records cannot be cut."""
        self.records = order.records
        again = chain.from_iterable(order.runs(epoch) for _ in count())
        self._runs = chain(order.runs(epoch, position.run), again)
        self._run = Run(0, 0, 0)
        self._start = position.record
        """Position in the order of the current run's first record."""

    def cut(self, start: int, size: int, ranks: range) -> Iterator[tuple[int, Run]]:
        """Yield the runs of each of these ranks, with the rank. Positions must not decrease.

        Rank r has the `size` positions from `start + r * size` on.
        """
        entry, first, last = self._run
        at = self._start
        start += ranks.start * size
        for rank in ranks:
            end = start + size
            while start < end:
                while at + last - first <= start:
                    at += last - first
                    entry, first, last = self._run = next(self._runs)
                self._start = at
                record = first + start - at
                start = min(end, at + last - first)
                yield rank, Run(entry, record, first + start - at)


def joined(runs: Iterable[Run]) -> Iterator[Run]:
    """Yield the runs, with those joined that follow each other in one object."""
    held: Run | None = None
    for run in runs:
        if held is not None and held.entry == run.entry and held.end == run.first:
            held = Run(held.entry, held.first, run.end)
            continue
        if held is not None:
            yield held
        held = run
    if held is not None:
        yield held
