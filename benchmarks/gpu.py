"""Measures the idle time of a GPU for each feed: `python -m benchmarks.gpu`.

docs/explanation/performance-training.md has the figures.

    cores 0..C-1   one training process (`gpu_trainer`), its DataLoader workers, the client's processes
    cores C..      the origin, an nginx that behaves as S3 does (`benchmarks.origin`)

The model is made and warmed up once for each load; then feeds take turns, in an order that rotates. Each run
begins with a new DataLoader and, for Penstock, a new sidecar, and lasts a fixed time from its first batch. If
several numbers of DataLoader workers are given, each is tried once and the one with the most images is kept.

Needs a GPU, PyTorch with torchvision, and the peers: `pip install --group gpu --group bench`. With `--device
cpu --loads tiny` everything runs without a GPU, to test the program; the figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.clients import ROOT, environment
from benchmarks.dataset import DataSet, Shape, directory_in_memory, nginx_etag
from benchmarks.gpu_task import IMAGE, LOADS, MARK, RECORD, Order
from benchmarks.origin import Origin, OriginFailed, missing, running_origin
from benchmarks.ours import Penstock, Sidecar
from benchmarks.process import Child, ProcessFailed, on_cores
from benchmarks.report import circumstances, insert_into, keep, kept, say
from benchmarks.stats import in_turns, list_of, spread
from benchmarks.task import Stream, Task

BEGIN = "<!-- gpu: begin; written by python -m benchmarks.gpu -->"
END = "<!-- gpu: end -->"
FEEDS = ("memory", "files", "penstock", "s3torchconnector", "obstore", "boto3", "s5cmd", "rclone")
RECORDS = 400
"""Records of each shard: 60 MB."""
SHARDS = 960
"""Number of shards: more than any run reads. All are links to one file."""
_PATIENCE = 240.0
"""Most seconds until a model is warm, or until a run has ended."""
Document = dict[str, Any]


class Shards(DataSet):
    """Shards of records with the same bytes: links to one file, so that many shards take no more memory."""

    def __init__(self, root: str) -> None:
        super().__init__(Shape("shards", 1, SHARDS, RECORDS * RECORD), root)

    def create(self) -> None:
        """Write the file, its links and their listing."""
        bucket = self.shape.bucket(0)
        directory = os.path.join(self.root, "objects", bucket)
        os.makedirs(directory)
        os.makedirs(os.path.join(self.root, "lists"))
        first = os.path.join(directory, self.shape.key(0))
        with open(first, "wb") as file:
            for number in range(RECORDS):
                start = number * 1_000_003 % (len(self._pool) - IMAGE)
                file.write(self._pool[start : start + IMAGE] + MARK)
        for index in range(1, self.shape.objects):
            os.link(first, os.path.join(directory, self.shape.key(index)))
        etag = nginx_etag(int(os.stat(first).st_mtime), self.shape.size)
        entries = [(self.shape.key(index), self.shape.size, etag) for index in range(self.shape.objects)]
        self.write_listing(bucket, entries)


@dataclass(frozen=True, slots=True)
class Cores:
    """CPU cores of the job and of the origin."""

    job: list[int]
    origin: list[int]

    def busy(self) -> float:
        """Return the busy seconds of the job's cores so far, including interrupts (proc_stat(5))."""
        wanted = {f"cpu{core}" for core in self.job}
        ticks = 0
        with open("/proc/stat", encoding="ascii") as file:
            for line in file:
                name, *fields = line.split()
                if name in wanted:
                    user, nice, system, _idle, _iowait, irq, softirq = map(int, fields[:7])
                    ticks += user + nice + system + irq + softirq
        return ticks / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings that the measurements of all loads share."""

    directory: str
    origin: Origin
    server: str
    data: Shards
    cores: Cores
    device: str
    workers: Sequence[int]
    """Numbers of DataLoader workers to try."""
    rounds: int
    seconds: float
    """Length of each run."""


@dataclass(frozen=True, slots=True)
class Place:
    """The trainer of one load, and where its runs are made."""

    setup: Setup
    trainer: Child
    ml: str
    """Base directory of the job, as the trainer uses it."""

    def run(self, feed: str, workers: int, seconds: float) -> Document:
        """Do one run and return its figures. Raises ProcessFailed, also for wrong records."""
        shape = self.setup.data.shape
        order = Order(
            feed=feed,
            url=self.setup.origin.urls[self.setup.server],
            bucket=shape.bucket(0),
            keys=[shape.key(index) for index in range(shape.objects)],
            directory=os.path.join(self.setup.data.root, "objects", shape.bucket(0)),
            size=shape.size,
            workers=workers,
            seconds=seconds,
        )
        with contextlib.ExitStack() as stack:
            sidecar = self._sidecar(workers) if feed == "penstock" else None
            if sidecar is not None:
                stack.callback(sidecar.close)
            self.trainer.say(json.dumps(asdict(order)))
            self._line("begin")
            cpu, since = self.setup.cores.busy(), time.monotonic()
            found: Document = json.loads(self._line())
            found["cores"] = (self.setup.cores.busy() - cpu) / (time.monotonic() - since)
            if sidecar is not None:
                found["waits"] = waits(sidecar.status())
            self.trainer.say("end")
            self._line("ended")
        if not found["right"]:
            raise ProcessFailed(f"{feed} brought records that are not whole")
        return found | {"workers": workers}

    def _line(self, due: str | None = None) -> str:
        line = self.trainer.line(deadline=time.monotonic() + _PATIENCE)
        if due is not None and line != due:
            raise ProcessFailed(f"the trainer said {line!r} and not {due!r}")
        return line

    def _sidecar(self, workers: int) -> Sidecar:
        shutil.rmtree(self.ml, ignore_errors=True)
        shape = self.setup.data.shape
        stream = Stream(bucket=shape.bucket(0), keys=[], size=0, fifo=os.path.join(self.ml, "train_0"))
        url = self.setup.origin.urls[self.setup.server]
        task = Task(
            url=url,
            ca_bundle=self.setup.origin.ca_bundle if url.startswith("https:") else None,
            streams=[stream],
            setting={},
        )
        return _RequestLimits("penstock", {}, {}, {}, workers).start(task, self.setup.directory)


def waits(status: Document) -> dict[str, float]:
    """Return the shares of the time with a reader in which the sidecar waited for trainer and for storage."""
    spent = [channel["seconds"] for channel in status["channels"].values()]
    there = sum(sum(each.values()) - each["idle"] for each in spent) or 1.0
    return {state: sum(each[state] for each in spent) / there for state in ("blocked", "starved")}


@dataclass(frozen=True)
class _RequestLimits(Penstock):
    """`penstock run` with one channel of as many rank FIFOs as there are readers."""

    ranks: int

    def job(self, task: Task, streams: list[Stream], base: str) -> Document:
        made = super().job(task, streams, base)
        made["InputDataConfig"][0]["Penstock"] = {"Ranks": self.ranks}
        return made


def measure(load: str, feeds: Sequence[str], setup: Setup) -> Document:
    """Measure all feeds of one load; return its part of the results document."""
    ml = os.path.join(setup.directory, "ml")
    env = os.environ | environment(setup.directory) | {"SAGEMAKER_BASE_DIR": ml, "OMP_NUM_THREADS": "1"}
    env["PATH"] = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))
    command = [sys.executable, "-m", "benchmarks.gpu_trainer", load, setup.device, str(max(setup.workers))]
    entries: dict[str, Document] = {}
    seconds = setup.seconds
    with on_cores(setup.cores.job):
        trainer = Child(f"the trainer of {load}", command, env=env, cwd=ROOT)
        try:
            name = trainer.line(deadline=time.monotonic() + _PATIENCE)
            place = Place(setup, trainer, ml)
            for feed in feeds:
                choices = setup.workers if feed != "memory" else [0]
                tried = {}
                for count in choices if len(choices) > 1 else ():
                    tried[count] = place.run(feed, count, seconds / 2)
                    say(f"{load}, {feed}: tried: {text(tried[count])}")
                best = max(tried, key=lambda count: rate_of(tried[count]), default=choices[0])
                entries[feed] = {"workers": best, "tried": tried, "runs": []}
            for number, feed in in_turns(setup.rounds, feeds):
                found = place.run(feed, entries[feed]["workers"], seconds)
                entries[feed]["runs"].append(found)
                say(f"{load}, {feed}: run {number + 1}: {text(found)}")
        finally:
            trainer.close()
    return {"device": name, "feeds": entries}


def rate_of(found: Document) -> float:
    """Return the images per second of a run."""
    images: int = found["images"]
    seconds: float = found["seconds"]
    return images / seconds


def text(found: Document) -> str:
    """Return a run's figures as text."""
    waited = "".join(f", {state} {part:.0%}" for state, part in found.get("waits", {}).items())
    return (
        f"{found['workers']} workers, {rate_of(found):,.0f} images/s, "
        f"GPU idle {found['idle']:.1%}, {found['cores']:.1f} cores, "
        f"first batch {found['first_batch']:.2f} s{waited}"
    )


