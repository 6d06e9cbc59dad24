"""Jobs that are killed while they upload: no torn object, no checkpoint lost, no upload left.

a run    `penstock exec` ─▶ a trainer that goes on from the newest checkpoint, writes more, and a model
a kill   of exec, its uploader or the trainer, when the server has got a drawn number of writes
between  each object that names others has them all in S3, whole; the next run begins in an empty
         directory or in the same one, and must find no older checkpoint than S3 had
the end  exec ends with 0, S3 has every file and the model, and no upload is left
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kit.archives import members
from tests.kit.credentials import set_credentials
from tests.kit.processes import job, penstock_with, uploader_of, write_job
from tests.kit.stub import S3Stub, StubThread
from tests.machines.machine import Machine, Result

TARGETS = ("exec", "uploader", "trainer")
MODEL = "b/out/killed/output/model.tar.gz"
STATES = "b/states/"
SMALL_PARTS = "streamer.s3.object_put.PART = 5000"
TRAINER = r"""
import hashlib, json, os, pathlib, random, shutil, sys, time
base, steps, seed = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
(base / "trainer").write_text(str(os.getpid()))
states, draw = base / "checkpoints", random.Random(seed)
done = -1
for each in sorted(states.glob("step-*/.metadata")):
    for name, due in json.loads(each.read_text()).items():
        if hashlib.sha256((each.parent / name).read_bytes()).hexdigest() != due:
            sys.exit(f"{each.parent.name}/{name} is torn")
    done = max(done, int(each.parent.name[5:]))
(base / "resumed").write_text(str(done))
for step in range(done + 1, steps):
    temporary = states / ("tmp-step" if draw.random() < 0.5 else f"step-{step:03d}")
    os.makedirs(temporary, exist_ok=True)
    sums = {}
    for number in range(draw.randint(1, 4)):
        data = draw.randbytes(draw.choice([0, 100, 4999, 12000]))
        (temporary / f"shard-{number}").write_bytes(data)
        sums[f"shard-{number}"] = hashlib.sha256(data).hexdigest()
    time.sleep(draw.random() / 10)  # it computes
    (temporary / ".metadata").write_text(json.dumps(sums))
    if temporary.name == "tmp-step":
        shutil.rmtree(states / f"step-{step:03d}", ignore_errors=True)  # restored without its end
        os.rename(temporary, states / f"step-{step:03d}")
(base / "model" / "weights").write_bytes(random.Random(seed).randbytes(20000))
"""


@dataclass(frozen=True)
class Kills:
    """The kills of one job."""

    seed: int
    kills: tuple[tuple[str, int, bool], ...]
    """Who is killed, after how many writes, and whether the next run has an empty directory."""

    def __str__(self) -> str:
        return f"{self.seed}"


class Results(Machine[Kills]):
    """A case takes some ten seconds, with several processes of its own."""

    limit = 240.0
    workers = 1

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Make each process's credentials."""
        set_credentials()
        yield

    def draw(self, seed: int) -> Kills:
        draw = random.Random(seed)
        return Kills(
            seed,
            tuple(
                (draw.choice(TARGETS), draw.randint(1, 40), draw.random() < 0.5)
                for _ in range(draw.randint(1, 4))
            ),
        )

    def named(self, text: str) -> Kills:
        return self.draw(int(text))

    def run(self, case: Kills) -> Result:
        stub = StubThread()
        try:
            with tempfile.TemporaryDirectory(prefix="results-") as directory:
                return Result(_Job(stub.start(), Path(directory), case.seed).run(case.kills))
        finally:
            stub.stop()


