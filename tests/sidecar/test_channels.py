"""Every kind of channel from its job file to the bytes in its FIFO, by real processes, against the model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.kit.processes import job, penstock, write_job
from tests.kit.stub import S3Stub
from tests.unit import reference

READ_TWO_EPOCHS = 'cat "$SM_CHANNEL_C"_0 "$SM_CHANNEL_C"_1'


def store_of(stub: S3Stub) -> dict[Any, Any]:
    objects = {f"b/data/{number}": os.urandom(1 + 997 * number) for number in range(7)}
    manifest = [{"prefix": "s3://b/data/"}, "5", "0", "3", "3"]
    lines = [
        {"image-ref": f"s3://b/data/{number}", "label": number, "box": [1, 2.5], "note": 'ä"'}
        for number in range(6)
    ]
    objects["b/lists/some.manifest"] = json.dumps(manifest).encode()
    objects["b/lists/lines.manifest"] = "\n".join(map(json.dumps, lines)).encode()
    stub.objects |= objects
    return {f"s3://{name}": data for name, data in objects.items()}


EVERY_KIND = pytest.mark.parametrize(
    ("kind", "uri"),
    [
        ("S3Prefix", "s3://b/data/"),
        ("ManifestFile", "s3://b/lists/some.manifest"),
        ("AugmentedManifestFile", "s3://b/lists/lines.manifest"),
    ],
)
"""Sources of channels, in what `store_of` holds."""


def job_of(stub: S3Stub, kind: str, uri: str, **channel: Any) -> dict[str, Any]:
    document = job(stub.url, None, "b/c/", MemoryBudget="32MiB")
    found = document["InputDataConfig"][0]
    source = found["DataSource"]["S3DataSource"]
    source |= {"S3DataType": kind, "S3Uri": uri, "S3DataDistributionType": "ShardedByS3Key"}
    if kind == "AugmentedManifestFile":
        source["AttributeNames"] = ["image-ref", "label", "note"]
    found |= channel
    return document


@EVERY_KIND
@pytest.mark.parametrize("arranged", [False, True], ids=["plain", "arranged"])
def test_two_hosts_stream_what_the_contract_says(
    stub: S3Stub, tmp_path: Path, kind: str, uri: str, arranged: bool
) -> None:
    """Two epochs on each of two hosts; arranged: shuffled, and wrapped in records."""
    store = store_of(stub)
    channel = {"RecordWrapperType": "RecordIO", "ShuffleConfig": {"Seed": 7}} if arranged else {}
    path = write_job(tmp_path / "job.yaml", job_of(stub, kind, uri, **channel))
    rows = reference.rows(kind, store, uri, ["image-ref", "label", "note"])
    flags = ["--host-count", "2", "--host-index"]
    for host in range(2):
        command = [*flags, str(host), "--", "sh", "-c", READ_TWO_EPOCHS]
        done = penstock("exec", "-c", path, *command, text=False)
        assert done.returncode == 0, done.stderr.decode()
        due = [
            reference.stream(
                rows, epoch=epoch, wrap=arranged, seed=7 if arranged else None, host=host, hosts=2
            )
            for epoch in range(2)
        ]
        assert done.stdout == b"".join(due)


def test_a_manifest_can_be_a_directory_of_files(stub: S3Stub, tmp_path: Path) -> None:
    store_of(stub)
    document = job_of(stub, "ManifestFile", "s3://b/lists/some.manifest", InputMode="File")
    stub.objects["b/lists/some.manifest"] = json.dumps(
        [{"prefix": "s3://b/da"}, "ta/5", "ta/0"]
    ).encode()  # what is below the prefix's last folder becomes the path
    path = write_job(tmp_path / "job.yaml", document)
    done = penstock("exec", "-c", path, "--", "sh", "-c", 'cd "$SM_CHANNEL_C" && find . -type f')
    assert (done.returncode, sorted(done.stdout.split())) == (0, ["./data/0", "./data/5"]), done.stderr
