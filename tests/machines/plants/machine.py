"""Plants each bug of the catalogue into a copy of the tree; a bug that no checker finds is a broken case.

The checkers look in order of cost, until one complains. What complains must pass without the bug, or it does
not count. A broken case means that a checker must become stronger.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence

from tests.machines.machine import Result
from tests.machines.plants.catalogue import PLANTS, Plant
from tests.machines.plants.checkers import checkers
from tests.machines.plants.trees import InTrees


class Plants(InTrees[Plant]):
    """A case is a bug, and takes seconds to minutes."""

    def cases(self) -> Sequence[Plant]:
        return PLANTS

    def run(self, case: Plant) -> Result:
        with self.trees.with_plant(case):
            for checker in checkers(case):
                if what := self.trees.found_by(checker):
                    if self.trace is not None:
                        self.trace.append(f"{checker.name}: {what}")
                    return Result(Counter([f"by {checker.name}"]), cells={"found by": checker.name})
        return Result(broken="found by nobody", cells={"found by": "**nobody**"})

    def table(self, cells: Mapping[str, Mapping[str, str]], _: str, /) -> str:
        by: dict[str, list[str]] = {}
        for case, each in cells.items():
            by.setdefault(each["found by"], []).append(case.partition(": ")[2])
        count = sum(len(names) for checker, names in by.items() if checker[0] != "*")
        lines = [
            f"{count} of {len(cells)} plants found, on {time.strftime('%Y-%m-%d')}.",
            "",
            "| Found by | Bugs |",
            "|---|---|",
        ]
        return "\n".join([*lines, *(f"| {checker} | {'; '.join(names)} |" for checker, names in by.items())])


MACHINE = Plants()
