"""Shuffles the records of a FIFO in windows, with a state. Pure.

    records, in the order of the FIFO ─▶ window of `records` records ─▶ permutation ─▶ records

The permutation of a window depends on the seed, the epoch, and the number of the window's first record. So
the state is an ordinary position, and the number of records before it that are of the present window: a
resumed reader reads the window again, permutes it in the same way, and leaves these out. Nothing of the
window is saved.

Ranks that share a channel by record take the same steps, and their state is that of the job. Their windows
are therefore whole steps, the same on all ranks: as many as `records` has, and at least one.

A window is read before its first record is returned, and the next one after its last.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from streamer.errors import ChannelError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_PIECE = 256
"""Most records of a piece, so that records that were returned are freed before the next window is read."""


@dataclass(frozen=True, slots=True)
class Shuffle:
    """How the records of a FIFO are shuffled."""

    records: int
    """Records of a window."""
    seed: int

    @classmethod
    def of(cls, shuffle: int | None, seed: int | None) -> Shuffle | None:
        """Return the shuffle of a reader's arguments, None for none. Raises ValueError."""
        if shuffle is None:
            if seed is not None:
                raise ValueError(
                    "seed has no meaning without shuffle: give shuffle=RECORDS, or leave seed out"
                )
            return None
        if type(shuffle) is not int or shuffle < 1:
            raise ValueError(f"shuffle is {shuffle!r}: give the number of records of a window, 1 or more")
        if not (seed is None or type(seed) is int):
            raise ValueError(f"seed is {seed!r}: give an integer")
        return cls(shuffle, seed or 0)

    def window(self, step: int) -> int:
        """Return the number of records of a window: whole steps of `step` records, and at least one."""
        return max(1, self.records // step) * step

    def inside(self, step: int, *, first: int, batch: int) -> dict[str, int] | None:
        """Return the window that a state at `step` is inside of; None if a window begins there.

        `first`: step at which a window of the epoch begins, at most `step`. `batch`: records of a rank in a
        step.
        """
        begin = step - (step - first) % (self.window(batch) // batch)
        if begin == step:
            return None
        return {"records": self.records, "seed": self.seed, "begin": begin, "batch": batch}

    def check(self, saved: Mapping[str, Any]) -> None:
        """Raise ValueError if a state inside a window is of another shuffle."""
        for name, value in (("shuffle", self.records), ("seed", self.seed)):
            was = saved["records" if name == "shuffle" else name]
            if was != value:
                raise ValueError(
                    f"the state is inside a window of {name}={was}, and this reader has {name}={value}: make "
                    "it with the arguments that the state was saved with"
                )


class NumberedRecords(NamedTuple):
    """Consecutive records of an epoch, with the number and position of the first.

    After a shuffle these are numbers in the order in which records are returned, from the same window on.
    """

    records: list[Any]
    first: int
    """Number in the epoch of the first record."""
    offset: int
    skip: int
    """Number of records between byte `offset` and the first record."""
    number: int | None = None
    """Number in its object of the record at `offset`, if records are read with their keys; else None."""
    window: int | None = None
    """Number in the epoch of the first record of the window, if records are shuffled; else None."""
    last: bool = False
    """Whether the epoch is known to have no further record."""

    @property
    def end(self) -> int:
        """Number in the epoch of the record after the last one."""
        return self.first + len(self.records)

    def part(self, begin: int, end: int) -> NumberedRecords:
        """Return the records from index `begin` up to `end`."""
        return self._replace(
            records=self.records[begin:end],
            first=self.first + begin,
            skip=self.skip + begin,
            last=self.last and end == len(self.records),
        )


class Windows:
    """Groups the records of one epoch into windows, and permutes each."""

    def __init__(self, shuffle: Shuffle, epoch: int, *, returned: int = 0) -> None:
        """`returned`: records of the first window that were returned before."""
        self._shuffle = shuffle
        self._epoch = epoch
        self._returned = returned
        self._window: NumberedRecords | None = None

    def add(self, block: NumberedRecords, step: int) -> Iterator[NumberedRecords]:
        """Yield pieces of the windows that `block` completes. `step`: as for `Shuffle.window`."""
        size, at = self._shuffle.window(step), 0
        while at < len(block.records):
            if self._window is None:
                self._window = block.part(at, at)._replace(window=block.first + at)
            held = self._window.records
            count = min(size - len(held), len(block.records) - at)
            held += block.records[at : at + count]
            at += count
            if len(held) == size:
                yield from self._pieces(last=block.last and at == len(block.records))

    def finish(self) -> Iterator[NumberedRecords]:
        """Yield pieces of the last window, at the end of the epoch. Raises ChannelError."""
        yield from self._pieces(last=True)

    def _pieces(self, *, last: bool) -> Iterator[NumberedRecords]:
        """Permute the present window, if any, and yield it. `last`: no record of the epoch follows."""
        window, self._window = self._window, None
        if window is None:
            return
        records, at = window.records, self._returned
        if at > len(records):
            raise ChannelError(
                f"the state has {at} records of a window that has {len(records)}: the objects have changed; "
                "begin without the state"
            )
        self._returned = 0
        permute(records, self._shuffle.seed, self._epoch, window.first)
        records.reverse()
        del records[len(records) - at :]
        while records:
            piece = records[: -_PIECE - 1 : -1]
            del records[-_PIECE:]
            first, skip = window.first + at, window.skip + at
            yield window._replace(records=piece, first=first, skip=skip, last=last and not records)
            at += len(piece)


def permute(records: list[Any], seed: int, epoch: int, first: int) -> None:
    """Permute a window whose first record has the number `first` in the epoch."""
    digest = hashlib.sha256(f"penstock window 1\n{seed} {epoch} {first}\n".encode()).digest()
    # Every version of Python draws the same numbers; they are no secret.
    draw = Random(int.from_bytes(digest[:8], "big")).random  # noqa: S311
    for last in range(len(records) - 1, 0, -1):
        other = int(draw() * (last + 1))
        records[last], records[other] = records[other], records[last]
