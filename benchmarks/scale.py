"""Measures engine processes on any number of cores: `python -m benchmarks.scale`.

    nginx (the second half of the cores) ─▶ engines ─▶ sidecar ─▶ 1, 8 or 64 FIFOs ─▶ readers (the first half)

Each load is streamed with every number of engine processes and of FIFOs, in turns whose order rotates. A row
has throughput, CPU of the sidecar with its engines, the sidecar's own share of it, and the median and longest
time in which its admin port answered meanwhile, which is how long its event loop was busy. `scaling` is the
throughput divided by the engines' number and by one engine's throughput; the origin may be the limit.

With fewer than four cores origin and clients share all, and the CPU seconds are what counts.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
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
from benchmarks.report import circumstances, insert_into, keep, kept
from benchmarks.scenarios import Scenario
from benchmarks.stats import in_turns, spread
from benchmarks.task import Task

BEGIN = "<!-- scale: begin; written by python -m benchmarks.scale -->"
END = "<!-- scale: end -->"
ENGINES = (0, 1, 2, 4, 8, 16)
FIFOS = (1, 8, 64)
LOADS = {"plain": ("fast", 64 * MIB), "tls": ("tls", 64 * MIB), "small": ("fast", 100_000)}
"""Server of the origin, and largest object, by load."""
LIMIT = 30.0
"""Seconds after which a reader leaves."""
ASK_EVERY = 0.2
"""Seconds between two questions to the admin port, each of which costs it 0.7 ms of CPU."""
Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Seen:
    """What the sidecar did during one run, besides streaming."""

    engine_cpu_seconds: float
    answers: list[float]
    """Seconds that the admin port took to answer, each time it was asked."""


class _Watched(Sidecar):
    """A sidecar whose admin port is asked while bytes move."""

    def __init__(self, sidecar: Sidecar, seen: list[Seen]) -> None:
        super().__init__(sidecar.child, sidecar.admin)
        self._seen = seen
        self._answers: list[float] = []
        self._over = threading.Event()
        self._before = self._engine_cpu()
        self._asking = threading.Thread(target=self._ask)

    def _engine_cpu(self) -> float:
        return float(sum(engine["cpu_seconds"] for engine in self.status()["engines"]))

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
        self._seen.append(Seen(self._engine_cpu() - self._before, self._answers))
        return super().after()

    def close(self) -> None:
        self._over.set()
        super().close()


@dataclass(frozen=True)
class Scaled(Penstock):
    """Penstock with a number of engine processes."""

    engines: int
    seen: list[Seen] = field(default_factory=list)

    @classmethod
    def by(cls, engines: int) -> Scaled:
        """Return Penstock with so many engine processes; 0: none."""
        setting: Document = {"default": {}}
        return cls(f"{engines} engines", setting, setting, {"Processes": engines}, engines)

    def start(self, task: Task, directory: str) -> Sidecar:
        return _Watched(super().start(task, directory), self.seen)


def shape_of(load: str, fifos: int, total: float) -> Shape:
    """Return objects of about `total` bytes in all, evenly on so many FIFOs."""
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


def measure(load: str, fifos: int, engines: Sequence[int], *, rounds: int, total: float) -> Document:
    """Measure one load on one number of FIFOs; return the runs by number of engines. Raises OriginFailed."""
    shape = shape_of(load, fifos, total)
    scenario = Scenario(name=load, text=load, server=LOADS[load][0], shape=shape, limit=LIMIT)
    clients = [Scaled.by(count) for count in engines]
    entries: Document = {str(client.engines): {"runs": [], "problem": None} for client in clients}
    with directory_in_memory("penstock-scale-") as made:
        data = DataSet(shape, os.path.join(made, "data"))
        data.create()
        with apart(data, os.path.join(made, "origin")) as origin:
            for number, client in in_turns(rounds, clients):
                entry = entries[str(client.engines)]
                if entry["problem"]:
                    continue
                try:
                    run = run_once(client, "default", scenario, origin, data, hashed=False)
                except (ProcessFailed, WrongBytes) as error:
                    entry["problem"] = str(error)
                    print(f"bench: {load}, {fifos} FIFOs, {client.name}: {error}", file=sys.stderr)
                    continue
                entry["runs"].append(figures(run, client.seen[-1]))
                print(
                    f"bench: {load}, {fifos} FIFOs, {client.name}, round {number + 1}: "
                    f"{run.gb_per_second:.2f} GB/s at {run.cpu_per_gb:.3f} CPU-s/GB",
                    flush=True,
                )
    return entries


def figures(run: Run, seen: Seen) -> Document:
    """Return the figures of one run."""
    answers = sorted(seen.answers) or [0.0]
    return {
        "gb_per_second": run.gb_per_second,
        "cpu_per_gb": run.cpu_per_gb,
        "own_share": max(0.0, 1 - seen.engine_cpu_seconds / run.cpu_seconds),
        "answer": statistics.median(answers),
        "slowest_answer": answers[-1],
        "peak_rss": run.peak_rss,
    }


def rows(fifos: str, entries: Document) -> Iterator[str]:
    """Yield the table's rows of one load and number of FIFOs."""
    one = entries.get("1", {}).get("runs")
    alone = statistics.median(run["gb_per_second"] for run in one) if one else None
    for engines, entry in entries.items():
        if not entry["runs"]:
            problem = " ".join((entry["problem"] or "no run").replace("|", "/").split())[:160]
            yield f"| {fifos} | {engines} | {problem} | - | - | - | - | - |"
            continue
        rate, cpu, share, answer, slowest, rss = (
            spread([run[name] for run in entry["runs"]])
            for name in ("gb_per_second", "cpu_per_gb", "own_share", "answer", "slowest_answer", "peak_rss")
        )
        scaling = "-" if not int(engines) or alone is None else f"{rate.median / alone / int(engines):.2f}"
        yield (
            f"| {fifos} | {engines} | {rate.text()} | {scaling} | {cpu.text()} | {share.median:.0%} | "
            f"{1000 * answer.median:.1f}, {1000 * slowest.high:.0f} | {rss.median / 1e6:.0f} |"
        )


