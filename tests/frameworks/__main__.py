"""`python -m tests.frameworks`: every framework at every number of ranks, and what was seen.

A framework that is not installed is named and left out. The exit status is 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import numpy as np

from streamer.formats import tfrecord
from streamer.readers import load_state
from tests.frameworks.programs.task import DIMENSIONS, EPOCHS
from tests.kit.processes import Sidecar, job, penstock, sidecar, write_job
from tests.servers.servers import Server, running

GLOBAL_BATCH = 24
UNEVEN = [3, 0, 410, 1, 170, 218, 77, 124]
"""Records of the objects."""
TOLERANCE = 1e-5
"""Most that two losses differ by, of sums that were rounded in another order."""
STOP = 30
"""Steps after which a job is stopped that goes on from its checkpoint."""
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


class Broken(Exception):
    """A promise that did not hold."""


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
        "Ranks": {
            "Count": ranks,
            "GlobalBatch": GLOBAL_BATCH,
            "Index": str(directory / "index"),
            "Block": 600,
        }
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
        built = penstock(
            "index",
            "build",
            "-c",
            path,
            "--to",
            str(directory / "index"),
            "--format",
            "TFRecord",
            "--every",
            "1",
        )
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
        f"tests.frameworks.programs.{framework.program}", str(directory / "out"),
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


def tried(framework: Framework, server: Server, numbers: list[int]) -> list[str]:
    """Return what was seen at each number of ranks; what was broken in capitals."""
    cells: list[str] = []
    first: Trained | None = None
    for ranks in numbers:
        try:
            trained = train(framework, server, ranks)
            first = first or trained
            cells.append(judge(trained, first))
        except Broken as broken:
            cells.append(f"BROKEN: {broken}")
        print(f"{framework.name}, {ranks} ranks: {cells[-1]}", flush=True)
    return cells


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.frameworks", description=__doc__)
    parser.add_argument("frameworks", nargs="*", metavar="FRAMEWORK", help=f"of {', '.join(FRAMEWORKS)}")
    parser.add_argument("--ranks", default="1,2,3,4,8", help="numbers of ranks that divide 24, one first")
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.frameworks) - set(FRAMEWORKS):
        parser.error(f"no such framework: {', '.join(sorted(unknown))}")
    numbers = [int(number) for number in chosen.ranks.split(",")]
    for variable in [variable for variable in os.environ if variable.startswith("AWS_")]:
        del os.environ[variable]
    cells: list[str] = []
    with running("moto") as server:
        os.environ |= {"AWS_ACCESS_KEY_ID": server.access_key, "AWS_SECRET_ACCESS_KEY": server.secret_key}
        os.environ |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
        upload(server)
        for framework in [FRAMEWORKS[name] for name in chosen.frameworks or FRAMEWORKS]:
            if importlib.util.find_spec(framework.needs) is None:
                print(f"{framework.name}: {framework.needs} is not installed")
                continue
            cells += tried(framework, server, numbers)
    return int(any(cell.startswith("BROKEN") for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
