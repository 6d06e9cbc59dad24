"""Every framework at every number of ranks, and the table of what was seen.

A framework that is not installed is named and left out.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import urllib.request
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import numpy as np

from streamer.formats import tfrecord
from streamer.readers import load_state
from tests.kit.credentials import set_credentials
from tests.kit.processes import Sidecar, job, penstock, sidecar, write_job
from tests.kit.stub import S3Stub, StubThread
from tests.machines.frameworks.interrupted import (
    INTERRUPTED,
    Broken,
    Interrupted,
    Job,
    Run,
    Seen,
    compare,
    drawn,
)
from tests.machines.frameworks.programs.task import DIMENSIONS, EPOCHS, GLOBAL_BATCH, TOLERANCE, UNEVEN
from tests.machines.machine import Machine, Result
from tests.machines.servers.servers import Server, running

RANKS = (1, 2, 3, 4, 8)
"""Divisors of the global batch; the first job is the one that the others are compared with."""
STOP = 30
"""Steps after which a job is stopped that goes on from its checkpoint."""
DRAWS = 3
"""Jobs of each program that is killed."""
LIMIT = 900
"""Seconds after which a training job hangs."""


@dataclass(frozen=True)
class Framework:
    name: str
    program: str
    needs: str
    """The module that must be installed."""
    leaves: bool = False
    """Whether it begins an epoch that it leaves."""
    stopped: bool = False
    """Whether the job is stopped after `STOP` steps, and goes on at another number of ranks."""
    processes: bool = True
    """Whether each rank is a process; else the replicas of one process divide the batches of one rank."""


FRAMEWORKS = {
    "ddp": Framework("PyTorch DDP", "ddp", "torch"),
    "fsdp": Framework("PyTorch FSDP", "fsdp", "torch"),
    "lightning": Framework("Lightning `Trainer.fit`", "lightning_fit", "lightning"),
    "lightning-resumed": Framework(
        "Lightning, stopped and resumed", "lightning_resumed", "lightning", leaves=True, stopped=True
    ),
    "huggingface": Framework("Hugging Face `Trainer`", "huggingface", "transformers"),
    "keras": Framework("Keras, MirroredStrategy", "keras_mirrored", "keras", leaves=True, processes=False),
}


@dataclass(frozen=True)
class Trained:
    """What one job did."""

    records: list[list[int]]
    """Records of each step, in order."""
    losses: list[float]
    """Mean loss of the ranks in each step."""
    fetched: float
    """Bytes fetched for each byte streamed."""


def uneven() -> Iterator[bytes]:
    """Objects of TFRecord. A record is its number, a vector and a label that the vector decides."""
    draw = np.random.default_rng(3)
    weights = draw.normal(size=DIMENSIONS)
    number = 0
    for count in UNEVEN:
        records = []
        for _ in range(count):
            vector = draw.normal(size=DIMENSIONS)
            floats = np.append(vector, vector @ weights).astype(np.float32)
            records.append(tfrecord.encode(struct.pack("<q", number) + floats.tobytes()))
            number += 1
        yield b"".join(records)


def upload(server: Server) -> None:
    client = boto3.client(
        "s3", endpoint_url=server.url, aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key, region_name="us-east-1",
    )  # fmt: skip
    client.create_bucket(Bucket="data")
    for number, body in enumerate(uneven()):
        client.put_object(Bucket="data", Key=f"train/{number}", Body=body)
    client.close()


def job_file(server: Server, directory: Path, ranks: int) -> str:
    document = job(server.url, directory / "ml", "data/train/")
    document["Penstock"]["HedgeBudget"] = 0  # a hedge on a slow machine is much of 180 kB
    channel = document["InputDataConfig"][0]
    channel["ShuffleConfig"] = {"Seed": 5}
    channel["Penstock"] = {
        "Ranks": {"Count": ranks, "GlobalBatch": GLOBAL_BATCH, "Block": 600},
        "Records": {"Format": "TFRecord", "Index": str(directory / "index")},
    }
    return write_job(directory / "job.yaml", document)


def fetched(running_sidecar: Sidecar) -> float:
    """Return the bytes received for each byte that FIFOs took, without parts that wait for the next epoch."""
    with urllib.request.urlopen(f"{running_sidecar.url}/metrics") as answer:
        text = answer.read().decode()

    def total(metric: str) -> float:
        return sum(map(float, re.findall(rf"^{metric}{{.*}} (\S+)$", text, re.MULTILINE)))

    written, wasted = total("penstock_fifo_written_bytes_total"), total("penstock_wasted_bytes_total")
    received = total("penstock_received_bytes_total") - total("penstock_reserved_bytes")
    return max(written + wasted, received) / written


def train(framework: Framework, server: Server, ranks: int) -> Trained:
    """Run one training job. Raises Broken if it fails, hangs, or its ranks made unequal numbers of steps."""
    with tempfile.TemporaryDirectory() as name:
        directory, out = Path(name), Path(name, "out")
        out.mkdir()
        path = job_file(server, directory, ranks if framework.processes else 1)
        built = penstock("index", "build", "-c", path)
        if built.returncode:
            raise Broken(built.stderr)
        share, found = 0.0, list[Any]()
        # A job that is stopped goes on at another number of ranks.
        for number in (ranks, 4 if ranks < 4 else 2) if framework.stopped else (ranks,):
            if found and (state := load_state(out) or {}).get("step") != STOP:
                raise Broken(f"the file of --resume has {state} after {STOP} steps")
            path = job_file(server, directory, number if framework.processes else 1)
            share = max(share, run_job(framework, path, directory, number))
            found.append([
                json.loads(Path(out, f"{rank}.json").read_text(encoding="utf-8"))
                for rank in range(number if framework.processes else 1)
            ])  # fmt: skip
        if share != 1 and not framework.leaves:
            raise Broken(f"{share} bytes were fetched for each byte streamed")
    for each in found:
        if len(lengths := {len(steps) for steps in each}) != 1:
            raise Broken(f"ranks made {sorted(lengths)} steps")
    steps = [step for each in found for step in zip(*each, strict=True)]
    return Trained(
        [[number for each in step for number in each["records"]] for step in steps],
        [float(np.mean([each["loss"] for each in step])) for step in steps],
        share,
    )


def run_job(framework: Framework, path: str, directory: Path, ranks: int) -> float:
    """Run a sidecar and a training job to its end; return the bytes fetched for each byte streamed."""
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    command = [
        sys.executable, "-m", *(launcher if framework.processes else []),
        f"tests.machines.frameworks.programs.{framework.program}", str(directory / "out"),
    ]  # fmt: skip
    environment = os.environ | {
        "SAGEMAKER_BASE_DIR": str(directory / "ml"), "GLOBAL_BATCH": str(GLOBAL_BATCH), "STOP": str(STOP),
        "REPLICAS": str(ranks), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    with sidecar(path, "--resume", f"{directory}/out/") as serving:
        serving.wait_for("ready")
        try:
            done = subprocess.run(
                command, env=environment, check=False, capture_output=True, text=True, timeout=LIMIT
            )
        except subprocess.TimeoutExpired:
            raise Broken(f"it still ran after {LIMIT} s") from None
        if done.returncode:
            raise Broken(f"exit status {done.returncode}: {done.stderr}")
        return fetched(serving)


def judge(trained: Trained, first: Trained) -> str:
    """Return steps, the largest difference of losses, bytes fetched for each byte streamed.

    Raises Broken if it is not what the job with one rank did.
    """
    steps = sum(UNEVEN) // GLOBAL_BATCH
    if len(trained.records) != steps * EPOCHS:
        raise Broken(f"{len(trained.records)} steps instead of {steps * EPOCHS}")
    for epoch in range(EPOCHS):
        read = [number for step in trained.records[epoch * steps : (epoch + 1) * steps] for number in step]
        if len(set(read)) != len(read) or len(read) != steps * GLOBAL_BATCH:
            raise Broken(f"epoch {epoch} had {len(read)} records, {len(set(read))} of them different")
    if trained.records != first.records:
        raise Broken("a step had other records than with one rank")
    apart = max(abs(one - other) for one, other in zip(trained.losses, first.losses, strict=True))
    if apart > TOLERANCE:
        raise Broken(f"losses differ by up to {apart:.1e}")
    return f"{len(trained.records)} steps, {apart:.0e}, {trained.fetched:.2f}"


def interrupt(program: Interrupted, case: str, first: Run | None) -> tuple[Run, Seen, Counter[str]]:
    """Run a job that is killed as the case says, until it ends. Raises Broken.

    Returns the job that nobody kills, `first` if it is there, what was seen, and who was killed.
    """
    with serving() as stub, tempfile.TemporaryDirectory(prefix="frameworks-") as name:
        if first is None:
            first = Job(program, stub, Path(name)).run(deque())
            if first.code:
                raise Broken(f"exit status {first.code}: {first.log}")
    kills, write_takes = drawn(case)
    with serving() as stub, tempfile.TemporaryDirectory(prefix="frameworks-") as name:
        seen, job_of_kills = Seen(), Job(program, stub, Path(name), write_takes)
        while True:
            saved, last = job_of_kills.saved(), not kills
            run = job_of_kills.run(kills)
            compare(run, first, saved, seen)
            if run.code == 0:
                return first, seen, job_of_kills.counts
            if last:
                raise Broken(f"exit status {run.code}: {run.log}")


@contextlib.contextmanager
def serving() -> Iterator[S3Stub]:
    """Serve the objects, and nothing else yet."""
    thread = StubThread()
    stub = thread.start()
    try:
        stub.objects |= {f"data/train/{number}": body for number, body in enumerate(uneven())}
        yield stub
    finally:
        thread.stop()


class Frameworks(Machine[str]):
    """A case is a framework; every number of ranks is a job. Or a program and its kills."""

    count = None
    limit = 2.0 * LIMIT
    workers = 1

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        self._whole: dict[str, Run] = {}
        with running("moto") as self._server:
            set_credentials(self._server.access_key, self._server.secret_key)
            upload(self._server)
            yield

    def cases(self) -> Sequence[str]:
        return [*FRAMEWORKS, *(f"{name} {number}" for name in INTERRUPTED for number in range(DRAWS))]

    def run(self, case: str) -> Result:
        if case not in FRAMEWORKS:
            return self._interrupt(case)
        framework = FRAMEWORKS[case]
        if importlib.util.find_spec(framework.needs) is None:
            return Result(Counter([f"{framework.needs} is not installed"]))
        cells: dict[str, str] = {}
        first: Trained | None = None
        for ranks in RANKS:
            try:
                trained = train(framework, self._server, ranks)
                first = first or trained
                cells[f"N = {ranks}"] = judge(trained, first)
            except Broken as error:
                cells[f"N = {ranks}"] = f"BROKEN: {error}"
        broken = [f"{name}: {cell}" for name, cell in cells.items() if cell.startswith("BROKEN")]
        return Result(Counter(jobs=len(RANKS)), "; ".join(broken), cells=cells)

    def _interrupt(self, case: str) -> Result:
        name = case.split(maxsplit=1)[0]
        program = INTERRUPTED[name]
        if importlib.util.find_spec(program.needs) is None:
            return Result(Counter([f"{program.needs} is not installed"]))
        try:
            self._whole[name], seen, counts = interrupt(program, case, self._whole.get(name))
        except Broken as error:
            return Result(Counter(jobs=1), str(error))
        counts |= Counter({"jobs": 1, "steps compared": seen.compared})
        return Result(counts, cells={"resumed": f"{seen.resumed}, {seen.apart:.0e}"})

    def table(self, cells: Mapping[str, Mapping[str, str]], _: str, /) -> str:
        head = [f"N = {ranks}" for ranks in RANKS]
        rows = [["", *head], ["---"] * (len(head) + 1)]
        rows += [
            [FRAMEWORKS[case].name, *(each[name] for name in head)]
            for case, each in cells.items()
            if case in FRAMEWORKS
        ]
        return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


MACHINE = Frameworks()
