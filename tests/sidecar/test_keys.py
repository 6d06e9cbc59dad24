"""Object keys that would be paths, lines, terminal codes or markup: they are names, and nothing else."""

from __future__ import annotations

import os
import unicodedata
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from sidecar.download.paths import relative_path
from streamer.errors import ConfigError
from tests.kit.pipes import read_all
from tests.kit.processes import job, penstock, sidecar, write_job
from tests.kit.stub import S3Stub, fails
from tests.kit.trailers import published_trailer

TWINS = [unicodedata.normalize(form, "b/train/café") for form in ("NFC", "NFD")]
KEYS = [
    "b/train/../../../../etc/passwd",
    "b/train//etc/passwd",
    "b/train/./.",
    "b/train/a\nb\r\nc",
    "b/train/\x1b]0;title\x07\x1b[2J",
    "b/train/%00%0a%2e%2e%2f",
    "b/train/\\x00\\n",
    "b/train/" + "k" * 1016,
    "b/train/" + "é" * 508,
    'b/train/"} 1\nforged{a="b',
    "b/train/<script>alert(1)</script>",
    "b/train/a b+c&d=e?versionId=x#y;z",
    "b/train/\u202egpj.exe\u2028",
    "b/train/\x7f\x85",
    *TWINS,
]
assert len(set(TWINS)) == 2


def plant(stub: S3Stub) -> bytes:
    stub.objects |= {key: key.encode() for key in KEYS}
    return b"".join(key.encode() for key in sorted(KEYS))


def test_hostile_keys_are_streamed_as_any(stub: S3Stub, tmp_path: Path) -> None:
    """And nothing is made outside of what a channel makes."""
    truth = plant(stub)
    with sidecar(write_job(tmp_path / "job.yaml", job(stub.url, tmp_path / "ml", "b/train/"))) as running:
        running.wait_for("ready")
        assert read_all(tmp_path / "ml/input/data/train_0") == truth
        running.wait_for("epoch complete")
        names = sorted(os.listdir(tmp_path / "ml/input/data"))
        assert [each for each in names if each not in (".penstock.finish", ".penstock.finished")] == [
            ".penstock.lock", ".train_0.penstock.json", ".train_1.penstock.json", "train_1",
        ]  # fmt: skip
        assert running.end() == 0


HOSTILE = 'b/train/a\nb\r\nc\x1b]0;t\x07\x1b[2J"} 1\nforged{a="b<script>alert(1)</script>\u202e\u2028\x7f\x85'


def test_a_hostile_key_forges_nothing(stub: S3Stub, tmp_path: Path) -> None:
    """Where it is told: in log, trailer, status, metrics, and on a terminal."""
    stub.objects[HOSTILE] = b"x"
    stub.script(*[fails(403, "AccessDenied")] * 9)
    with sidecar(write_job(tmp_path / "job.yaml", job(stub.url, tmp_path / "ml", "b/train/"))) as running:
        running.wait_for("ready")
        with open(tmp_path / "ml/input/data/train_0", "rb", buffering=0):
            error = running.wait_for("epoch failed")["error"]
            assert HOSTILE in error
            assert published_trailer(tmp_path / "ml/input/data", "train", 0).error == error
            assert running.status()["channels"]["train"]["errors"][0]["text"] in error
            for family in text_string_to_metric_families(running.get("/metrics")[1]):
                assert "forged" not in family.name
            shown = penstock("top", "--once", "--url", running.url)
            assert running.end() == 3
    assert all("timestamp" in event for event in running.events[:-1]), "a line of the log is not of the log"
    reported = penstock("cat", f"s3://{HOSTILE}", "--endpoint-url", stub.url, "--path-style")
    assert reported.returncode == 3
    assert reported.stderr.count("\n") == 1
    for stated in (shown.stdout, reported.stderr):
        assert not set(stated) & set("\x1b\x07\r\x7f\x85\u202e\u2028")


def test_no_key_leaves_the_channel_s_directory(stub: S3Stub, tmp_path: Path) -> None:
    """In File mode it is refused by name, or lies below. What looks the same is two files."""
    kept = {}
    for key in KEYS:
        try:
            kept[relative_path(key, "b/train/")] = key
        except ConfigError as error:
            assert "use InputMode: Pipe" in str(error)  # noqa: PT017 - each key by itself
    assert {"train/etc/passwd", "etc/passwd"}.isdisjoint(kept)
    assert set(TWINS) <= set(kept.values())
    stub.objects |= {key: key.encode() for key in kept.values()}
    document = job(stub.url, tmp_path / "ml", "b/train/")
    document["InputDataConfig"][0]["InputMode"] = "File"
    with sidecar(write_job(tmp_path / "job.yaml", document)) as running:
        running.wait_for("ready")
        assert running.end() == 0
    place = tmp_path / "ml/input/data/train"
    assert {path: (place / path).read_bytes() for path in kept} == {
        path: key.encode() for path, key in kept.items()
    }
    assert sum(len(files) for _, _, files in os.walk(place)) == len(kept)
