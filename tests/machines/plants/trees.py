"""Copies of the tree of one worker: one to plant in, and one that stays as it is."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.machines.machine import CaseT, Machine
from tests.machines.plants.catalogue import Plant
from tests.machines.plants.checkers import Checker

ROOT = Path(__file__).resolve().parents[3]
WITHIN = 300.0
"""Seconds of a look."""
CLEAN_LONGER = 3
"""How much longer a look may take in the clean tree, if it had no end in the planted one."""


class Trees:
    """Both trees, in a directory."""

    def __init__(self, directory: Path) -> None:
        files = subprocess.run(
            ["/usr/bin/git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
        ).stdout
        self.clean, self.planted = directory / "clean", directory / "planted"
        for name in (name.decode() for name in files.split(b"\0") if name):
            for tree in (self.clean, self.planted) if (ROOT / name).is_file() else ():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, tree / name)
        self._sound: dict[str, bool] = {}
        """By checker: whether it passes on the clean tree."""

    @contextlib.contextmanager
    def with_plant(self, plant: Plant) -> Iterator[None]:
        """Plant it until the end of the block."""
        path = self.planted / plant.path
        whole = path.read_text()
        path.write_text(plant.planted(whole))
        try:
            yield
        finally:
            path.write_text(whole)

    def found_by(self, checker: Checker) -> str:
        """What the checker has found; empty if nothing, or only what it finds in the clean tree too."""
        looks: Checker | None = checker
        while looks is not None:
            outcome = looks.look(self.planted, WITHIN)
            if not outcome.complains:
                return ""
            longest = CLEAN_LONGER * WITHIN if outcome.hung else WITHIN
            if self._counts(looks.again(outcome), longest):
                return outcome.what
            looks = looks.but(outcome)
        return ""

    def _counts(self, looks: Checker, within: float) -> bool:
        """Whether the complaint comes from the plant.

        What fails in the clean tree too may fail because the machine is busy, so it looks at both again.
        """
        if not looks.look(self.clean, within).complains:
            return True
        return looks.look(self.planted, within).complains and not looks.look(self.clean, within).complains

    def searched_by(self, checker: Checker) -> str:
        """What a search has found; empty if nothing, and if it is busy to the end of its time."""
        outcome = checker.look(self.planted, WITHIN)
        if not outcome.complains or outcome.hung:
            return ""
        if checker.name not in self._sound:
            clean = checker.look(self.clean, WITHIN)
            self._sound[checker.name] = not clean.complains or clean.hung
        return outcome.what if self._sound[checker.name] else ""


class InTrees(Machine[CaseT]):
    """Base of the machines that plant bugs: a worker has trees of its own, and a case takes minutes."""

    count = None
    limit = 7200.0
    workers = 2

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        with tempfile.TemporaryDirectory(prefix="penstock-plants-") as directory:
            self.trees = Trees(Path(directory))
            yield
