"""Which of the machines that know no plant find each, without the tests that stand near it."""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.machines.machine import Machine, Result
from tests.machines.plants.catalogue import PLANTS, Plant
from tests.machines.plants.checkers import Checker, searchers
from tests.machines.plants.trees import Trees


@dataclass(frozen=True)
class Search:
    """One machine, and one plant."""

    by: Checker
    plant: Plant

    def __str__(self) -> str:
        return f"{self.by.name}: {self.plant}"


class Searchers(Machine[Search]):
    """No case is broken: the counts are the result, and `--trace` names what was found."""

    count = None
    limit = 7200.0
    workers = 2

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        with tempfile.TemporaryDirectory(prefix="penstock-plants-") as directory:
            self._trees = Trees(Path(directory))
            yield

    def cases(self) -> Sequence[Search]:
        return [Search(by, plant) for plant in PLANTS for by in searchers()]

    def run(self, case: Search) -> Result:
        with self._trees.with_plant(case.plant):
            what = self._trees.searched_by(case.by)
        if self.trace is not None:
            self.trace.append(what or "not found")
        return Result(Counter([f"{'found' if what else 'not found'} by {case.by.name}"]))


MACHINE = Searchers()
