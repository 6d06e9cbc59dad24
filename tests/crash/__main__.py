"""Every system call of a run as a place to fail: `python -m tests.crash --points 5000 --seed 1`.

Each shape is run once and its system calls counted; a point is one of those, with a fault: the process is
killed there, the call returns an errno, or it takes longer. Each point is a run of its own, judged by what
its readers got. `--replay ID` runs one again and shows the log; counts differ a little from run to run, so an
ID may need some repetitions. The exit code is 1 if something is broken.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import multiprocessing
import os
import platform
import random
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import TypeVar

from tests.crash.calls import Point, errors_of
from tests.crash.lab import laboratory, serve, warm
from tests.crash.shapes import SHAPES, Servers, Shape
from tests.crash.trial import Lab, Outcome, Run

_AGAIN = 2
"""How often a broken point is run again, to tell what happens each time from what happens at times."""
_WEIGHTS = {"kill": 3, "delay": 1, "error": 6}
"""How often each sort of fault is drawn."""
_RECORDINGS = 3
"""How often a run without a fault is tried: on a busy machine a server may be slower than `GiveUpAfter`."""
_MOST_AGAIN = 20
"""Points for which that is done."""
TRAILER_STATES = ("equal", "told", "exit", "broken", "not reached")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__.split("\n")[0])
    parser.add_argument("--points", type=int, default=200, help="how many to draw")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--all", action="store_true", help="every point of the chosen shapes: a night or more"
    )
    parser.add_argument("--shape", action="append", choices=SHAPES, help="one of them; all, if not given")
    parser.add_argument("--process", action="append", help="sidecar, keeper, successor, handover; all")
    parser.add_argument("--call", action="append", help="points of these system calls alone")
    parser.add_argument("--fault", action="append", choices=_WEIGHTS, help="points with these alone")
    parser.add_argument("--replay", metavar="ID", action="append", help="run a point and show its log")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no further point after these")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--into", metavar="FILE", help="append a line for each point as it is done")
    given = parser.parse_args()
    if platform.machine() != "x86_64" or sys.platform != "linux":
        parser.error("the numbers of system calls are known for Linux on x86-64 only")
    began = time.monotonic()
    with serve() as servers:
        warm(servers)
        with workers(given.workers, servers) as staff:
            if given.replay:
                return replay([Point.of(each) for each in given.replay], staff)
            shapes = [SHAPES[name] for name in given.shape or SHAPES]
            found = recorded(shapes, staff)
            known = [
                each
                for each in found
                if (not given.process or each.process in given.process)
                and (not given.call or each.call in given.call)
            ]
            chosen = {sort: weight for sort, weight in _WEIGHTS.items() if sort in (given.fault or _WEIGHTS)}
            points = every(known, chosen) if given.all else drawn(known, given.points, given.seed, chosen)
            counts = {True: sum(len(each.kinds) for each in known), False: len(points)}
            print(f"{counts[True]} system calls in {len(shapes)} shapes, {counts[False]} points", flush=True)
            report = Report(given.into)
            for task, outcome in staff.run(points, until=began + 60 * given.minutes):
                report.add(task, outcome)
            print(report, flush=True)
            broken = list(report.broken)[:_MOST_AGAIN]
            for task, outcome in staff.run([each for each in broken for _ in range(_AGAIN)]):
                report.again[task].append(outcome.state)
            for point, states in report.again.items():
                print(f"again {point}: {', '.join(states)}")
    print(f"{report.count} points in {time.monotonic() - began:.0f} s, {len(report.broken)} broken")
    return 1 if report.broken else 0


def replay(points: list[Point], staff: Staff) -> int:
    """Run the points and show their logs; whether one is broken."""
    broken = False
    for task, outcome in staff.run([Replay(point) for point in points]):
        print(outcome.log, end="")
        print(line_of(task.point, outcome), "" if outcome.reached else "(not reached)")
        broken |= outcome.state == "broken"
    return int(broken)


# Which points there are


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls of one name that a process made in a run."""

    shape: str
    process: str
    call: str
    kinds: list[str]
    """What the first argument of each is a descriptor of."""

    def points(self, n: int) -> dict[str, list[Point]]:
        """Those of the n-th call, from 1, by sort."""
        faults = {"kill": ["kill"], "delay": ["delay"], "error": errors_of(self.call, self.kinds[n - 1])}
        return {
            sort: [Point(self.shape, self.process, self.call, n, fault) for fault in names]
            for sort, names in faults.items()
        }


