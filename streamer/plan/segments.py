"""The elements of a plan: an object version, and a byte range of it. A stream has them and literal bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from streamer.formats.recordio import MAX_PAYLOAD, header, padding


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """One object version, as listed. References from two listings of unchanged data are equal."""

    bucket: str
    key: str
    size: int
    """Bytes."""
    etag: str
    """ETag without quotes and `W/`, since only some servers quote it in listings; or a time
    (`streamer.plan.validators`)."""
    version: str | None = None
    """Version id that a manifest names; None: read the current version, which must have the same ETag."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes `start` (inclusive) to `end` (exclusive) of one object version."""

    object: ObjectRef
    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end <= self.object.size:
            raise ValueError(f"no such range: {self}")

    def __len__(self) -> int:
        return self.end - self.start


class ObjectStart(NamedTuple):
    """Offset in a plan's stream from which on its bytes are of one object."""

    offset: int
    number: int
    """Number in the object of the first record that begins there."""
    key: str
    """Empty for literals that are of no object."""
    bucket: str


LONGEST_RECORD = MAX_PAYLOAD
"""Bytes that one RecordIO record of a single part can hold (contract §5.1)."""


def frame(size: int) -> tuple[bytes, bytes]:
    """Return header and padding of a RecordIO record of `size` bytes. Raises ValueError if it is too long."""
    return header(size), padding(size)
