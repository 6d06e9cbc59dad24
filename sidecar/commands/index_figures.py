"""`penstock index show`: the figures of record indexes, without a job file and without S3."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from sidecar.job.index_file import SUFFIX, read_index
from streamer.errors import ConfigError
from streamer.units import decimal_bytes

if TYPE_CHECKING:
    from streamer.formats.record_index import RecordIndex


def show(folder: str) -> dict[str, Any]:
    """Return the document of `penstock index show --json`: the figures of every index of the folder."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(SUFFIX))
    except OSError as error:
        raise ConfigError(f"cannot list the folder of record indexes {folder}: {error.strerror}") from error
    if not names:
        raise ConfigError(f"there is no record index in {folder}: make it by `penstock index build`")
    document = {}
    for name in names:
        path = os.path.join(folder, name)
        document[name.removesuffix(SUFFIX)] = figures(path, read_index(path))
    return {"channels": document}


def figures(path: str, index: RecordIndex) -> dict[str, Any]:
    """Return the figures of the index at `path`."""
    totals, size = index.totals(), os.path.getsize(path)
    return {
        "file": path,
        "format": str(index.format),
        "every": index.stride,
        "objects": totals.objects,
        "records": totals.records,
        "bytes": totals.bytes,
        "index_bytes": size,
        "index_bytes_per_record": round(size / max(totals.records, 1), 4),
    }


def lines(document: dict[str, Any]) -> list[str]:
    """Return what people read about the indexes of a document."""
    return [
        f"{name}\n  format   {channel['format']}\n  objects  {channel['objects']}"
        + (f" ({channel['scanned']} scanned, {channel['imported']} imported)" if "scanned" in channel else "")
        + f"\n  records  {channel['records']}"
        f"\n  bytes    {channel['bytes']} ({decimal_bytes(channel['bytes'])})"
        f"\n  index    {decimal_bytes(channel['index_bytes'])}, {channel['index_bytes_per_record']} bytes a "
        f"record, {channel['file']}"
        + (f"\n  verified {channel['verified']}" if "verified" in channel else "")
        for name, channel in document["channels"].items()
    ]
