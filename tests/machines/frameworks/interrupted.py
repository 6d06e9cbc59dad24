"""Jobs that are killed while they save checkpoints, and go on from S3 in an empty directory.

    trainer ─ checkpoints ─▶ `penstock exec` ─▶ S3 ─▶ the next `penstock exec`, whose directory is empty
       └─ a line for each step and save, into a FIFO ─▶ this process ─ kills at a drawn one

The records of each step, and its loss, must be those of a job that nobody has killed. A job goes on at the
newest checkpoint with a state that S3 had, or at a later one.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from streamer.step_state import FILE_NAME
from tests.kit.processes import PENSTOCK, job, penstock, uploader_of, write_job
from tests.kit.stub import S3Stub
from tests.machines.frameworks.programs.task import GLOBAL_BATCH, TOLERANCE, UNEVEN

STEPS = sum(UNEVEN) // GLOBAL_BATCH
"""Steps of an epoch."""
LIMIT = 300.0
"""Seconds after which a run hangs."""
ENDED_WITHIN = 200.0
"""Seconds in which ranks notice that the sidecar was killed; a reader waits 120 s for the next epoch."""
BUCKET, PREFIX = "data", "results/checkpoints/"
TARGETS = ("all", "sidecar", "trainer", "rank", "uploader")
"""Who is killed: all processes as with their host, exec alone, all ranks, the last rank, the uploader."""


class Broken(Exception):
    """A promise that did not hold."""


@dataclass(frozen=True)
class Interrupted:
    """A program that saves checkpoints."""

    name: str
    needs: str
    program: str
    options: tuple[str, ...] = ()
    ranks: int = 2
    """0: a program of one process without a launcher."""


INTERRUPTED = {
    "dcp": Interrupted("`torch.distributed.checkpoint`", "torch", "dcp"),
    "lightning-file": Interrupted("Lightning, one file", "lightning", "lightning_s3", ("file",)),
    "lightning-link": Interrupted('Lightning, `save_last="link"`', "lightning", "lightning_s3", ("link",)),
    "huggingface-s3": Interrupted("Hugging Face `Trainer`", "transformers", "huggingface_s3"),
    "keras-checkpoint": Interrupted("Keras, `ModelCheckpoint`", "keras", "keras_s3", ("checkpoint",), 0),
    "keras-backup": Interrupted("Keras, `BackupAndRestore`", "keras", "keras_s3", ("backup",), 0),
}


@dataclass(frozen=True)
class Kill:
    """Who is killed, and when: at the `number`th of the lines or writes of `kind`, and `after` seconds."""

    target: str
    kind: str
    number: int
    after: float

    @classmethod
    def drawn(cls, draw: random.Random) -> Kill:
        kind = draw.choice(["step", "save", "save", "write"])
        most = {"step": 40, "save": 7, "write": 30}[kind]
        after = draw.choice([0, 0.05 * draw.random()])
        return cls(draw.choice(TARGETS), kind, draw.randint(2, most), after)


@dataclass
class Run:
    """What one run of a job told."""

    begin: set[int] = field(default_factory=set)
    """The step that each rank began with."""
    steps: dict[int, list[tuple[list[int], float]]] = field(default_factory=dict)
    """Records and loss of each step, by rank."""
    processes: set[int] = field(default_factory=set)
    launchers: set[int] = field(default_factory=set)
    code: int = 0
    log: str = ""


class Job:
    """One job: its runs, and what S3 has of it."""

    def __init__(self, program: Interrupted, stub: S3Stub, directory: Path, write_takes: float = 0.0) -> None:
        self._program, self.stub, self._directory = program, stub, directory
        self._write_takes = write_takes
        self.fifo = directory / "steps"
        os.mkfifo(self.fifo)
        self.counts: Counter[str] = Counter()
        self._runs = 0

    def run(self, kills: deque[Kill]) -> Run:
        """Run `penstock exec` once, in an empty directory, with the first of the kills. Raises Broken.

        After one of the uploader alone the job goes on, to the next kill.
        """
        base = self._directory / f"ml-{self._runs}"
        self._runs += 1
        ranks = self._program.ranks
        path = write_job(self._directory / "job.yaml", self._document(base, max(1, ranks)))
        if self._runs == 1:
            built = penstock("index", "build", "-c", path)
            if built.returncode:
                raise Broken(built.stderr)
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
        command = [
            *PENSTOCK, "exec", "-c", path, "--resume", "/opt/ml/checkpoints/", "--",
            sys.executable, "-m", *(launcher if ranks else []),
            f"tests.machines.frameworks.programs.{self._program.program}",
            str(self._directory), *self._program.options,
        ]  # fmt: skip
        environment = os.environ | {
            "GLOBAL_BATCH": str(GLOBAL_BATCH), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
            "STEPS": str(self.fifo),
        }  # fmt: skip
        with (self._directory / f"log-{self._runs}").open("w+") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            run = _Running(process, self, kills, self._write_takes).followed()
            log.seek(0)
            run.log = log.read()
        return run

    def saved(self) -> int:
        """Return the step of the newest state in S3; 0 if there is none."""
        found = [
            json.loads(data)
            for key, data in self.stub.objects.items()
            if key.startswith(f"{BUCKET}/{PREFIX}") and key.endswith(FILE_NAME)
        ]
        return max((each["epoch"] * STEPS + each["step"] for each in found), default=0)

    def _document(self, base: Path, ranks: int) -> dict[str, Any]:
        document = job(self.stub.url, base, f"{BUCKET}/train/") | {
            "TrainingJobName": "frames",
            "OutputDataConfig": {"S3OutputPath": f"s3://{BUCKET}/results"},
            "CheckpointConfig": {"S3Uri": f"s3://{BUCKET}/{PREFIX}"},
        }
        channel = document["InputDataConfig"][0]
        channel["ShuffleConfig"] = {"Seed": 5}
        channel["Penstock"] = {
            "Ranks": {"Count": ranks, "GlobalBatch": GLOBAL_BATCH, "Block": 600},
            "Records": {"Format": "TFRecord", "Index": str(self._directory / "index")},
        }
        return document


class _Running:
    """A run that is followed line by line, and the kill in it."""

    def __init__(
        self, process: subprocess.Popen[bytes], job: Job, kills: deque[Kill], write_takes: float
    ) -> None:
        self._process, self._kills, self._write_takes = process, kills, write_takes
        self._fifo, self._stub, self._counts = job.fifo, job.stub, job.counts
        self._kill = kills.popleft() if kills else None
        self._run = Run()
        self._seen: Counter[str] = Counter()
        self._wake_out, self._wake = os.pipe()
        self._due = False

    def followed(self) -> Run:
        """Follow it to its end, and end what is left of it."""
        lines = os.open(self._fifo, os.O_RDWR | os.O_NONBLOCK)
        exited = os.pidfd_open(self._process.pid)
        self._stub.puts.spoil = self._spoil
        until, rest = time.monotonic() + LIMIT, b""
        try:
            while True:
                ready, _, _ = select.select([lines, exited, self._wake_out], [], [], until - time.monotonic())
                if not ready:
                    raise Broken(f"it still ran after {LIMIT} s")
                if lines in ready:
                    rest = self._read(lines, rest)
                    continue
                if self._wake_out in ready:
                    os.read(self._wake_out, 1)
                    self._strike()
                if exited in ready:
                    break
            self._run.code = self._process.wait()
            self._end_ranks()
            with contextlib.suppress(BlockingIOError):
                self._read(lines, rest)
        finally:
            self._kill = None
            self._process.kill()
            self._process.wait()
            self._end_ranks(0)
            for fd in (lines, exited, self._wake, self._wake_out):
                os.close(fd)
        return self._run

    def _read(self, lines: int, rest: bytes) -> bytes:
        """Take the lines in the FIFO; return what is there of the next one. Raises BlockingIOError."""
        *whole, rest = (rest + os.read(lines, 1 << 20)).split(b"\n")
        for line in whole:
            self._take(json.loads(line))
        return rest

    def _take(self, line: dict[str, Any]) -> None:
        run, rank = self._run, line["rank"]
        if "begin" in line:
            run.begin.add(line["begin"])
            run.processes.add(line["pid"])
            if line["parent"] != self._process.pid:
                run.launchers.add(line["parent"])
        elif "records" in line:
            run.steps.setdefault(rank, []).append((line["records"], line["loss"]))
            if rank == 0:
                self._note("step")
        elif rank == 0:
            self._note("save")

    def _spoil(self, operation: str, request: Any, response: Any) -> Any:
        time.sleep(self._write_takes)  # all requests wait meanwhile
        name = f"{request.match_info['bucket']}/{request.match_info['key']}"
        if operation in ("PutObject", "CompleteMultipartUpload"):
            # A real server's times are of whole seconds.
            self._stub.written[name] = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.000Z}"
        if self._run.begin:
            self._note("write")
        return response

    def _note(self, kind: str) -> None:
        self._seen[kind] += 1
        kill = self._kill
        if kill is None or self._due or kind != kill.kind or self._seen[kind] < kill.number:
            return
        self._due = True
        if kind == "write":  # in the server's thread: before its response
            os.write(self._wake, b"x")
        else:
            threading.Timer(kill.after, lambda: os.write(self._wake, b"x")).start()

    def _strike(self) -> None:
        kill, run = self._kill, self._run
        if kill is None:
            return
        ranks, pid = [*run.launchers, *run.processes], self._process.pid
        uploader = uploader_of(pid)
        victims: dict[str, list[int | None]] = {
            "all": [pid, uploader, *ranks],
            "sidecar": [pid],
            "trainer": [*ranks],
            "rank": [max(run.processes)],
            "uploader": [uploader],
        }
        self._counts[f"kills of {kill.target}"] += 1
        for victim in victims[kill.target]:
            if victim is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
        if kill.target == "uploader":
            self._kill = self._kills.popleft() if self._kills else None
            self._seen.clear()
            self._due = False

    def _end_ranks(self, seconds: float = ENDED_WITHIN) -> None:
        """Wait for the ranks, which a sidecar's end must end, and kill those that stay."""
        for pid in [*self._run.processes, *self._run.launchers]:
            with contextlib.suppress(ProcessLookupError):
                fd = os.pidfd_open(pid)
                ended = select.select([fd], [], [], seconds)[0]
                os.close(fd)
                if not ended:
                    os.kill(pid, signal.SIGKILL)
                    if seconds:
                        raise Broken(f"a rank still ran {seconds} s after exec")


