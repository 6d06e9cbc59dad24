"""The figures of record indexes; those of a folder need neither a job file nor S3."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from sidecar.config.index_place import SUFFIX, index_path
from sidecar.index.stored import open_stored
from streamer.errors import ConfigError
from streamer.units import decimal_bytes

if TYPE_CHECKING:
    from streamer.formats.record_index import RecordIndex


def show(folder: str) -> dict[str, Any]:
    """Return the document of `penstock index show --json`: the figures of every index of the folder."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(SUFFIX))
    except OSError as error:
        raise ConfigError(
            f"cannot list the directory of record indexes {folder}: {error.strerror}"
        ) from error
    if not names:
        raise ConfigError(f"there is no record index in {folder}: make it by `penstock index build`")
    document = {}
    for name in (each.removesuffix(SUFFIX) for each in names):
        if (stored := open_stored(index_path(folder, name))) is not None:
            document[name] = figures(stored.path, stored.index(), stored.size)
    return {"channels": document}


def figures(name: str, index: RecordIndex, size: int) -> dict[str, Any]:
    """Return the figures of an index. `name`: its path or URI. `size`: its bytes."""
    return {
        "file": name,
        "format": str(index.format),
        "objects": len(index),
        "records": index.records,
        "bytes": index.bytes,
        "index_bytes": size,
        "index_bytes_per_record": round(size / max(index.records, 1), 4),
    }


def lines(document: dict[str, Any]) -> list[str]:
    """Return what people read about the indexes of a document."""
    return [
        f"{name}\n  format   {channel['format']}\n  objects  {channel['objects']}"
        + (f" ({channel['scanned']} scanned)" if "scanned" in channel else "")
        + f"\n  records  {channel['records']}"
        f"\n  bytes    {channel['bytes']} ({decimal_bytes(channel['bytes'])})"
        f"\n  index    {decimal_bytes(channel['index_bytes'])}, {channel['index_bytes_per_record']} bytes a "
        f"record, {channel['file']}"
        + (f"\n  verified {channel['verified']}" if "verified" in channel else "")
        for name, channel in document["channels"].items()
    ]
