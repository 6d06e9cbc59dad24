"""Divides a prefix into ranges of keys that are listed at the same time. Pure: no requests.

    prefix   ├──────────── range ────────────┼───── range ─────┼──────── range ────────┤
             start ─ first … last ─ ? ─ stop = start ─ …  stop = start

A range has the keys after `start` up to and including `stop`. It is split at any text between its last listed
key and `stop`, so every key belongs to exactly one range, whatever the keys are. Where ranges are split only
decides how many requests that takes. Keys are compared as text, which orders them as their UTF-8 does.

Where keys lie is a guess from the keys that have been listed. A column is an index into a key:

- Columns in which keys are known to differ are split between characters, of those that keys have.
- In an earlier column keys may all be the same ("img-" in "img-0001"). One request after the next character
  ("inh" after "img") shows whether they are.
"""

from __future__ import annotations

import string
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_COLUMNS = 256
"""Most columns that are looked at, from the first in which keys of a range may differ."""
_SAMPLE = 8
"""Keys of a page that are looked at."""
_GREATEST = 0x10FFFF
_UNKNOWN_COLUMNS = 3
"""Columns that are tried at once of those in which keys may all be the same."""
_FURTHER_COLUMNS = 3
"""Columns that are tried after the first one in which the listed keys of a range differ."""
_LAST_ASCII = "\x7f"
_SURROGATES = range(0xD800, 0xE000)
_CLASSES = (string.digits, string.ascii_lowercase, string.ascii_uppercase)


@dataclass(slots=True)
class KeyRange:
    """A range of keys, and what has been listed of it."""

    start: str = ""
    """The keys of the range are greater; the first range has no lower bound."""
    stop: str | None = None
    """The greatest key that the range can have; None: no bound."""
    first: str | None = None
    """The first key that was listed, in the range or after it; None: not known yet, or there is none."""
    last: str | None = None
    """The last key that was listed and is in the range."""
    kept: int = 0
    """Number of keys that were listed and are in the range."""
    next: str | None = None
    """The first key that was listed after the range; None: none, or not yet."""
    done: bool = False
    """Whether the whole range has been listed."""

    def take(self, keys: Sequence[bytes], *, more: bool) -> int:
        """Add the keys of the next page, which ascend; return how many of them are in the range.

        `more`: whether a page follows.
        """
        count = len(keys)
        if self.stop is not None and keys and keys[-1] > (stop := self.stop.encode()):
            count = bisect_right(keys, stop)
            self.next = keys[count].decode()
        self.done = count < len(keys) or not more
        if keys and self.first is None:
            self.first = keys[0].decode()
        if count:
            self.last = keys[count - 1].decode()
            self.kept += count
        return count

    def split(self, points: Iterable[str]) -> list[KeyRange]:
        """End the range at the first of `points`, which ascend; return ranges for the rest."""
        after: list[KeyRange] = []
        left = self
        for point in points:
            after.append(KeyRange(point, left.stop))
            left.stop = point
            left = after[-1]
        return after


