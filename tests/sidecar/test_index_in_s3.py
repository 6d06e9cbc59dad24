"""A record index in S3: written whole by conditional PUTs, read on any host, and no part of any stream."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from streamer.formats.record_index import RecordIndex, object_name
from tests.kit.index import IndexBytes
from tests.kit.pipes import read_all
from tests.kit.processes import job, penstock, penstock_with, sidecar, write_job
from tests.kit.stub import Answer, Fault, S3Stub, error, fails, stalls
from tests.unit.test_borders import made, naive

PAYLOADS = [bytes([number % 256]) * (number * 37 % 900) for number in range(700)]
OBJECTS = {
    "b/train/0": made("TFRecord", PAYLOADS[:300]),
    "b/train/1": b"",
    "b/train/2": made("TFRecord", PAYLOADS[300:]),
}
PLACE, KEY = "s3://b/train/", "b/train/train.index"
"""Beside the data."""
EAGER = (
    "sidecar.index.build.APPEND_EVERY = 0",
    "sidecar.index.target.UPLOAD_EVERY = 0",
    "sidecar.index.target.UPLOAD_SHARE = 0",
)
IN_PARTS = ("streamer.s3.object_put.PART = 3000",)


def written(stub: S3Stub, tmp_path: Path, *, place: str = PLACE, **ranks: Any) -> str:
    """The path of a job file, whose channel may be divided by record."""
    stub.objects |= OBJECTS
    document = job(stub.url, tmp_path / "ml", "b/train/")
    if ranks:
        records = {"Format": "TFRecord", "Index": place}
        document["InputDataConfig"][0]["Penstock"] = {"Ranks": ranks, "Records": records}
    return write_job(tmp_path / "job.yaml", document)


def build(path: str, *options: str, place: str = PLACE, code: int = 0) -> Any:
    to = ("--to", place, "--format", "TFRecord")
    done = penstock("index", "build", "-c", path, *to, *options)
    assert done.returncode == code, done.stderr
    return done


def rows(data: bytes) -> dict[int, list[int]]:
    index = RecordIndex(IndexBytes(data))
    assert index.end == len(data)
    return {row.name: list(row.offsets) for row in index}


def expected(*names: str) -> dict[int, list[int]]:
    return {object_name("b", name[2:]): naive("TFRecord", OBJECTS[name]) for name in names}


def test_an_index_beside_the_data_is_no_data(stub: S3Stub, tmp_path: Path) -> None:
    path = written(stub, tmp_path)
    local = tmp_path / "index"
    build(path, place=str(local))
    build(path)
    assert stub.objects[KEY] == (local / "train.index").read_bytes()
    stub.seen.clear()
    stub.puts.seen.clear()
    found = json.loads(build(path, "--json").stdout)["channels"]["train"]
    assert (found["objects"], found["scanned"], found["file"]) == (3, 0, f"{PLACE}train.index")
    assert ({seen.key for seen in stub.seen}, stub.puts.seen) == ({KEY[2:]}, []), "nothing is new"

    for command in ("verify", "verify --all", "show"):
        done = penstock("index", *command.split(), "-c", path, "--from", PLACE)
        assert (done.returncode, "records  700\n" in done.stdout) == (0, True), done.stderr
    plans = []
    for place in (str(local), PLACE):
        written(stub, tmp_path, place=place, Count=2, GlobalBatch=14)
        objects = stub.objects.pop(KEY) if place != PLACE else b""
        plans.append(json.loads(penstock("plan", "-c", path, "--json").stdout)["channels"])
        stub.objects |= {KEY: objects} if objects else {}
    assert plans[0] == plans[1]
    done = penstock("doctor", "-c", path)
    assert "index train        ok       700 records of TFRecord in 3 objects" in done.stdout
    assert "may not be data" not in done.stdout
    written(stub, tmp_path)
    assert "train/train.index" in penstock("doctor", "-c", path).stdout, (
        "a job that does not name it is warned"
    )


def test_the_index_of_a_channel_left_out_is_no_data_either(stub: S3Stub, tmp_path: Path) -> None:
    stub.objects |= OBJECTS
    document = job(stub.url, None, "b/train/", "b/train/2")
    for channel in document["InputDataConfig"]:
        channel["Penstock"] = {"Records": {"Format": "TFRecord", "Index": PLACE}}
    path = write_job(tmp_path / "job.yaml", document)
    first, second = (channel["ChannelName"] for channel in document["InputDataConfig"])
    for options in ((), ("--channel", first)):
        done = penstock("index", "build", "-c", path, *options)
        assert done.returncode == 0, done.stderr
    assert rows(stub.objects[f"b/train/{first}.index"]) == expected(*OBJECTS)
    assert rows(stub.objects[f"b/train/{second}.index"]) == expected("b/train/2")


def test_a_job_keeps_the_index_of_its_start(stub: S3Stub, tmp_path: Path) -> None:
    path = written(stub, tmp_path, Count=1, GlobalBatch=7)
    build(path)
    data = tmp_path / "ml" / "input" / "data"
    with sidecar(path) as running:
        running.wait_for("ready")
        assert read_all(data / "train-0_0") == b"".join(OBJECTS.values())
        stub.objects[KEY] = b"another"
        assert read_all(data / "train-0_1") == b"".join(OBJECTS.values())
        assert [seen.key for seen in stub.seen].count("train/train.index") == 1
        assert running.end() == 0


@pytest.mark.parametrize("settings", [EAGER, IN_PARTS])
def test_two_builds_do_not_undo_each_other(stub: S3Stub, tmp_path: Path, settings: tuple[str, ...]) -> None:
    """The other one has found an object that this one has not listed."""
    path = written(stub, tmp_path)
    OBJECTS["b/train/3"] = OBJECTS["b/train/0"]
    del stub.objects["b/train/1"], stub.objects["b/train/2"]
    stub.objects["b/train/3"] = OBJECTS["b/train/3"]
    build(path)
    other = stub.objects.pop(KEY)
    assert rows(other) == expected("b/train/0", "b/train/3")

    written(stub, tmp_path)
    del stub.objects["b/train/3"]
    stub.puts.seen.clear()
    stub.puts.before.append(lambda: stub.objects.update({KEY: other}))
    command = ["index", "build", "-c", path, "--to", PLACE, "--format", "TFRecord"]
    done = subprocess.run([*penstock_with(*settings), *command], stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert rows(stub.objects[KEY]) == expected("b/train/0", "b/train/1", "b/train/2", "b/train/3")
    del OBJECTS["b/train/3"]
    made_ = [each[2] for each in stub.puts.seen if each[0] in {"PutObject", "CompleteMultipartUpload"}]
    assert made_[0] == "*"
    assert all(made_[1:])
    assert "*" not in made_[1:]
    assert not stub.puts.uploads, "an upload that lost was aborted"


def test_objects_of_which_no_byte_is_read_are_stored(stub: S3Stub, tmp_path: Path) -> None:
    """The rows are appended several times, each of which may begin an upload."""
    path = written(stub, tmp_path)
    stub.objects |= {f"b/train/{number}": b"" for number in range(11)}
    few = penstock_with(*EAGER, "sidecar.index.build.MOST_PENDING = 2")
    command = ["index", "build", "-c", path, "--to", PLACE, "--format", "TFRecord"]
    subprocess.run([*few, *command], check=True)
    assert rows(stub.objects[KEY]) == {object_name("b", f"train/{number}"): [] for number in range(11)}


def test_a_build_goes_on_where_one_was_killed_on_another_host(stub: S3Stub, tmp_path: Path) -> None:
    stub.objects |= OBJECTS
    document = job(stub.url, tmp_path / "ml", "b/train/")
    document["Penstock"]["HedgeBudget"] = 0  # hedges would use up the faults, and bring the object
    path = write_job(tmp_path / "job.yaml", document)
    stub.script(*[stalls(stub, after=5000)] * 9, key="b/train/2")
    command = ["index", "build", "-c", path, "--to", PLACE, "--format", "TFRecord"]
    with subprocess.Popen(
        [*penstock_with(*EAGER), *command],
        env=os.environ | {"TMPDIR": str(tmp_path)},
    ) as process:
        # Not for more rows: what is appended during an upload goes with the next one, after further bytes.
        while KEY not in stub.objects:
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    stub.faults.clear()
    stub.release()
    stub.seen.clear()
    stored = rows(stub.objects[KEY])
    lacking = {
        name[2:] for name, data in OBJECTS.items() if data and object_name("b", name[2:]) not in stored
    }
    assert "train/2" in lacking
    build(path)
    assert {seen.key for seen in stub.seen} == lacking | {"train/train.index"}
    assert penstock("index", "verify", "-c", path, "--from", PLACE, "--all").returncode == 0


def replaced(stub: S3Stub, data: bytes) -> Fault:
    """The object is replaced while it is read."""

    async def fault(_: Answer) -> web.StreamResponse:
        stub.objects[KEY] = data
        return error(412, "PreconditionFailed")

    return fault


def test_an_upload_that_never_succeeds_is_given_up_once(stub: S3Stub, tmp_path: Path) -> None:
    stub.objects |= OBJECTS
    document = job(stub.url, tmp_path / "ml", "b/train/")
    document["Penstock"]["GiveUpAfter"] = 0.1
    path = write_job(tmp_path / "job.yaml", document)
    stub.puts.refused.extend([(503, "SlowDown")] * 1000)
    done = build(path, code=5)
    assert "without an upload; first and last error: " in done.stderr
    assert "record index not stored" not in done.stderr


def test_what_s3_answers_is_an_error_by_name(stub: S3Stub, tmp_path: Path) -> None:
    path = written(stub, tmp_path, Count=2, GlobalBatch=14)

    def fails_with(code: int, *texts: str, command: tuple[str, ...] = ("plan", "-c", path)) -> None:
        done = penstock(*command)
        missing = [text for text in texts if text not in done.stderr]
        assert (done.returncode, missing) == (code, []), done.stderr

    order = f"penstock index build -c {path} --channel train"
    absent = order.replace(path, "JOB")
    name = f"{PLACE}train.index"
    fails_with(2, f"there is no record index {name}: make it by `{absent}`, or correct Records.Index")
    assert (
        "index train        ok       there is none yet; run builds it"
        in penstock("doctor", "-c", path).stdout
    )
    command = tuple(shlex.split(order)[1:])
    stub.puts.refused.append((403, "AccessDenied"))
    fails_with(3, "may not write this object; they need s3:PutObject", name, command=command)
    stub.puts.refused.append((403, ""))
    fails_with(3, "may not write this object; they need s3:PutObject", name, command=command)
    stub.puts.refused.append((501, "NotImplemented"))
    fails_with(5, "set Penstock.Endpoint.IfMatch: omit", name, command=command)
    assert KEY not in stub.objects, "an upload that has failed is not tried once more"
    document = yaml.safe_load(Path(path).read_text())
    document["Penstock"]["Endpoint"]["IfMatch"] = "omit"
    without = write_job(tmp_path / "omit.yaml", document)
    stub.puts.refused.append((412, "PreconditionFailed"))
    refusal = "the endpoint refused to write the object, as if the request had a condition (S3 responded Pre"
    fails_with(5, refusal, name, command=tuple(without if word == path else word for word in command))
    stub.puts.refused.extend([(503, "SlowDown")] * 2)
    fails_with(0, command=command)

    whole = stub.objects[KEY]
    stub.script(fails(503, "SlowDown"), replaced(stub, whole + b""), key=KEY)
    fails_with(0)
    stub.script(fails(403, "AccessDenied"), key=KEY)
    fails_with(3, "access denied", name)
    stub.objects[KEY] = whole[:-9]
    fails_with(7, f"the record index {name} is damaged at byte 36", "penstock index build")
    fails_with(0, command=command)
    assert stub.objects[KEY] == whole, "the next build mends it"
    stub.objects[KEY] = b"no index"
    fails_with(7, f"{name} cannot be read as a record index")
    fails_with(7, f"{name} cannot be read as a record index", command=command)
    stub.objects |= {KEY: whole, "b/train/3": b"no record", "b/train/4": OBJECTS["b/train/0"]}
    stub.puts.refused.append((403, "AccessDenied"))
    fails_with(
        8, "record index not stored", "s3:PutObject", "the object ends inside a TFRecord", command=command
    )
    assert stub.objects[KEY] == whole
    other = f"the record index {PLACE}train.index is of TFRecord, and not of lines"
    fails_with(2, other, command=(*command, "--format", "lines"))
    written(stub, tmp_path, place="gs://b/", Count=2, GlobalBatch=14)
    fails_with(2, "'gs://b/' is not an S3 URI: write s3://b/")
