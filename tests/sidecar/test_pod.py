"""`penstock run` and `penstock-finish` in the order of a pod: when the model is in S3, and who says so.

`tests.kit.pod` is a harness of processes, and no kubelet.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.archives import members
from tests.kit.children import output_of
from tests.kit.pod import Pod
from tests.kit.processes import Sidecar, job, sidecar, write_job
from tests.kit.stub import S3Stub

MODEL = "b/out/my-job/output/model.tar.gz"
OUTPUT = "b/out/my-job/output/output.tar.gz"
SAVES = """
import os, signal, sys
base, code = sys.argv[1], int(sys.argv[2])
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("started", flush=True)
if "waits" in sys.argv:
    signal.sigwait([signal.SIGTERM])
open(f"{base}/model/weights", "wb").write(os.urandom(1 << 20))
open(f"{base}/output/data/log", "w").write("trained")
if code:
    open(f"{base}/output/failure", "w").write("no more GPU")
sys.exit(code)
"""
"""A trainer that saves and ends with a code; with the argument `waits`, at SIGTERM."""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tmp_path / "ml"


@pytest.fixture
def serving(stub: S3Stub, base: Path, tmp_path: Path) -> Iterator[Sidecar]:
    stub.objects["b/train/0"] = b"bytes"
    document = job(stub.url, base, "b/train/", GiveUpAfter=3)
    document |= {"TrainingJobName": "my-job", "OutputDataConfig": {"S3OutputPath": "s3://b/out"}}
    with sidecar(write_job(tmp_path / "job.yaml", document), cold=True) as running:
        running.wait_for("ready")
        yield running


def pod(serving: Sidecar, base: Path, *arguments: str, finish: bool = True, grace: float = 60) -> Pod:
    assert isinstance(serving.process, subprocess.Popen)
    wrapped = [str(base / "input/config/penstock-finish"), "--"] if finish else []
    return Pod(serving.process, [*wrapped, sys.executable, "-c", SAVES, str(base), *arguments], grace=grace)


def weights(base: Path) -> bytes:
    return (base / "model/weights").read_bytes()


def test_the_model_is_in_s3_when_the_trainers_container_ends(
    stub: S3Stub, serving: Sidecar, base: Path
) -> None:
    with pod(serving, base, "0") as running:
        assert running.trainer.wait() == 0
        assert members(stub.objects[MODEL]) == {"weights": weights(base)}
        assert members(stub.objects[OUTPUT]) == {"log": b"trained"}
        assert serving.status()["uploads"]["output"] == "complete"
        assert running.completed() == (0, 0)
    assert not stub.puts.uploads


def test_a_trainer_that_fails_keeps_its_code(stub: S3Stub, serving: Sidecar, base: Path) -> None:
    with pod(serving, base, "3") as running:
        assert running.completed() == (3, 0)
    assert MODEL not in stub.objects
    assert members(stub.objects[OUTPUT]) == {"log": b"trained"}
    assert serving.wait_for("the trainer has ended", code=3, reason="no more GPU")


def test_a_pod_that_is_deleted_saves_and_uploads(stub: S3Stub, serving: Sidecar, base: Path) -> None:
    with pod(serving, base, "0", "waits") as running:
        assert output_of(running.trainer).readline() == "started\n"
        assert running.deleted() == (0, 0)
    assert members(stub.objects[MODEL]) == {"weights": weights(base)}


def test_without_penstock_finish_the_upload_begins_at_sigterm(
    stub: S3Stub, serving: Sidecar, base: Path
) -> None:
    with pod(serving, base, "0", finish=False) as running:
        assert running.completed() == (0, 0)
    assert members(stub.objects[MODEL]) == {"weights": weights(base)}


def test_what_is_not_uploaded_is_9(stub: S3Stub, serving: Sidecar, base: Path) -> None:
    stub.puts.refused.extend([(503, "SlowDown")] * 9999)
    with pod(serving, base, "0") as running:
        code = running.trainer.wait()
        assert running.trainer.stderr is not None
        text = running.trainer.stderr.read()
        assert code == 9
        assert "model: gave up after" in text, text
        assert serving.status()["uploads"]["output"] == "incomplete"
        assert running.completed() == (9, 9)
    assert MODEL not in stub.objects
    assert weights(base)


def test_checkpoints_that_are_left_are_incomplete_too(stub: S3Stub, base: Path, tmp_path: Path) -> None:
    stub.objects["b/train/0"] = b"bytes"
    document = job(stub.url, base, "b/train/") | {"CheckpointConfig": {"S3Uri": "s3://b/run"}}
    with sidecar(write_job(tmp_path / "job.yaml", document), cold=True) as serving:
        serving.wait_for("ready")
        assert serving.status()["uploads"]["output"] == "waiting"
        stub.puts.refused.extend([(403, "AccessDenied")] * 9999)
        finish = str(base / "input/config/penstock-finish")
        assert isinstance(serving.process, subprocess.Popen)
        trainer = [finish, "--", "sh", "-c", f"echo 1 >{base}/checkpoints/weights"]
        with Pod(serving.process, trainer, grace=60) as running:
            assert running.trainer.wait() == 9
            assert serving.status()["uploads"]["output"] == "incomplete"
            assert running.completed() == (9, 9)


def test_a_second_signal_ends_the_wait_and_not_the_upload(stub: S3Stub, serving: Sidecar, base: Path) -> None:
    signals: list[int] = []

    def signal_once() -> None:
        for number in (signal.SIGTERM, signal.SIGTERM)[len(signals) :]:
            signals.append(number)
            running.trainer.send_signal(number)
            lines = iter(running.trainer.stderr or ())
            assert "SIGTERM" in next(line for line in lines if "SIG" in line)

    stub.puts.before.append(signal_once)
    with pod(serving, base, "0") as running:
        assert running.completed() == (9, 0)
    assert members(stub.objects[MODEL]) == {"weights": weights(base)}


def test_a_container_that_is_started_again_in_its_pod(stub: S3Stub, serving: Sidecar, base: Path) -> None:
    with pod(serving, base, "3") as first:
        assert first.trainer.wait() == 3
    assert MODEL not in stub.objects
    with pod(serving, base, "0") as second:
        assert second.completed() == (0, 0)
    assert members(stub.objects[MODEL]) == {"weights": weights(base)}


def test_the_end_of_another_trainer_after_one_with_0_is_9(stub: S3Stub, serving: Sidecar, base: Path) -> None:
    """Another rank: its files came after the upload."""
    with pod(serving, base, "0") as first:
        assert first.trainer.wait() == 0
    with pod(serving, base, "0") as second:
        assert second.trainer.wait() == 9
        second.completed()


def test_a_restart_waits_for_the_upload(stub: S3Stub, serving: Sidecar, base: Path) -> None:
    """The next sidecar would know nothing of the request."""
    parts: list[int] = []

    def restart() -> None:
        if not parts:
            parts.append(1)
            serving.process.send_signal(signal.SIGUSR2)
            assert "being uploaded" in serving.wait_for("cannot restart, going on")["error"]

    stub.puts.before.append(restart)
    with pod(serving, base, "0") as running:
        assert running.completed() == (0, 0)
    assert members(stub.objects[MODEL]) == {"weights": weights(base)}


def test_a_sidecar_that_is_killed_in_the_upload(stub: S3Stub, serving: Sidecar, base: Path) -> None:
    stub.puts.before.append(serving.process.kill)
    with pod(serving, base, "0") as running:
        assert running.trainer.wait() == 9
        serving.process.wait()
    if MODEL in stub.objects:  # the uploader was faster than its end
        assert members(stub.objects[MODEL]) == {"weights": weights(base)}


def test_grace_that_is_over(stub: S3Stub, serving: Sidecar, base: Path) -> None:
    """All are killed: no torn object, and nobody has called the model uploaded."""
    stub.puts.refused.extend([(503, "SlowDown")] * 9999)
    with pod(serving, base, "0", "waits", grace=1) as running:
        assert output_of(running.trainer).readline() == "started\n"
        code, _ = running.deleted()
        assert code == -signal.SIGKILL
    assert MODEL not in stub.objects
