"""Other people's readers (contract §7) as processes, beside a real `penstock run`."""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.harness import fill
from tests.kit.processes import Sidecar, job, leftovers, sidecar, write_job
from tests.kit.stub import S3Stub
from tests.sidecar import foreign
from tests.sidecar.foreign import MAGIC

SIZES = [3_000_000, 0, 1, 1_500_000]
"""More than a FIFO holds, in several parts."""


@contextlib.contextmanager
def serving(stub: S3Stub, tmp_path: Path, *prefixes: str, **channel: str) -> Iterator[Sidecar]:
    document = job(stub.url, tmp_path / "ml", *prefixes)
    for each in document["InputDataConfig"]:
        each.update(channel)
    with sidecar(write_job(tmp_path / "job.yaml", document)) as running:
        running.wait_for("ready")
        yield running
        assert running.end() == 0


def reads(tmp_path: Path, reader: str, epochs: int, *channels: str) -> Any:
    """What the reader's process says of each epoch."""
    data = tmp_path / "ml" / "input" / "data"
    command = [sys.executable, str(Path(foreign.__file__)), reader, str(data), str(epochs), *channels]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_mlio(stub: S3Stub, tmp_path: Path) -> None:
    """Every FIFO is there at the first try; MLIO would allow two seconds, and 60 for a byte."""
    data = fill(stub, SIZES, prefix="b/train/")
    with serving(stub, tmp_path, "b/train/") as running:
        reported = reads(tmp_path, "mlio", 3, "train")
        running.wait_for("epoch complete", epoch=2)
    assert [(found, failed) for found, failed, _ in reported] == [(digest(data), 0)] * 3
    assert max(longest for _, _, longest in reported) < 60


def test_mlio_of_empty_epochs(stub: S3Stub, tmp_path: Path) -> None:
    """No byte comes: the end of file wakes it."""
    fill(stub, [0, 0], prefix="b/train/")
    with serving(stub, tmp_path, "b/train/"):
        reported = reads(tmp_path, "mlio", 2, "train")
    assert [found for found, _, _ in reported] == [digest(b"")] * 2


def test_xgboost(stub: S3Stub, tmp_path: Path) -> None:
    data = fill(stub, SIZES, prefix="b/train/")
    with serving(stub, tmp_path, "b/train/"):
        assert reads(tmp_path, "xgboost", 1, "validation") == ["absent"]
        assert not (tmp_path / "ml" / "input" / "data" / "train").exists()  # it appends the number itself
        assert reads(tmp_path, "xgboost", 1, "train") == [digest(data)]


def test_the_bring_your_own_sample(stub: S3Stub, tmp_path: Path) -> None:
    data = fill(stub, SIZES, prefix="b/train/")
    with serving(stub, tmp_path, "b/train/"):
        assert reads(tmp_path, "own_algorithm", 3, "train") == [digest(data)] * 3


def test_a_reader_of_the_lowest_number(stub: S3Stub, tmp_path: Path) -> None:
    """It works only because a FIFO is gone before its reader sees the end."""
    data = fill(stub, SIZES, prefix="b/train/")
    with serving(stub, tmp_path, "b/train/"):
        reported = reads(tmp_path, "lowest", 4, "train")
    assert reported == [[f"train_{epoch}", digest(data)] for epoch in range(4)]


def test_pandas(stub: S3Stub, tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    rows = [(number, number * number) for number in range(50_000)]
    lines = [b"%d,%d\n" % row for row in rows]
    stub.objects |= {f"b/train/{part}": b"".join(lines[part * 10_000 :][:10_000]) for part in range(5)}
    with serving(stub, tmp_path, "b/train/"):
        reported = reads(tmp_path, "read_csv", 2, "train")
    assert reported == [[50_000, sum(a for a, _ in rows), sum(b for _, b in rows)]] * 2


def test_two_channels_zipped_at_unequal_speed(stub: S3Stub, tmp_path: Path) -> None:
    """The fast one is 200 times the slow one, and far more than its budget and FIFO hold."""
    few = fill(stub, [30_000, 70_000], prefix="b/labels/")
    many = fill(stub, [20_000_000], prefix="b/images/", seed=2)
    with serving(stub, tmp_path, "b/labels/", "b/images/"):
        reported = reads(tmp_path, "zipped", 2, "labels", "images")
    assert reported == [[digest(few), digest(many)]] * 2


def test_dmlc_reads_what_is_wrapped(stub: S3Stub, tmp_path: Path) -> None:
    """One whole record for each object, a magic inside included."""
    objects = [b"ABCD" + MAGIC.to_bytes(4, "little") + b"EF", b"", b"1", bytes(2_000_001)]
    stub.objects |= {f"b/train/{number}": data for number, data in enumerate(objects)}
    with serving(stub, tmp_path, "b/train/", RecordWrapperType="RecordIO"):
        assert reads(tmp_path, "dmlc", 2, "train") == [[digest(data) for data in objects]] * 2


def test_a_reader_of_one_epoch_leaves_nothing_behind(stub: S3Stub, tmp_path: Path) -> None:
    data = fill(stub, SIZES, prefix="b/train/")
    with serving(stub, tmp_path, "b/train/"):
        assert reads(tmp_path, "own_algorithm", 1, "train") == [digest(data)]
    assert leftovers(tmp_path / "ml") == [".train_0.penstock.json"]
