"""Shares of several sources in one sequence of records, by weights. Pure.

    weights ─▶ picks: the source of every record, a period of sum(weights) that repeats
    picks, records of each source, Until ─▶ records of each source in one epoch

With T records given, a source is *due* unless it has more than T·weight/sum. Of those that are due, the
source comes next whose next block ends first on its own clock: (taken + block) / weight is least, and of
equal ones the first source. This is earliest eligible virtual deadline first (Stoica and Abdel-Wahab, 1995).
So in every prefix a source has its share to within one block, the largest of all; by record, to within one
record.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm
from typing import TYPE_CHECKING, Literal, NamedTuple

from streamer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


def in_lowest_terms(weights: Sequence[Fraction]) -> list[int]:
    """Return whole numbers in the ratio of `weights`."""
    scale = lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * scale) for weight in weights]
    common = gcd(*whole)
    return [each // common for each in whole]


def next_source(taken: Sequence[int], blocks: Sequence[int], weights: Sequence[int], whole: int) -> int:
    """Return the source of the next block. `taken`: records of each source so far.

    `blocks`: records of the next block of each source; 0 if it has none left. If only sources that are not
    due have any, these take part. `whole`: sum of the weights. Raises ValueError if no source has any.
    """
    total = sum(taken)
    best, best_due, best_end, best_weight = -1, False, 0, 0
    for source, block in enumerate(blocks):
        if not block:
            continue
        have, weight = taken[source], weights[source]
        due = have * whole <= total * weight
        if due < best_due:
            continue
        end = have + block
        if due > best_due or best < 0 or end * best_weight < best_end * weight:
            best, best_due, best_end, best_weight = source, due, end, weight
    if best < 0:
        raise ValueError("no source has a block left")
    return best


Until = Literal["first", "all"]
"""The end of an epoch: before a source would begin again, or when every source has been read."""
MixBy = Literal["block", "record"]
LARGEST_SUM = 100_000
"""Largest sum of the weights in lowest terms: the table of picks takes 4 bytes each."""


class MixChange(NamedTuple):
    """Other weights, from a step of an epoch on."""

    epoch: int
    step: int
    """Number of the first global batch with these weights."""
    weights: tuple[int, ...]
    """In lowest terms."""


@dataclass(frozen=True, slots=True)
class Mix:
    """How the sources of a channel are mixed."""

    weights: tuple[int, ...]
    """Of each source, in lowest terms."""
    until: Until = "first"
    by: MixBy = "block"
    then: tuple[MixChange, ...] = ()
    """Changes of the weights, in the order of their steps."""


def lowest_terms(weights: Sequence[float]) -> tuple[int, ...]:
    """Return whole numbers in the ratio of `weights`, exactly as these are written in decimal.

    Raises ConfigError if their sum is too large.
    """
    terms = tuple(in_lowest_terms([Fraction(str(weight)) for weight in weights]))
    if sum(terms) > LARGEST_SUM:
        raise ConfigError(
            f"the weights, as whole numbers in lowest terms, have a sum of more than {LARGEST_SUM}; round "
            "them, as to three digits"
        )
    return terms


class Picks:
    """The source of every record when records are mixed one by one: a period that repeats."""

    def __init__(self, weights: Sequence[int]) -> None:
        """Takes a tenth of a microsecond for each source and pick of the period."""
        self.weights = weights
        self.period = sum(weights)
        self.starts = array("Q")
        """Positions in the period at which another source follows."""
        self.sources = array("H")
        """The source from each of these on."""
        self._places = [array("Q") for _ in weights]
        """Positions in the period of each source."""
        taken, ones = [0] * len(weights), [1] * len(weights)
        for position in range(self.period):
            source = next_source(taken, ones, weights, self.period)
            taken[source] += 1
            self._places[source].append(position)
            if not self.sources or self.sources[-1] != source:
                self.starts.append(position)
                self.sources.append(source)

    def place(self, source: int, number: int) -> int:
        """Return the position of the source's record of this number, from 0."""
        periods, rest = divmod(number, self.weights[source])
        return periods * self.period + self._places[source][rest]

    def before(self, source: int, position: int) -> int:
        """Return how many records of the source are before the position."""
        periods, rest = divmod(position, self.period)
        return periods * self.weights[source] + bisect_right(self._places[source], rest - 1)

    def epoch(self, records: Sequence[int], until: Until) -> list[int]:
        """Return the records of each source in one epoch, of sources with so many; none may be 0."""
        every = range(len(records))
        if until == "first":
            end = min(self.place(source, records[source]) for source in every)
        else:
            end = max(self.place(source, records[source] - 1) for source in every) + 1
        return [self.before(source, end) for source in every]
