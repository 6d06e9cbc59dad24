"""Every system call of a run as a place to fail.

A shape is run without a fault, and its system calls are counted; a point is one of those, with a fault: the
process is killed there, the call returns an errno, or it takes longer. A seed draws shape, process and sort
of fault, then one of the calls. Counts differ a little from run to run, so a finding names its point, which
`--case` runs again; that may need some repetitions.
"""

from __future__ import annotations

import contextlib
import math
import platform
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.machines.crash.calls import Point, errors_of
from tests.machines.crash.lab import laboratory, serve, warm
from tests.machines.crash.shapes import SHAPES
from tests.machines.crash.trial import Outcome, Run
from tests.machines.machine import Machine, Result

WEIGHTS = {"kill": 3, "delay": 1, "error": 6}
"""How often each sort of fault is drawn."""
RECORDINGS = 3
"""How often a run without a fault is tried: on a busy machine a server may be slower than `GiveUpAfter`."""
Calls = dict[str, list[str]]
"""By name of a call that a process made, what the first argument of each is a descriptor of."""


@dataclass(frozen=True)
class Draw:
    """What a seed draws before the calls are known."""

    seed: int
    shape: str
    process: str
    sort: str

    def __str__(self) -> str:
        return f"{self.shape}:{self.process}:?:?:{self.sort}"

    def point(self, calls: Calls) -> Point:
        """Draw one of these calls, by the square root of how often its name is called, and a fault for it."""
        dice = random.Random(self.seed)
        faults = {
            name: [(n, found) for n, kind in enumerate(kinds, 1) if (found := self._faults(name, kind))]
            for name, kinds in sorted(calls.items())
        }
        names = [name for name, found in faults.items() if found]
        (name,) = dice.choices(names, [math.sqrt(len(faults[name])) for name in names])
        n, possible = faults[name][int(dice.random() * len(faults[name]))]
        return Point(self.shape, self.process, name, n, dice.choice(possible))

    def _faults(self, call: str, kind: str) -> list[str]:
        return errors_of(call, kind) if self.sort == "error" else [self.sort]


class Crash(Machine[Draw | Point]):
    """A case takes some seconds. `--trace` prints the log."""

    count = 200
    limit = 300.0

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        if platform.machine() != "x86_64" or sys.platform != "linux":
            raise OSError("the numbers of system calls are known for Linux on x86-64 only")
        self._recorded: dict[tuple[str, bool], dict[str, Calls]] = {}
        with serve() as servers:
            warm(servers)
            with laboratory(servers) as self._lab:
                yield

    def draw(self, seed: int) -> Draw:
        dice = random.Random(seed)
        shape = SHAPES[dice.choice([*SHAPES])]
        process = dice.choice(
            ("sidecar", "keeper", "successor", "handover") if shape.keeper else ("sidecar",)
        )
        (sort,) = dice.choices([*WEIGHTS], [*WEIGHTS.values()])
        return Draw(seed, shape.name, process, sort)

    def named(self, text: str) -> Point:
        return Point.of(text)

    def run(self, case: Draw | Point) -> Result:
        point = case if isinstance(case, Point) else self._decided(case)
        outcome = Run(self._lab, SHAPES[point.shape], point).outcome()
        if self.trace is not None:
            self.trace += [outcome.log, line_of(point, outcome)]
        broken = outcome.state == "broken"
        state = outcome.state if broken or outcome.reached else "not reached"
        return Result(Counter([f"{point.sort} {state}"]), broken * line_of(point, outcome), case=str(point))

    def _decided(self, draw: Draw) -> Point:
        recovery = draw.process in ("successor", "handover")
        processes = ("successor", "handover") if recovery else ("sidecar", "keeper")
        if (calls := self._recorded.get((draw.shape, recovery))) is None:
            run = Run(self._lab, SHAPES[draw.shape], record=processes)
            calls = self._recorded[draw.shape, recovery] = recorded(run.outcome)
        return draw.point(calls[draw.process])


def recorded(run: Callable[[], Outcome]) -> dict[str, Calls]:
    """Return the calls of a run without a fault, by process. Raises RuntimeError if each try is broken."""
    for _ in range(RECORDINGS):
        outcome = run()
        if outcome.state != "broken":
            return {process: dict(calls) for process, calls in outcome.calls.items()}
    raise RuntimeError(f"broken without a fault: {outcome.why}\n{outcome.log}")


def line_of(point: Point, outcome: Outcome) -> str:
    """Return what came of a point, in one line."""
    suffered = f" suffered {outcome.suffered}" if outcome.suffered else ""
    context = f" [{trace}]" if (trace := innermost(outcome.log)) else ""
    return f"{point} {outcome.state}: exit codes {outcome.codes}{suffered} {'; '.join(outcome.why)}{context}"


def innermost(log: str) -> str:
    """Return our own innermost lines of the last traceback in a log, and its error."""
    _, found, trace = log.rpartition("Traceback (most recent call last)")
    lines = trace.replace("\\n", "\n").split("\n") if found else []
    ours = [line for line in lines if re.search(r"/(sidecar|streamer)/", line)]
    place = re.compile(r'.*/((?:sidecar|streamer)/[^"\\]*)\\?", line (\d+).*')
    places = [place.sub(r"\1:\2", line) for line in ours[-2:]]
    errors = [line.strip() for line in lines if re.match(r"[ |]*\w*(Error|Exception)\b", line)]
    return " ".join([*places, *errors[-1:]])[:200]


MACHINE = Crash()
