"""Which of the machines that know no plant find each, without the tests that stand near it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tests.machines.machine import Result
from tests.machines.plants.catalogue import PLANTS, Plant
from tests.machines.plants.checkers import Checker, searchers
from tests.machines.plants.trees import InTrees


@dataclass(frozen=True)
class Search:
    """One machine, and one plant."""

    by: Checker
    plant: Plant

    def __str__(self) -> str:
        return f"{self.by.name}: {self.plant}"


class Searchers(InTrees[Search]):
    """No case is broken: the counts are the result, and `--trace` names what was found."""

    def cases(self) -> Sequence[Search]:
        return [Search(by, plant) for plant in PLANTS for by in searchers()]

    def run(self, case: Search) -> Result:
        with self.trees.with_plant(case.plant):
            what = self.trees.searched_by(case.by)
        if self.trace is not None:
            self.trace.append(what or "not found")
        return Result(Counter([f"{'found' if what else 'not found'} by {case.by.name}"]))


MACHINE = Searchers()
