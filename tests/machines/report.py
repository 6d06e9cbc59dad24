"""Adds up what came of cases: counts, what is broken, and the commands that repeat it."""

from __future__ import annotations

import math
import os
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.machines.machine import Machine, Ticket, load
from tests.machines.pool import Outcome, run_cases

MOST_AGAIN = 20
"""Broken cases that are run again."""
SHOWN_EACH = 20.0
"""Seconds between two lines about the state."""


@dataclass
class Report:
    """What came of the cases so far."""

    name: str
    cases: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    broken: dict[Ticket, Outcome] = field(default_factory=dict)
    again: dict[Ticket, bool] = field(default_factory=dict)
    """By broken case, whether it was broken again when it ran alone."""
    cells: dict[str, dict[str, str]] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    def add(self, outcome: Outcome) -> None:
        """Count it."""
        self.cases += 1
        self.counts += outcome.result.counts
        if outcome.result.cells:
            self.cells[outcome.case] = outcome.result.cells
        if outcome.result.broken:
            self.broken[outcome.ticket] = outcome

    def command(self, outcome: Outcome) -> str:
        """Return the command that runs a case again."""
        ticket = outcome.result.case or outcome.ticket
        which = f"--seed {ticket} --count 1" if isinstance(ticket, int) else f"--case {shlex.quote(ticket)}"
        return f"python -m tests.machines {self.name} {which}"

    @property
    def state(self) -> str:
        """One line: cases, seconds, counts."""
        counts = ", ".join(f"{count:,} {name}" for name, count in sorted(self.counts.items()))
        return f"{self.cases:,} cases in {time.monotonic() - self.began:.0f} s: {counts or 'nothing counted'}"

    def __str__(self) -> str:
        lines = [self.state]
        for ticket, outcome in self.broken.items():
            again = {True: "broken again: ", False: "not broken again: ", None: ""}[self.again.get(ticket)]
            lines.append(f"  {self.command(outcome)}\n    {again}{outcome.result.broken:.300}")
        return "\n".join([*lines, f"{self.name}: {self.cases:,} cases, {len(self.broken)} broken"])


def search(
    machine: str,
    tickets: Iterable[Ticket],
    *,
    name: str = "",
    workers: int | None = None,
    minutes: float = math.inf,
    stop: bool = False,
    trace: bool = False,
    show: Callable[[str], None] = lambda _: None,
) -> Report:
    """Run the cases of `tickets` on the machine of a module; those that are broken once more, alone.

    `workers`: None leaves their number to the machine. `minutes`: begin no case after them. `stop`: end with
    the first broken case. `show` is given findings as they come, the state now and then, and traces.
    """
    kind = load(machine)
    report = Report(name)
    until, shown = report.began + 60 * minutes, report.began
    workers = workers or kind.workers or os.cpu_count() or 1
    for outcome in run_cases(machine, tickets, workers=workers, until=until, trace=trace):
        report.add(outcome)
        if trace:
            show(f"{outcome.case}\n{outcome.trace}")
        if outcome.result.broken:
            show(f"{outcome.ticket}: {outcome.case:.2000}\n{outcome.ticket}: {outcome.result.broken:.2000}")
            if stop:
                break
        if time.monotonic() - shown > SHOWN_EACH:
            shown = time.monotonic()
            show(f"{report.state}; {len(report.broken)} broken")
    _run_again(kind, machine, report)
    return report


def _run_again(kind: Machine[Any], machine: str, report: Report) -> None:
    """Tell what breaks each time from what breaks at times, and from what breaks on a busy machine alone."""
    tickets = list(report.broken)[:MOST_AGAIN]
    for outcome in run_cases(machine, tickets, workers=1) if tickets else ():
        report.again[outcome.ticket] = bool(outcome.result.broken)
        if kind.timed and not outcome.result.broken:
            del report.broken[outcome.ticket]
            report.cells[outcome.case] = outcome.result.cells
            report.counts["broken once, not alone"] += 1
