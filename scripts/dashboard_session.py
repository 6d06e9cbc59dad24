"""Runs some minutes of training for pictures of the dashboards: sidecars, readers and a Prometheus.

    S3 stub ──▶ penstock run ──▶ FIFOs ──▶ a reader of a limited rate      one of each for every host
                     └── /metrics ◀── Prometheus, with dashboards/prometheus.yml and its rules

Storage and trainer are simulated, by `HOSTS`. Real sidecars export every sample.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from aiohttp import web

from examples.demo.server import free_ports
from tests.kit.processes import job, sidecar, write_job
from tests.kit.stub import Answer, Fault, StubThread, cut_after, fails
from tests.operate.scraping import Prometheus, scraping

MB = 1_000_000
OBJECT = bytes(range(256)) * (1 << 14)
"""Content of every object, 4 MiB."""
OBJECTS = {"train": 150, "eval": 20}
"""Number of objects of each channel."""


class Phase(NamedTuple):
    """Rates and faults of one host's storage and trainer in a part of the session."""

    trainer: float
    """Most MB/s of the reader."""
    storage: float = math.inf
    """Most MB/s of all responses together."""
    refused: int = 0
    """Requests in ten whose response is SlowDown."""
    cut: int = 0
    """Requests in ten whose body breaks off half-way."""


HOSTS = {
    "digits-0": (Phase(30), Phase(30, storage=12), Phase(60, refused=3, cut=1), Phase(15), Phase(50)),
    "digits-1": (Phase(30), Phase(20)),
    "digits-2": (Phase(40, storage=16), Phase(40, storage=16), Phase(40, storage=16, refused=2)),
}
"""Phases of equal length, by host. The first host has every condition in turn; the last has slow storage."""


class Host:
    """The simulated storage and trainer of one host."""

    def __init__(self, phases: tuple[Phase, ...], seconds: float) -> None:
        self._phases, self._seconds, self._begun = phases, seconds, time.monotonic()
        self._gets = itertools.count()
        self._free_at = 0.0

    @property
    def phase(self) -> Phase:
        """Return the present phase; the last one after the session."""
        share = (time.monotonic() - self._begun) / self._seconds
        return self._phases[min(int(share * len(self._phases)), len(self._phases) - 1)]

    def weather(self, _name: str, _start: int, size: int) -> Fault | None:
        """Return the fault of the next GET, or None (`S3Stub.weather`)."""
        phase, turn = self.phase, next(self._gets) % 10
        if turn < phase.refused:
            return fails(503, "SlowDown")
        if turn < phase.refused + phase.cut:
            return cut_after(size // 2)
        return None if phase.storage == math.inf else self._slow

    async def _slow(self, answer: Answer) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, headers=answer.headers)
        response.content_length = len(answer.body)
        await response.prepare(answer.request)
        for start in range(0, len(answer.body), 1 << 17):
            piece = answer.body[start : start + (1 << 17)]
            self._free_at = max(self._free_at, time.monotonic()) + len(piece) / (self.phase.storage * MB)
            await asyncio.sleep(self._free_at - time.monotonic())
            await response.write(piece)
        return response

    def read(self, directory: Path, over: threading.Event) -> None:
        """Read epoch after epoch of both channels until `over` is set."""
        for epoch, channel in ((epoch, channel) for epoch in itertools.count() for channel in OBJECTS):
            path = directory / f"{channel}_{epoch}"
            with contextlib.suppress(FileNotFoundError), open(path, "rb", buffering=0) as fifo:
                due = time.monotonic()
                while not over.is_set() and (piece := fifo.read(1 << 18)):
                    due = max(due + len(piece) / (self.phase.trainer * MB), time.monotonic() - 0.1)
                    time.sleep(max(0.0, due - time.monotonic()))
            if over.is_set():
                return

    @contextlib.contextmanager
    def running(self, work: Path, port: int) -> Iterator[None]:
        """Run S3 stub, sidecar and reader until the end of the block."""
        document = job("", work / "ml", "b/train/", "b/eval/", MemoryBudget="128MiB", DrainFor=0)
        server, over = StubThread(), threading.Event()
        stub = server.start()
        with contextlib.ExitStack() as stack:
            stack.callback(server.stop)
            stub.objects |= {f"b/{ch}/{i:03}": OBJECT for ch, count in OBJECTS.items() for i in range(count)}
            stub.weather = self.weather
            document["Penstock"]["Endpoint"] = {"Url": stub.url, "PathStyle": True, "Anonymous": True}
            document["Penstock"]["Admin"]["Port"] = port
            del document["Penstock"]["PartSize"]  # the sidecar chooses the size
            work.mkdir()
            running = stack.enter_context(sidecar(write_job(work / "job.yaml", document)))
            running.wait_for("ready")
            reader = threading.Thread(target=self.read, args=(work / "ml/input/data", over))
            reader.start()
            stack.callback(reader.join, 10)
            stack.callback(running.end)
            stack.callback(over.set)
            yield


@contextlib.contextmanager
def session(work: Path, *, seconds: float) -> Iterator[Prometheus]:
    """Run every host for `seconds`, and yield the Prometheus while they still run."""
    ports = dict(zip(HOSTS, free_ports(len(HOSTS)), strict=True))
    targets = [
        {"targets": [f"127.0.0.1:{port}"], "labels": {"instance": name}} for name, port in ports.items()
    ]
    scrape = {"job_name": "penstock", "scrape_interval": "2s", "static_configs": targets}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(scraping(work, scrape_configs=[scrape]))
        for name, phases in HOSTS.items():
            stack.enter_context(Host(phases, seconds).running(work / name, ports[name]))
        time.sleep(seconds)
        yield server
