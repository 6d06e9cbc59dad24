"""Who looks for a planted bug, in order of cost, and how each says what it has found.

The tests that a plant names come first, one folder after the other; then the machines. A checker that fails
has found the bug only if what failed passes without it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.machines.plants.catalogue import Plant

FOLDERS = {
    "unit": "unit tests",
    "relay": "relay tests",
    "readers": "reader tests",
    "sidecar": "process tests",
}
MACHINES: dict[str, tuple[str, ...]] = {
    "relay tests, all": ("pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/relay"),
    "schedules": ("tests.machines", "schedules", "--count", "500", "--stop", "--workers", "1"),
    "keeper": ("tests.machines", "keeper", "--count", "300", "--stop", "--workers", "1"),
    "hostile": ("tests.machines", "hostile", "--count", "48", "--stop"),
    "crash": ("tests.machines", "crash", "--count", "100", "--stop"),
    "process tests, all": ("pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/sidecar", "tests/readers"),
}
"""By name, the arguments of `python -m`."""
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?::.*?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Checker:
    """One look at a tree."""

    name: str
    arguments: tuple[str, ...]

    def look(self, tree: Path, within: float) -> Outcome:
        """Run in `tree`, for at most `within` seconds."""
        command = [sys.executable, "-m", *self.arguments]
        environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
        began = time.monotonic()
        with subprocess.Popen(
            command,
            cwd=tree,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            try:
                output, hung = process.communicate(timeout=within)[0], False
            except subprocess.TimeoutExpired:
                hung = True
                os.killpg(process.pid, signal.SIGKILL)
                output = process.communicate()[0]
        return Outcome(process.returncode, output, time.monotonic() - began, hung=hung)

    def again(self, outcome: Outcome) -> Checker:
        """The part of this checker that has failed."""
        failed = _FAILED.findall(outcome.output)
        if self.arguments[0] != "pytest" or not failed:
            return self
        return Checker(self.name, (*_PYTEST, *failed))

    def but(self, outcome: Outcome) -> Checker | None:
        """This checker without the test that has failed, which says nothing; None for a machine."""
        failed = _FAILED.findall(outcome.output)
        if self.arguments[0] != "pytest" or not failed:
            return None
        return Checker(self.name, (*self.arguments, *(f"--deselect={each}" for each in failed)))


_PYTEST = ("pytest", "-q", "-x", "-p", "no:cacheprovider")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a look has ended."""

    code: int
    output: str
    seconds: float
    hung: bool

    @property
    def complains(self) -> bool:
        return self.hung or self.code != 0

    @property
    def what(self) -> str:
        """The test that has failed, or the last that was said."""
        if failed := _FAILED.findall(self.output):
            return str(failed[0]).rsplit("/", 1)[-1]
        lines = self.output.strip().splitlines()
        return "hung" if self.hung else lines[-1].strip()[:100] if lines else f"exit code {self.code}"


def checkers(plant: Plant) -> Iterator[Checker]:
    """Those for one plant, the cheapest first."""
    for folder, name in FOLDERS.items():
        if tests := [each for each in plant.tests if each.startswith(f"tests/{folder}/")]:
            yield Checker(name, (*_PYTEST, *tests))
    for name, arguments in MACHINES.items():
        yield Checker(name, arguments)


def searchers() -> list[Checker]:
    """Return the machines that are no tests and know no plant."""
    return [Checker(name, arguments) for name, arguments in MACHINES.items() if arguments[0] != "pytest"]
