"""A trial as users run it: `penstock run` behind a keeper, killed under its readers and started again.

The readers are threads of this process and live through it all. A kill strikes when all of them together
have so many bytes, wherever the sidecar is then, and the next sidecar starts at once. What counts is
what the readers get; `Account.pauses` has how long each restart let them wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from streamer.errors import BadAnswer
from streamer.helpers.keeper.protocol import address
from streamer.plan import Plan
from streamer.s3.client.session import open_clients
from tests.kit.outcomes import Broken, Got, Scene, read_epoch
from tests.kit.patience import Patience
from tests.kit.processes import Sidecar, job, sidecar, write_job
from tests.kit.truth import BUCKET, REF, TEXT

LONGEST = 100.0
"""Seconds without progress after which readers count as hung."""


def end_keeper(data: Path) -> None:
    """Kill the keeper of this data directory, if it is still there."""
    with (
        contextlib.suppress(OSError),
        address(str(data / ".penstock.keeper")) as reachable,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client,
    ):
        client.connect(reachable)
        pid = int.from_bytes(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], "little")
        os.kill(pid, signal.SIGKILL)


def document(scene: Scene, base: Path) -> dict[str, Any]:
    """The trial as a job file."""
    trial = scene.trial
    channels = [_channel(scene, number) for number in range(len(trial.sizes))]
    section: dict[str, Any] = {
        "BaseDirectory": str(base),
        "Admin": {"Port": 0},
        "Endpoint": {"Url": scene.endpoint.url, "PathStyle": True},
        "Transport": trial.transport,
        "MemoryBudget": trial.budget,
        "PartSize": trial.part_size,
        "StallTimeout": 1,
        "GiveUpAfter": 30,
        "HedgeBudget": trial.hedge,
        "Hosts": {"Index": trial.shard.index, "Count": trial.shard.count},
    }
    if scene.endpoint.ca_bundle:
        section["Endpoint"]["CaBundle"] = scene.endpoint.ca_bundle
    if trial.requests_in_flight is not None:
        section["RequestsInFlight"] = trial.requests_in_flight
    if trial.shard.by == "bytes":
        section["ShardBy"] = "bytes"
    return job("", None) | {"InputDataConfig": channels, "Penstock": section}


def _channel(scene: Scene, number: int) -> dict[str, Any]:
    trial = scene.trial
    kind = {"prefix": "S3Prefix", "manifest": "ManifestFile", "augmented": "AugmentedManifestFile"}
    key = f"c{number}/" if trial.naming == "prefix" else f"manifest{number}"
    source: dict[str, Any] = {"S3DataType": kind[trial.naming], "S3Uri": f"s3://{BUCKET}/{key}"}
    if trial.naming == "augmented":
        source["AttributeNames"] = [REF, TEXT]
    if trial.shard.count > 1:
        source["S3DataDistributionType"] = "ShardedByS3Key"
    found: dict[str, Any] = {"ChannelName": f"c{number}", "DataSource": {"S3DataSource": source}}
    if trial.wrap:
        found["RecordWrapperType"] = "RecordIO"
    if trial.inflate:
        found["CompressionType"] = "Gzip"
    if trial.shuffle is not None:
        found["ShuffleConfig"] = {"Seed": trial.shuffle}
    extras: dict[str, Any] = {"Integrity": "checksum"} if trial.check else {}
    if trial.ranks > 1 and number == 0:
        extras["Ranks"] = trial.ranks
    if extras:
        found["Penstock"] = extras
    return found


class _Reader:
    """All epochs of one channel, in a thread."""

    def __init__(self, scene: Scene, name: str, data: Path) -> None:
        self.epochs: list[Got] = []
        self._dice = random.Random(f"{scene.trial.seed} reader {name}")
        self._paths = [data / f"{name}_{epoch}" for epoch in range(scene.trial.epochs)]
        self._thread = threading.Thread(target=self._read, name=f"reader of {name}", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for path in self._paths:
            self.epochs.append(Got())
            read_epoch(path, step=self._dice.choice([4096, 65536, 1 << 20]), into=self.epochs[-1])
            if self.epochs[-1].error is not None:
                return

    @property
    def received(self) -> int:
        return sum(len(got.data) for got in self.epochs)

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def join(self, patience: Patience) -> None:
        while self.running:
            if patience.exhausted():
                raise Broken(f"{self._thread.name} hangs with {self.received} bytes")
            self._thread.join(1)


async def run_killed(scene: Scene, directory: Path) -> None:
    """Raises Broken."""
    async with open_clients(scene.endpoint, connections=8) as clients:
        try:
            plans = await scene.plans(clients)
        except BadAnswer:
            return
    for objects in (scene.stub.faults, scene.stub.head_faults):
        objects.clear()  # planned once: those faults are spent
    await asyncio.to_thread(_run, scene, plans, directory)


def _run(scene: Scene, plans: dict[str, Plan], directory: Path) -> None:
    base = directory / "ml"
    data = base / "input" / "data"
    path = write_job(directory / "job.yaml", document(scene, base))
    total = sum(plan.total_bytes(epoch) for plan in plans.values() for epoch in range(scene.trial.epochs))
    patience = Patience(LONGEST)
    readers: list[_Reader] = []
    try:
        for part in scene.trial.kills:
            with _started(scene, path, readers, patience) as running:
                readers = readers or [_Reader(scene, name, data) for name in plans]
                _wait(readers, int(part * total), patience)
                running.process.kill()
                scene.account.faults["sidecar killed"] += 1
        with _started(scene, path, readers, patience) as running:
            for reader in readers:
                reader.join(patience)
            if (code := running.end()) != 0:
                raise Broken(f"the sidecar ended with {code}")
    finally:
        end_keeper(data)
    for (name, plan), reader in zip(plans.items(), readers, strict=True):
        for epoch, got in enumerate(reader.epochs):
            scene.judge(name, plan, epoch, got)
            scene.account.epochs["complete"] += got.error is None
        if len(reader.epochs) < scene.trial.epochs:
            raise Broken(f"{name} ended after {len(reader.epochs)} epochs")


@contextlib.contextmanager
def _started(scene: Scene, path: str, readers: list[_Reader], patience: Patience) -> Iterator[Sidecar]:
    """A sidecar; notes how long readers that it finds there wait for their next byte, if they want one."""
    began, before = time.monotonic(), sum(reader.received for reader in readers)
    with sidecar(path, "--keeper", "auto") as running:
        running.wait_for("ready")
        if any(reader.running for reader in readers):
            _wait(readers, before + 1, patience)
            scene.account.pauses.append(round(time.monotonic() - began, 3))
        yield running


def _wait(readers: list[_Reader], count: int, patience: Patience) -> None:
    """Until the readers have so many bytes together, or have ended."""
    while sum(reader.received for reader in readers) < count and any(reader.running for reader in readers):
        if patience.exhausted():
            raise Broken(f"the readers hang with {[reader.received for reader in readers]} bytes")
        time.sleep(0.002)
