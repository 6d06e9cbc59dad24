"""`penstock index`: built once, incremental, resumable, and never trusted over the bytes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sidecar.index.file import open_index
from streamer.errors import SinkError
from streamer.formats import tfrecord
from streamer.formats.record_format import RecordFormat
from streamer.formats.record_index import IndexedObject, block, header, object_name
from tests.kit.faults import resets_after
from tests.kit.index import read_index, with_stride
from tests.kit.processes import job, penstock, penstock_with, write_job
from tests.kit.raw import etag
from tests.kit.stub import S3Stub, fails, stalls
from tests.unit.test_borders import made, naive

PAGE = Path(__file__).parents[2] / "docs/how-to/record-index.md"
PAYLOADS = [bytes([number % 256]) * (number * 37 % 900) for number in range(700)]
RECORDS = [tfrecord.encode(each) for each in PAYLOADS]


def setup(stub: S3Stub, tmp_path: Path, kind: str = "TFRecord", **penstock_keys: Any) -> str:
    """A channel of three objects, one of them empty; the path of the job file."""
    stub.objects |= {
        "b/train/0": made(kind, PAYLOADS[:300]),
        "b/train/1": b"",
        "b/train/2": made(kind, PAYLOADS[300:]),
    }
    return write_job(tmp_path / "job.yaml", job(stub.url, None, "b/train/", **penstock_keys))


def build(path: str, folder: Path, *options: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = penstock("index", "build", "-c", path, "--to", str(folder), *options)
    assert done.returncode == code, done.stderr
    return done


def verify(path: str, folder: Path, *options: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = penstock("index", "verify", "-c", path, "--from", str(folder), *options)
    assert done.returncode == code, done.stderr
    return done


def requested(stub: S3Stub) -> set[str]:
    found = {seen.key for seen in stub.seen}
    stub.seen.clear()
    return found


def rows(folder: Path) -> dict[int, IndexedObject]:
    return {row.name: row for row in read_index(str(folder / "train.index"))}


@pytest.mark.parametrize("kind", ["TFRecord", "RecordIO", "lines", "tar"])
def test_an_index_is_built_verified_and_shown(stub: S3Stub, tmp_path: Path, kind: str) -> None:
    path, folder = setup(stub, tmp_path, kind), tmp_path / "index"
    found = json.loads(build(path, folder, "--format", kind, "--json").stdout)["channels"]["train"]
    assert requested(stub) == {"train/0", "train/2"}

    expected = {key: naive(kind, data) for key, data in stub.objects.items()}
    total = sum(map(len, expected.values()))
    assert (found["objects"], found["records"], found["scanned"]) == (3, total, 3)
    assert found["bytes"] == sum(map(len, stub.objects.values()))
    indexed = rows(folder)
    for key, offsets in expected.items():
        row = indexed[object_name(*key.split("/", 1))]
        assert (row.records, list(row.offsets)) == (len(offsets), offsets)
    shown = json.loads(penstock("index", "show", "--from", str(folder), "--json").stdout)["channels"]
    assert shown["train"].items() <= found.items()
    assert f"records  {total}\n" in penstock("index", "show", "--from", str(folder)).stdout
    refused = penstock("index", "show", "-c", path, "--from", str(folder))
    assert (refused.returncode, "leave out -c" in refused.stderr) == (2, True), refused.stderr

    every = ("--samples", "20000")
    checked = json.loads(verify(path, folder, *every, "--json").stdout)["channels"]["train"]
    assert checked["verified"] == f"{sum(len(row.offsets) for row in indexed.values())} indexed records"
    assert "verified all bytes" in verify(path, folder, "--all").stdout


def test_the_job_file_has_place_and_format(stub: S3Stub, tmp_path: Path) -> None:
    """Without options the commands take the channels that have an index, and leave the others out."""
    setup(stub, tmp_path)
    folder = tmp_path / "index"
    document = job(stub.url, None, "b/train/", "b/other/", "b/labels/")
    train, _, labels = document["InputDataConfig"]
    train["Penstock"] = {"Records": {"Format": "TFRecord", "Index": str(folder)}}
    labels["Penstock"] = {"Ranks": {"Count": 1, "GlobalBatch": 1}, "Records": {"Format": "fixed:8"}}
    path = write_job(tmp_path / "job.yaml", document)
    for words in ("build", "verify --all", "show"):
        done = penstock("index", *words.split(), "-c", path, "--json")
        assert done.returncode == 0, done.stderr
        assert {name: each["records"] for name, each in json.loads(done.stdout)["channels"].items()} == {
            "train": 700
        }
    for command in ("build", "verify"):
        done = penstock("index", command, "-c", path, "--channel", "other")
        assert done.returncode == 2
        assert "channel 'other' names no place of an index: add Records: {Format: TFRecord, In" in done.stderr
    done = penstock("index", "build", "-c", path, "--channel", "other", "--to", str(folder))
    assert "record format of channel 'other' is unknown: add Records: {Format: TFRecord, " in done.stderr
    done = penstock("index", "build", "-c", path, "--channel", "labels", "--to", str(folder))
    assert "channel 'labels' has records of one size (fixed:8), which need no index" in done.stderr
    assert done.returncode == 2
    del train["Penstock"]
    write_job(tmp_path / "job.yaml", document)
    for command in ("build", "verify", "show"):
        done = penstock("index", command, "-c", path)
        assert (done.returncode, "channel 'train' names no place" in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("begin", "why"),
    [
        (lambda file: with_stride(file, 256), "it has 1 record of 256, and this Penstock needs every one"),
        (lambda _: header(RecordFormat.parse("fixed:8")), "it is of fixed:8, whose records need no index"),
    ],
)
def test_a_file_that_earlier_builds_wrote_is_refused_by_name(
    stub: S3Stub, tmp_path: Path, begin: Callable[[bytes], bytes], why: str
) -> None:
    path, folder = setup(stub, tmp_path), tmp_path / "index"
    build(path, folder, "--format", "TFRecord")
    file = folder / "train.index"
    file.write_bytes(begin(file.read_bytes()))
    shown = penstock("index", "show", "--from", str(folder))
    for done in (build(path, folder, "--format", "TFRecord", code=7), verify(path, folder, code=7), shown):
        assert f"{file} cannot be read as a record index: {why}" in done.stderr, done.stderr
    assert shown.returncode == 7


def test_only_objects_that_changed_are_scanned_again(stub: S3Stub, tmp_path: Path) -> None:
    path, folder = setup(stub, tmp_path), tmp_path / "index"
    build(path, folder, "--format", "TFRecord")
    before = (folder / "train.index").read_bytes()
    requested(stub)
    build(path, folder)
    assert requested(stub) == set()
    assert (folder / "train.index").read_bytes() == before

    stub.objects["b/train/0"] = stub.objects["b/train/0"][: len(RECORDS[0])]
    stub.objects["b/train/3"] = RECORDS[5]
    del stub.objects["b/train/2"]
    verify(path, folder, code=6)
    found = json.loads(build(path, folder, "--json").stdout)["channels"]["train"]
    assert requested(stub) == {"train/0", "train/3"}
    assert (found["objects"], found["records"], found["scanned"]) == (3, 2, 2)
    index = read_index(str(folder / "train.index"))
    assert index.names() == [object_name("b", f"train/{number}") for number in (0, 1, 3)], "plan order"
    verify(path, folder, "--all")


AT_ONCE = penstock_with("sidecar.index.build.APPEND_EVERY = 0")
"""`penstock` that appends each row at once."""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_build_that_is_ended_goes_on(stub: S3Stub, tmp_path: Path, number: signal.Signals) -> None:
    path, folder = setup(stub, tmp_path), tmp_path / "index"
    stub.script(*[stalls(stub, after=5000)] * 9, key="b/train/2")
    command = [*AT_ONCE, "index", "build", "-c", path, "--to", str(folder), "--format", "TFRecord"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        while not _has_rows(folder / "train.index"):
            assert process.poll() is None
        process.send_signal(number)
        assert process.wait() == (-signal.SIGKILL if number is signal.SIGKILL else 130)
    stub.faults.clear()
    stub.release()
    requested(stub)
    with open(folder / "train.index", "ab") as file:
        file.write(b"ROWS\1\0\0\0")  # as of a row that was being written
    assert penstock("index", "show", "--from", str(folder)).returncode == 7
    build(path, folder)
    assert requested(stub) == {"train/2"}
    verify(path, folder, "--all")


def _has_rows(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return path.stat().st_size > 100
    return False


def test_one_build_writes_an_index(tmp_path: Path) -> None:
    path, tfrecords = str(tmp_path / "new" / "train.index"), RecordFormat.parse("TFRecord")
    with open_index(path, tfrecords) as file:
        match = "another process writes"
        with pytest.raises(SinkError, match=match), open_index(path, tfrecords):
            raise AssertionError
        row = IndexedObject(7, 8, 100, 1, 100, array("Q", [0]))
        file.append([row, row])
        file.tidy([7])
        assert list(file.index) == [row]
    assert os.listdir(tmp_path / "new") == ["train.index"]
    assert list(read_index(path)) == [row]
    with open_index(path, tfrecords) as file:
        assert list(file.index) == [row]


def test_what_is_no_file_is_refused_and_never_waited_for(stub: S3Stub, tmp_path: Path) -> None:
    path, folder = setup(stub, tmp_path), tmp_path / "index"
    folder.mkdir()
    os.mkfifo(folder / "train.index")
    assert "is no file; remove it" in build(path, folder, "--format", "TFRecord", code=7).stderr
    assert "there is no record index" in verify(path, folder, code=2).stderr
    os.unlink(folder / "train.index")
    os.symlink(tmp_path / "elsewhere", folder / "train.index")
    done = build(path, folder, "--format", "TFRecord", code=7)
    assert f"{folder}/train.index is a symbolic link" in done.stderr
    assert not (tmp_path / "elsewhere").exists()
    os.unlink(folder / "train.index")
    os.symlink(folder, tmp_path / "link")
    build(path, tmp_path / "link", "--format", "TFRecord")
    (tmp_path / "read").mkdir()
    os.symlink(folder / "train.index", tmp_path / "read" / "train.index")
    verify(path, tmp_path / "read")


def test_faults_of_storage_are_survived(stub: S3Stub, tmp_path: Path) -> None:
    path, folder = setup(stub, tmp_path), tmp_path / "index"
    stub.script(fails(503, "SlowDown"), resets_after(1000), fails(500, "InternalError"), resets_after(70_000))
    build(path, folder, "--format", "TFRecord")
    verify(path, folder, "--all")


def test_a_wrong_format_is_told_from_corrupt_objects(stub: S3Stub, tmp_path: Path) -> None:
    path, folder = setup(stub, tmp_path), tmp_path / "index"
    done = build(path, folder, "--format", "RecordIO", code=8)
    assert (
        "; no object is of the format RecordIO: correct Records.Format, or --format: s3://b/train/0"
        in done.stderr
    )
    assert set(rows(folder)) == {object_name("b", "train/1")}, "an empty object fits every format"


def test_an_object_of_another_format_is_named_and_the_others_are_kept(stub: S3Stub, tmp_path: Path) -> None:
    path, folder = setup(stub, tmp_path), tmp_path / "index"
    good = stub.objects["b/train/0"]
    at = len(b"".join(RECORDS[:100]))
    stub.objects["b/train/0"] = good[:at] + b"\xff" + good[at + 1 :]
    stub.objects["b/train/3"] = good[:-1]
    done = build(path, folder, "--format", "TFRecord", code=8)
    wrong = "no TFRecord begins here: the CRC of its length is wrong"
    assert f"{wrong}: s3://b/train/0 (offset {at})" in done.stderr
    last = len(good) - len(RECORDS[299])
    cut = f"the object ends inside a TFRecord, at byte {len(good) - 1}"
    assert f"{cut}: s3://b/train/3 (offset {last})" in done.stderr
    assert "1 more objects are refused" in done.stderr
    assert set(rows(folder)) == {object_name("b", f"train/{number}") for number in (1, 2)}
    requested(stub)

    stub.objects["b/train/0"] = good
    del stub.objects["b/train/3"]
    build(path, folder)
    assert requested(stub) == {"train/0"}
    verify(path, folder, "--all")


def rewrite(folder: Path, **changes: Any) -> None:
    """Change the row of `train/0`, as if another program had written it, with a right checksum."""
    path = folder / "train.index"
    index = read_index(str(path))
    name = object_name("b", "train/0")
    changed = [row._replace(**changes) if row.name == name else row for row in index]
    path.write_bytes(header(index.format) + block(changed))


def test_a_record_that_is_elsewhere_is_an_error_by_name(stub: S3Stub, tmp_path: Path) -> None:
    path, folder = setup(stub, tmp_path), tmp_path / "index"
    build(path, folder, "--format", "TFRecord")
    name = object_name("b", "train/0")
    right = rows(folder)[name]
    size = len(stub.objects["b/train/0"])

    every, at = ("--samples", "20000"), right.offsets[7]
    rewrite(folder, offsets=array("Q", [*right.offsets[:7], at + 1, *right.offsets[8:]]))
    done = verify(path, folder, *every, code=8)
    named = "no record is where the index has one: no TFRecord begins here: the CRC of its length is wrong"
    assert f"{named}: s3://b/train/0 (offset {at + 1})" in done.stderr
    done = verify(path, folder, "--all", code=8)
    assert f"the records are not where the index has them: 300 records up to byte {size}" in done.stderr
    assert f"s3://b/train/0 (offset {at})" in done.stderr

    far = size + 10**9
    rewrite(folder, offsets=array("Q", [*right.offsets[:299], far]))
    done = verify(path, folder, code=8)
    assert f"the object ends before it: s3://b/train/0 (offset {far})" in done.stderr


def test_an_index_of_another_time_or_place_is_refused(stub: S3Stub, tmp_path: Path) -> None:
    path, folder = setup(stub, tmp_path), tmp_path / "index"
    assert "there is no record index" in verify(path, folder, code=2).stderr
    assert "cannot list the directory" in penstock("index", "show", "--from", str(folder)).stderr
    assert "record format of channel 'train' is unknown" in build(path, folder, code=2).stderr
    assert not folder.exists()
    build(path, folder, "--format", "TFRecord")
    done = build(path, folder, "--format", "lines", code=2)
    assert "is of TFRecord, and not of lines; remove it, or name another directory" in done.stderr
    stub.objects["b/train/3"] = RECORDS[0]
    done = verify(path, folder, code=6)
    remedy = "the object is not in the record index; build the record index again"
    assert f"{remedy}: s3://b/train/3" in done.stderr
    stub.objects["b/train/0"] = RECORDS[0]
    done = verify(path, folder, code=6)
    assert "has another size, ETag or version than when it was indexed, as 1 more object;" in done.stderr
    (folder / "train.index").write_bytes(b"something else")
    assert "it does not begin as a record index does" in build(path, folder, code=7).stderr
    assert penstock("index", "show", "--from", str(tmp_path / "index")).returncode == 7


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"CompressionType": "Gzip"}, "CompressionType: Gzip has no records at fixed offsets"),
        ({"RecordWrapperType": "RecordIO"}, "RecordWrapperType: RecordIO makes every object one record"),
    ],
)
def test_a_channel_without_addressable_records_is_refused(
    stub: S3Stub, tmp_path: Path, change: dict[str, str], why: str
) -> None:
    document = job(stub.url, None, "b/train/", "b/other/")
    document["InputDataConfig"][1] |= change
    path = write_job(tmp_path / "job.yaml", document)
    assert why in build(path, tmp_path / "index", "--format", "lines", code=2).stderr
    stub.objects["b/train/0"] = b"a\nb\n"
    build(path, tmp_path / "index", "--format", "lines", "--channel", "train")
    done = build(path, tmp_path / "index", "--channel", "nothing", code=2)
    assert "the job file has no channel 'nothing'; it has train, other" in done.stderr


def lose(file: Path, key: str, record: int) -> None:
    """Write an index again without one of an object: two are one, or the last one lacks."""
    index = read_index(str(file))
    rows = [
        row._replace(records=row.records - 1, offsets=row.offsets[:record] + row.offsets[record:][1:])
        if row.name == object_name("b", key)
        else row
        for row in index
    ]
    file.write_bytes(header(index.format) + block(rows))


@pytest.mark.parametrize("kind", ["TFRecord", "RecordIO", "lines", "tar"])
def test_an_index_with_two_records_as_one_is_found(stub: S3Stub, tmp_path: Path, kind: str) -> None:
    path, folder = setup(stub, tmp_path, kind), tmp_path / "index"
    build(path, folder, "--format", kind)
    lose(folder / "train.index", "train/2", 101)
    done = verify(path, folder, "--samples", "20000", code=8)
    assert "the index has 1 record from here to the next one, and the object has not" in done.stderr
    assert "s3://b/train/2" in done.stderr


@pytest.mark.parametrize("kind", ["TFRecord", "lines", "tar"])
def test_the_last_record_of_every_object_is_looked_at(stub: S3Stub, tmp_path: Path, kind: str) -> None:
    """However few records are drawn."""
    path, folder = setup(stub, tmp_path, kind), tmp_path / "index"
    build(path, folder, "--format", kind)
    looked = json.loads(verify(path, folder, "--samples", "1", "--json").stdout)["channels"]["train"]
    assert looked["verified"] in ("2 indexed records", "3 indexed records")
    file, records = folder / "train.index", len(naive(kind, stub.objects["b/train/0"]))
    lose(file, "train/0", records - 1)
    assert "s3://b/train/0" in verify(path, folder, "--samples", "1", code=8).stderr


def test_a_row_that_ends_before_its_object_is_damage(stub: S3Stub, tmp_path: Path) -> None:
    """It lacks its last records. The next build scans the object again."""
    path, folder = setup(stub, tmp_path), tmp_path / "index"
    build(path, folder, "--format", "TFRecord")
    file, name = folder / "train.index", object_name("b", "train/0")
    index = read_index(str(file))
    rows = list(index)
    (row,) = (row for row in rows if row.name == name)
    short = row._replace(records=299, end=row.offsets[299], offsets=row.offsets[:299])
    file.write_bytes(header(index.format) + block([short, *(each for each in rows if each != row)]))
    assert "is damaged at byte 36" in verify(path, folder, code=7).stderr
    build(path, folder)
    assert {row.name: row for row in read_index(str(file))} == {row.name: row for row in rows}


def test_the_program_of_the_page_writes_an_index_from_those_of_other_programs(
    stub: S3Stub, tmp_path: Path
) -> None:
    path = write_job(tmp_path / "job.yaml", job(stub.url, None, "my-bucket/train/"))
    listed = []
    for key, data in {"train/0": b"".join(RECORDS[:300]), "train/sub/4": b"".join(RECORDS[:10])}.items():
        stub.objects[f"my-bucket/{key}"] = data
        ends = [*naive("TFRecord", data)[1:], len(data)]
        lines = [f"{at} {end - at}\n" for at, end in zip(naive("TFRecord", data), ends, strict=True)]
        file = tmp_path / "idx" / (key.removeprefix("train/") + ".idx")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(lines))
        listed.append({"Key": key, "Size": len(data), "ETag": f'"{etag(data)}"'})
    (tmp_path / "objects.json").write_text(json.dumps({"Contents": listed}))
    (tmp_path / "index").mkdir()
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    verify(path, tmp_path / "index")
    verify(path, tmp_path / "index", "--all")


@pytest.mark.parametrize("transport", ["splice", "buffered", "aiobotocore"])
def test_every_transport_reads_the_same(stub: S3Stub, tmp_path: Path, transport: str) -> None:
    path, folder = setup(stub, tmp_path, "lines", Transport=transport), tmp_path / "index"
    build(path, folder, "--format", "lines")
    verify(path, folder)
    row = rows(folder)[object_name("b", "train/2")]
    assert list(row.offsets) == naive("lines", stub.objects["b/train/2"])


def test_all_hosts_objects_are_indexed(stub: S3Stub, tmp_path: Path) -> None:
    setup(stub, tmp_path)
    document = job(stub.url, None, "b/train/")
    source = document["InputDataConfig"][0]["DataSource"]["S3DataSource"]
    source |= {"S3DataDistributionType": "ShardedByS3Key", "InstanceGroupNames": ["gpu"]}
    path = write_job(tmp_path / "sharded.yaml", document)
    environment = {**os.environ, "RANK": "1", "WORLD_SIZE": "2"}
    done = penstock(
        "index", "build", "-c", path, "--to", str(tmp_path / "index"), "--format", "TFRecord", env=environment
    )
    assert done.returncode == 0, done.stderr
    assert len(rows(tmp_path / "index")) == 3


def test_an_object_without_an_etag_is_refused_by_name(stub: S3Stub, tmp_path: Path) -> None:
    """A time of modification is too weak a proof for rows that are kept."""
    path = setup(stub, tmp_path)
    stub.times["b/train/2"] = "2026-11-03T21:56:26Z"
    done = penstock("index", "build", "-c", path, "--to", str(tmp_path / "index"), "--format", "TFRecord")
    assert done.returncode != 0
    assert "the server has no ETag for this object" in done.stderr
    assert "s3://b/train/2" in done.stderr
