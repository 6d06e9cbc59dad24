"""Measures one sidecar with many FIFOs, on any number of cores: `python -m benchmarks.scale`.

    nginx (the second half of the cores) ─▶ sidecar ─▶ 1, 8 or 64 FIFOs ─▶ readers (the first half)

Each load is streamed into every number of FIFOs. A row has throughput, CPU of the sidecar, and the median and
longest time in which its admin port answered meanwhile, which is how long its event loop was busy.

With fewer than four cores origin and sidecar share all, and the CPU seconds are what counts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.dataset import MIB, DataSet, Shape, directory_in_memory
from benchmarks.measure import Run, WrongBytes, run_once
from benchmarks.origin import Origin, OriginFailed, missing, running_origin
from benchmarks.ours import Penstock, Sidecar
from benchmarks.process import ProcessFailed, on_cores
from benchmarks.scenarios import Scenario
from benchmarks.stats import spread
from benchmarks.task import Task

FIFOS = (1, 8, 64)
LOADS = {"plain": ("fast", 64 * MIB), "tls": ("tls", 64 * MIB), "small": ("fast", 100_000)}
"""Server of the origin, and largest object, by load."""
LIMIT = 30.0
"""Seconds after which a reader leaves."""
ASK_EVERY = 0.2
"""Seconds between two questions to the admin port, each of which costs it 0.7 ms of CPU."""


class _Watched(Sidecar):
    """A sidecar whose admin port is asked while bytes move."""

    def __init__(self, sidecar: Sidecar, answers: list[list[float]]) -> None:
        super().__init__(sidecar.child, sidecar.admin)
        self._answers: list[float] = []
        answers.append(self._answers)
        self._over = threading.Event()
        self._asking = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        while not self._over.wait(ASK_EVERY):
            began = time.monotonic()
            with contextlib.suppress(OSError):
                urllib.request.urlopen(self.admin + "livez", timeout=LIMIT).read()  # noqa: S310 - our own child
                self._answers.append(time.monotonic() - began)

    def go(self) -> None:
        self._asking.start()

    def after(self) -> Mapping[str, Any]:
        self._over.set()
        self._asking.join()
        return super().after()

    def close(self) -> None:
        self._over.set()
        super().close()


@dataclass(frozen=True)
class Watched(Penstock):
    """Penstock whose admin port is asked while bytes move."""

    answers: list[list[float]] = field(default_factory=list)
    """By run, the seconds that the admin port took to answer, each time it was asked."""

    def start(self, task: Task, directory: str) -> Sidecar:
        return _Watched(super().start(task, directory), self.answers)


def watched() -> Watched:
    """Return Penstock with its defaults."""
    setting: dict[str, Any] = {"default": {}}
    return Watched("penstock", setting, setting, {})


def shape_of(load: str, fifos: int, total: float) -> Shape:
    """Return objects of about `total` bytes in all, evenly on `fifos` FIFOs."""
    largest = LOADS[load][1]
    size = min(largest, max(1, int(total / fifos)))
    return Shape(f"{load}-{fifos}", fifos, max(1, round(total / fifos / size)), size)


def cores_of_origin() -> list[int]:
    """Return the cores for the origin alone; none if there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[len(cores) // 2 :] if len(cores) >= 4 else []


@contextlib.contextmanager
def apart(data: DataSet, directory: str) -> Iterator[Origin]:
    """Run the origin on its own cores, and let this process and its later children run on the others."""
    allowed, theirs = os.sched_getaffinity(0), cores_of_origin()
    with contextlib.ExitStack() as stack:
        with on_cores(theirs or allowed):
            origin = stack.enter_context(running_origin(data, directory))
        stack.enter_context(on_cores(allowed - set(theirs)))
        yield origin


def measure(load: str, fifos: int, *, rounds: int, total: float) -> list[tuple[Run, list[float]]]:
    """Measure one load on one number of FIFOs; return each run with the admin port's answers, in seconds.

    Raises OriginFailed, ProcessFailed, WrongBytes.
    """
    shape = shape_of(load, fifos, total)
    scenario = Scenario(name=load, text=load, server=LOADS[load][0], shape=shape, limit=LIMIT)
    client = watched()
    with directory_in_memory("penstock-scale-") as made:
        data = DataSet(shape, os.path.join(made, "data"))
        data.create()
        with apart(data, os.path.join(made, "origin")) as origin:
            runs = [run_once(client, "default", scenario, origin, data, hashed=False) for _ in range(rounds)]
    return list(zip(runs, client.answers, strict=True))


def row(load: str, fifos: int, measured: Sequence[tuple[Run, list[float]]]) -> str:
    """Return the table's row of one load and number of FIFOs."""
    runs = [run for run, _ in measured]
    answers = [each for _, seconds in measured for each in seconds] or [0.0]
    return (
        f"| {load} | {fifos} | {spread([run.gb_per_second for run in runs]).text()} "
        f"| {spread([run.cpu_per_gb for run in runs]).text()} "
        f"| {1000 * statistics.median(answers):.1f}, {1000 * max(answers):.0f} "
        f"| {spread([run.peak_rss for run in runs]).median / 1e6:.0f} |"
    )


def _numbers(text: str) -> list[int]:
    found = [int(each) for each in text.split(",") if each]
    if not found or min(found) < 1:
        raise ValueError(text)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 0, 1 if a run failed, 2 if nothing can be measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--loads", default=",".join(LOADS), metavar="LIST", help=f"of {', '.join(LOADS)} (all)"
    )
    parser.add_argument(
        "--fifos", type=_numbers, default=list(FIFOS), metavar="LIST", help="numbers (1,8,64)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each (3)")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of a run (2)")
    chosen = parser.parse_args(arguments)
    loads = [name for name in chosen.loads.split(",") if name]
    if unknown := set(loads) - set(LOADS):
        parser.error(f"--loads: no {min(unknown)!r}; there are {', '.join(LOADS)}")
    if chosen.rounds < 1 or chosen.gigabytes <= 0:
        parser.error("--rounds must be at least 1, --gigabytes above 0")
    if reason := missing():
        print(f"bench: {reason}", file=sys.stderr)
        return 2
    cores = len(cores_of_origin())
    print(f"{cores or 'no'} cores of the origin alone; load when it began: {os.getloadavg()[0]:.1f}\n")
    print("| load | FIFOs | GB/s | CPU-s/GB | answer, ms | RSS, MB |\n|---|---|---|---|---|---|")
    try:
        for load in loads:
            for fifos in chosen.fifos:
                measured = measure(load, fifos, rounds=chosen.rounds, total=chosen.gigabytes * 1e9)
                print(row(load, fifos, measured), flush=True)
    except (OriginFailed, ProcessFailed, WrongBytes) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
