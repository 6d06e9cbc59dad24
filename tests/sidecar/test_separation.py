"""`Fetch: auto`: ranks that are fetched together until one holds back the others, by real processes."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from tests.kit.impatient import prefix
from tests.kit.pipes import read_all
from tests.kit.processes import penstock, sidecar, write_job
from tests.kit.stub import S3Stub
from tests.kit.trailers import published_trailer
from tests.sidecar.test_keeper import keeper_of, running
from tests.sidecar.test_record_ranks import index
from tests.sidecar.test_shared_streams import (
    Pull,
    both,
    fifo,
    filled,
    opened,
    status_with,
    tar_streams,
    tars,
)

AT_ONCE = prefix(0)


def test_ranks_that_are_read_one_after_the_other(stub: S3Stub, tmp_path: Path) -> None:
    """They are separated once, which log, status and metrics show; trailers are as ever."""
    path, due = filled(stub, tmp_path, count=4, Fetch="auto")
    planned = json.loads(penstock("plan", "-c", path, "--json").stdout)["channels"]["train"]["ranks"]
    assert [each["parts"] for each in planned.values()] == [8, 0, 0, 0]
    with sidecar(path, prefix=AT_ONCE) as started:
        started.wait_for("ready")
        assert {each["fetched_together"] for each in started.status()["channels"].values()} == {True}
        for epoch in range(2):
            assert [read_all(fifo(tmp_path, rank, epoch)) for rank in range(4)] == due
        event = started.wait_for("ranks separated", channel="train")
        assert set(event["by"]) <= {"train-1", "train-2", "train-3"}
        assert "set Fetch: together" in event["do"]
        status = started.status()["channels"]
        metrics = started.get("/metrics")[1]
        trailers = [published_trailer(tmp_path / "ml/input/data", f"train-{rank}", 1) for rank in range(4)]
        assert started.end() == 0
    assert [each["event"] for each in started.events].count("ranks separated") == 1
    assert {each["fetched_together"] for each in status.values()} == {False}
    assert 'penstock_channel_fetched_together{channel="train-0"} 0.0' in metrics
    assert all(each["received_bytes"] >= 2 << 20 for each in status.values())
    digests = [each["digest"] for each in planned.values()]
    assert [(each.state, each.digest) for each in trailers] == [("complete", digest) for digest in digests]


@pytest.mark.parametrize("copies", [1, 2])
def test_a_sidecar_that_is_killed_after_the_separation(stub: S3Stub, tmp_path: Path, copies: int) -> None:
    """A keeper holds the FIFOs. The next sidecar fetches the ranks together again, each from its own byte."""
    path, streams = filled(stub, tmp_path, megabytes=48, Copies=copies, Fetch="auto")
    due = [stream for stream in streams for _ in range(copies)]
    with contextlib.ExitStack() as stack:
        with running(path, "--keeper", "auto", prefix=AT_ONCE) as started:
            started.wait_for("ready")
            files = opened(stack, [fifo(tmp_path, number) for number in range(copies)])
            begun = [file.read(1) + file.read(10_000 * number) for number, file in enumerate(files)]
            started.wait_for("ranks separated")
        with sidecar(path, "--keeper", "auto") as again:
            again.wait_for("ready")
            files += opened(stack, [fifo(tmp_path, number) for number in range(copies, 2 * copies)])
            readers = [Pull(file.readall) for file in files]  # type: ignore[attr-defined]
            found = [reader.join() for reader in readers]
            assert [first + rest for first, rest in zip(begun, found, strict=False)] == due[:copies]
            assert found[copies:] == due[copies:]
            assert both(tmp_path, 1, 2 * copies) == due
            assert {each["fetched_together"] for each in again.status()["channels"].values()} == {True}
            assert keeper_of(again)
            assert again.end() == 0


def test_end_marks_of_tar_samples(stub: S3Stub, tmp_path: Path) -> None:
    """The archives of each rank, end marks included, whenever the ranks are separated."""
    path = write_job(tmp_path / "job.yaml", tars(stub, tmp_path, Count=3, Fetch="separately"))
    index(path, tmp_path, kind="tar")
    due = tar_streams(path, tmp_path, 3)
    path = write_job(tmp_path / "job.yaml", tars(stub, tmp_path, Count=3, Fetch="auto"))
    with sidecar(path, prefix=AT_ONCE) as started:
        started.wait_for("ready")
        assert [read_all(fifo(tmp_path, rank)) for rank in range(3)] == due
        started.wait_for("ranks separated")
        assert started.end() == 0


def test_ranks_with_large_slices_are_fetched_separately(stub: S3Stub, tmp_path: Path) -> None:
    """A FIFO does not hold a slice of more than 1 MiB, so ranks would be read in turns."""
    path, due = filled(stub, tmp_path, batch=300, Remainder="repeat", Fetch="auto")
    with sidecar(path) as started:
        started.wait_for("ready")
        assert {each["fetched_together"] for each in started.status()["channels"].values()} == {False}
        for rank in range(2):
            assert read_all(fifo(tmp_path, rank)).startswith(due[rank][: 300 * 4096])
        assert started.end() == 0


def test_explicit_values_never_separate_ranks_or_always_do(stub: S3Stub, tmp_path: Path) -> None:
    for fetch in ("together", "separately"):
        path, due = filled(stub, tmp_path, Fetch=fetch)
        with sidecar(path, prefix=AT_ONCE) as started:
            started.wait_for("ready")
            first = Pull(read_all, fifo(tmp_path, 0))
            if fetch == "together":
                status_with(started, "train-0", lambda each: each["held_back_by"])
            else:
                assert first.join() == due[0]
            assert read_all(fifo(tmp_path, 1)) == due[1]
            assert first.join() == due[0]
            assert started.end() == 0
        assert "ranks separated" not in {each["event"] for each in started.events}