def recorded(shapes: list[Shape], staff: Staff) -> list[Calls]:
    """Run each shape without a fault, and with a sidecar killed if it has a keeper; the calls of both."""
    tasks: list[Recording] = []
    for shape in shapes:
        tasks.append(Recording(shape.name, ("sidecar", "keeper") if shape.keeper else ("sidecar",)))
        if shape.keeper:
            tasks.append(Recording(shape.name, ("successor", "handover")))
    found: list[Calls] = []
    for tries_left in reversed(range(_RECORDINGS)):
        broken: list[Recording] = []
        for task, outcome in staff.run(tasks):
            if outcome.state == "broken":
                broken.append(task)
                if not tries_left:
                    raise SystemExit(f"{task} is broken without a fault: {outcome.why}\n{outcome.log}")
                print(
                    f"{task} is broken without a fault, and is run again: {outcome.why}\n{outcome.log}",
                    flush=True,
                )
            for process, calls in outcome.calls.items() if task not in broken else ():
                found.extend(Calls(task.shape, process, call, kinds) for call, kinds in calls.items())
        tasks = broken
    return sorted(found, key=lambda each: (each.shape, each.process, each.call))


def every(known: list[Calls], chosen: Container[str]) -> list[Point]:
    return [
        point
        for each in known
        for n in range(1, len(each.kinds) + 1)
        for sort, points in each.points(n).items()
        for point in points
        if sort in chosen
    ]


