"""Jobs that are killed while they upload: no torn object, no checkpoint lost, no upload left.

a run    `penstock exec` ─▶ a trainer that goes on from the newest checkpoint, writes more, and a model
a kill   of exec, its uploader (twice), the trainer or all three, at a drawn point of the bytes that pass a
         relay to the server: a write that begins, the response to one, or any piece, restored ones too
between  each object that names others has them all in S3, whole, and so has each file that the journal has;
         the next run begins in an empty directory or in the same one; there it aborts the uploads that were
         left, before its trainer begins; and the trainer finds no older checkpoint than S3 had
the end  exec ends with 0, S3 has every file and the model, and no upload is left

The server is the scripted stub, SeaweedFS or Ceph. One that cannot be started on this machine is named, and
breaks no case.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sidecar.upload.journal import Journal, journal_of
from streamer.directory import Directory
from streamer.plan import S3Uri
from streamer.s3.object_put import PART
from tests.kit.archives import members
from tests.kit.credentials import set_credentials
from tests.kit.processes import PENSTOCK, job, uploader_of, write_job
from tests.kit.proxy import TcpProxy, standing_before
from tests.kit.stub import StubThread
from tests.machines.machine import Machine, Result
from tests.machines.servers.habits import s3
from tests.machines.servers.servers import Server, Unavailable, running

TARGETS = ("exec", "uploader", "trainer", "all")
SERVERS = ("stub", "seaweedfs", "ceph")
POINTS = ("write", "response", "piece")
MOST_WRITES = 28
"""A run has some more."""
PIECES_OF_A_WRITE = 15
"""On average; a piece has at most 64 KiB."""
LARGE = PART * 5 // 4
"""Bytes of a file of two parts."""
STEPS = 4
"""Steps of a run."""
UPLOADER_KILLS = 2
"""Kills in a run. After the third one the uploader is not started again."""
BUCKET = "results"
MODEL = "out/killed/output/model.tar.gz"
STATES = "states/"
TRAINER = r"""
import hashlib, json, os, pathlib, random, shutil, sys, time
base, steps, seed, large = pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:])
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
        data = draw.randbytes(draw.choice([0, 1, 100, 4999, 5000, 70000, large]))
        (temporary / f"shard-{number}").write_bytes(data)
        sums[f"shard-{number}"] = hashlib.sha256(data).hexdigest()
    time.sleep(draw.random() / 10)  # it computes
    (base / "metadata").write_text(json.dumps(sums))
    os.rename(base / "metadata", temporary / ".metadata")
    if temporary.name == "tmp-step":
        shutil.rmtree(states / f"step-{step:03d}", ignore_errors=True)  # restored without its end
        os.rename(temporary, states / f"step-{step:03d}")
(base / "model" / "weights").write_bytes(random.Random(seed).randbytes(large))
"""


@dataclass(frozen=True)
class Kill:
    """The kill of one run."""

    target: str
    point: str
    count: int
    """Which of these points it is."""
    fresh: bool
    """Whether the next run has an empty directory."""


@dataclass(frozen=True)
class Kills:
    """The kills of one job."""

    server: str
    seed: int
    kills: tuple[Kill, ...]

    def __str__(self) -> str:
        return f"{self.server}-{self.seed}"


class Results(Machine[Kills]):
    """A case takes some ten seconds, with several processes of its own."""

    limit = 240.0
    workers = 1

    def draw(self, seed: int) -> Kills:
        return _drawn(SERVERS[seed % len(SERVERS)], seed)

    def named(self, text: str) -> Kills:
        server, _, seed = text.partition("-")
        return _drawn(server, int(seed))

    def run(self, case: Kills) -> Result:
        try:
            with contextlib.ExitStack() as stack:
                server = stack.enter_context(_serving(case.server))
                client = stack.enter_context(contextlib.closing(s3(server)))
                relay = stack.enter_context(standing_before(server.url))
                directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="results-"))
                return Result(_Job(case, client, relay, Path(directory)).run())
        except Unavailable as error:
            print(f"{case.server} is missing: {error}", file=sys.stderr)
            return Result(Counter([f"jobs without {case.server}, which is missing"]))


def _drawn(server: str, seed: int) -> Kills:
    draw = random.Random(seed)
    kills = []
    for _ in range(draw.randint(2, 6)):
        point, count = draw.choice(POINTS), draw.randint(1, draw.choice([6, MOST_WRITES]))
        if point == "piece":
            count = draw.randint(1, count * PIECES_OF_A_WRITE)
        kills.append(Kill(draw.choice(TARGETS), point, count, draw.random() < 0.5))
    return Kills(server, seed, tuple(kills))


@contextlib.contextmanager
def _serving(name: str) -> Iterator[Server]:
    """Run a server with an object to train with, and make its credentials this process's."""
    with contextlib.ExitStack() as stack:
        if name == "stub":
            stub = StubThread()
            stack.callback(stub.stop)
            server = Server(stub.start().url, "AKIDTEST", "not-a-secret", "")
        else:
            server = stack.enter_context(running(name))
        set_credentials(server.access_key, server.secret_key)
        with contextlib.closing(s3(server)) as client:
            if name != "stub":
                client.create_bucket(Bucket=BUCKET)
            client.put_object(Bucket=BUCKET, Key="train/0", Body=b"bytes", ChecksumAlgorithm="CRC64NVME")
        yield server