def rows(entries: Document) -> Iterator[str]:
    """Yield the table's rows for one load."""
    for feed, entry in entries.items():
        if not entry["runs"]:
            continue
        runs = entry["runs"]
        rate, idle, cores, first = (
            spread(values)
            for values in (
                list(map(rate_of, runs)),
                [100 * run["idle"] for run in runs],
                [run["cores"] for run in runs],
                [run["first_batch"] for run in runs],
            )
        )
        yield (
            f"| {feed} | {entry['workers'] or '-'} | {rate.median:,.0f} ({rate.low:,.0f}–{rate.high:,.0f}) "
            f"| {rate.median * RECORD / 1e9:.2f} | **{idle.median:.1f} %** ({idle.low:.1f}–{idle.high:.1f}) "
            f"| {cores.text()} | {first.text()} |"
        )


def markdown(results: Document) -> str:
    """Return date, machine and a table per load, as Markdown."""
    machine = results["machine"]
    reported = (
        f"Measured on {results['date']} on one {results['device']}, {machine['job']} of its host's cores for "
        f"the job and {machine['origin']} for the origin, Linux {machine['kernel']}, Python "
        f"{machine['python']}, PyTorch {machine['torch']}; {results['rounds']} runs of "
        f"{results['seconds']:g} s for each row: median, and in parentheses minimum and maximum."
    )
    lines = [reported]
    for name, load in results["loads"].items():
        lines += [
            "",
            f"**{LOADS[name].text}** (`{name}`)",
            "",
            "| feed | workers | images/s | GB/s | GPU idle | cores busy | first batch, s |",
            "|---|---|---|---|---|---|---|",
            *rows(load["feeds"]),
        ]
    return "\n".join(lines) + "\n"