def drawn(known: list[Calls], count: int, seed: int, weights: dict[str, int]) -> list[Point]:
    """Draw `count` points: each shape and process alike, each call by the square root of its number."""
    dice = random.Random(seed)
    groups: dict[tuple[str, str], list[Calls]] = defaultdict(list)
    for each in known:
        groups[each.shape, each.process].append(each)
    points: dict[Point, None] = {}
    names = list(groups)
    most = min(count, len(every(known, weights)) // 2)  # the last ones are drawn too slowly; see --all
    while len(points) < most:
        dice.shuffle(names)
        for name in names:
            (calls,) = dice.choices(groups[name], [math.sqrt(len(each.kinds)) for each in groups[name]])
            found = calls.points(dice.randint(1, len(calls.kinds)))
            sorts = [sort for sort in weights if found[sort]]
            if not sorts:
                continue
            (sort,) = dice.choices(sorts, [weights[each] for each in sorts])
            points[dice.choice(found[sort])] = None
            if len(points) == most:
                break
    return list(points)


# Who runs them


@dataclass(frozen=True, slots=True)
class Recording:
    """A task: a run without a fault, in which the calls of these processes are noted."""

    shape: str
    processes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Replay:
    """A task: a run of the point, whose log is kept."""

    point: Point


_Task = TypeVar("_Task", Point, Recording, Replay)


class Staff:
    """Processes that run tasks, one at a time each."""

    def __init__(self, connections: list[Connection]) -> None:
        self._connections = connections

    def run(self, tasks: list[_Task], until: float = math.inf) -> Iterator[tuple[_Task, Outcome]]:
        """Each task with its outcome, as they come."""
        waiting = list(reversed(tasks))
        busy: dict[Connection, _Task] = {}
        idle = list(self._connections)
        while busy or (waiting and time.monotonic() < until):
            while waiting and idle and time.monotonic() < until:
                connection, task = idle.pop(), waiting.pop()
                connection.send(task)
                busy[connection] = task
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                idle.append(ready)
                yield busy.pop(ready), ready.recv()


@contextlib.contextmanager
def workers(count: int, servers: Servers) -> Iterator[Staff]:
    """Workers, until the end of the block."""
    context = multiprocessing.get_context("fork")
    ours: list[Connection] = []
    processes = []
    for _ in range(count):
        mine, theirs = multiprocessing.Pipe()
        process = context.Process(target=_work, args=(theirs, servers, [*ours, mine]))
        process.start()
        theirs.close()
        ours.append(mine)
        processes.append(process)
    try:
        yield Staff(ours)
    finally:
        for connection in ours:
            connection.close()
        for process in processes:
            process.join(60)


def _work(tasks: Connection, servers: Servers, others: list[Connection]) -> None:
    for other in others:
        other.close()
    with laboratory(servers) as lab, contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            tasks.send(_outcome(lab, tasks.recv()))


def _outcome(lab: Lab, task: Point | Recording | Replay) -> Outcome:
    if isinstance(task, Recording):
        return Run(lab, SHAPES[task.shape], record=task.processes).outcome()
    if isinstance(task, Replay):
        return Run(lab, SHAPES[task.point.shape], task.point).outcome()
    outcome = Run(lab, SHAPES[task.shape], task).outcome()
    if outcome.state != "broken":
        outcome.log = ""
    return outcome


# What came of it


@dataclass
class Report:
    """Counts, and what is broken."""

    into: str | None = None
    counts: dict[tuple[str, str, str], Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    again: dict[Point, list[str]] = field(default_factory=lambda: defaultdict(list))
    broken: dict[Point, Outcome] = field(default_factory=dict)
    count: int = 0

    def add(self, point: Point, outcome: Outcome) -> None:
        self.count += 1
        reached = outcome.state == "broken" or outcome.reached
        state = outcome.state if reached else "not reached"
        self.counts[point.shape, point.process, point.sort][state] += 1
        if outcome.state == "broken":
            self.broken[point] = outcome
            print(line_of(point, outcome), flush=True)
        if self.into:
            with open(self.into, "a", encoding="utf-8") as file:
                file.write(line_of(point, outcome) + ("\n" if reached else " (not reached)\n"))

    def __str__(self) -> str:
        head = f"{'shape':18} {'process':10} {'fault':6}" + "".join(f"{name:>12}" for name in TRAILER_STATES)
        lines = [head]
        total: Counter[str] = Counter()
        for (shape, process, sort), counts in sorted(self.counts.items()):
            lines.append(f"{shape:18} {process:10} {sort:6}" + _row(counts))
            total += counts
        lines.append(f"{'all':36}" + _row(total))
        for point, outcome in self.broken.items():
            lines.append(line_of(point, outcome))
        return "\n".join(lines)


def _row(counts: Counter[str]) -> str:
    return "".join(f"{counts[name] or '-':>12}" for name in TRAILER_STATES)


def line_of(point: Point, outcome: Outcome) -> str:
    """One line."""
    suffered = f" suffered {outcome.suffered}" if outcome.suffered else ""
    context = f" [{trace}]" if (trace := innermost(outcome.log)) else ""
    return f"{point} {outcome.state}: exit codes {outcome.codes}{suffered} {'; '.join(outcome.why)}{context}"


def innermost(log: str) -> str:
    """Our own innermost lines, and the error, of the last traceback in a log."""
    _, found, trace = log.rpartition("Traceback (most recent call last)")
    lines = trace.replace("\\n", "\n").split("\n") if found else []
    ours = [line for line in lines if re.search(r"/(sidecar|streamer)/", line)]
    place = re.compile(r'.*/((?:sidecar|streamer)/[^"\\]*)\\?", line (\d+).*')
    places = [place.sub(r"\1:\2", line) for line in ours[-2:]]
    errors = [line.strip() for line in lines if re.match(r"[ |]*\w*(Error|Exception)\b", line)]
    return " ".join([*places, *errors[-1:]])[:200]


if __name__ == "__main__":
    sys.exit(main())
