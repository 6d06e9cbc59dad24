"""Job file, environment and record index of a sidecar that streams `s3://bucket/data/` of a server here."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterable
from typing import Any

from benchmarks.index_server import etag
from sidecar.index.file import open_index
from streamer.formats.record_format import RecordFormat
from streamer.formats.record_index import IndexedObject, object_name, object_version


def environment(url: str, directory: str) -> dict[str, str]:
    """Return the environment of a program: keys and an endpoint, and no AWS file."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "PYTHON"))}
    return kept | {
        "AWS_ACCESS_KEY_ID": "AKIDBENCHMARK",
        "AWS_SECRET_ACCESS_KEY": "not-a-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": url,
        "S3_ENDPOINT_URL": url,  # s5cmd's
        "AWS_CONFIG_FILE": os.path.join(directory, "none"),
        "AWS_SHARED_CREDENTIALS_FILE": os.path.join(directory, "none"),
        "AWS_EC2_METADATA_DISABLED": "true",
        "RCLONE_CONFIG": "",
    }


def write_job(
    base_directory: str, extras: dict[str, Any] | None = None, *, shuffled: bool = False, **penstock: Any
) -> str:
    """Write a job file with the channel `train` beside its base directory; return the file's path.

    `extras`: the channel's `Penstock` section. `penstock`: further keys of the job's section.
    """
    source = {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": "s3://bucket/data/"}}
    channel: dict[str, Any] = {"ChannelName": "train", "DataSource": source}
    if extras is not None:
        channel["Penstock"] = extras
    if shuffled:
        channel["ShuffleConfig"] = {"Seed": 1}
    section = {"BaseDirectory": base_directory, "Endpoint": {"PathStyle": True}, "Admin": {"Port": 0}}
    path = base_directory + ".json"
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"InputDataConfig": [channel], "Penstock": section | penstock}, file)
    return path


def write_index(directory: str, keys: Iterable[str], *, record: int, records: int) -> int:
    """Write the index of TFRecord objects, each of `records` records of `record` bytes; return its size."""
    path, size = os.path.join(directory, "train.index"), record * records
    offsets = array("Q", range(0, size, record))
    os.mkdir(directory)
    with open_index(path, RecordFormat("TFRecord")) as file:
        for key in keys:
            version = object_version("bucket", key, size=size, etag=etag(key), version=None)
            file.append([IndexedObject(object_name("bucket", key), version, size, records, size, offsets)])
    return os.path.getsize(path)
