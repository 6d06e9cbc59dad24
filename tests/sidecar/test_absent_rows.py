"""A start makes the rows that a record index lacks, and the index itself: a job file is all that it needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sidecar.index.file import open_index
from streamer.formats import tfrecord
from streamer.formats.record_format import RecordFormat
from tests.kit.index import read_index
from tests.kit.pipes import read_all
from tests.kit.processes import job, penstock, sidecar, write_job
from tests.kit.stub import S3Stub

PLACES = ["folder", "s3://b/index/"]


def put(stub: S3Stub, *numbers: int) -> None:
    for number in numbers:
        records = [tfrecord.encode(b"%d/%d" % (number, each)) for each in range(10)]
        stub.objects[f"b/train/{number}"] = b"".join(records)


def by_record(stub: S3Stub, tmp_path: Path, place: str, **extras: Any) -> str:
    """The path of a job file with two ranks, whose index is nowhere yet."""
    document = job(stub.url, tmp_path / "ml", "b/train/")
    document["InputDataConfig"][0]["Penstock"] = {
        "Ranks": {"Count": 2, "GlobalBatch": 4, "Fetch": "separately"},
        "Records": {"Format": "TFRecord", "Index": place if "://" in place else str(tmp_path / place)},
    } | extras
    return write_job(tmp_path / "job.yaml", document)


def started(path: str, ml: Path) -> tuple[list[bytes], list[dict[str, Any]]]:
    """The first epoch of both ranks, and the lines about what was built."""
    with sidecar(path) as running:
        running.wait_for("ready")
        read = [read_all(ml / "input" / "data" / f"train-{rank}_0") for rank in range(2)]
        assert running.end() == 0
    return read, [each for each in running.events if each["event"] == "record index is built"]


@pytest.mark.parametrize("place", PLACES)
def test_a_start_makes_what_the_index_lacks(stub: S3Stub, tmp_path: Path, place: str) -> None:
    put(stub, 0, 1)
    path = by_record(stub, tmp_path, place)
    done = penstock("plan", "-c", path)
    assert (done.returncode, "there is no record index" in done.stderr) == (2, True), "plan reads no data"
    assert "run builds it at its start" in penstock("doctor", "-c", path).stdout

    read, (built,) = started(path, tmp_path / "ml")
    assert (built["objects"], built["bytes"]) == (2, sum(map(len, read)))
    data = stub.objects["b/train/0"] + stub.objects["b/train/1"]
    pairs = [data[first : first + 2 * 19] for first in range(0, len(data), 2 * 19)]
    assert read == [b"".join(pairs[0::2]), b"".join(pairs[1::2])]
    assert started(path, tmp_path / "ml") == (read, []), "the next start reads nothing for it"

    put(stub, 2)
    stub.objects["b/train/0"] += tfrecord.encode(b"more")
    _, (built,) = started(path, tmp_path / "ml")
    assert built["objects"] == 2, "the new one, and the one that was replaced"
    planned = json.loads(penstock("plan", "-c", path, "--json").stdout)["channels"]["train"]
    assert planned["records"] == 28
    assert penstock("index", "verify", "-c", path, "--all").returncode == 0


def test_a_start_goes_on_with_a_build_that_was_killed(stub: S3Stub, tmp_path: Path) -> None:
    """It had written a part of its last block of rows."""
    put(stub, 0)
    path = by_record(stub, tmp_path, "folder")
    started(path, tmp_path / "ml")
    file = tmp_path / "folder" / "train.index"
    whole = file.read_bytes()
    put(stub, 1)
    for torn, objects in ((whole + whole[-100:-50], 1), (whole[:-9], 2)):
        file.write_bytes(torn)
        assert penstock("plan", "-c", path).returncode == 7, "only a start writes"
        _, (built,) = started(path, tmp_path / "ml")
        assert built["objects"] == objects
        assert len(read_index(str(file))) == 2


def test_rows_that_another_job_needs_are_kept(stub: S3Stub, tmp_path: Path) -> None:
    put(stub, 0, 1, 2)
    started(by_record(stub, tmp_path, "folder"), tmp_path / "ml")
    put(stub, 3)
    _, (built,) = started(by_record(stub, tmp_path, "folder", Include=["3"]), tmp_path / "ml")
    assert built["objects"] == 1
    assert len(read_index(str(tmp_path / "folder" / "train.index"))) == 4


def test_an_object_of_another_format_ends_the_start_by_name(stub: S3Stub, tmp_path: Path) -> None:
    """The rows of the others are kept, so the next start reads that object alone."""
    put(stub, 0)
    stub.objects["b/train/1"] = b"a line of text\n" * 9
    path = by_record(stub, tmp_path, "folder")
    done = penstock("run", "-c", path)
    assert done.returncode == 8
    assert "no TFRecord begins here" in done.stderr
    assert "s3://b/train/1" in done.stderr
    put(stub, 1)
    _, (built,) = started(path, tmp_path / "ml")
    assert built["objects"] == 1


def test_an_index_that_may_not_be_written_ends_the_start_by_name(stub: S3Stub, tmp_path: Path) -> None:
    put(stub, 0)
    stub.puts.refused.extend([(403, "AccessDenied")] * 9)
    done = penstock("run", "-c", by_record(stub, tmp_path, "s3://b/index/"))
    assert (done.returncode, "s3:PutObject" in done.stderr) == (3, True), done.stderr


def test_an_index_that_another_process_writes_ends_the_start(stub: S3Stub, tmp_path: Path) -> None:
    put(stub, 0)
    path = by_record(stub, tmp_path, "folder")
    (tmp_path / "folder").mkdir()
    with open_index(str(tmp_path / "folder" / "train.index"), RecordFormat.parse("TFRecord")):
        done = penstock("run", "-c", path)
    assert (done.returncode, "another process writes" in done.stderr) == (7, True), done.stderr
    assert started(path, tmp_path / "ml")[1], "an empty file is no index yet"
