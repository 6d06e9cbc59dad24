"""Runs every client of a load in turns, each run in new processes.

A client has a trainer for each accelerator, with its loaders (`benchmarks.mlperf.trainer`); Penstock has one
sidecar too. CPU seconds are those of all these processes, from the end of the first step of the last
accelerator to the end of the run.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.clients import ROOT, Running, environment
from benchmarks.lineup import CLIENTS
from benchmarks.mlperf.feeds import Order
from benchmarks.mlperf.loads import Load, batches, utilisation
from benchmarks.mlperf.samples import Samples
from benchmarks.origin import Origin
from benchmarks.process import Child, ProcessFailed, cpu_seconds
from benchmarks.report import say
from benchmarks.stats import in_turns
from benchmarks.task import Stream, Task

TRAINER = os.path.join(ROOT, "benchmarks", "mlperf", "trainer.py")
DISTRIBUTIONS = {
    "obstore": ["obstore"],
    "s3dlio": ["s3dlio"],
    "s3torchconnector": ["s3torchconnector"],
    "runai": ["runai-model-streamer", "runai-model-streamer-s3"],
    "boto3": ["boto3"],
}
"""Distributions of the peers."""
AHEAD = 2
"""Least number of batches that are begun and not computed."""
_PATIENCE = 240.0
"""Most seconds until the libraries are imported, and beyond ten times the length of a run."""
Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """Number of loaders of an accelerator and requests in flight of each; of Penstock, keys of the job."""

    loaders: int
    requests: int = 0
    job: Mapping[str, Any] | None = None


def settings(feed: str, load: Load) -> dict[str, Setting]:
    """Return the settings to try of a feed, the default first."""
    if feed == "penstock":
        return {name: Setting(1, job=job) for name, job in CLIENTS["penstock"].settings.items()}
    counts = dict.fromkeys((load.loaders, 2, 1))
    if feed in ("files", "runai", "s3torchconnector"):  # these choose the number of requests themselves
        return {f"{count} loaders": Setting(count, 16) for count in counts}
    return {f"{count} loaders × {64 // count} requests": Setting(count, 64 // count) for count in counts}


def unavailable(feed: str) -> str | None:
    """Return why a feed cannot run on this machine; None if it can."""
    for name in DISTRIBUTIONS.get(feed, ()):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return f"{name} is not installed"
    return None


@dataclass(frozen=True, slots=True)
class Bench:
    """What all runs of one load share."""

    load: Load
    origin: Origin
    server: str
    data: Samples
    seconds: float
    """Length of a run from the end of its first step."""

    def run(self, feed: str, setting: Setting) -> Document:
        """Do one run; return its figures. Raises ProcessFailed."""
        url = self.origin.urls[self.server]
        bundle = self.origin.ca_bundle if url.startswith("https:") else None
        env = {"AWS_ENDPOINT_URL": url, "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0"}
        env |= {"AWS_CA_BUNDLE": bundle} if bundle else {}
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-mlperf-"))
            count = self.data.shape.buckets
            fifos = [CLIENTS["penstock"].fifo(directory, index) for index in range(count)]
            trainers = []
            for index, fifo in enumerate(fifos):
                path = self._order(feed, setting, index, fifo, directory)
                command = [sys.executable, "-I", "-S", TRAINER, path]
                trainer = Child("the trainer", command, env=environment(directory) | env, cwd=ROOT)
                stack.callback(trainer.close)
                trainers.append(trainer)
            for trainer in trainers:
                trainer.line(deadline=time.monotonic() + _PATIENCE)
            clients = [trainer.pid for trainer in trainers]
            if feed == "penstock":
                task = Task(
                    url=url,
                    ca_bundle=bundle,
                    streams=[
                        Stream(bucket=self.data.shape.bucket(at), keys=[], size=0, fifo=fifo)
                        for at, fifo in enumerate(fifos)
                    ],
                    setting=dict(setting.job or {}),
                )
                sidecar: Running = CLIENTS["penstock"].start(task, directory)
                stack.callback(sidecar.close)
                clients.append(sidecar.child.pid)
            return self._measure(trainers, clients)

    def _order(self, feed: str, setting: Setting, index: int, fifo: str, directory: str) -> str:
        """Write the orders of one accelerator and its loaders; return the path of the accelerator's."""
        made = list(batches(self.load, self.data.sizes))
        order = Order(
            feed=feed,
            url=self.origin.urls[self.server],
            ca_bundle=self.origin.ca_bundle if self.server == "tls" else None,
            bucket=self.data.shape.bucket(index),
            keys=self.data.keys,
            whole=self.load.samples_per_object == 1,
            directory=self.data.directory(index),
            fifo=fifo,
            largest=self.data.largest,
            loaders=setting.loaders,
            requests=setting.requests,
            batches=made,
        )
        path = os.path.join(directory, f"order-{index}.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(asdict(order), file)
        loader = [sys.executable, "-m", "benchmarks.mlperf.loader", path]
        accelerator = {
            "loaders": [[*loader, str(number)] for number in range(setting.loaders)],
            "sizes": [sum(length for _, _, length in batch) for batch in made],
            "ahead": max(AHEAD, setting.loaders),
            "computation": self.load.computation,
            "seconds": self.seconds,
        }
        path = os.path.join(directory, f"accelerator-{index}.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(accelerator, file)
        return path

    def _measure(self, trainers: Sequence[Child], clients: Sequence[int]) -> Document:
        for trainer in trainers:
            trainer.say("go")
        deadline = time.monotonic() + _PATIENCE + 10 * self.seconds
        for trainer in trainers:
            if (line := trainer.line(deadline=deadline)) != "begin":
                raise ProcessFailed(f"the trainer said {line!r} and not 'begin'")
        cpu, since = sum(map(cpu_seconds, clients)), time.monotonic()
        found = [json.loads(trainer.line(deadline=deadline)) for trainer in trainers]
        cpu, elapsed = sum(map(cpu_seconds, clients)) - cpu, time.monotonic() - since
        gigabytes = sum(each["bytes"] for each in found) / 1e9
        return {
            "utilisation": statistics.fmean(
                utilisation(self.load, each["steps"], each["seconds"]) for each in found
            ),
            "gb_per_second": sum(each["bytes"] / each["seconds"] for each in found) / 1e9,
            "cpu_per_gb": cpu / gigabytes,
            "cpu": cpu / elapsed,
            "accelerator_cpu": sum(each["accelerator_cpu"] / each["seconds"] for each in found),
            "steps": sum(each["steps"] for each in found),
        }


def measure(
    bench: Bench, feeds: Sequence[str], rounds: int, *, defaults: bool, earlier: Document
) -> Document:
    """Measure all feeds of a load in turns; return their entries of the results document.

    `earlier`: entries of earlier results, whose settings are used without trying others.
    """
    entries: Document = {}
    for feed in feeds:
        choices = settings(feed, bench.load)
        entry: Document = {
            "setting": next(iter(choices)),
            "tried": {},
            "runs": [],
            "problem": unavailable(feed),
        }
        entries[feed] = entry
        if not entry["problem"] and (known := earlier.get(feed)) and known["setting"] in choices:
            entry |= {"setting": known["setting"], "tried": known["tried"]}
            continue
        if entry["problem"] or defaults or len(choices) == 1:
            continue
        for name, setting in choices.items():
            if found := _run(bench, feed, setting, entry):
                entry["tried"][name] = found
                say(f"{feed} [{name}]: tried: {text(found)}")
        if entry["tried"]:
            entry["setting"] = max(entry["tried"], key=lambda name: entry["tried"][name]["gb_per_second"])
            entry["problem"] = None
    for _, feed in in_turns(rounds, [feed for feed in feeds if not entries[feed]["problem"]]):
        entry = entries[feed]
        if entry["problem"]:
            continue
        if found := _run(bench, feed, settings(feed, bench.load)[entry["setting"]], entry):
            entry["runs"].append(found)
            say(f"{feed} [{entry['setting']}]: run {len(entry['runs'])}: {text(found)}")
    return entries


def _run(bench: Bench, feed: str, setting: Setting, entry: Document) -> Document | None:
    """Do one run; note its failure in the feed's entry."""
    try:
        return bench.run(feed, setting)
    except (ProcessFailed, ProcessLookupError) as error:
        entry["problem"] = str(error)
        say(f"{feed}: FAILED: {error}")
        return None


def text(found: Document) -> str:
    """Return a run's figures as text."""
    return (
        f"utilisation {found['utilisation']:.1%}, {found['gb_per_second']:.2f} GB/s, "
        f"{found['cpu_per_gb']:.2f} CPU-s/GB, {found['cpu']:.2f} cores"
    )