class _Job:
    """The runs of one job, and what S3 has of it."""

    def __init__(self, stub: S3Stub, directory: Path, seed: int) -> None:
        self._stub, self._directory, self._seed = stub, directory, seed
        self._base = directory / "ml-0"
        stub.objects["b/train/0"] = b"bytes"
        self._counts: Counter[str] = Counter()

    def run(self, kills: tuple[tuple[str, int, bool], ...]) -> Counter[str]:
        """Run to the end. Raises AssertionError for a broken promise."""
        steps, known, abandoned = 0, -1, set[str]()
        for number, (target, writes, fresh) in enumerate(kills):
            steps += 6
            self._execute(steps, (target, writes))
            known = max(known, self._newest())
            if fresh:
                abandoned |= self._stub.puts.uploads.keys()  # the journal is on the volume that is left
                self._base = self._directory / f"ml-{number + 1}"
        code = self._execute(steps + 3, None)
        assert code == 0, f"the last run ended with {code}"
        resumed = int((self._base / "resumed").read_text())
        assert resumed >= known, f"resumed at step {resumed}, and S3 had {known}"
        assert self._newest() == steps + 2
        states = self._base / "checkpoints"
        for each in states.rglob("*"):
            name = each.relative_to(states).as_posix()
            if each.is_file() and not name.startswith(".penstock"):
                assert self._stub.objects.get(STATES + name) == each.read_bytes(), f"{name} is not in S3"
        weights = random.Random(self._seed).randbytes(20000)
        assert members(self._stub.objects[MODEL]) == {"weights": weights}
        assert self._stub.puts.uploads.keys() <= abandoned, "an upload is left in S3"
        return self._counts + Counter({"runs": len(kills) + 1, "steps": steps + 3})

    def _newest(self) -> int:
        """The newest whole step in S3. Raises AssertionError if a step's files are not what it names."""
        newest, objects = -1, dict(self._stub.objects)
        for key, data in objects.items():
            folder, _, name = key.rpartition("/")
            if key.startswith(f"{STATES}step-") and name == ".metadata":
                for shard, due in json.loads(data).items():
                    found = objects.get(f"{folder}/{shard}")
                    assert found is not None, f"{folder} names {shard}, which is not there"
                    assert hashlib.sha256(found).hexdigest() == due, f"{folder}/{shard} is torn"
                newest = max(newest, int(folder[-3:]))
        return newest

    def _execute(self, steps: int, kill: tuple[str, int] | None) -> int:
        """Run `penstock exec` once, with a kill or without; return its exit code."""
        path = write_job(self._directory / "job.yaml", self._document())
        trainer = self._directory / "train.py"
        trainer.write_text(TRAINER)
        command = [*penstock_with(SMALL_PARTS), "exec", "-c", path, "--", sys.executable, str(trainer)]
        with subprocess.Popen(
            [*command, str(self._base), str(steps), str(self._seed)], stderr=subprocess.PIPE, text=True
        ) as process:
            self._stub.puts.spoil = self._killer(process.pid, kill)
            text = process.communicate()[1]
        self._stub.puts.spoil = lambda _operation, _request, response: response
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.killpg(int((self._base / "trainer").read_text()), signal.SIGKILL)
        if kill is None and process.returncode:
            raise AssertionError(text)
        return process.returncode

    def _document(self) -> dict[str, Any]:
        return job(self._stub.url, self._base, "b/train/") | {
            "TrainingJobName": "killed",
            "OutputDataConfig": {"S3OutputPath": "s3://b/out"},
            "CheckpointConfig": {"S3Uri": f"s3://{STATES}"},
        }

    def _killer(self, pid: int, kill: tuple[str, int] | None) -> Any:
        """What counts the writes, and kills before the response to the one that is meant."""
        left = [0 if kill is None else kill[1]]

        def spoil(_operation: str, _request: Any, response: Any) -> Any:
            left[0] -= 1
            if kill is not None and not left[0]:
                victim = {"exec": pid, "uploader": uploader_of(pid)}.get(kill[0])
                if kill[0] == "trainer" and (self._base / "trainer").exists():
                    victim = int((self._base / "trainer").read_text())
                if victim:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(victim, signal.SIGKILL)
                        self._counts[f"kills of the {kill[0]}"] += 1
            return response

        return spoil


MACHINE = Results()
