"""What a machine is: it makes a case of a seed, runs it in a process of the pool, and returns a result."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar, Generic, TypeVar

CaseT = TypeVar("CaseT")
Ticket = int | str
"""What names a case to a process of the pool: its seed, or its text."""

ABOUT = {
    "crash": "kills, errors and delays at system calls of sidecar and keeper",
    "elastic": "jobs whose ranks share records, killed and continued at another number of ranks",
    "frameworks": "training frameworks over ranks that share a channel by record",
    "fuzz": "bytes that a parser does not end as it must on",
    "guest": "loss, delay, a link that is down, and cgroup limits, in a Linux guest",
    "hostile": "servers that are wrong in every field, timing and framing",
    "keeper": "the keeper under orders of events, kills and failing system calls, against a model",
    "plants": "bugs that are planted, and the checker that finds each",
    "results": "jobs that are killed while they upload checkpoints and model",
    "schedules": "the relay in virtual time, under orders of events",
    "searchers": "bugs that are planted, and the machines that find each without its tests",
    "servers": "real S3 servers, each with its own habits",
}
"""Every machine by name."""


@dataclass
class Result:
    """What came of a case."""

    counts: Counter[str] = field(default_factory=Counter)
    """What it did, in units of the machine's own; a report adds them up."""
    broken: str = ""
    """The promise that it broke; empty if none."""
    case: str = ""
    """The text that runs it again, of a case that is decided only while it runs."""
    cells: dict[str, str] = field(default_factory=dict)
    """What it gives to the machine's table, by row or column."""


class Machine(Generic[CaseT]):
    """Subclasses draw cases, or list them all, and run them."""

    count: ClassVar[int | None] = 100
    """Cases, unless told; None: all that there are."""
    limit: ClassVar[float] = 120.0
    """Seconds without progress after which a case counts as hung."""
    workers: ClassVar[int | None] = None
    """Processes, unless told; None: one for each processor."""
    timed: ClassVar[bool] = False
    """Whether limits of time judge: a case is broken then only if it breaks a second time, alone."""
    trace: list[str] | None = None
    """Lines that a case writes for `--trace`; None if nobody asks."""

    def cases(self) -> Sequence[CaseT]:
        """Return all cases in the order of their seeds; empty if the machine draws without end."""
        return ()

    def draw(self, seed: int) -> CaseT:
        """Return the case of a seed."""
        cases = self.cases()
        return cases[seed % len(cases)]

    def named(self, text: str) -> CaseT:
        """Return the case with this text. Raises ValueError."""
        for case in self.cases():
            if str(case) == text:
                return case
        raise ValueError(f"no such case: {text}")

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Hold what all cases of one process share."""
        yield

    def run(self, case: CaseT) -> Result:
        """Run a case. What it raises is a finding, after which its process is replaced."""
        raise NotImplementedError

    def table(self, cells: Mapping[str, Mapping[str, str]], page: str, /) -> str:
        """Return a page's table in Markdown. `cells`: by the text of each case; `page`: its present table."""
        raise NotImplementedError


def home(name: str) -> str:
    """Return the module of a machine, which has it as `MACHINE`."""
    return f"tests.machines.{name}.machine"


def load(module: str) -> Machine[Any]:
    """Import a machine from its module."""
    machine: Machine[Any] = import_module(module).MACHINE
    return machine


def case_of(machine: Machine[CaseT], ticket: Ticket) -> CaseT:
    """Return the case that a ticket names."""
    return machine.draw(ticket) if isinstance(ticket, int) else machine.named(ticket)
