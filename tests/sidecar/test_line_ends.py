"""Objects of text that do not end with a line feed: told at the start, and joined line by line."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamer.readers import PipeReader
from streamer.readers.tokens import TokenReader
from tests.kit.processes import PENSTOCK, findings, job, sidecar, write_job
from tests.kit.stub import S3Stub, stalls

EVENT = "an object does not end with a line feed"
LINES = [b'{"n": %d}' % number for number in range(40)]


def put(stub: S3Stub, *, ended: int = 3, suffix: str = "jsonl") -> None:
    """Put four objects of ten lines, of which `ended` end with a line feed."""
    for index in range(4):
        data = b"\n".join(LINES[10 * index : 10 * index + 10])
        stub.objects[f"b/train/{index}.{suffix}"] = data + b"\n" * (index < ended)


def document(stub: S3Stub, tmp_path: Path, **section: Any) -> str:
    written = job(stub.url, tmp_path / "ml", "b/train/")
    written["InputDataConfig"][0] |= {"Penstock": section} if section else {}
    return write_job(tmp_path / "job.yaml", written)


@pytest.mark.parametrize("section", [{}, {"Ranks": 2}, {"Limit": {"Objects": 4, "Seed": 1}}], ids=str)
def test_the_start_and_the_doctor_warn(stub: S3Stub, tmp_path: Path, section: dict[str, Any]) -> None:
    """They find one object among others, and also with a plan that is made whole first."""
    put(stub)
    path = document(stub, tmp_path, **section)
    with sidecar(path) as running:
        warning = running.wait_for(EVENT, channel="train")
        assert warning["object"] == "s3://b/train/3.jsonl"
        assert "add Penstock: {Join: lines}" in warning["do"]
        assert "penstock_channel_unjoined" in running.get("/metrics")[1]
    found = findings(path)["line ends train"]
    assert found["state"] == "warning"
    assert "s3://b/train/3.jsonl does not end with a line feed" in found["text"]


def test_the_sample_is_eight_objects(stub: S3Stub) -> None:
    stub.objects = {f"b/train/{index:02}.csv": b"1\n2\n" for index in range(40)}
    subprocess.run([*PENSTOCK, "cat", "--endpoint-url", stub.url, "s3://b/train/"], check=True)
    assert [seen.range for seen in stub.seen].count("bytes=3-3") == 8


def test_cat_warns(stub: S3Stub) -> None:
    put(stub, suffix="csv")
    command = [*PENSTOCK, "cat", "--endpoint-url", stub.url, "s3://b/train/"]
    done = subprocess.run(command, capture_output=True, check=True)
    assert done.stdout.count(b"\n") == 39
    assert EVENT in done.stderr.decode()
    joined = subprocess.run([*command, "--join", "lines"], capture_output=True, check=True)
    assert joined.stdout == b"".join(line + b"\n" for line in LINES)
    assert EVENT not in joined.stderr.decode()


@pytest.mark.parametrize(("ended", "suffix"), [(4, "jsonl"), (0, "bin")])
def test_no_warning_without_cause(stub: S3Stub, ended: int, suffix: str) -> None:
    put(stub, ended=ended, suffix=suffix)
    command = [*PENSTOCK, "cat", "--endpoint-url", stub.url, "s3://b/train/"]
    assert EVENT not in subprocess.run(command, capture_output=True, check=True).stderr.decode()


@pytest.mark.parametrize("section", [{}, {"Limit": {"Objects": 4, "Seed": 1}}], ids=str)
def test_a_job_does_not_wait_for_the_look(stub: S3Stub, tmp_path: Path, section: dict[str, Any]) -> None:
    put(stub, ended=0)
    for name, data in stub.objects.items():
        stub.script(stalls(stub), key=name, first=len(data) - 1)
    with sidecar(document(stub, tmp_path, **section)) as running:
        running.wait_for("ready")
        assert not [event for event in running.events if event["event"] == EVENT]
        stub.release()
        running.wait_for(EVENT, channel="train")


def test_a_header_of_each_object_is_left_out(
    stub: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llm.c's token files have such a header; without SkipBytes it would be tokens."""
    tokens = np.arange(3000, dtype="<u2")
    header = struct.pack("<256i", 20240520, 1, 1000, *[0] * 253)
    for index in range(3):
        stub.objects[f"b/train/{index}.bin"] = header + tokens[1000 * index : 1000 * index + 1000].tobytes()
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path / "ml"))
    with sidecar(document(stub, tmp_path, SkipBytes=1024)) as running:
        running.wait_for("ready")
        for _ in range(2):
            assert (np.concatenate(list(TokenReader("train", "uint16", length=100))) == tokens).all()


def test_joined_lines_are_the_lines_of_all_objects(
    stub: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(stub, ended=2)
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path / "ml"))
    with sidecar(document(stub, tmp_path, Join="lines")) as running:
        running.wait_for("ready")
        for _ in range(2):
            assert list(PipeReader("train", "TextLine")) == LINES
        assert not [event for event in running.events if event["event"] == EVENT]
