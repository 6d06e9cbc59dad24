"""Every kind of channel from its job file to the bytes in its FIFO, by real processes, against the model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.kit.processes import job, penstock, write_job
from tests.kit.stub import S3Stub


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


def test_a_manifest_can_be_a_directory_of_files(stub: S3Stub, tmp_path: Path) -> None:
    store_of(stub)
    document = job_of(stub, "ManifestFile", "s3://b/lists/some.manifest", InputMode="File")
    stub.objects["b/lists/some.manifest"] = json.dumps(
        [{"prefix": "s3://b/da"}, "ta/5", "ta/0"]
    ).encode()  # what is below the prefix's last folder becomes the path
    path = write_job(tmp_path / "job.yaml", document)
    done = penstock("exec", "-c", path, "--", "sh", "-c", 'cd "$SM_CHANNEL_C" && find . -type f')
    assert (done.returncode, sorted(done.stdout.split())) == (0, ["./data/0", "./data/5"]), done.stderr
