"""A channel's plan: its objects in order, and what follows from them.

Order is the UTF-8 byte order of keys, whatever order the server listed them in (S3 promises it, some
compatible servers do not keep it). Keys, sizes and ETags are frozen once per job, so every epoch
streams the same bytes or fails by name (contract §9-2). The digest covers exactly what decides the
stream: two plans have one digest if and only if they stream the same ranges of the same versions.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from streamer.errors import ConfigError
from streamer.plan.segments import ObjectRef, Segment

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class S3Uri(NamedTuple):
    """A bucket and a key or key prefix (which may be empty)."""

    bucket: str
    key: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key}"


_URI = re.compile(r"s3://([^/]+)/?(.*)", re.DOTALL)


def parse_s3_uri(uri: str) -> S3Uri:
    """Split `s3://bucket/prefix` (contract §3). Raises ConfigError for anything else."""
    match = _URI.fullmatch(uri)
    if match is None:
        raise ConfigError(f"{uri!r} is not an S3 URI: write s3://BUCKET/PREFIX")
    return S3Uri(*match.groups())


def frozen_order(listed: Iterable[ObjectRef]) -> tuple[ObjectRef, ...]:
    """The objects of a listing in plan order, without zero-byte "folder" markers.

    Consoles and mount tools create empty objects whose key ends in `/`; they hold no data, and under
    record wrapping they would become empty records (contract §3.1).
    """
    objects = [ref for ref in listed if not (ref.size == 0 and ref.key.endswith("/"))]
    objects.sort(key=lambda ref: ref.key.encode())
    return tuple(objects)


@dataclass(frozen=True)
class Plan:
    """Everything that decides what one channel streams."""

    objects: tuple[ObjectRef, ...]

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of one epoch."""
        return sum(ref.size for ref in self.objects)

    def segments(self) -> Iterator[Segment]:
        """One epoch's segments, in stream order; empty objects contribute none."""
        return (Segment(ref, 0, ref.size) for ref in self.objects if ref.size)

    @cached_property
    def digest(self) -> str:
        """SHA-256, in hex, over one JSON array a line per segment: bucket, key, ETag, start, end."""
        state = hashlib.sha256(b"penstock plan 1\n")
        for segment in self.segments():
            ref = segment.object
            line = json.dumps([ref.bucket, ref.key, ref.etag, segment.start, segment.end])
            state.update(line.encode() + b"\n")
        return state.hexdigest()
