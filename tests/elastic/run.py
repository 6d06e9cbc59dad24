"""One job of a seed: sidecar and trainer, killed again and again, each time at another number of ranks.

    seed ─▶ order, kills, numbers of ranks    one S3 server and one record index for all seeds
    each run ─▶ `penstock run --resume` ─ FIFOs ─▶ trainer, a process ─ global batches ─▶ this process
    SIGKILL of trainer and sidecar after a drawn number of global batches, in either order
    the steps before the saved state are the job's; those after it are taken again

At the end the job's global batches must be those of the specification, each exactly once.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

from streamer.formats import tfrecord
from tests.kit.processes import job, penstock, sidecar, write_job
from tests.kit.stepping import Training
from tests.kit.stub import S3Stub, StubThread
from tests.unit import reference

COUNTS = (31, 0, 150, 4, 67, 1, 210)
"""Records of the objects."""
GLOBAL_BATCHES = (12, 60, 64)
MOST_KILLS = 4
Batches = list[tuple[int, int, list[str]]]
"""Epoch, step, and names of the records, of global batches in order."""


@dataclass(frozen=True)
class Found:
    """What one seed, or many, have come to."""

    jobs: int = 0
    kills: int = 0
    resizes: int = 0
    batches: int = 0
    records: int = 0
    ranks: frozenset[int] = field(default_factory=frozenset)

    def __add__(self, other: Found) -> Found:
        pairs = {name: getattr(self, name) + getattr(other, name) for name in vars(self) if name != "ranks"}
        return Found(**pairs, ranks=self.ranks | other.ranks)

    def __str__(self) -> str:
        return (
            f"{self.jobs} jobs, {self.kills} kills, {self.resizes} resizes over {sorted(self.ranks)} ranks, "
            f"{self.batches} global batches of {self.records} records"
        )


class Data:
    """The objects of many seeds, on a server, with their record index."""

    def __init__(self, stub: S3Stub, directory: Path) -> None:
        self.directory, self.url = directory, stub.url
        objects = [
            [tfrecord.encode(b"%d/%d/" % (entry, number) + bytes(number * 7 % 90)) for number in range(count)]
            for entry, count in enumerate(COUNTS)
        ]
        self.sizes = [sum(map(len, each)) for each in objects]
        stub.objects |= {f"b/train/{entry}": b"".join(each) for entry, each in enumerate(objects)}
        path = write_job(directory / "index.yaml", job(self.url, None, "b/train/"))
        to = str(directory / "index")
        done = penstock("index", "build", "-c", path, "--to", to, "--format", "TFRecord", "--every", "1")
        assert done.returncode == 0, done.stderr


@dataclass(frozen=True)
class Job:
    """What a seed draws."""

    ranks: dict[str, Any]
    shuffle: int | None
    epochs: int
    counts: tuple[int, ...]
    """Ranks of each run; the last one reads to the end."""

    @classmethod
    def draw(cls, seed: int) -> Job:
        draw = random.Random(seed)
        batch = draw.choice(GLOBAL_BATCHES)
        divisors = [number for number in range(1, 65) if batch % number == 0]
        # Few ranks as often as many: the number is drawn by its size.
        counts = tuple(
            min(divisors, key=lambda each: abs(each - target))
            for target in (2 ** draw.uniform(0, 6) for _ in range(draw.randint(1, MOST_KILLS) + 1))
        )
        ranks: dict[str, Any] = {"GlobalBatch": batch, "Remainder": draw.choice(["drop", "repeat", "pad"])}
        shuffle = draw.choice([None, draw.randrange(1 << 31)])
        if shuffle is not None:
            ranks["Block"] = draw.choice([1, 100, 700, 1 << 20])
        epochs = draw.randint(1, 2)
        ranks["Fetch"] = draw.choice(["separately", "together"])
        return cls(ranks, shuffle, epochs, counts)

    def due(self, data: Data) -> Batches:
        """The global batches of all epochs, by the specification."""
        found: Batches = []
        for epoch in range(self.epochs):
            order = reference.record_order(
                COUNTS, data.sizes, seed=self.shuffle, epoch=epoch, block=self.ranks.get("Block", 1 << 20)
            )
            batches = reference.global_batches(order, self.ranks["GlobalBatch"], self.ranks["Remainder"])
            for step, batch in enumerate(batches):
                found.append((epoch, step, [f"{entry}/{number}/" for entry, number in batch]))
        return found


def run_seed(seed: int, data: Data) -> Found:
    """Run a job to its end, through all its kills. Raises AssertionError if a global batch is not as due."""
    drawn, draw = Job.draw(seed), random.Random(~seed)
    with tempfile.TemporaryDirectory(prefix=f"{seed}-", dir=data.directory) as directory:
        runner = _Runner(data, drawn, Path(directory))
        due, kept = drawn.due(data), Batches()
        for number, ranks in enumerate(drawn.counts):
            last = number + 1 == len(drawn.counts)
            limit = None if last else draw.randint(0, len(due) - len(kept))
            batches = runner.run(ranks, limit, draw)
            assert batches == due[len(kept) : len(kept) + len(batches)]
            kept += batches[: runner.saved(due) - len(kept)] if not last else batches
    assert kept == due, f"{len(kept)} global batches of {len(due)}, or others"
    resizes = sum(1 for before, after in pairwise(drawn.counts) if before != after)
    records = sum(len(batch) for _, _, batch in due)
    return Found(1, len(drawn.counts) - 1, resizes, len(due), records, frozenset(drawn.counts))


class _Runner:
    """Runs sidecar and trainer of one job."""

    def __init__(self, data: Data, drawn: Job, directory: Path) -> None:
        self._data, self._drawn, self._directory = data, drawn, directory
        self._state = directory / "state.json"

    def saved(self, due: Batches) -> int:
        """The number of global batches that the saved state has."""
        if not self._state.exists():
            return 0
        state = json.loads(self._state.read_text())
        return sum(1 for epoch, step, _ in due if (epoch, step) < (state["epoch"], state["step"]))

    def run(self, ranks: int, limit: int | None, draw: random.Random) -> Batches:
        """Return the global batches that the trainer took: `limit` until the kill, or all to the end."""
        base = self._directory / "ml"
        document = job(self._data.url, base, "b/train/", MemoryBudget="64MiB", PartSize="64KiB")
        channel = document["InputDataConfig"][0]
        keys = {"Count": ranks, "Index": str(self._data.directory / "index")}
        channel["Penstock"] = {"Ranks": self._drawn.ranks | keys}
        if self._drawn.shuffle is not None:
            channel["ShuffleConfig"] = {"Seed": self._drawn.shuffle}
        path = write_job(self._directory / "job.yaml", document)
        training = Training(
            str(self._state),
            epochs=self._drawn.epochs,
            save_every=draw.randint(1, 4),
            saver=draw.randrange(ranks),
            load=draw.random() < 0.5,
        )
        trainer = [sys.executable, "-m", "tests.kit.stepping", json.dumps(asdict(training))]
        environment = os.environ | {"SAGEMAKER_BASE_DIR": str(base)}
        with sidecar(path, "--resume", str(self._state)) as serving:
            serving.wait_for("ready")
            with subprocess.Popen(
                trainer, env=environment, stdout=subprocess.PIPE, text=True
            ) as training_run:
                assert training_run.stdout is not None
                lines = list(islice(training_run.stdout, limit))
                if limit is None:
                    assert training_run.wait() == 0, "the trainer failed"
                kills = [serving.process.kill, training_run.kill]
                for kill in kills if draw.random() < 0.5 else kills[::-1]:
                    kill()
                lines += training_run.stdout  # of batches that were taken before the kill
        whole = (json.loads(line) for line in lines if line.endswith("\n"))
        return [(epoch, step, [*chain(*shares)]) for epoch, step, shares in whole]


_data: list[Data] = []


def prepare() -> None:
    """Start the server of this process, for `run`, and build the index."""
    os.environ |= {"AWS_ACCESS_KEY_ID": "AKIAELASTIC", "AWS_SECRET_ACCESS_KEY": "secret"}
    os.environ["AWS_DEFAULT_REGION"] = "us-east-1"
    _data.append(Data(StubThread().start(), Path(tempfile.mkdtemp(prefix="elastic-"))))


def run(seed: int) -> Found:
    """Run one seed on the data of this process."""
    return run_seed(seed, _data[0])
