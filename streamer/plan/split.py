"""Divides objects into folds by their keys, for holdout sets and cross-validation. Pure.

`streamer.plan.record_selection` divides blocks of records instead.

    key ─ BLAKE2b, keyed with the seed ─▶ a number of 64 bits ─▶ fold 0 … of-1 ─▶ taken or left out

The fold depends on the key, the seed and the number of folds alone. So an object stays in its fold when
others are added or removed, when it is replaced, and in every bucket that it is copied to. Two channels with
complementary folds are disjoint and have all objects together.

docs/explanation/semantics.md specifies this for other languages, with an example.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from streamer.errors import ConfigError

MOST_FOLDS = 1_000_000
"""Most folds; more are a mistake."""
_RANGES = re.compile(r"\s*([0-9]{1,9})\s*(?:-\s*([0-9]{1,9})\s*)?")


@dataclass(frozen=True)
class Split:
    """The folds that are taken, of all."""

    of: int
    """Number of folds."""
    take: tuple[range, ...]
    """The folds that are taken; none is empty, and no fold is in two."""
    seed: int = 0

    @cached_property
    def _taken(self) -> bytearray:
        taken = bytearray(self.of)
        for folds in self.take:
            taken[folds.start : folds.stop] = b"\1" * len(folds)
        return taken

    @cached_property
    def _key(self) -> bytes:
        return self.seed.to_bytes(8, "little", signed=True)

    def fold(self, key: str) -> int:
        """Return the fold of an object's key."""
        drawn = hashlib.blake2b(b"split " + key.encode(), digest_size=8, key=self._key).digest()
        return int.from_bytes(drawn, "big") * self.of >> 64

    def takes(self, key: str) -> bool:
        """Return whether the object of this key is taken."""
        return self.has(self.fold(key))

    def has(self, fold: int) -> bool:
        """Return whether a fold is taken."""
        return bool(self._taken[fold])


def parse_folds(text: str, of: int) -> tuple[range, ...]:
    """Return the folds that a text such as `0-98` or `0-3, 7` names, of folds 0 up to `of`.

    Raises ConfigError for another form, a fold that does not exist, or one that is named twice.
    """
    found: list[range] = []
    for each in text.split(","):
        match = _RANGES.fullmatch(each)
        if match is None:
            raise ConfigError(
                f"{text!r} names no folds; write a range such as 0-98, or several with commas between"
            )
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        if last < first:
            raise ConfigError(f"{each.strip()!r} ends before it begins; write {last}-{first}")
        if last >= of:
            raise ConfigError(f"there is no fold {last}: of {of} the last one is {of - 1}")
        found.append(range(first, last + 1))
    ordered = sorted(found, key=lambda folds: folds.start)
    for before, after in pairwise(ordered):
        if after.start < before.stop:
            raise ConfigError(f"{text!r} names the fold {after.start} twice; name each once")
    return tuple(ordered)
