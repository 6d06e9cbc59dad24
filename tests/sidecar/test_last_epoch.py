"""`Penstock.Epochs`: nothing is fetched, offered or waited for after the last epoch, by real processes."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from streamer.errors import ChannelError
from streamer.readers import PipeReader
from streamer.readers.core.position import ReaderPosition
from tests.kit.harness import fill
from tests.kit.pipes import read_all
from tests.kit.processes import job, sidecar, write_job
from tests.kit.stub import S3Stub, fails
from tests.kit.trailers import published_trailer
from tests.sidecar.test_record_ranks import GLOBAL, all_epochs, divided, index, uneven

SIZES = [300_000, 0, 1, 200_000]


def fifos(data: Path) -> list[str]:
    return sorted(name for name in os.listdir(data) if re.fullmatch(r"[a-z0-9-]+_\d+", name))


@pytest.fixture
def place(stub: S3Stub, tmp_path: Path) -> Any:
    """A job of two epochs, its data directory, and what an epoch of `train` is."""
    truth = fill(stub, SIZES, prefix="b/train/")

    def make(*more: str, **section: Any) -> Any:
        document = job(stub.url, tmp_path / "ml", "b/train/", *more, **{"Epochs": 2} | section)
        return write_job(tmp_path / "job.yaml", document), tmp_path / "ml" / "input" / "data", truth

    return make


@pytest.mark.parametrize("transport", ["splice", "buffered"])
def test_nothing_follows_the_last_epoch(stub: S3Stub, place: Any, transport: str) -> None:
    """No FIFO, no request; the sidecar stays, so that a container of it does not start again."""
    path, data, truth = place(Transport=transport)
    with sidecar(path) as started:
        started.wait_for("ready")
        for epoch in range(2):
            assert read_all(data / f"train_{epoch}") == truth
        started.wait_for("epoch complete", epoch=1)
        assert fifos(data) == []
        assert len(stub.seen) == 2 * sum(size > 0 for size in SIZES)
        trailer = published_trailer(data, "train", 1)
        assert (trailer.state, trailer.epochs) == ("complete", 2)
        assert started.get("/readyz")[0] == 200
        assert started.status()["channels"]["train"]["state"] == "stopped"
        reader = PipeReader("train", "TFRecord", epoch=2, timeout=600, pipe_dir=str(data))
        with pytest.raises(ChannelError, match=r"has Penstock.Epochs: 2, and they are over; raise it"):
            next(iter(reader))
        assert started.end() == 0


@pytest.mark.parametrize(("count", "copies"), [(2, 1), (1, 2)])
def test_nor_that_of_a_shared_stream(stub: S3Stub, tmp_path: Path, count: int, copies: int) -> None:
    uneven(stub)
    fetch = "together" if count > 1 else "auto"
    document = divided(stub, tmp_path, Count=count, Copies=copies, GlobalBatch=GLOBAL, Fetch=fetch)
    document["Penstock"]["Epochs"] = 2
    path = write_job(tmp_path / "job.yaml", document)
    index(path)
    with sidecar(path) as started:
        started.wait_for("ready")
        before = len(stub.seen)
        read = all_epochs(tmp_path / "ml", count * copies)
        for name in read:
            started.wait_for("epoch complete", epoch=1, channel=name)
        after = len(stub.seen)
        assert after > before
        assert fifos(tmp_path / "ml/input/data") == []
        assert started.end() == 0
    assert len(stub.seen) == after


def test_a_last_epoch_that_fails_has_no_successor(stub: S3Stub, place: Any) -> None:
    path, data, _ = place(Epochs=1, GiveUpAfter=1)
    named = "ChannelName: train"
    document = Path(path).read_text().replace(named, f"{named}\n  Penstock: {{WhenFailed: close}}")
    Path(path).write_text(document)
    stub.script(*[fails(404, "NoSuchKey")] * 9)
    with sidecar(path) as started:
        started.wait_for("ready")
        assert read_all(data / "train_0") == b""
        started.wait_for("epoch failed")
        assert fifos(data) == []
        assert not (data / ".train_1.penstock.json").exists()
        started.end()


def test_a_restart_knows_which_channels_are_over(stub: S3Stub, place: Any) -> None:
    other = fill(stub, SIZES, prefix="b/test/")
    path, data, truth = place("b/test/", Epochs=1)
    with sidecar(path) as started:
        started.wait_for("ready")
        assert read_all(data / "train_0") == truth
        started.wait_for("epoch complete", epoch=0, channel="train")
        seen = sum("/train/" in each.key for each in stub.seen)
        for times in (2, 3):
            started.process.send_signal(signal.SIGUSR2)
            started.wait_for("ready", times=times)
            assert fifos(data) == ["test_0"]
        assert read_all(data / "test_0") == other
        started.wait_for("epoch complete", epoch=0, channel="test")
        assert sum("/train/" in each.key for each in stub.seen) == seen
        assert published_trailer(data, "train", 0).state == "complete"
        assert started.end() == 0


def test_a_state_after_the_last_epoch_is_refused(place: Any) -> None:
    path, *_ = place()
    state = ReaderPosition("train", 2).state()
    with sidecar(path, "--resume", json.dumps(state), "--resume-anyway") as started:
        assert started.wait() == 2
        text = started.wait_for("ended", code=2)["error"]
    assert text == (
        "channel train would go on with epoch 2, counted from 0, and the job has Penstock.Epochs: 2; "
        "raise it if the training is not over"
    )
