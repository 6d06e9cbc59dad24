"""`sagemaker_tensorflow`, installed as its page says, under a program that knows nothing of Penstock."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from streamer.formats import tfrecord
from tests.kit.processes import job, penstock, write_job
from tests.kit.stub import S3Stub
from tests.kit.warm_python import warm_python

ROOT = Path(__file__).parent.parent.parent
PROGRAM = """
import sys
sys.path[:0] = %r, %r
import sagemaker_tensorflow, sagemaker_tensorflow.pipemode
import tensorflow as tf
from sagemaker_tensorflow import PipeModeDataset, PipeModeDatasetException

assert sagemaker_tensorflow.__file__.startswith(sys.path[0]), sagemaker_tensorflow.__file__
assert sagemaker_tensorflow.pipemode.PipeModeDataset is PipeModeDataset
try:
    PipeModeDataset(channel="valid", record_format="TFRecord")
except PipeModeDatasetException as error:
    print(error)
dataset = PipeModeDataset("train", "TFRecord", benchmark=True, benchmark_records_interval=60)
numbers = [int(record) for record in dataset.repeat(2).as_numpy_iterator()]
assert numbers == 2 * list(range(100)), numbers
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A directory with the distribution alone, as pip puts it there; its dependency is this checkout."""
    pytest.importorskip("tensorflow")
    target = tmp_path / "site"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    source = ROOT / "compat" / "sagemaker_tensorflow"
    subprocess.run(
        [*pip, "--disable-pip-version-check", "--target", str(target), str(source)],
        check=True, capture_output=True,
    )  # fmt: skip
    return target


@pytest.mark.timeout(120)
def test_a_program_of_the_incumbents_runs_unchanged(stub: S3Stub, tmp_path: Path, installed: Path) -> None:
    stub.objects |= {
        f"b/train/{part}": b"".join(
            tfrecord.encode(b"%d" % number) for number in range(part * 50, part * 50 + 50)
        )
        for part in range(2)
    }
    path = write_job(tmp_path / "job.yaml", job(stub.url, None, "b/train/"))
    done = penstock("exec", "-c", path, "--", warm_python(), "-c", PROGRAM % (str(installed), str(ROOT)))
    assert done.returncode == 0, done.stderr
    name = "PipeModeDatasetOp::Dataset::Iterator"
    size = sum(len(str(number)) for number in range(100))
    first = sum(len(str(number)) for number in range(60))
    epoch = (
        rf"{name} records: 60\n{name} records read_time_ns: \d+\n{name} records read_bytes: {first}\n"
        rf"{name} total read_time_ms: \d+\n{name} total read_bytes: {size}\n{name} total read_GB/s: \S+\n"
    )
    reported = "Channel valid not found in Training Job InputDataConfig; the Pipe channels are train\n"
    assert re.fullmatch(reported + epoch * 2, done.stdout), done.stdout
