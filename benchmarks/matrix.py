"""Runs a scenario: makes the objects, starts the origin, then interleaves the runs of all clients.

    1. every setting of every client once, to find the fastest        (if there are several)
    2. that setting once with a hashing reader: every byte checked    (not counted: hashing slows the reader)
    3. rounds: each client once per round, in an order that rotates, so that a disturbance of the
       machine affects all clients

The row of a client that fails has the reason; the other clients are measured.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.clients import Client
from benchmarks.dataset import DataSet, Shape
from benchmarks.measure import Run, WrongBytes, run_once
from benchmarks.netns import own_network
from benchmarks.origin import Origin, running_origin
from benchmarks.process import ProcessFailed
from benchmarks.report import say
from benchmarks.scenarios import Scenario
from benchmarks.stats import fastest, in_turns

Document = dict[str, Any]


class Matrix:
    """Runs scenarios one after the other in one directory on a tmpfs."""

    def __init__(
        self,
        clients: Sequence[Client],
        *,
        directory: str,
        rounds: int,
        defaults: bool,
    ) -> None:
        """`defaults`: use every client's first setting without trying the others."""
        self._clients = clients
        self._directory = directory
        self._rounds = rounds
        self.defaults = defaults
        self._data: DataSet | None = None
        self.chosen: dict[tuple[str, str], str] = {}
        """Fastest setting by scenario and client."""

    def measure(self, scenario: Scenario) -> Document:
        """Measure a scenario; return its part of the results document. Raises OriginFailed."""
        data = self._objects(scenario.shape)
        with self._origin(scenario, data) as origin:
            work = _Work(self, scenario, origin, data)
            for client in self._clients:
                work.prepare(client)
            for _, client in in_turns(self._rounds, self._clients):
                work.count(client)
        return {
            "text": scenario.text,
            "objects": scenario.shape.describe(),
            "bytes": scenario.shape.total_bytes,
            "limit_seconds": scenario.limit,
            "reader_rate": scenario.reader_rate,
            "clients": work.entries,
        }

    def _objects(self, shape: Shape) -> DataSet:
        """Return the data set of a shape; remove the last one first, so that only one takes memory."""
        if self._data is None or self._data.shape != shape:
            if self._data is not None:
                self._data.remove()
            say(f"writing {shape.describe()} ({shape.total_bytes / 1e9:.1f} GB of memory)")
            self._data = DataSet(shape, os.path.join(self._directory, "data"))
            self._data.create()
        return self._data

    @contextlib.contextmanager
    def _origin(self, scenario: Scenario, data: DataSet) -> Iterator[Origin]:
        directory = os.path.join(self._directory, f"origin-{scenario.name}")
        if scenario.mtu is None:
            with running_origin(data, directory) as origin:
                yield origin
            return
        with (
            own_network(scenario.mtu) as network,
            running_origin(data, directory, address=network.address, prefix=network.prefix) as origin,
        ):
            yield origin


class _Work:
    """The clients of one scenario and their results so far."""

    def __init__(self, matrix: Matrix, scenario: Scenario, origin: Origin, data: DataSet) -> None:
        self._matrix = matrix
        self._scenario = scenario
        self._origin = origin
        self._data = data
        self.entries: dict[str, Document] = {}

    def prepare(self, client: Client) -> None:
        """Choose the client's setting and check the bytes that it delivers."""
        entry: Document = {"setting": None, "tried": {}, "runs": [], "verified": False, "problem": None}
        self.entries[client.name] = entry
        if reason := client.unavailable():
            entry["problem"] = reason
            say(f"{client.name}: not measured: {reason}")
            return
        entry["version"] = client.version()
        try:
            setting = entry["setting"] = self._settle(client, entry["tried"])
            run = self._run(client, setting, hashed=True)
            entry["verified"] = run.verified
            self._tell(client, setting, run, "every byte right")
        except (ProcessFailed, WrongBytes) as error:
            self._fail(client, error)

    def count(self, client: Client) -> None:
        """Do one run and add its figures to the results."""
        entry = self.entries[client.name]
        if entry["problem"]:
            return
        try:
            # Hashing costs nothing in a reader with a limited rate.
            run = self._run(client, entry["setting"], hashed=self._scenario.reader_rate is not None)
        except (ProcessFailed, WrongBytes) as error:
            self._fail(client, error)
            return
        entry["runs"].append(asdict(run))
        self._tell(client, entry["setting"], run, f"run {len(entry['runs'])}")

    def _settle(self, client: Client, tried: dict[str, float]) -> str:
        scenario, known = self._scenario, self._matrix.chosen
        choices = client.choices(scenario.shape)
        if self._matrix.defaults or scenario.single_setting or len(choices) == 1:
            return choices[0]
        if scenario.settings_from and (chosen := known.get((scenario.settings_from, client.name))):
            return chosen
        if scenario.settings_from:
            return choices[0]
        for name in choices:
            run = self._run(client, name, hashed=False)
            tried[name] = run.gb_per_second
            self._tell(client, name, run, "setting tried")
        known[scenario.name, client.name] = fastest(tried)
        return fastest(tried)

    def _run(self, client: Client, setting: str, *, hashed: bool) -> Run:
        return run_once(client, setting, self._scenario, self._origin, self._data, hashed=hashed)

    def _tell(self, client: Client, setting: str, run: Run, what: str) -> None:
        say(
            f"{client.name} [{setting}]: {what}: {run.gb_per_second:.2f} GB/s, "
            f"{run.cpu_per_gb:.2f} CPU-s/GB, {run.peak_rss / 1e6:.0f} MB{', cut off' if run.cut else ''}"
        )

    def _fail(self, client: Client, error: Exception) -> None:
        self.entries[client.name]["problem"] = str(error)
        say(f"{client.name}: FAILED: {error}")
