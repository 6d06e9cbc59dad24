"""Selects the records of a channel that its ranks share: by folds of blocks, and by a number. Pure.

    objects, in plan order ─ cut ─▶ blocks ─ Split by block ─▶ blocks of some folds ─ Limit ─▶ RecordOrder

A fold has whole blocks of `BLOCK` bytes, so that requests stay large. Block k of an object draws word k of
SHAKE-256 of the split's seed and the object's key. So it keeps its fold when other objects are added or
removed.

A limit takes the first records that the split has taken, up to exactly its number. With a seed it takes the
objects in the order of the numbers that they draw, as a sample of objects does (`streamer.plan.selection`).

Selected blocks take 8 bytes each, and 16 while they are selected (`memory_of_split`). A limit takes 8 bytes
an object, with a seed 24 while it is applied.
docs/explanation/record-order.md specifies both for other languages.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from dataclasses import dataclass
from sys import byteorder
from typing import TYPE_CHECKING

from streamer.errors import ConfigError
from streamer.plan.record_order import BLOCK, SelectedRecords, records_of_blocks, records_per_block
from streamer.plan.record_table import only_object
from streamer.plan.selection import Draw
from streamer.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from streamer.plan.entries import Entries
    from streamer.plan.split import Split

_SELECTED_BLOCK = 16
"""Bytes of a block's number, twice."""
_SORTED_AT_ONCE = 1 << 13
"""Objects that are sorted at once: to sort a list of all takes 100 bytes for each."""


@dataclass(frozen=True, slots=True)
class RecordLimit:
    """At most so many records."""

    records: int
    seed: int | None = None
    """Take the objects in a random order with this seed; None: in plan order."""


@dataclass(frozen=True, slots=True)
class RecordSelection:
    """Which records a channel's ranks share; by default all of them."""

    split: Split | None = None
    """Folds of blocks."""
    limit: RecordLimit | None = None


def select_records(
    entries: Entries,
    counts: Sequence[int],
    sizes: Sequence[int],
    selection: RecordSelection,
    *,
    block: int = BLOCK,
    first: int = 0,
) -> SelectedRecords:
    """Return what `selection` takes of objects with so many records and bytes, in blocks of `block` bytes.

    `first`: number of the first of these objects in `entries`; a limit with a seed needs all of them.
    Takes about a microsecond for each block of a split. Raises ConfigError if no record is selected.
    """
    split, limit, each = selection.split, selection.limit, records_of_blocks(counts, sizes, block)
    left = sum(counts) if limit is None else limit.records
    bounds = array("Q", bytes(8 * len(counts)))
    chosen: list[array[int]] = [array("Q")] * (0 if split is None else len(counts))
    """The selected blocks of each object, numbered within it."""
    for entry in _turns(entries, len(counts), limit):
        if not left:
            break
        count, size = counts[entry], each[entry]
        if split is None:
            bounds[entry] = min(left, count)
            left -= bounds[entry]
            continue
        blocks = array("Q", taken_blocks(split, only_object(entries, first + entry).key, -(-count // size)))
        bounds[entry] = count
        records = len(blocks) * size
        if blocks and (blocks[-1] + 1) * size > count:
            records -= (blocks[-1] + 1) * size - count
        if records > left:
            whole, rest = divmod(left, size)
            bounds[entry] = blocks[whole] * size + rest if rest else (blocks[whole - 1] + 1) * size
            del blocks[whole + bool(rest) :]
            records = left
        chosen[entry] = blocks
        left -= records
    if split is None:
        return SelectedRecords(counts, each, bounds, None, None)
    numbers, base = array("Q"), 0
    for entry, blocks in enumerate(chosen):
        numbers.extend([base + number for number in blocks])
        base += -(-counts[entry] // each[entry])
    if base and not numbers:
        raise ConfigError(
            f"Split leaves out every record: {counted(base, 'block is', 'blocks are')} in other folds of the "
            f"{split.of}; take more folds, or fewer and larger ones by a smaller Of"
        )
    return SelectedRecords(counts, each, bounds, numbers, split)


def memory_of_split(counts: Iterable[int], sizes: Iterable[int], split: Split) -> int:
    """Return about how many bytes of memory the blocks that the split takes need while they are selected.

    `counts`, `sizes`: records and bytes of every object.
    """
    blocks = sum(
        -(-records // records_per_block(records, size, BLOCK))
        for records, size in zip(counts, sizes, strict=True)
    )
    return blocks * _SELECTED_BLOCK * sum(map(len, split.take)) // split.of


def taken_blocks(split: Split, key: str, blocks: int) -> list[int]:
    """Return the numbers of the blocks of the object with this key that the split takes, of so many."""
    name = f"split blocks {split.seed} {key}"
    words = array("Q", hashlib.shake_256(name.encode()).digest(8 * blocks))
    if byteorder == "big":
        words.byteswap()
    return [number for number, word in enumerate(words) if split.has(word * split.of >> 64)]


def _turns(entries: Entries, count: int, limit: RecordLimit | None) -> Iterable[int]:
    """Return the numbers of the objects in the order in which a limit takes them."""
    if limit is None or limit.seed is None:
        return range(count)
    drawn = array("Q", map(Draw(limit.seed), entries))
    parts = (range(count)[first : first + _SORTED_AT_ONCE] for first in range(0, count, _SORTED_AT_ONCE))
    runs = [array("Q", sorted(part, key=drawn.__getitem__)) for part in parts]
    return heapq.merge(*runs, key=drawn.__getitem__)  # stable: of equal numbers the earlier object