@dataclass
class Seen:
    """What a job that was killed did."""

    resumed: list[int] = field(default_factory=list)
    compared: int = 0
    apart: float = 0.0


def compare(run: Run, first: Run, saved: int, seen: Seen) -> None:
    """Compare a run with one that nobody killed. `saved`: the step that S3 had. Raises Broken."""
    if not run.steps:
        if run.code > 0:
            raise Broken(f"exit status {run.code} before the first step: {run.log}")
        return
    if len(run.begin) != 1:
        raise Broken(f"ranks began with steps {sorted(run.begin)}")
    [begin] = run.begin
    if begin < saved:
        raise Broken(f"it went on with step {begin}, and S3 had step {saved}")
    seen.resumed.append(begin)
    for rank, steps in run.steps.items():
        for number, (records, loss) in enumerate(steps, begin):
            if number >= len(first.steps[rank]):
                break
            due, loss_due = first.steps[rank][number]
            if records != due:
                raise Broken(f"step {number}, resumed at {begin}: rank {rank} had other records")
            seen.compared += rank == 0 and begin > 0
            seen.apart = max(seen.apart, abs(loss - loss_due))
    if seen.apart > TOLERANCE:
        raise Broken(f"losses differ by up to {seen.apart:.1e}")


def drawn(case: str) -> tuple[deque[Kill], float]:
    """Return the kills of a case, and the seconds that the server takes for a write."""
    draw = random.Random(case)
    return deque(Kill.drawn(draw) for _ in range(draw.randint(2, 3))), draw.choice([0.0, 0.05])
