"""The sidecar under a memory limit that the kernel holds: never killed, and no reader waits long."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sidecar.process.resources import Footprint
from streamer.units import MIB
from tests.kit import cgroup
from tests.kit.harness import fill
from tests.kit.processes import job, sidecar, write_job
from tests.kit.stub import S3Stub

LIMIT = 256 * MIB
CHANNELS, ASLEEP, ABSENT = 20, 4, 1
REQUESTS = 64
RATE = 10e6
"""Bytes per second of a reader that reads."""
PATIENCE = 90.0
"""Most seconds for one run."""


@dataclass(frozen=True, slots=True)
class Source:
    """What a channel streams, and the hash of its stream."""

    bucket: str
    sha256: str
    compressed: bool = False


@dataclass(slots=True)
class Reader:
    """A thread that reads one channel."""

    source: Source
    path: Path
    asleep: bool
    right: bool = False
    longest_wait: float = 0.0
    """Seconds for a byte."""
    over: threading.Event = field(default_factory=threading.Event)

    def read(self, wake: threading.Event) -> None:
        """Read to the end, at most `RATE`; a sleeping reader pauses after its first bytes until `wake`."""
        digest, began, size = hashlib.sha256(), time.monotonic(), 0
        with open(self.path, "rb", buffering=0) as file:
            while True:
                asked = time.monotonic()
                data = file.read(256 * 1024)
                if not self.asleep:
                    self.longest_wait = max(self.longest_wait, time.monotonic() - asked)
                if not data:
                    break
                digest.update(data)
                size += len(data)
                if self.asleep:
                    wake.wait()
                elif (ahead := size / RATE - (time.monotonic() - began)) > 0:
                    time.sleep(ahead)
        self.right = digest.hexdigest() == self.source.sha256
        self.over.set()


def sources(stub: S3Stub, *, zipped: bool) -> list[Source]:
    """Twenty channels of one data set, the first of compressed objects."""
    plain = fill(stub, [1_500_000] * 4, prefix="plain/")
    stub.objects |= {f"zipped/{n}.gz": gzip.compress(bytes([n]) * 8_000_000, 1) for n in range(4)}
    text = b"".join(bytes([n]) * 8_000_000 for n in range(4))
    found = [Source("plain", hashlib.sha256(plain).hexdigest())] * CHANNELS
    if zipped:
        found[0] = Source("zipped", hashlib.sha256(text).hexdigest(), compressed=True)
    return found


def job_of(found: Sequence[Source], stub: S3Stub, tmp_path: Path, wish: str) -> dict[str, Any]:
    """A job with a channel `c00`, `c01` and so on for each source."""
    document = job(stub.url, tmp_path / "ml", *(f"b/c{index:02d}" for index in range(len(found))))
    for channel, source in zip(document["InputDataConfig"], found, strict=True):
        channel["DataSource"]["S3DataSource"]["S3Uri"] = f"s3://{source.bucket}/"
        channel["CompressionType"] = "Gzip" if source.compressed else "None"
    for name in ("MemoryBudget", "PartSize"):
        del document["Penstock"][name]
    document["Penstock"] |= {"RequestsInFlight": REQUESTS, "DrainFor": 0, "Transport": wish}
    if wish != "splice":
        document["Penstock"]["Endpoint"]["CaBundle"] = str(tmp_path / "ca.pem")
    return document


def run(stub: S3Stub, tmp_path: Path, *, wish: str, zipped: bool, limit: int = LIMIT) -> None:
    """Stream twenty channels under the limit: every stream is right, and no reader waits long.

    The last channel has no reader; those of the four before it sleep until the others have ended.
    """
    found, base = sources(stub, zipped=zipped), tmp_path / "ml"
    awake, there = CHANNELS - ASLEEP - ABSENT, CHANNELS - ABSENT
    readers = [
        Reader(source, base / f"input/data/c{index:02d}_0", asleep=index >= awake)
        for index, source in enumerate(found[:there])
    ]
    path, wake = write_job(tmp_path / "job.yaml", job_of(found, stub, tmp_path, wish)), threading.Event()
    with limited(limit) as group, sidecar(path, prefix=group.prefix) as running:
        running.wait_for("ready")
        for reader in readers:
            threading.Thread(target=reader.read, args=(wake,), daemon=True).start()
        deadline = time.monotonic() + PATIENCE
        wait(readers[:awake], group, deadline)
        wake.set()
        wait(readers[awake:], group, deadline)
        assert all(reader.right for reader in readers)
        assert group.peak + (group.sockets or 0) < limit
        assert max(reader.longest_wait for reader in readers) < 20


def wait(readers: Sequence[Reader], group: cgroup.Cgroup, deadline: float) -> None:
    """Wait for the readers, as long as the kernel has killed no process."""
    for reader in readers:
        while not reader.over.wait(0.2):
            assert not group.killed, "killed by the kernel"
            assert time.monotonic() < deadline, f"no end of {reader.path.name}"


@contextlib.contextmanager
def limited(limit: int) -> Iterator[cgroup.Cgroup]:
    """A cgroup; skips the test where no cgroup can be made."""
    try:
        with cgroup.limited(limit) as made:
            yield made
    except cgroup.NoCgroup as error:
        pytest.skip(f"no cgroup with a limit of memory: {error}")


def test_splice_transport(stub: S3Stub, tmp_path: Path) -> None:
    run(stub, tmp_path, wish="splice", zipped=False)


def test_twenty_channels_over_tls_run_in_the_least_that_is_accepted(tls_stub: S3Stub, tmp_path: Path) -> None:
    """160 MiB hold too; 1 MiB less than the least is refused before any FIFO exists."""
    least = Footprint(transport="buffered", fifos=CHANNELS, requests=REQUESTS).needed(2 * CHANNELS * MIB)
    assert least <= 160 * MIB
    document = job_of(sources(tls_stub, zipped=True), tls_stub, tmp_path, "buffered")
    path = write_job(tmp_path / "refused.yaml", document)
    with limited(least - MIB) as group, sidecar(path, prefix=group.prefix) as running:
        assert running.wait() != 0
        text = str(running.events)
    assert f"memory limit of {least // MIB - 1} MiB is too low" in text
    assert f"raise the memory limit of the container to {least // MIB} MiB" in text
    assert not list(tmp_path.glob("ml/input/data/*"))
    run(tls_stub, tmp_path, wish="buffered", zipped=True, limit=least)


def test_a_process_that_takes_more_is_killed_and_seen_to_be() -> None:
    """So that the others mean something."""
    greedy = "import os, sys; os.write(1, b'.'); keep = bytearray(b'1') * (64 << 20)"
    with limited(32 * MIB) as group:
        done = subprocess.run([*group.prefix, sys.executable, "-c", greedy], capture_output=True, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert group.killed == 1
        assert group.peak <= 32 * MIB
