"""Names of record indexes: `DIRECTORY/CHANNEL.index`, or `s3://BUCKET/PREFIX/CHANNEL.index`."""

from __future__ import annotations

import os

from streamer.plan import S3Uri, parse_address

SUFFIX = ".index"


def index_uri(place: str, channel: str) -> S3Uri | None:
    """Return the URI of a channel's index; None if `place` is a local folder.

    Raises ConfigError for a URI that is not of S3.
    """
    if "://" not in place:
        return None
    bucket, prefix = parse_address(place)
    folder = prefix if not prefix or prefix.endswith("/") else f"{prefix}/"
    return S3Uri(bucket, f"{folder}{channel}{SUFFIX}")


def index_path(folder: str, channel: str) -> str:
    """Return the path of a channel's index."""
    return os.path.join(folder, channel + SUFFIX)
