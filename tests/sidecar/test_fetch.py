"""`Fetch`: ranks that are one stream, and those that are fetched separately, by real processes."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.kit.pipes import read_all
from tests.kit.processes import penstock_with, sidecar
from tests.kit.stub import S3Stub
from tests.sidecar.test_shared_streams import Pull, fifo, filled, opened, status_with

SOON = penstock_with("sidecar.job.channel_log.HELD_BACK_AFTER = 0.4")


@pytest.mark.parametrize("fetch", ["auto", "together"])
def test_a_fifo_without_a_reader_is_named_to_those_who_wait(stub: S3Stub, tmp_path: Path, fetch: str) -> None:
    """Whoever reads rank after rank is told so, in the log and the status, and goes on with all readers."""
    path, due = filled(stub, tmp_path, count=4, Fetch=fetch)
    with sidecar(path, prefix=SOON) as started:
        started.wait_for("ready")
        early = [Pull(read_all, fifo(tmp_path, rank)) for rank in range(3)]
        event = started.wait_for("held back", by=["train-3"], waiting=["train-0", "train-1", "train-2"])
        assert "set Fetch: separately" in event["do"]
        # The bottleneck is that of the last seconds.
        channels = status_with(started, "train-0", lambda each: each["bottleneck"]["kind"] == "held_back")
        waiting = channels["train-0"]
        assert waiting["held_back_by"] == ["train-3"]
        assert "set Fetch: separately" in waiting["bottleneck"]["remedy"]
        assert [read_all(fifo(tmp_path, 3)), *(reader.join() for reader in early)] == [due[3], *due[:3]]
        assert started.end() == 0


def test_ranks_that_pause_together_hold_nobody_back(stub: S3Stub, tmp_path: Path) -> None:
    """The trainer saves a checkpoint: the FIFOs have bytes, and only the trainer can go on."""
    path, due = filled(stub, tmp_path, megabytes=48, Fetch="auto")
    with sidecar(path, prefix=SOON) as started, contextlib.ExitStack() as stack:
        started.wait_for("ready")
        files = opened(stack, [fifo(tmp_path, rank) for rank in range(2)])
        begun = [file.read(1) for file in files]
        for rank in range(2):
            status_with(started, f"train-{rank}", lambda each: each["fifo_bytes"])
        status_with(
            started, "train-0", lambda each: each["seconds"]["blocked"] + each["seconds"]["held_back"] > 2
        )
        readers = [Pull(file.readall) for file in files]  # type: ignore[attr-defined]
        assert [first + reader.join() for first, reader in zip(begun, readers, strict=True)] == due
        assert started.end() == 0
    assert "held back" not in {each["event"] for each in started.events}


def test_ranks_with_large_slices_are_fetched_separately(stub: S3Stub, tmp_path: Path) -> None:
    """A FIFO does not hold a slice of more than 1 MiB, so ranks would be read in turns."""
    path, due = filled(stub, tmp_path, batch=300, Remainder="repeat", Fetch="auto")
    with sidecar(path) as started:
        started.wait_for("ready")
        for rank in range(2):
            assert read_all(fifo(tmp_path, rank)).startswith(due[rank][: 300 * 4096])
        assert started.end() == 0


def test_explicit_values_separate_ranks_or_do_not(stub: S3Stub, tmp_path: Path) -> None:
    for fetch in ("together", "separately"):
        path, due = filled(stub, tmp_path, Fetch=fetch)
        with sidecar(path) as started:
            started.wait_for("ready")
            first = Pull(read_all, fifo(tmp_path, 0))
            if fetch == "together":
                status_with(started, "train-0", lambda each: each["held_back_by"])
            else:
                assert first.join() == due[0]
            assert read_all(fifo(tmp_path, 1)) == due[1]
            assert first.join() == due[0]
            assert started.end() == 0
