"""Key lists: a key list says which object each byte of a FIFO is of.

A FIFO has the bytes of the objects alone. With `RecordKeys` in the job file the sidecar keeps
`<dir>/.<channel>_<epoch>.penstock.keys` beside the trailer, a text of JSON lines in stream order:

    {"format": 1, "run": "5f0e…"}
    [0, 0, "train/a.tfrecord", "bucket"]
    [81920, 0, "train/b.tfrecord", "bucket"]

Each line after the first says: from this offset of the epoch's stream on, the bytes are of this object, and
the first record there is the object's record of this number. Of lines with one offset the last is valid; the
others are of objects without a byte. The text of an attribute (AugmentedManifestFile) is of no object, and
its key is empty.

The sidecar appends a line before the FIFO accepts the first byte of its object. So a reader that has a byte
finds its line in the file. `run` is that of the trailer. Both sidecar and readers use this module, so it
imports nothing of either.
"""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

FORMAT = 1


class KeyListLine(NamedTuple):
    """The object of a FIFO's bytes from one offset on."""

    offset: int
    """Offset in the epoch's stream."""
    number: int
    """Number in the object of the first record that begins there or after it."""
    key: str
    bucket: str


def key_list_path(directory: str, channel: str, epoch: int) -> str:
    """Return the path of an epoch's key list, beside its FIFO."""
    return os.path.join(directory, f".{channel}_{epoch}.penstock.keys")


def first_line(run: str) -> bytes:
    """Return the first line of a key list."""
    return json.dumps({"format": FORMAT, "run": run}).encode() + b"\n"


def parse_first_line(text: bytes) -> str:
    """Return the run in the first line of a key list. Raises ValueError."""
    document = _parsed(text)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"the first line is not that of a key list of format {FORMAT}")
    return str(document.get("run"))


def encoded(line: KeyListLine) -> bytes:
    """Return a line of a key list."""
    return json.dumps(line).encode() + b"\n"


def parsed(text: bytes) -> KeyListLine:
    """Return the line that `encoded` has written. Raises ValueError."""
    document = _parsed(text)
    if not isinstance(document, list) or list(map(type, document)) != [int, int, str, str]:
        raise ValueError(f"{text[:100]!r} is no line of a key list")
    return KeyListLine(*document)


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{text[:100]!r} is not JSON: {error}") from error