def lacking(loads: Sequence[str]) -> str | None:
    """Return why nothing can be measured on this machine; None if it can."""
    if reason := missing():
        return reason
    for name in ("torch", "numpy", *(["torchvision"] if any(LOADS[load].model for load in loads) else [])):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed (pip install --group gpu)"
    return None


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    for name, known, usual in (("loads", LOADS, "resnet18"), ("feeds", FEEDS, "all")):
        text = f"of {', '.join(known)} ({usual})"
        made.add_argument(f"--{name}", type=list_of(known), default=usual, metavar="LIST", help=text)
    made.add_argument("--workers", default="2,8", metavar="LIST", help="DataLoader workers to try (2,8)")
    made.add_argument("--server", default="paced", help="of the origin: paced, fast (paced)")
    made.add_argument("--rounds", type=int, default=3, help="counted runs of each (3)")
    made.add_argument("--seconds", type=float, default=8.0, help="of a run (8)")
    made.add_argument("--cores", type=int, default=0, metavar="N", help="for the job (three quarters)")
    made.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    made.add_argument("--out", default="build/benchmarks/gpu.json", metavar="FILE", help="results")
    made.add_argument("--into", metavar="FILE", help="put the tables of the results into this Markdown file")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = _parser().parse_args(arguments)
    loads, feeds = chosen.loads, chosen.feeds
    results = kept(chosen.out) or {"loads": {}}
    if loads:
        if reason := lacking(loads):
            print(f"bench: {reason}", file=sys.stderr)
            return 2
        try:
            _measure(loads, feeds, chosen, results)
        except (ProcessFailed, OriginFailed) as error:
            print(f"bench: {error}", file=sys.stderr)
            return 1
    if chosen.into is not None:
        insert_into(chosen.into, markdown(results), begin=BEGIN, end=END)
    return 0


def _measure(
    loads: Sequence[str], feeds: Sequence[str], chosen: argparse.Namespace, results: Document
) -> None:
    cores = sorted(os.sched_getaffinity(0))
    here = chosen.cores or max(1, len(cores) * 3 // 4)
    if here >= len(cores):
        raise OriginFailed(f"of {len(cores)} cores the origin needs at least one: give fewer --cores")
    divided = Cores(cores[:here], cores[here:])
    with directory_in_memory("penstock-gpu-") as made:
        data = Shards(os.path.join(made, "data"))
        data.create()
        with contextlib.ExitStack() as stack:
            with on_cores(divided.origin):
                origin = stack.enter_context(running_origin(data, os.path.join(made, "origin")))
            setup = Setup(
                directory=made,
                origin=origin,
                server=chosen.server,
                data=data,
                cores=divided,
                device=chosen.device,
                workers=[int(count) for count in chosen.workers.split(",")],
                rounds=chosen.rounds,
                seconds=chosen.seconds,
            )
            for load in loads:
                found = measure(load, feeds, setup)
                results["loads"][load] = found
                reported = circumstances()
                results |= reported | {
                    "device": found["device"],
                    "server": chosen.server,
                    "rounds": chosen.rounds,
                    "seconds": chosen.seconds,
                    "machine": reported["machine"]
                    | {
                        "job": len(divided.job),
                        "origin": len(divided.origin),
                        "torch": importlib.metadata.version("torch"),
                    },
                }
                keep(results, chosen.out)


if __name__ == "__main__":
    sys.exit(main())
