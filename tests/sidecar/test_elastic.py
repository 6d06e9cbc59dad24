"""A job that goes on at another number of ranks, by real processes: where `--resume` finds its state."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from streamer.readers import PipeReader
from streamer.step_state import FILE_NAME
from tests.kit.processes import penstock, sidecar, write_job
from tests.kit.stub import S3Stub
from tests.sidecar.test_record_keys import directories
from tests.sidecar.test_record_ranks import BLOCK, GLOBAL, SEED, divided, index, shuffled, uneven
from tests.unit import reference

EPOCHS = 2
Batches = list[tuple[int, int, list[str]]]
"""Epoch, step and names of the records of each global batch."""


def trained(base: Path, *, error: str = "", **training: Any) -> Batches:
    """Run a trainer; return the global batches that it took. `error`: end of its error."""
    trainer = [sys.executable, "-m", "tests.kit.stepping", json.dumps(training)]
    env = os.environ | {"SAGEMAKER_BASE_DIR": str(base)}
    done = subprocess.run(trainer, env=env, capture_output=True, text=True, check=False)
    assert done.stderr.strip().endswith(error) if error else done.returncode == 0, done.stderr
    lines = map(json.loads, done.stdout.splitlines())
    return [(epoch, step, [name for share in shares for name in share]) for epoch, step, shares in lines]


class Elastic:
    """A job of uneven objects, and what its trainer has to read."""

    def __init__(self, stub: S3Stub, tmp_path: Path) -> None:
        records = uneven(stub)
        counts, sizes = [len(each) for each in records], [sum(map(len, each)) for each in records]
        self._stub, self._tmp_path = stub, tmp_path
        self.state = tmp_path / "checkpoints" / FILE_NAME
        self.state.parent.mkdir()
        self.due = []
        for epoch in range(EPOCHS):
            order = reference.record_order(counts, sizes, seed=SEED, epoch=epoch, block=BLOCK)
            for step, batch in enumerate(reference.global_batches(order, GLOBAL, "drop")):
                self.due.append((epoch, step, [f"{entry}/{number}/" for entry, number in batch]))

    def job(self, ranks: int, **keys: Any) -> str:
        document = shuffled(divided(self._stub, self._tmp_path, Count=ranks, GlobalBatch=GLOBAL))
        document["InputDataConfig"][0]["Penstock"]["Ranks"] |= keys
        path = write_job(self._tmp_path / "job.yaml", document)
        if not (self._tmp_path / "index").exists():
            index(path)
        return path

    def train(self, path: str, *options: str, **training: Any) -> Batches:
        """Run sidecar and trainer; return the global batches."""
        with sidecar(path, *options) as running:
            running.wait_for("ready")
            fields: dict[str, Any] = {"path": str(self.state), "epochs": EPOCHS} | training
            found = trained(self._tmp_path / "ml", **fields)
            running.process.kill()
        return found


@pytest.fixture
def elastic(stub: S3Stub, tmp_path: Path) -> Elastic:
    return Elastic(stub, tmp_path)


@pytest.mark.parametrize("load", [True, False])
def test_any_number_of_ranks_goes_on_after_the_steps_that_were_taken(elastic: Elastic, load: bool) -> None:
    """In both epochs; any rank's state is the job's, and without loading it a reader begins there too."""
    found = []
    for ranks, limit, saver in ((2, 4, 1), (3, 1, 2), (12, 3, 7), (1, 2, 0), (4, None, 3)):
        directory = str(elastic.state.parent)
        found += elastic.train(elastic.job(ranks), "--resume", directory, limit=limit, saver=saver, load=load)
    assert found == elastic.due


@pytest.mark.parametrize("limit", [3, 6, 9])
def test_the_readers_need_no_resumed_sidecar(elastic: Elastic, limit: int) -> None:
    """They leave the epochs before that of their state, and drop the records of its steps before.

    So does a trainer that was killed after its checkpoint, and before the file of `--resume`.
    """
    first = elastic.train(elastic.job(2), limit=limit)
    assert first + elastic.train(elastic.job(4)) == elastic.due


def test_a_length_is_known_in_an_epoch_after_the_one_that_is_offered(elastic: Elastic) -> None:
    elastic.train(elastic.job(2), limit=9)
    with sidecar(elastic.job(2)) as running:
        running.wait_for("ready")
        base = elastic.state.parent.parent / "ml"
        reader = PipeReader("train-0", "TFRecord", timeout=30, **directories(base))
        reader.load_state_dict(json.loads(elastic.state.read_text()))
        assert len(reader) == 6 * GLOBAL // 2
        assert running.end() == 0


@pytest.mark.parametrize("uri", ["s3://b/run/state.json", "s3://b/run/"])
def test_a_state_in_s3(elastic: Elastic, stub: S3Stub, uri: str) -> None:
    """Absent at the first start, with the same option."""
    path = elastic.job(3)
    with sidecar(path, "--resume", uri) as running:
        key = "b/run/state.json" if uri.endswith("json") else f"b/run/{FILE_NAME}"
        running.wait_for("no state yet, beginning at epoch 0", resume=f"s3://{key}")
        running.wait_for("ready")
        assert running.end() == 0
    first = elastic.train(path, "--resume", uri, limit=8)
    stub.objects[key] = elastic.state.read_bytes()
    assert first + elastic.train(elastic.job(6), "--resume", uri) == elastic.due


def test_exec_resumes_too(elastic: Elastic) -> None:
    elastic.train(elastic.job(2), limit=9)
    training = json.dumps({"path": str(elastic.state), "epochs": EPOCHS})
    command = [sys.executable, "-m", "tests.kit.stepping", training]
    done = penstock("exec", "-c", elastic.job(4), "--resume", str(elastic.state), "--", *command)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)[:2] for line in done.stdout.splitlines()] == [[1, 3], [1, 4], [1, 5]]


def test_a_state_that_does_not_fit_is_refused_before_a_fifo_is_offered(elastic: Elastic) -> None:
    elastic.train(elastic.job(2), limit=9)
    resume = "--resume", str(elastic.state)
    path = elastic.job(2, GlobalBatch=6)
    done = penstock("run", "-c", path, *resume)
    assert (done.returncode, "GlobalBatch was 12 and is 6" in done.stderr) == (2, True), done.stderr
    elastic.state.write_text("")
    done = penstock("run", "-c", elastic.job(2), *resume)
    assert (done.returncode, "--resume is not JSON" in done.stderr) == (2, True), done.stderr


def test_readers_refuse_a_state_of_another_order(elastic: Elastic) -> None:
    elastic.train(elastic.job(2), limit=3)
    state = json.loads(elastic.state.read_text())
    state["order"] |= {"digest": "0" * 64, "block": 601}
    elastic.state.write_text(json.dumps(state))
    elastic.train(
        elastic.job(2),
        error="the state of channel train was saved under another order of records: Block was 601 and is "
        "600; restore what has changed, begin without the state, or begin anyway: --resume-anyway, and "
        "load_state_dict with anyway=True",
    )


def test_a_fifo_that_begins_after_the_reader_s_step_is_an_error(elastic: Elastic) -> None:
    elastic.train(elastic.job(2), limit=3)
    later = elastic.state.with_name("later.json")
    state = json.loads(elastic.state.read_text())
    later.write_text(json.dumps(state | {"step": 4}))
    error = (
        "train-0_0 begins after step 3, the step of the state of train-0: save the checkpoint first and the "
        "file of --resume after it, or give the sidecar this state"
    )
    elastic.train(elastic.job(2), "--resume", str(later), error=error)
