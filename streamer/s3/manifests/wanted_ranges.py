"""Divides the keys that blocks of rows want into ranges, each of which one listing finds.

A range has the keys of all blocks between two pivots, so a page of its listing serves all these blocks. The
pivots are quantiles of a sample, so ranges have about `ITEMS` keys each.

Pure and synchronous.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from itertools import repeat
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from streamer.s3.manifests.row_block import ITEMS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from streamer.s3.manifests.row_block import RowBlock

SAMPLE = ITEMS // 64
"""Distance of the keys that are in the sample for pivots."""
MOST_RANGES = 256
"""Most ranges; with more keys, the ranges are larger."""
MIXED_SAMPLE = 100
"""Keys of a block that are compared with those of the next block."""
MIXED_GAPS = 5
"""The blocks are mixed if more than one in `MIXED_GAPS` of these keys has a gap of its own between those."""


NumberedItem = tuple["RowBlock", int]
"""Block and number of an object."""


class SortedBlock(NamedTuple):
    """A block, and those of its items that a listing may name, sorted by name."""

    block: RowBlock
    items: array[int]

    def position(self, name: bytes, first: int = 0) -> int:
        """Return the position of the first item, from `first` on, whose name is not less than `name`."""
        return bisect_left(self.items, name, first, key=self.block.name)


class WantedRange:
    """Items of one or more blocks, in the order of the blocks."""

    def __init__(self, parts: Sequence[SortedBlock]) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return sum(len(part.items) for part in self._parts)

    @property
    def first_row(self) -> int:
        """First row of the manifest that needs one of the keys."""
        part = self._parts[0]
        return part.block.row_of(min(part.items))

    def sorted_items(self) -> list[tuple[bytes, RowBlock, int]]:
        """Return the name (`BUCKET/KEY`), block and number of each item, sorted by name."""
        found: list[tuple[bytes, RowBlock, int]] = []
        for block, items in self._parts:
            found += zip(block.names(items), repeat(block), items)
        found.sort(key=itemgetter(0))
        return found


def grouped(items: Iterable[tuple[bytes, RowBlock, int]]) -> dict[str, dict[bytes, list[NumberedItem]]]:
    """Group sorted items by bucket and key: several rows may name the same object."""
    by_bucket: dict[str, dict[bytes, list[NumberedItem]]] = {}
    start = b""
    by_key: dict[bytes, list[NumberedItem]] = {}
    for name, block, item in items:
        if not start or not name.startswith(start):
            start = name[: name.index(b"/") + 1]
            by_key = by_bucket[start[:-1].decode()] = {}
        by_key.setdefault(name[len(start) :], []).append((block, item))
    return by_bucket


def is_mixed(block: SortedBlock, following: SortedBlock) -> bool:
    """Return whether many keys of `following` are between those of `block`: the manifest is shuffled."""
    step = max(1, len(block.items) // MIXED_SAMPLE)
    sample = block.block.names(block.items[::step])
    return len({following.position(name) for name in sample}) > len(sample) / MIXED_GAPS


def pivots(blocks: Sequence[SortedBlock]) -> list[bytes]:
    """Return the first name of each range but the first, in ascending order.

    Rows that name the same objects again do not make more ranges.
    """
    names = [block.block.name(item) for block in blocks for item in block.items[::SAMPLE]]
    sample = sorted(set(names))
    items = sum(len(block.items) for block in blocks)
    count = min(round(items * len(sample) / max(len(names), 1) / ITEMS), MOST_RANGES)
    return sorted({sample[number * len(sample) // count] for number in range(1, count)})


def cut(block: SortedBlock, at: Sequence[bytes]) -> list[SortedBlock]:
    """Cut a block's items at these pivots; a part may be empty."""
    parts, first = [], 0
    for pivot in at:
        end = block.position(pivot, first)
        parts.append(SortedBlock(block.block, block.items[first:end]))
        first = end
    return [*parts, SortedBlock(block.block, block.items[first:])]
