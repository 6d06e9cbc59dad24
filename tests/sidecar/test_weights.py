"""Weights of a mix that change at a step (`Mix.Then`), by real processes: batches, states, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from streamer.formats import tfrecord
from tests.kit.processes import penstock, sidecar, write_job
from tests.kit.stub import S3Stub
from tests.sidecar.test_elastic import Batches, trained
from tests.sidecar.test_record_ranks import GLOBAL, divided, index, refused, shuffled, uneven

EPOCHS, RARE = 4, 30
AT = 2, 2
"""Epoch and step of the change."""
THEN = [{"Epoch": AT[0], "Step": AT[1], "Weights": [0.5, 0.5]}]


class MixedJob:
    """A job that mixes two prefixes, 2 : 1 and then 1 : 1."""

    def __init__(self, stub: S3Stub, tmp_path: Path) -> None:
        uneven(stub)
        stub.objects["b/rare/0"] = b"".join(tfrecord.encode(b"rare/%d/" % each) for each in range(RARE))
        self._stub, self._tmp_path = stub, tmp_path
        self.state = tmp_path / "state.json"

    def path(self, ranks: int, then: list[dict[str, Any]] = THEN) -> str:
        document = shuffled(divided(self._stub, self._tmp_path, Count=ranks, GlobalBatch=GLOBAL))
        document["InputDataConfig"][0]["Penstock"] |= {
            "AlsoFrom": ["s3://b/rare/"],
            "Mix": {"Weights": [2, 1], "Until": "all", "By": "record", "Then": then},
        }
        path = write_job(self._tmp_path / "job.yaml", document)
        if not (self._tmp_path / "index").exists():
            index(path)
        return path

    def read(self, limit: int | None = None) -> Batches:
        """Train; return the global batches."""
        return trained(self._tmp_path / "ml", path=str(self.state), epochs=EPOCHS, limit=limit)

    def train(self, ranks: int, limit: int | None = None) -> Batches:
        with sidecar(self.path(ranks), "--resume", str(self.state)) as running:
            running.wait_for("ready")
            found = self.read(limit)
            running.process.kill()
        return found


@pytest.fixture
def mixed(stub: S3Stub, tmp_path: Path) -> MixedJob:
    return MixedJob(stub, tmp_path)


def test_any_number_of_ranks_goes_on_in_the_schedule(mixed: MixedJob) -> None:
    """From a state before the change and from one after it; the shares are exact on both sides."""
    whole = mixed.train(2)
    mixed.state.unlink()
    steps = max(step for _, step, _ in whole) + 1
    assert len(whole) == EPOCHS * steps
    parts = mixed.train(2, limit=AT[0] * steps + 1)
    assert json.loads(mixed.state.read_text())["order"]["mix"]["then"] == [[*AT, [1, 1]]]
    parts += mixed.train(3, limit=3)
    parts += mixed.train(1)
    assert parts == whole

    for epoch in range(EPOCHS):
        names = [name for each, _, batch in whole for name in batch if each == epoch]
        border = AT[1] * GLOBAL if epoch == AT[0] else 0 if epoch > AT[0] else len(names)
        for first, last, share in ((0, border, 1 / 3), (border, len(names), 1 / 2)):
            rare = 0
            for count, name in enumerate(names[first:last], 1):
                rare += name.startswith("rare")
                assert abs(rare - count * share) < 1


def test_the_next_sidecar_goes_on_with_the_keeper_s_fifos(mixed: MixedJob) -> None:
    due = mixed.train(2)
    mixed.state.unlink()
    with sidecar(mixed.path(2), "--keeper", "auto") as running:
        running.wait_for("ready")
        running.process.kill()
        running.wait()
    with sidecar(mixed.path(2), "--keeper", "auto") as running:
        order = running.wait_for("planned", channel="train")["order"]
        running.wait_for("ready")
        labels = f'whole="train",training_job="penstock",order="{order}"'
        assert f"penstock_order_hosts{{{labels}}} 1.0\n" in running.get("/metrics")[1]
        assert mixed.read() == due
        assert running.end() == 0


def test_another_schedule_is_refused_by_name(mixed: MixedJob) -> None:
    """With a state that was saved under the first one; and one whose step no epoch has."""
    mixed.train(2, limit=2)
    other = [THEN[0] | {"Step": 3}]
    done = penstock("run", "-c", mixed.path(2, other), "--resume", str(mixed.state))
    assert (done.returncode, "Mix was" in done.stderr) == (2, True), done.stderr
    refused(mixed.path(2, [THEN[0] | {"Step": 900}]), 2, "has a change at step 900 of epoch 2")
