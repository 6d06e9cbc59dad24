"""Shares of several sources in one sequence of records, by weights. Pure.

    weights ─▶ picks: the source of every record, a period of sum(weights) that repeats
    picks, records of each source, Until ─▶ records of each source in one epoch
    changes of the weights, epoch        ─▶ phases of the epoch: from which step on it has which weights

`streamer.shares` has the rule that picks the next source.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from streamer.errors import ConfigError
from streamer.shares import in_lowest_terms, next_source

if TYPE_CHECKING:
    from collections.abc import Sequence

Until = Literal["first", "all"]
"""The end of an epoch: before a source would begin again, or when every source has been read."""
MixBy = Literal["block", "record"]
LARGEST_SUM = 100_000
"""Largest sum of the weights in lowest terms: the table of picks takes 4 bytes each."""

MOST_CHANGES = 100
"""Most changes of the weights of a job: states and trailers have all, and each has a table of picks."""


@dataclass(frozen=True, slots=True)
class Mix:
    """How the sources of a channel are mixed."""

    weights: tuple[int, ...]
    """Of each source, in lowest terms."""
    until: Until = "first"
    by: MixBy = "block"


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


class MixChange(NamedTuple):
    """Other weights, from a step of an epoch on."""

    epoch: int
    step: int
    """Number of the first global batch with these weights; not reached in an earlier epoch."""
    weights: tuple[int, ...]
    """In lowest terms."""

    @property
    def start(self) -> tuple[int, int]:
        """Epoch and step."""
        return self.epoch, self.step


def parse_changes(value: object, sources: int) -> tuple[MixChange, ...]:
    """Return the changes in a state or trailer: `[[epoch, step, [7, 2, 1]], …]`, in order.

    `sources`: number of sources that are mixed. Raises ValueError.
    """
    try:
        found = tuple(MixChange(epoch, step, tuple(weights)) for epoch, step, weights in _items(value))
    except (TypeError, ValueError) as error:
        raise ValueError(f"no changes of weights: {value!r}"[:500]) from error
    numbers = [number for change in found for number in change.start]
    terms = [weight for change in found for weight in change.weights]
    starts = [(0, 0), *(change.start for change in found)]
    if (
        len(found) > MOST_CHANGES
        or not all(type(number) is int and number >= 0 for number in numbers)
        or not all(type(weight) is int and weight > 0 for weight in terms)
        or any(len(change.weights) != sources or sum(change.weights) > LARGEST_SUM for change in found)
        or any(before >= after for before, after in pairwise(starts))
    ):
        raise ValueError(f"no changes of the weights of {sources} prefixes: {value!r}"[:500])
    return found


def _items(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError("not a list")
    return value


def changed(
    weights: tuple[int, ...], changes: Sequence[MixChange], change: MixChange
) -> tuple[MixChange, ...]:
    """Return the changes with one more, which replaces those at its step and later.

    `weights`: before the first change. A change to the weights that hold already is left out.
    """
    kept = tuple(each for each in changes if each.start < change.start)
    holds = kept[-1].weights if kept else weights
    return kept if holds == change.weights else (*kept, change)


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
