"""`penstock plan` and `doctor` compare first bytes with the channel's format, which readers obey."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from streamer.formats import recordio, tfrecord
from streamer.readers import PipeModeDatasetException, PipeReader
from tests.kit.processes import findings, job, penstock, sidecar, write_job
from tests.kit.stub import S3Stub

RECORDS = [b"record %d" % number for number in range(100)]
TFRECORDS = b"".join(map(tfrecord.encode, RECORDS))


def written(stub: S3Stub, tmp_path: Path, penstock_: dict[str, Any], **channel: Any) -> str:
    document = job(stub.url, tmp_path / "ml", "b/train/")
    document["InputDataConfig"][0] |= {"Penstock": penstock_} | channel
    return write_job(tmp_path / "job.yaml", document)


def planned(path: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(penstock("plan", "-c", path, "--json").stdout)
    return dict(document["channels"]["train"])


def test_readers_obey_the_channel(stub: S3Stub, tmp_path: Path) -> None:
    stub.objects["b/train/0"] = b"".join(map(recordio.encode, RECORDS))
    path = written(stub, tmp_path, {"Records": {"Format": "recordio"}})
    base = tmp_path / "ml"
    directories: dict[str, Any] = {
        "pipe_dir": base / "input" / "data",
        "config_dir": base / "input" / "config",
        "state_dir": base / "pipe_state",
    }
    with sidecar(path) as running:
        running.wait_for("ready")
        with pytest.raises(
            PipeModeDatasetException, match=r"train has Records\.Format: RecordIO, .* TFRecord"
        ):
            PipeReader("train", "TFRecord", **directories)
        assert list(PipeReader("train", **directories)) == RECORDS


@pytest.mark.parametrize(
    ("form", "data", "extras", "why", "do"),
    [
        (
            "RecordIO",
            TFRECORDS,
            {},
            "is TFRecord, not RecordIO",
            "set Records.Format: TFRecord in the channel",
        ),
        ("TFRecord", b"a line\n", {}, "is text, not TFRecord", "set Records.Format: lines in the channel"),
        ("lines", gzip.compress(b"a line\n", mtime=0), {}, "is gzip, not lines", "set CompressionType: Gzip"),
        ("lines", bytes(8) + TFRECORDS, {"SkipBytes": 8}, "is TFRecord, not lines", "Format: TFRecord"),
    ],
)
def test_another_format_is_named(  # noqa: PLR0917 - a row of the table
    stub: S3Stub, tmp_path: Path, form: str, data: bytes, extras: dict[str, Any], why: str, do: str
) -> None:
    stub.objects |= {"b/train/0": b"", "b/train/1": data}
    path = written(stub, tmp_path, {"Records": {"Format": form}} | extras)
    finding = findings(path)["format train"]
    assert finding["state"] == "failure"
    assert finding["text"] == f"s3://b/train/1 {why}"
    assert do in finding["fix"]
    advice = planned(path)["wrong_format"]
    assert (advice["why"], advice["do"]) == (finding["text"], finding["fix"])
    assert f"  format   wrong: s3://b/train/1 {why}; " in penstock("plan", "-c", path).stdout


@pytest.mark.parametrize(
    ("form", "data", "channel"),
    [
        ("TFRecord", TFRECORDS, {}),
        ("lines", b"a line\n", {}),
        ("fixed:7", b"a line\n", {}),
        ("TFRecord", gzip.compress(TFRECORDS, mtime=0), {"CompressionType": "Gzip"}),
    ],
)
def test_the_right_format_is_no_finding(
    stub: S3Stub, tmp_path: Path, form: str, data: bytes, channel: dict[str, Any]
) -> None:
    stub.objects["b/train/0"] = data
    path = written(stub, tmp_path, {"Records": {"Format": form}}, **channel)
    assert "format train" not in findings(path)
    assert "wrong_format" not in planned(path)


def test_a_channel_without_a_format(stub: S3Stub, tmp_path: Path) -> None:
    """Any records may be right; what needs a key is named, and is right for a program that knows it."""
    stub.objects["b/train/0"] = TFRECORDS
    path = written(stub, tmp_path, {})
    assert "format train" not in findings(path)
    stub.objects["b/train/0"] = b"\x89PNG\r\n\x1a\n"
    finding = findings(path)["format train"]
    assert (finding["state"], finding["text"]) == ("ok", "s3://b/train/0 is a PNG image")
    assert "RecordWrapperType: RecordIO" in finding["fix"]
    before = len(stub.seen)
    assert "wrong_format" not in planned(path)
    assert len(stub.seen) == before, "plan reads no object"