def markdown(results: Document) -> str:
    """Return date, machine and a table per load, as Markdown."""
    machine = results["machine"]
    origin = f"{machine['origin']} of them for the origin" if machine["origin"] else "shared with the origin"
    reported = (
        f"Measured on {results['date']}: median of {results['rounds']} runs, and in parentheses minimum and "
        f"maximum. {machine['cores']} cores, {origin}, Linux {machine['kernel']}, Python "
        f"{machine['python']}, Penstock {results['version']}; load when it began: {machine['load']:.1f}."
    )
    lines = [reported]
    for load, by_fifos in results["loads"].items():
        lines += [
            "",
            f"**`{load}`**, {results['gigabytes']:g} GB",
            "",
            "| FIFOs | engines | GB/s | scaling | CPU-s/GB | sidecar's share | answer, ms | RSS, MB |",
            "|---|---|---|---|---|---|---|---|",
            *itertools.chain.from_iterable(rows(fifos, entries) for fifos, entries in by_fifos.items()),
        ]
    return "\n".join(lines) + "\n"


def _numbers(text: str) -> list[int]:
    found = [int(each) for each in text.split(",") if each]
    if not found or min(found) < 0:
        raise ValueError(text)
    return found


def _parser(cores: int) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__.splitlines()[0])
    engines = [count for count in ENGINES if count <= max(2, cores)]
    made.add_argument("--loads", default=",".join(LOADS), metavar="LIST", help=f"of {', '.join(LOADS)} (all)")
    made.add_argument(
        "--engines", type=_numbers, default=engines, metavar="LIST", help="numbers (up to the cores)"
    )
    made.add_argument("--fifos", type=_numbers, default=list(FIFOS), metavar="LIST", help="numbers (1,8,64)")
    made.add_argument("--rounds", type=int, default=3, help="counted runs of each (3)")
    made.add_argument("--gigabytes", type=float, default=2.0, help="of a run (2)")
    made.add_argument(
        "--out",
        default="build/benchmarks/scale.json",
        metavar="FILE",
        help="results; loads of an earlier run with the same rounds and size stay",
    )
    made.add_argument("--into", metavar="FILE", help="put the tables of all results into this Markdown file")
    return made


def _earlier(path: str, rounds: int, gigabytes: float) -> Document:
    """Return the results at `path` if they have as many runs of the same size; else an empty document."""
    results = kept(path)
    return results if results and (results["rounds"], results["gigabytes"]) == (rounds, gigabytes) else {}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 0, 1 if a run failed, 2 if nothing can be measured."""
    cores = len(os.sched_getaffinity(0))
    parser = _parser(cores)
    chosen = parser.parse_args(arguments)
    loads = [name for name in chosen.loads.split(",") if name]
    if unknown := set(loads) - set(LOADS):
        parser.error(f"--loads: no {min(unknown)!r}; there are {', '.join(LOADS)}")
    if chosen.rounds < 1 or chosen.gigabytes <= 0 or 0 in chosen.fifos:
        parser.error("--rounds and --fifos must be at least 1, --gigabytes above 0")
    if reason := missing():
        print(f"bench: {reason}", file=sys.stderr)
        return 2
    now = circumstances() | {
        "version": Scaled.by(0).version(),
        "rounds": chosen.rounds,
        "gigabytes": chosen.gigabytes,
    }
    now["machine"] |= {"origin": len(cores_of_origin()), "load": os.getloadavg()[0]}
    results = _earlier(chosen.out, chosen.rounds, chosen.gigabytes) or now | {"loads": {}}
    try:
        for load in loads:
            results["loads"][load] = {
                str(fifos): measure(
                    load, fifos, chosen.engines, rounds=chosen.rounds, total=chosen.gigabytes * 1e9
                )
                for fifos in chosen.fifos
            }
            results |= now
            keep(results, chosen.out)
    except OriginFailed as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    print(markdown(results))
    if chosen.into is not None:
        insert_into(chosen.into, markdown(results), begin=BEGIN, end=END)
    entries = [each for by_fifos in results["loads"].values() for each in by_fifos.values()]
    return int(any(entry["problem"] for each in entries for entry in each.values()))


if __name__ == "__main__":
    sys.exit(main())