class _Point:
    """Sees the bytes that pass the relay, and kills at the point that is meant."""

    def __init__(self, kill: Kill, strike: Callable[[], bool]) -> None:
        """`strike` kills; it returns false if there is nobody now, and then the next point has its turn."""
        self._kill = kill
        self._strike = strike
        self._left = kill.count
        self._times = UPLOADER_KILLS if kill.target == "uploader" else 1
        self._writing: set[int] = set()
        """Connections whose last request is a write."""

    def pass_on(self, connection: int, data: bytes, request: bool) -> None:
        """Take note of bytes before they are passed on; see `TcpProxy.on_data`."""
        points = {"piece"}
        if request and data.startswith((b"PUT ", b"POST ", b"DELETE ")):
            points.add("write")
            self._writing.add(connection)
        elif not request and connection in self._writing and not data.startswith(b"HTTP/1.1 100 "):
            points.add("response")
            self._writing.discard(connection)
        if self._kill.point in points:
            self._left -= 1
            if self._left == 0:
                struck = self._strike()
                self._times -= struck
                self._left = self._kill.count if struck and self._times else not struck


class _Job:
    """The runs of one job, and what S3 has of it."""

    def __init__(self, case: Kills, client: Any, relay: TcpProxy, directory: Path) -> None:
        self._case, self._client, self._relay, self._directory = case, client, relay, directory
        self._base = directory / "ml-0"
        self._counts: Counter[str] = Counter()
        self._read: dict[str, tuple[str, bytes]] = {}
        """ETag and bytes of each object, as they were last read."""
        self._known = -1
        """The newest whole step that S3 has had."""
        self._abandoned: set[str] = set()
        """Uploads whose journal is on a volume that was left."""

    def run(self) -> Counter[str]:
        """Run to the end. Raises AssertionError for a broken promise."""
        steps = 0
        for number, kill in enumerate(self._case.kills):
            steps += STEPS
            self._execute(steps, kill)
            if kill.fresh:
                self._abandoned |= self._uploads()
                self._base = self._directory / f"ml-{number + 1}"
        steps += STEPS
        objects = self._execute(steps, None)
        assert self._known == steps - 1
        states = self._base / "checkpoints"
        for each in states.rglob("*"):
            name = each.relative_to(states).as_posix()
            if each.is_file() and not name.startswith(".penstock"):
                assert objects.get(STATES + name) == each.read_bytes(), f"{name} is not in S3"
        assert members(objects[MODEL]) == {"weights": random.Random(self._case.seed).randbytes(LARGE)}
        assert self._uploads() <= self._abandoned, "an upload is left in S3"
        return self._counts + Counter({"jobs": 1, "runs": len(self._case.kills) + 1, "steps": steps})

    def _execute(self, steps: int, kill: Kill | None) -> dict[str, bytes]:
        """Run `penstock exec` once, with a kill or without; check and return what S3 has then."""
        left = self._uploads()
        for name in ("trainer", "resumed"):
            (self._base / name).unlink(missing_ok=True)
        path = write_job(self._directory / "job.yaml", self._document())
        trainer = self._directory / "train.py"
        trainer.write_text(TRAINER)
        command = [*PENSTOCK, "exec", "-c", path, "--", sys.executable, str(trainer), str(self._base)]
        command += map(str, (steps, self._case.seed, LARGE))
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            if kill is not None:
                self._relay.on_data = _Point(kill, partial(self._strike, kill, process.pid)).pass_on
            text = process.communicate()[1]
        self._relay.on_data = None
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.killpg(int((self._base / "trainer").read_text()), signal.SIGKILL)
        assert "is torn" not in text, text
        assert kill is not None or process.returncode == 0, text
        objects = self._objects()
        self._check_journal(objects)
        if (resumed := self._base / "resumed").exists():
            step = int(resumed.read_text())
            assert step >= self._known, f"resumed at step {step}, and S3 had {self._known}"
            earlier = (left & self._uploads()) - self._abandoned
            assert not earlier, f"the trainer has begun, and uploads of an earlier run are left: {earlier}"
        self._known = max(self._known, _newest(objects))
        return objects

    def _strike(self, kill: Kill, pid: int) -> bool:
        """Kill the processes that are meant; return whether there is one."""
        started, struck = self._base / "trainer", False
        trainer = int(started.read_text() or 0) if started.exists() else None
        for name, victim in {"exec": pid, "uploader": uploader_of(pid), "trainer": trainer}.items():
            if victim and kill.target in (name, "all"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
                    self._counts[f"kills of the {name}, {self._case.server}"] += 1
                    struck = True
        return struck

    def _document(self) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self._relay.port}"
        return job(url, self._base, f"{BUCKET}/train/") | {
            "TrainingJobName": "killed",
            "OutputDataConfig": {"S3OutputPath": f"s3://{BUCKET}/out"},
            "CheckpointConfig": {"S3Uri": f"s3://{BUCKET}/{STATES}"},
        }

    def _objects(self) -> dict[str, bytes]:
        """Return all objects by key."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        etags = {each["Key"]: each["ETag"] for page in pages for each in page["Contents"]}
        for key, etag in etags.items():
            if self._read.get(key, ("", b""))[0] != etag:
                got = self._client.get_object(Bucket=BUCKET, Key=key)
                self._read[key] = got["ETag"], got["Body"].read()
        return {key: self._read[key][1] for key in etags}

    def _uploads(self) -> set[str]:
        """Return the ids of all multipart uploads."""
        listed = self._client.list_multipart_uploads(Bucket=BUCKET)
        return {f"{each['UploadId']} of {each['Key']}" for each in listed.get("Uploads", [])}

    def _check_journal(self, objects: dict[str, bytes]) -> None:
        """Raise AssertionError if S3 lacks a file that the journal has."""
        states, file = self._base / "checkpoints", journal_of(S3Uri(BUCKET, STATES))
        if not (states / file).exists():
            return
        shutil.copy(states / file, self._directory / file)
        with Directory.at(str(self._directory)) as copy, contextlib.closing(Journal(copy, file)) as journal:
            self._counts["files reported"] += len(journal.files)
            for name in journal.files:
                found = objects.get(STATES + name)
                assert found is not None, f"{name} was reported, and is not in S3"
                path = states / name
                if path.exists() and journal.same(name, path.stat()) is not None:
                    assert found == path.read_bytes(), f"{name} was reported, and S3 has another one"


def _newest(objects: dict[str, bytes]) -> int:
    """The newest whole step in S3. Raises AssertionError if a step's files are not what it names."""
    newest = -1
    for key, data in objects.items():
        folder, _, name = key.rpartition("/")
        if key.startswith(f"{STATES}step-") and name == ".metadata":
            for shard, due in json.loads(data).items():
                found = objects.get(f"{folder}/{shard}")
                assert found is not None, f"{folder} names {shard}, which is not there"
                assert hashlib.sha256(found).hexdigest() == due, f"{folder}/{shard} is torn"
            newest = max(newest, int(folder[-3:]))
    return newest


MACHINE = Results()
