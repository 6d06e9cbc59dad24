"""`Records` without a global batch: a job finds the records while it streams, and no byte of it differs."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sidecar.index.file import open_index
from sidecar.index.learning import IndexLearner
from sidecar.index.target import IndexTarget, IndexUpload
from streamer.formats.record_format import RecordFormat
from streamer.formats.record_index import IndexedObject, RecordIndex
from streamer.plan import ObjectRef, Plan
from tests.kit.index import IndexBytes, read_index
from tests.kit.pipes import read_all, read_some
from tests.kit.processes import Sidecar, findings, job, penstock, sidecar, write_job
from tests.kit.stub import S3Stub, fails
from tests.unit.test_borders import made

PAYLOADS = [bytes([number % 256]) * (number * 37 % 900) for number in range(700)]


def put(stub: S3Stub, kind: str = "TFRecord", objects: int = 7) -> bytes:
    """Objects of 100 records, one of them empty; what an epoch of them is."""
    names = [f"b/train/{number}" for number in range(objects)]
    for number, name in enumerate(names):
        stub.objects[name] = made(kind, PAYLOADS[number * 100 : number * 100 + 100]) if number != 2 else b""
    return b"".join(stub.objects[name] for name in names)


def written(
    stub: S3Stub,
    tmp_path: Path,
    records: dict[str, Any] | None = None,
    more: Any = None,
    **penstock_keys: Any,
) -> str:
    """The path of a job file, whose channel learns its index."""
    document = job(stub.url, tmp_path / "ml", "b/train/", **penstock_keys)
    learned = {"Format": "TFRecord", "Index": str(tmp_path / "learned")} | (records or {})
    document["InputDataConfig"][0]["Penstock"] = {"Records": learned} | (more or {})
    return write_job(tmp_path / "job.yaml", document)


def fifo(tmp_path: Path, epoch: int, name: str = "train") -> Path:
    return tmp_path / "ml" / "input" / "data" / f"{name}_{epoch}"


def rows(path: Path) -> dict[int, IndexedObject]:
    return {row.name: row for row in read_index(str(path / "train.index"))}


def built(path: str, tmp_path: Path, *options: str) -> dict[int, IndexedObject]:
    """The rows of an index that is built of the same objects."""
    done = penstock("index", "build", "-c", path, "--to", str(tmp_path / "built"), *options)
    assert done.returncode in (0, 8), done.stderr
    return rows(tmp_path / "built")


def streamed(started: Sidecar, tmp_path: Path, stream: bytes, *epochs: int) -> None:
    started.wait_for("ready")
    for epoch in epochs:
        assert read_all(fifo(tmp_path, epoch)) == stream
        started.wait_for("epoch complete", epoch=epoch)


def events(started: Sidecar, name: str) -> list[dict[str, Any]]:
    return [each for each in started.events if each["event"] == name]


@pytest.mark.parametrize(
    ("kind", "transport"),
    [
        ("TFRecord", "auto"),
        ("TFRecord", "buffered"),
        ("TFRecord", "aiobotocore"),
        ("RecordIO", "auto"),
        ("lines", "buffered"),
        ("tar", "auto"),
    ],
)
def test_an_epoch_learns_the_index_that_a_build_makes(
    stub: S3Stub, tmp_path: Path, kind: str, transport: str
) -> None:
    stream = put(stub, kind)
    path = written(stub, tmp_path, {"Format": kind}, Transport=transport)
    with sidecar(path) as started:
        started.wait_for("record index is learnt", objects=0, format=kind)
        streamed(started, tmp_path, stream, 0)
        learnt = started.wait_for("record index learnt")
        assert (learnt["learnt"], learnt["refused"], learnt["objects"]) == (7, 0, 7)
        streamed(started, tmp_path, stream, 1, 2)
        assert started.end() == 0
        assert len(events(started, "record index learnt")) == 1, "the second epoch learns nothing again"
    expected = built(path, tmp_path)
    assert rows(tmp_path / "learned") == expected

    before = (tmp_path / "learned" / "train.index").read_bytes()
    with sidecar(path) as started:
        started.wait_for("record index is learnt", objects=7)
        streamed(started, tmp_path, stream, 0)
        assert started.end() == 0
        assert not events(started, "record index learnt")
    assert (tmp_path / "learned" / "train.index").read_bytes() == before
    again = penstock("index", "build", "-c", path, "--to", str(tmp_path / "learned"), "--json")
    assert json.loads(again.stdout)["channels"]["train"]["scanned"] == 0
    assert rows(tmp_path / "learned") == expected
    for options in ((), ("--all",)):
        done = penstock("index", "verify", "-c", path, "--from", str(tmp_path / "learned"), *options)
        assert done.returncode == 0, done.stderr


def test_objects_with_a_row_are_spliced(stub: S3Stub, tmp_path: Path) -> None:
    """The transport is `splice`, and no reason to read the bytes of all objects is logged."""
    stream = put(stub)
    with sidecar(written(stub, tmp_path)) as started:
        assert started.wait_for("transport")["transport"] == "splice"
        streamed(started, tmp_path, stream, 0, 1)
        assert started.end() == 0
        assert not events(started, "bytes are read, not spliced")


def test_a_shuffled_channel_of_several_ranks(stub: S3Stub, tmp_path: Path) -> None:
    """Each FIFO has some of the objects in each epoch; one index has all of them."""
    put(stub)
    document_path = written(stub, tmp_path, more={"Ranks": 2, "Integrity": "checksum"})
    with sidecar(document_path) as started, ThreadPoolExecutor(2) as ranks:
        started.wait_for("ready")
        list(ranks.map(lambda rank: read_all(fifo(tmp_path, 0, f"train-{rank}")), range(2)))
        started.wait_for("epoch complete", channel="train-0")
        started.wait_for("epoch complete", channel="train-1")
        counted = started.get("/metrics")[1].splitlines()
        assert started.end() == 0
    begin = 'penstock_index_objects_total{channel="train-'
    found = [line.split() for line in counted if line.startswith(begin) and 'row="learnt"' in line]
    assert sum(float(number) for _, number in found) == 6, "the empty object has no bytes"
    assert rows(tmp_path / "learned") == built(document_path, tmp_path)


def test_a_joined_channel(stub: S3Stub, tmp_path: Path) -> None:
    """The index is of the objects, not of the stream that leaves out their end marks."""
    stream = put(stub, "tar")
    path = written(stub, tmp_path, {"Format": "tar"}, {"Join": "tar"})
    with sidecar(path) as started:
        started.wait_for("ready")
        assert len(read_all(fifo(tmp_path, 0))) < len(stream)
        started.wait_for("epoch complete")
        assert started.end() == 0
    assert rows(tmp_path / "learned") == built(path, tmp_path)


def test_an_object_that_is_not_of_the_format_is_left_out(stub: S3Stub, tmp_path: Path) -> None:
    """Corrupt or cut off: its bytes stream on, it is logged once, and all others are learnt."""
    put(stub)
    stub.objects["b/train/1"] = stub.objects["b/train/1"][:-1]
    stub.objects["b/train/3"] = b"\xff" * 5000
    stub.objects["b/train/5"] = stub.objects["b/train/5"][:2000] + bytes(3000)
    stream = b"".join(stub.objects[f"b/train/{number}"] for number in range(7))
    path = written(stub, tmp_path)
    with sidecar(path) as started:
        streamed(started, tmp_path, stream, 0, 1)
        learnt = started.wait_for("record index learnt")
        assert (learnt["learnt"], learnt["refused"]) == (4, 3)
        assert started.end() == 0
        refused = events(started, "object is not in the record index")
        assert [each["object"] for each in refused] == [f"s3://b/train/{number}" for number in (1, 3, 5)]
        assert "at byte 0" in refused[1]["why"]
    assert rows(tmp_path / "learned") == built(path, tmp_path)


def test_short_records_are_left_to_a_build(stub: S3Stub, tmp_path: Path) -> None:
    """To find them on the way would hold up all channels."""
    put(stub)
    stub.objects["b/train/4"] = made("TFRecord", [b"x"] * 300_000)
    stream = b"".join(stub.objects[f"b/train/{number}"] for number in range(7))
    path = written(stub, tmp_path)
    with sidecar(path) as started:
        streamed(started, tmp_path, stream, 0)
        refused = started.wait_for("object is not in the record index")
        assert (refused["object"], "less than 256 bytes" in refused["why"]) == ("s3://b/train/4", True)
        assert started.end() == 0
    assert len(rows(tmp_path / "learned")) == 6
    done = penstock("index", "build", "-c", path, "--to", str(tmp_path / "learned"), "--json")
    assert json.loads(done.stdout)["channels"]["train"]["scanned"] == 1
    assert rows(tmp_path / "learned") == built(path, tmp_path)


def test_a_reader_that_leaves_and_comes_back(stub: S3Stub, tmp_path: Path) -> None:
    stub.objects["b/train/0"] = first = made("TFRecord", [bytes(1000)] * 60)
    stub.objects["b/train/1"] = second = made("TFRecord", [bytes(90_000)] * 600)
    path = written(stub, tmp_path)
    with sidecar(path) as started:
        started.wait_for("ready")
        read_some(fifo(tmp_path, 0), len(first) + 10)
        started.wait_for("epoch abandoned")
        assert started.wait_for("record index learnt")["objects"] == 1, "the second object was cut"
        streamed(started, tmp_path, first + second, 1)
        started.wait_for("record index learnt", objects=2)
        assert started.end() == 0
    assert rows(tmp_path / "learned") == built(path, tmp_path)


def test_an_epoch_that_is_resumed_inside_an_object(stub: S3Stub, tmp_path: Path) -> None:
    """The rest of the object has no row; the next epoch has all of it. Nothing is lost by kill -9."""
    stub.objects["b/train/0"] = first = made("TFRecord", [bytes(1000)] * 60)
    stub.objects["b/train/1"] = second = made("TFRecord", [bytes(90_000)] * 600)
    stub.objects["b/train/2"] = third = made("TFRecord", [bytes(1000)] * 60)
    path = written(stub, tmp_path)
    stream = first + second + third
    with sidecar(path, "--keeper", "auto") as started:
        started.wait_for("ready")
        file = open(fifo(tmp_path, 0), "rb", buffering=0)  # noqa: SIM115 - closed below
        half = b""
        while len(half) < 5_000_000:
            half += file.read(1 << 20)
    with file, sidecar(path, "--keeper", "auto") as started:
        assert started.wait_for("record index is learnt")["objects"] in (0, 1)
        assert half + file.readall() == stream
        started.wait_for("epoch complete", epoch=0)
        learnt = started.wait_for("record index learnt")
        assert learnt["objects"] < 3, "the second object is not known whole"
        streamed(started, tmp_path, stream, 1)
        started.wait_for("record index learnt", objects=3)
        assert started.end() == 0
    assert rows(tmp_path / "learned") == built(path, tmp_path)


@pytest.fixture
def place(stub: S3Stub) -> Iterator[str]:
    yield "s3://b/train/"
    assert not stub.puts.uploads


def test_an_index_in_s3(stub: S3Stub, tmp_path: Path, place: str) -> None:
    """Beside the data, of which it is no part; a build that stores in between loses no row."""
    stream = put(stub)
    path = written(stub, tmp_path, {"Index": place})
    with sidecar(path) as started:
        streamed(started, tmp_path, stream, 0)
        started.wait_for("record index learnt", index=f"{place}train.index")
        stub.objects["b/train/7"] = more = made("TFRecord", PAYLOADS[:9])
        done = penstock("index", "build", "-c", path, "--to", place)
        assert done.returncode == 0, done.stderr
        streamed(started, tmp_path, stream, 1)
        assert started.end() == 0
    expected = built(path, tmp_path)
    index = RecordIndex(IndexBytes(stub.objects["b/train/train.index"]))
    assert index.end == len(stub.objects["b/train/train.index"])
    assert {row.name: row for row in index} == expected
    with sidecar(path) as started:
        started.wait_for("record index is learnt", objects=8)
        streamed(started, tmp_path, stream + more, 0)
        assert started.end() == 0
        assert not events(started, "record index learnt")


@pytest.mark.parametrize("what", ["read", "written"])
def test_an_index_that_is_refused_costs_no_epoch(stub: S3Stub, tmp_path: Path, place: str, what: str) -> None:
    stream = put(stub)
    if what == "read":
        stub.objects["b/train/train.index"] = b"an index"
        stub.script(*[fails(403, "AccessDenied")] * 9, key="b/train/train.index")
    else:
        stub.puts.refused.extend([(403, "AccessDenied")] * 9)
    with sidecar(written(stub, tmp_path, {"Index": place}, None, GiveUpAfter=1)) as started:
        streamed(started, tmp_path, stream, 0, 1)
        event = {"read": "record index not learnt", "written": "record index not stored"}[what]
        assert "AccessDenied" in started.wait_for(event)["error"]
        assert started.end() == 0
    assert stub.objects.get("b/train/train.index") == {"read": b"an index", "written": None}[what]


def test_an_upload_that_was_refused_once_is_repeated(stub: S3Stub, tmp_path: Path, place: str) -> None:
    """After the next epoch, although that finds no further row."""
    stream = put(stub)
    stub.puts.refused.append((403, "AccessDenied"))
    with sidecar(written(stub, tmp_path, {"Index": place})) as started:
        started.wait_for("ready")
        assert read_all(fifo(tmp_path, 0)) == stream
        started.wait_for("record index learnt")
        streamed(started, tmp_path, stream, 1)
        assert started.end() == 0
    index = RecordIndex(IndexBytes(stub.objects["b/train/train.index"]))
    assert len(index) == 7


def test_an_index_in_s3_is_stored_when_the_job_ends(stub: S3Stub, tmp_path: Path, place: str) -> None:
    """Also that of an epoch that is not over."""
    stub.objects["b/train/0"] = first = made("TFRecord", [bytes(1000)] * 60)
    stub.objects["b/train/1"] = made("TFRecord", [bytes(90_000)] * 600)
    path = written(stub, tmp_path, {"Index": place}, DrainFor=0)
    with sidecar(path) as started:
        started.wait_for("ready")
        with open(fifo(tmp_path, 0), "rb") as file:
            assert file.read(len(first)) == first
            assert started.end(signal.SIGINT) == 0
    index = RecordIndex(IndexBytes(stub.objects["b/train/train.index"]))
    assert index.records == 60


def test_an_index_that_another_process_writes(stub: S3Stub, tmp_path: Path) -> None:
    stream = put(stub)
    path = written(stub, tmp_path)
    (tmp_path / "learned").mkdir()
    with open(tmp_path / "learned" / "train.index", "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with sidecar(path) as started:
            assert "another" in started.wait_for("record index not learnt")["error"]
            streamed(started, tmp_path, stream, 0)
            assert started.end() == 0
    assert os.path.getsize(tmp_path / "learned" / "train.index") == 0


def test_a_disk_that_is_full_ends_learning_alone(stub: S3Stub, tmp_path: Path) -> None:
    """The file stays whole: it has no block that is cut off."""
    stub.objects["b/train/0"] = stream = made("TFRecord", [bytes(300)] * 30_000)
    path = written(stub, tmp_path)
    with sidecar(path, cold=True, prefix=["prlimit", "--fsize=200000"]) as started:
        streamed(started, tmp_path, stream, 0, 1)
        assert "cannot write" in started.wait_for("record index not learnt")["error"]
        assert started.end() == 0
    read_index(str(tmp_path / "learned" / "train.index"))


def test_an_index_of_another_kind_is_an_error(stub: S3Stub, tmp_path: Path) -> None:
    put(stub)
    path = written(stub, tmp_path)
    built(path, tmp_path, "--format", "lines")
    os.rename(tmp_path / "built", tmp_path / "learned")
    with sidecar(path) as started:
        assert started.wait() == 2
    assert "is of lines, and not of TFRecord" in str(started.events)


def test_a_kill_loses_no_row_that_was_appended(stub: S3Stub, tmp_path: Path) -> None:
    stream = put(stub)
    path = written(stub, tmp_path)
    with sidecar(path) as started:
        streamed(started, tmp_path, stream, 0)
        started.wait_for("record index learnt")
        started.process.send_signal(signal.SIGKILL)
        started.wait()
    assert rows(tmp_path / "learned") == built(path, tmp_path)


async def test_versions_that_replace_each_other_end_learning(tmp_path: Path) -> None:
    """A plan with two versions of an object has no end of rows to replace; a replaced object has one."""

    def row(version: int) -> IndexedObject:
        return IndexedObject(1, version, 10, 1, 10, array("Q", [0]))

    ref = ObjectRef("b", "k", 10, "etag")
    clients: Any = None
    target = IndexTarget(str(tmp_path / "train.index"), None, None, clients)
    with open_index(target.path, RecordFormat.parse("TFRecord")) as file:
        file.append([row(0)])
        learner = IndexLearner("train", file, Plan.of([]), IndexUpload(target, file))
        for version, goes_on in ((1, True), (2, False)):
            assert learner.lacks(1, version)
            learner.add(ref, row(version))
            await learner.close()
            assert learner.lacks(1, 3) is goes_on


def test_doctor_and_the_index_to_be_learnt(stub: S3Stub, tmp_path: Path) -> None:
    """It is absent, it is there, it is of another kind, and its directory is a file."""
    put(stub)
    path = written(stub, tmp_path)

    def finding() -> tuple[str, str]:
        found = findings(path)["index train"]
        return found["state"], found["text"]

    assert finding() == ("ok", "there is none yet; the channel learns it while it streams")
    built(path, tmp_path)
    os.rename(tmp_path / "built", tmp_path / "learned")
    whole = ("ok", "it has 7 objects; the channel learns the others while it streams")
    assert finding() == whole
    with open(tmp_path / "learned" / "train.index", "ab") as file:
        file.write(b"a block that a process was killed in")
    assert finding() == whole
    written(stub, tmp_path, {"Format": "tar"})
    assert finding()[0] == "failure"
    written(stub, tmp_path, {"Index": path})
    assert finding() == ("warning", f"the directory {path} cannot be written")
