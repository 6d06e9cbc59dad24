"""Weights of a mix that `penstock set` changes at a step, by real processes: batches, states, refusals."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from streamer.formats import tfrecord
from tests.kit.processes import Sidecar, job, penstock, sidecar, write_job
from tests.kit.stub import S3Stub
from tests.kit.trailers import published_trailer
from tests.sidecar.test_record_ranks import GLOBAL, divided, index, shuffled, uneven

EPOCHS, RARE = 4, 30
AT = 2, 2
"""Epoch and step of the change: beyond the small epochs that are fetched before a reader comes."""


class MixedJob:
    """A job that mixes two prefixes, 2 : 1."""

    def __init__(self, stub: S3Stub, tmp_path: Path) -> None:
        uneven(stub)
        stub.objects["b/rare/0"] = b"".join(tfrecord.encode(b"rare/%d/" % each) for each in range(RARE))
        self._stub, self._tmp_path = stub, tmp_path
        self.state, self.token = tmp_path / "state.json", str(tmp_path / "token")
        Path(self.token).write_text("0123456789abcdef\n")

    def path(self, ranks: int) -> str:
        document = shuffled(divided(self._stub, self._tmp_path, Count=ranks, GlobalBatch=GLOBAL))
        document["Penstock"]["Admin"] = {"Port": 0, "TokenFile": self.token}
        document["InputDataConfig"][0]["Penstock"] |= {
            "AlsoFrom": ["s3://b/rare/"],
            "Mix": {"Weights": [2, 1], "Until": "all", "By": "record"},
        }
        path = write_job(self._tmp_path / "job.yaml", document)
        if not (self._tmp_path / "index").exists():
            index(path, self._tmp_path)
        return path

    def set(self, running: Sidecar, *words: str) -> subprocess.CompletedProcess[Any]:
        return penstock("set", "--url", running.url, "--token-file", self.token, *words)

    def read(self, limit: int | None = None) -> list[tuple[int, int, list[str]]]:
        """Train; return the global batches."""
        fields = {"path": str(self.state), "epochs": EPOCHS, "limit": limit}
        trainer = [sys.executable, "-m", "tests.kit.stepping", json.dumps(fields)]
        env = os.environ | {"SAGEMAKER_BASE_DIR": str(self._tmp_path / "ml")}
        done = subprocess.run(trainer, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        lines = map(json.loads, done.stdout.splitlines())
        return [(epoch, step, [name for share in shares for name in share]) for epoch, step, shares in lines]

    def train(
        self, ranks: int, limit: int | None = None, *, change: bool
    ) -> list[tuple[int, int, list[str]]]:
        with sidecar(self.path(ranks), "--resume", str(self.state)) as running:
            running.wait_for("ready")
            if change:
                done = self.set(running, "train.weights=0.5,0.5", "--at", "{}:{}".format(*AT))
                assert done.returncode == 0, done.stderr
                noted = running.wait_for("weights changed", channel="train", epoch=AT[0], step=AT[1])
                assert noted["order"] in done.stdout
                metrics = running.get("/metrics")[1]
                digest = f'training_job="penstock",order="{noted["order"]}"'
                assert f'penstock_order_hosts{{whole="train",{digest}}} 1.0' in metrics
                weight = 'penstock_mix_weight_ratio{whole="train",prefix="s3://b/rare/"}'
                assert f"{weight} {1 / 3}\n" in metrics, "the change is pending"
            found = self.read(limit)
            if change and limit is not None:  # the weights hold already, so nothing changes
                again = json.loads(self.set(running, "--json", "train.weights=1,1").stdout)
                assert (again["epoch"], again["step"]) == AT
            running.process.kill()
        return found


@pytest.fixture
def mixed(stub: S3Stub, tmp_path: Path) -> MixedJob:
    return MixedJob(stub, tmp_path)


def test_any_number_of_ranks_goes_on_with_the_weights_of_the_state(mixed: MixedJob) -> None:
    """From a state before the change and from one after it; the shares are exact on both sides."""
    whole = mixed.train(2, change=True)
    mixed.state.unlink()
    steps = max(step for _, step, _ in whole) + 1
    assert len(whole) == EPOCHS * steps
    parts = mixed.train(2, limit=AT[0] * steps + 1, change=True)
    assert json.loads(mixed.state.read_text())["order"]["changes"]["weights"] == [[*AT, [1, 1]]]
    parts += mixed.train(3, limit=3, change=False)
    parts += mixed.train(1, change=False)
    assert parts == whole

    for epoch in range(EPOCHS):
        names = [name for each, _, batch in whole for name in batch if each == epoch]
        border = AT[1] * GLOBAL if epoch == AT[0] else 0 if epoch > AT[0] else len(names)
        for first, last, share in ((0, border, 1 / 3), (border, len(names), 1 / 2)):
            rare = 0
            for count, name in enumerate(names[first:last], 1):
                rare += name.startswith("rare")
                assert abs(rare - count * share) < 1


def test_the_next_sidecar_takes_the_change_from_the_keeper_s_fifos(mixed: MixedJob) -> None:
    due = mixed.train(2, change=True)
    mixed.state.unlink()
    with sidecar(mixed.path(2), "--keeper", "auto") as running:
        running.wait_for("ready")
        assert mixed.set(running, "train.weights=1,1", "--at", "{}:{}".format(*AT)).returncode == 0
        running.process.kill()
        running.wait()
    with sidecar(mixed.path(2), "--keeper", "auto") as running:
        running.wait_for("weights of a mix changed earlier", channel="train", changes=[[*AT, [1, 1]]])
        running.wait_for("ready")
        assert mixed.read() == due
        assert running.end() == 0


def test_a_change_that_cannot_be_made_is_refused_by_name(mixed: MixedJob) -> None:
    with sidecar(mixed.path(2)) as running:
        running.wait_for("ready")
        mixed.read(limit=1)
        for words, error in (
            (["train.weights=1,1", "--at", "0:0"], "has come past step 0 of epoch 0 on this host"),
            (["train.weights=1,1", "--at", "5:900"], "steps, and the step is 900"),
            (["train.weights=1,1,1"], "mixes 2 prefixes; give a weight for each"),
            (["train.weights=1,0"], "greater than 0"),
            (["other.weights=1,1"], "no Pipe channel with a Mix is called 'other'"),
            (["train.weights=1,a"], "write train.weights=70,20,10"),
            (["train.weights=1,1", "bandwidth=1MB"], "in a command of their own"),
            (["bandwidth=1MB", "--at", "0:5"], "no word has weights"),
        ):
            done = mixed.set(running, *words)
            assert (done.returncode, error in done.stderr) == (2, True), (words, done.stderr)
        done = mixed.set(running, "--json", "train.weights=1,1")
        after = json.loads(done.stdout)
        assert after["changes"] == [{"epoch": after["epoch"], "step": after["step"], "weights": [1, 1]}]
        assert json.loads(running.get("/weights")[1])["train"]["changes"] == after["changes"]


@pytest.mark.parametrize("ranks", [{"Count": 2}, {"Count": 1, "Copies": 2}], ids=str)
def test_a_change_in_mid_epoch_gives_the_bytes_of_one_beforehand(
    stub: S3Stub, tmp_path: Path, ranks: dict[str, Any]
) -> None:
    """While bytes flow: the sidecar has planned a part of the epoch, and has no memory for the rest."""
    for name, count in (("train", 600), ("rare", 200)):
        records = [tfrecord.encode(f"{name}/{each}/".encode() + bytes(40_000)) for each in range(count)]
        stub.objects[f"b/{name}/0"] = b"".join(records)
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    document = job(stub.url, tmp_path / "ml", "b/train/", MemoryBudget="8MiB", PartSize="1MiB")
    document["Penstock"]["Admin"] = {"Port": 0, "TokenFile": str(token)}
    channel = document["InputDataConfig"][0]
    channel["ShuffleConfig"] = {"Seed": 3}
    channel["Penstock"] = {
        "AlsoFrom": ["s3://b/rare/"],
        "Mix": {"Weights": [5, 1]},
        "Ranks": ranks | {"GlobalBatch": 4, "Block": "512KiB", "Index": str(tmp_path / "index")},
    }
    path = write_job(tmp_path / "job.yaml", document)
    index(path, tmp_path)
    data = tmp_path / "ml/input/data"

    def read(rank: int, begun: threading.Barrier, go_on: threading.Event) -> bytes:
        found = hashlib.sha256()
        with open(data / f"train-{rank}_0", "rb", buffering=0) as fifo:
            found.update(fifo.read(4096))
            begun.wait()
            go_on.wait()
            while part := fifo.read(1 << 20):
                found.update(part)
        return found.digest()

    state, found = "", []
    for _ in range(2):
        begun, go_on = threading.Barrier(3), threading.Event()
        with (
            sidecar(path, *(["--resume", state] if state else [])) as running,
            ThreadPoolExecutor() as threads,
        ):
            running.wait_for("ready")
            streams = [threads.submit(read, rank, begun, go_on) for rank in range(2)]
            try:
                begun.wait()
                if not state:
                    to = ["--url", running.url, "--token-file", str(token)]
                    after = json.loads(penstock("set", "--json", *to, "train.weights=1,5").stdout)
                    print("AFTER", after)
                    assert after["epoch"] == 0 < after["step"], "in the part that is not planned"
            finally:
                go_on.set()
            found.append([stream.result() for stream in streams])
            running.wait_for("epoch complete", times=2)
            assert running.end() == 0
        order = published_trailer(data, "train-0", 0).order
        state = json.dumps({"format": 1, "channel": "train", "epoch": 0, "step": 0, "order": order})
    assert found[0] == found[1]