@dataclass(slots=True)
class KeySpace:
    """What the keys listed so far tell of all keys that begin with a prefix."""

    prefix: str
    _seen: dict[int, set[str]] = field(default_factory=dict)
    """Characters of keys, by column."""
    _seen_anywhere: set[str] = field(default_factory=set)
    _alphabets: dict[int, list[str]] = field(default_factory=dict)
    """Results of `_alphabet` since a new character was seen."""
    _varying: set[int] = field(default_factory=set)
    """Columns in which neighbouring ranges differ."""

    def learn(self, keys: Sequence[bytes]) -> None:
        """Take note of the characters of some keys of a page."""
        begin = len(self.prefix)
        for key in keys[:: max(1, len(keys) // _SAMPLE)]:
            for column, character in enumerate(key.decode()[begin : begin + _COLUMNS], begin):
                if character not in (seen := self._seen.setdefault(column, set())):
                    seen.add(character)
                    self._seen_anywhere.add(character)
                    self._alphabets.clear()

    def _alphabet(self, column: int) -> list[str]:
        """Return the characters that keys are likely to have in a column, in order."""
        if (alphabet := self._alphabets.get(column)) is None:
            likely = set(seen := self._seen.get(column, set()))
            for characters in _CLASSES:
                if not seen.isdisjoint(characters):
                    found = sorted(self._seen_anywhere.intersection(characters))
                    likely.update(each for each in characters if found[0] <= each <= found[-1])
            alphabet = self._alphabets[column] = sorted(likely)
        return alphabet

    def learn_border(self, before: KeyRange, after: KeyRange) -> None:
        """Take note of the column in which two neighbouring ranges differ."""
        if before.last is not None and after.last is not None and after.first is not None:
            self._varying.add(_common(before.last, after.first))

    def points(self, keys: KeyRange) -> Sequence[str]:
        """Return texts between the last listed key and the end of the range, in order, to split it at."""
        if keys.done or keys.last is None or keys.first is None:
            return []
        last, stop = keys.last, keys.stop
        begin = self._begin(keys)
        depth = max(begin, _common(keys.first, last)) if keys.kept > 1 else begin
        unknown: list[str] = []
        found: list[str] = []
        for column in range(begin, min(depth, begin + _COLUMNS) + _FURTHER_COLUMNS):
            least = last[column] if column < len(last) else ""
            if column < depth and column not in self._varying:
                unknown += _inside([last[:column] + _after(least)], last, stop)
                continue
            greater = self._greater(column, least)
            points = _inside([last[:column] + each for each in greater], last, stop)
            found += points or _inside([last[:column] + _after(least)], last, stop)
            if points or unknown:
                break
        return spread(unknown[::-1], _UNKNOWN_COLUMNS) if unknown else sorted(found)

    def _greater(self, column: int, least: str) -> list[str]:
        """Return characters after `least` that keys are likely to have in the column, in order."""
        greater = {each for each in self._alphabet(column) if each > least}
        if least > _LAST_ASCII:
            numbers = [ord(least) + (1 << shift) for shift in range(16)]
            greater.update(chr(each) for each in numbers if each not in _SURROGATES and each <= _GREATEST)
        return sorted(greater)

    def left(self, keys: KeyRange) -> float:
        """Estimate how many keys of the range were not listed yet: as dense as those that were."""
        if keys.done or keys.first is None or keys.last is None:
            return 0.0
        depth = _common(keys.first, keys.last)
        begin = min(self._begin(keys), depth)
        width = min(max(8, depth + 4 - begin), _COLUMNS)
        alphabets = [self._alphabet(column) for column in range(begin, begin + width)]
        first, last, stop = (_number(each, begin, alphabets) for each in (keys.first, keys.last, keys.stop))
        return keys.kept * max(0, stop - last) / max(1, last - first)

    def _begin(self, keys: KeyRange) -> int:
        """Return the first column in which keys of the range that are still to come can differ."""
        if keys.stop is None or keys.last is None:
            return len(self.prefix)
        return max(len(self.prefix), _common(keys.last, keys.stop))


def _number(key: str | None, begin: int, alphabets: Sequence[Sequence[str]]) -> int:
    """Return the columns of a key from `begin` on as the digits of a number. `key`: None for the greatest."""
    number = 0 if key is not None else 1
    for column, alphabet in enumerate(alphabets, begin):
        number *= 2 * len(alphabet) + 2  # also digits for what lies between the characters
        if key is not None and column < len(key):
            number += bisect_left(alphabet, key[column]) + bisect_right(alphabet, key[column]) + 1
    return number


def _common(one: str, other: str) -> int:
    """Return the number of characters that both texts begin with."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))


def _inside(points: Iterable[str], last: str, stop: str | None) -> list[str]:
    """Return the points that are after `last` and before `stop`."""
    return [each for each in points if last < each and (stop is None or each < stop)]


def _after(character: str) -> str:
    """Return the next character; empty if there is none."""
    if not character:
        return ""
    number = ord(character) + 1
    if number in _SURROGATES:
        number = _SURROGATES.stop
    return chr(number) if number <= _GREATEST else ""


def spread(points: Sequence[str], count: int) -> Sequence[str]:
    """Return `count` of the points at equal distances, or all of them if there are no more."""
    if len(points) <= count:
        return points
    return [points[(index + 1) * len(points) // (count + 1)] for index in range(count)]
