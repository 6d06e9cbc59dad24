"""Minutes of a training that are worth a picture: sidecars, readers, and a Prometheus beside them.

    S3 stub ──▶ penstock run ──▶ FIFOs ──▶ a reader that takes so many MB/s      one of each for every host
                     └── /metrics ◀── Prometheus, with dashboards/prometheus.yml and its rules

Nothing is made up but the weather: the storage sends slowly, or fails, or the trainer is slow, as `PHASES`
says, and everything that Prometheus keeps is what real sidecars exported meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import yaml
from aiohttp import web

from examples.demo.server import free_ports
from tests.kit.processes import job, sidecar, write_job
from tests.kit.stub import Answer, Fault, StubThread, cut_after, fails

ROOT = Path(__file__).resolve().parents[1]
MB = 1_000_000
OBJECT = bytes(range(256)) * (1 << 14)
"""The content of every object, 4 MiB."""
OBJECTS = {"train": 150, "eval": 20}


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """How storage and trainer of one host are, from `since` (0 to 1 of the whole) on; rates in MB/s."""

    since: float
    storage: float | None = None
    """What all answers together bring; None: as fast as it goes."""
    trainer: float = 40
    refused: float = 0.0
    """Share of the requests that are answered with SlowDown."""
    cut: float = 0.0
    """Share of the answers that break off half-way."""


PHASES: dict[str, tuple[Phase, ...]] = {
    "digits-0": (
        Phase(since=0, trainer=30),
        Phase(since=0.22, storage=12),
        Phase(since=0.45, trainer=60, refused=0.3, cut=0.1),
        Phase(since=0.62, trainer=15),
        Phase(since=0.82, trainer=50),
    ),
    "digits-1": (Phase(since=0, trainer=30), Phase(since=0.5, trainer=20)),
    "digits-2": (Phase(since=0, storage=16), Phase(since=0.7, storage=16, refused=0.2)),
}
"""By host. The first has every condition in turn; of the others one is the slowest for its storage's sake."""


@dataclass
class Weather:
    """The phases of one host as its S3 stub and its reader ask for them."""

    phases: tuple[Phase, ...]
    seconds: float
    begun: float = field(default_factory=time.monotonic)
    _asked: itertools.count[int] = field(default_factory=itertools.count)
    _free_at: float = 0.0

    @property
    def now(self) -> Phase:
        """The phase that it is."""
        at = (time.monotonic() - self.begun) / self.seconds
        return [phase for phase in self.phases if phase.since <= at][-1]

    def __call__(self, _name: str, _start: int, size: int) -> Fault | None:
        """What a GET meets (`S3Stub.weather`)."""
        phase, turn = self.now, next(self._asked) % 100
        if turn % 10 < phase.refused * 10:
            return fails(503, "SlowDown")
        if turn % 10 >= 10 - phase.cut * 10:
            return cut_after(size // 2)
        return None if phase.storage is None else self._slow

    async def _slow(self, answer: Answer) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, headers=answer.headers)
        response.content_length = len(answer.body)
        await response.prepare(answer.request)
        for start in range(0, len(answer.body), 1 << 17):
            piece, limit = answer.body[start : start + (1 << 17)], self.now.storage
            if limit is not None:
                self._free_at = max(self._free_at, time.monotonic()) + len(piece) / (limit * MB)
                await asyncio.sleep(self._free_at - time.monotonic())
            await response.write(piece)
        return response


@dataclass(frozen=True)
class Prometheus:
    """The API of a running one."""

    url: str

    def get(self, path: str, **parameters: Any) -> Any:
        """The data of an API call. Raises OSError if it is refused."""
        with urlopen(f"{self.url}/api/v1/{path}?{urlencode(parameters)}", timeout=30) as answer:  # noqa: S310
            return json.load(answer)["data"]


@contextlib.contextmanager
def prometheus(work: Path, targets: dict[str, int]) -> Iterator[Prometheus]:
    """A Prometheus that scrapes `targets` (ports by name), configured by dashboards/prometheus.yml."""
    config = yaml.safe_load((ROOT / "dashboards/prometheus.yml").read_text(encoding="utf-8"))
    (scrape,) = config["scrape_configs"]
    scrape["static_configs"] = [
        {"targets": [f"127.0.0.1:{port}"], "labels": {"instance": name}} for name, port in targets.items()
    ]
    rules = {
        path.name: str(path) for place in ("deploy", "dashboards") for path in (ROOT / place).rglob("*.y*ml")
    }
    if "rule_files" in config:
        config["rule_files"] = [rules[Path(name).name] for name in config["rule_files"]]
    (work / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    (port,) = free_ports(1)
    command = [
        "prometheus",
        f"--config.file={work / 'prometheus.yml'}",
        f"--storage.tsdb.path={work / 'tsdb'}",
    ]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    running = subprocess.Popen(command)
    try:
        found = Prometheus(f"http://127.0.0.1:{port}")
        for _ in range(300):
            with contextlib.suppress(OSError):
                found.get("status/buildinfo")
                break
            time.sleep(0.1)
        yield found
    finally:
        running.terminate()
        running.wait(30)


@contextlib.contextmanager
def host(work: Path, name: str, port: int, weather: Weather) -> Iterator[None]:
    """An S3, a sidecar and a reader that goes through epoch after epoch of both channels."""
    server = StubThread()
    stub = server.start()
    stub.objects |= {f"b/{ch}/{i:03}": OBJECT for ch, count in OBJECTS.items() for i in range(count)}
    stub.weather = weather
    work.mkdir()
    document = job(stub.url, work / "ml", "b/train/", "b/eval/", MemoryBudget="128MiB", DrainFor=0)
    document["Penstock"] |= {
        "Admin": {"Port": port},
        "Endpoint": {"Url": stub.url, "PathStyle": True, "Anonymous": True},
    }
    del document["Penstock"]["PartSize"]  # it adapts
    document["TrainingJobName"] = name
    over = threading.Event()
    try:
        with sidecar(write_job(work / "job.yaml", document)) as running:
            running.wait_for("ready")
            reader = threading.Thread(target=_read, args=(work / "ml/input/data", weather, over.is_set))
            reader.start()
            try:
                yield
            finally:
                over.set()
                running.end()
                reader.join(10)
    finally:
        server.stop()


def _read(directory: Path, weather: Weather, over: Callable[[], bool]) -> None:
    for epoch, channel in ((epoch, channel) for epoch in itertools.count() for channel in OBJECTS):
        with (
            contextlib.suppress(FileNotFoundError),
            open(directory / f"{channel}_{epoch}", "rb", buffering=0) as fifo,
        ):
            due = time.monotonic()
            while not over() and (piece := fifo.read(1 << 18)):
                due = max(due + len(piece) / (weather.now.trainer * MB), time.monotonic() - 0.1)
                time.sleep(max(0.0, due - time.monotonic()))
        if over():
            return


@contextlib.contextmanager
def session(work: Path, *, seconds: float) -> Iterator[tuple[Prometheus, float, float]]:
    """Run it all; the Prometheus, and between which times (Unix seconds) it is worth looking at."""
    ports = dict(zip(PHASES, free_ports(len(PHASES)), strict=True))
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(prometheus(work, ports))
        for name, phases in PHASES.items():
            stack.enter_context(host(work / name, name, ports[name], Weather(phases, seconds)))
        begun = time.time()
        time.sleep(seconds)
        yield server, begun, time.time()
