"""Kills engine processes under every kind of channel: `python -m tests.kit.engine_kills --kills 200`.

    stub (plain or TLS) ─▶ engines ─▶ penstock run ─▶ FIFOs ─▶ a thread each, which hashes every epoch
                              ▲ SIGKILL when all threads together have so many bytes

Channels: large objects, small ones, small ones that are inflated, and two rank FIFOs. A run draws the number
of engines and the bytes at which it kills from its seed; even seeds have TLS. A killed process is the
template or any engine, also one that has just been forked or has outlived its template. Each epoch's SHA-256
must be that of its objects in order.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import trustme

from tests.kit.patience import Patience
from tests.kit.processes import Sidecar, job, sidecar, write_job
from tests.kit.stub import S3Stub, StubThread
from tests.kit.tls import serving

KILLS_EACH = 10
"""Kills of one run."""
EPOCHS = 3
STREAMS = ("large", "small", "zipped", "ranks-0", "ranks-1")


def main(arguments: list[str] | None = None) -> int:
    """Run until so many processes are killed; return 1 if an epoch has other bytes."""
    parser = argparse.ArgumentParser(prog="python -m tests.kit.engine_kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1, help="of the first run")
    chosen = parser.parse_args(arguments)
    os.environ.update(AWS_ACCESS_KEY_ID="AKIDTEST", AWS_SECRET_ACCESS_KEY="not-a-secret")
    killed = epochs = wrong = 0
    for seed in itertools.count(chosen.seed):
        found = run(seed)
        killed, epochs, wrong = killed + found.killed, epochs + found.epochs, wrong + len(found.wrong)
        print(f"seed {seed}: {found}; {killed} killed, {epochs} epochs, {wrong} wrong in all", flush=True)
        if killed >= chosen.kills:
            return int(wrong > 0)
    return 0


class Run:
    """What one run did, and the readers that it shares bytes with."""

    def __init__(self, seed: int, chance: random.Random) -> None:
        self.tls = seed % 2 == 0
        self.engines = chance.choice([1, 2, 3])
        self.killed = 0
        self.epochs = 0
        self.wrong: list[str] = []
        self.got = 0
        self.news = threading.Condition()

    def __str__(self) -> str:
        reported = f"{'TLS' if self.tls else 'plain'}, {self.engines} engines, {self.killed} killed"
        return f"{reported}, {self.epochs} epochs" + "".join(f", WRONG: {each}" for each in self.wrong)

    def read(self, data: Path, stream: str, truth: str) -> None:
        """Read and compare every epoch of a stream."""
        for epoch in range(EPOCHS):
            digest = hashlib.sha256()
            with open(data / f"{stream}_{epoch}", "rb", buffering=0) as fifo:
                while read := fifo.read(1 << 16):
                    digest.update(read)
                    self._note(len(read))
            with self.news:
                self.epochs += 1
                if digest.hexdigest() != truth:
                    self.wrong.append(f"{stream}_{epoch}")

    def wait_for(self, count: int) -> None:
        """Wait until all readers together have so many bytes. Raises TimeoutError."""
        patience, before = Patience(60), -1
        with self.news:
            while self.got < count:
                if self.got > before:
                    patience, before = Patience(60), self.got
                if not self.news.wait(1) and patience.exhausted():
                    raise TimeoutError(f"readers have {self.got} bytes and wait for {count}")

    def _note(self, count: int) -> None:
        with self.news:
            self.got += count
            self.news.notify_all()


def run(seed: int) -> Run:
    """Stream every channel for some epochs while engines are killed."""
    chance = random.Random(seed)
    found = Run(seed, chance)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stub = stack.enter_context(_served(directory, tls=found.tls))
        truths = fill(stub, chance)
        document = _job(stub, directory, found)
        running = stack.enter_context(sidecar(write_job(directory / "job.yaml", document), cold=True))
        running.wait_for("ready")
        data = directory / "ml" / "input" / "data"
        readers = [
            threading.Thread(target=found.read, args=(data, stream, truths[stream][0]), daemon=True)
            for stream in STREAMS
        ]
        total = EPOCHS * sum(size for _, size in truths.values())
        for reader in readers:
            reader.start()
        try:
            _kill_and_wait(found, running, [chance.randrange(total) for _ in range(KILLS_EACH)], chance)
            found.wait_for(total)
        except TimeoutError:
            print(json.dumps([running.events[-20:], running.status()]), file=sys.stderr)
            raise
        for reader in readers:
            reader.join()
        if running.end():
            found.wrong.append("the sidecar's exit code")
    return found


def _kill_and_wait(found: Run, running: Sidecar, places: list[int], chance: random.Random) -> None:
    for at in sorted(places):
        found.wait_for(at)
        pids = {*engines_of(running.process.pid), *(each["pid"] for each in running.status()["engines"])}
        with suppress(IndexError, ProcessLookupError):  # none runs, or it has just ended
            os.kill(chance.choice(sorted(pids)), signal.SIGKILL)
            found.killed += 1


@contextmanager
def _served(directory: Path, *, tls: bool) -> Iterator[S3Stub]:
    if tls:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(directory / "ca.pem"))
        with serving(authority) as stub:
            yield stub
        return
    thread = StubThread()
    try:
        yield thread.start()
    finally:
        thread.stop()


def fill(stub: S3Stub, chance: random.Random) -> dict[str, tuple[str, int]]:
    """Put objects for every stream; return each stream's SHA-256, and its bytes."""
    small = [chance.randrange(1, 120_000) for _ in range(60)]
    sizes = {
        "large": [3_000_000, 2_000_001],
        "small": small,
        "zipped": [*small[:30], 1_500_000],
        "ranks": [2_000_000, 2_000_000],
    }
    truths = {}
    for channel, each in sizes.items():
        bodies = [chance.randbytes(size) for size in each]
        for number, body in enumerate(bodies):
            stored = gzip.compress(body, 1) if channel == "zipped" else body
            stub.objects[f"b/{channel}/{number:03}"] = stored
        streams = {channel: bodies}
        if channel == "ranks":
            streams = {f"{channel}-{rank}": [body] for rank, body in enumerate(bodies)}
        for stream, objects in streams.items():
            whole = b"".join(objects)
            truths[stream] = hashlib.sha256(whole).hexdigest(), len(whole)
    return truths


def _job(stub: S3Stub, directory: Path, found: Run) -> dict[str, Any]:
    prefixes = [f"b/{channel}/" for channel in ("large", "small", "zipped", "ranks")]
    settings = {"Processes": found.engines, "PartSize": "512KiB", "MemoryBudget": "32MiB"}
    document = job(stub.url, directory / "ml", *prefixes, **settings)
    by_name = {each["ChannelName"]: each for each in document["InputDataConfig"]}
    by_name["zipped"]["CompressionType"] = "Gzip"
    by_name["ranks"]["Penstock"] = {"Ranks": 2}
    if found.tls:
        document["Penstock"]["Endpoint"]["CaBundle"] = str(directory / "ca.pem")
    return document


def engines_of(pid: int) -> list[int]:
    """The template of a sidecar and its engine processes, also those that are starting."""
    found = []
    with suppress(OSError):  # the process has ended
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text(encoding="ascii").split():
                if b"streamer.engines" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found += [int(child), *engines_of(int(child))]
    return found


if __name__ == "__main__":
    sys.exit(main())
