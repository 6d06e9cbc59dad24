"""Markers: which directories of checkpoints are whole in S3, when several hosts write them.

A marker is an object `.penstock/<step>/<host>.json`: the files of one host in the directory `<step>`. A step
is complete when all hosts that its newest marker names have a marker, and the objects have the ETags in
these. So a step that is written again is incomplete until its new markers are there.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

PREFIX = ".penstock/"
"""What the keys of markers begin with, below that of the checkpoints. These objects are not restored."""


class Marker(NamedTuple):
    """The files of one host in the directory of a step."""

    step: str
    host: str
    hosts: Sequence[str]
    """All hosts of the job that wrote the step."""
    modified: int
    """Time of the last change of the files, in ns since 1970, by the host's clock."""
    files: Mapping[str, tuple[int, str]]
    """Size and ETag, by name below the prefix of the checkpoints."""

    @property
    def name(self) -> str:
        """What its key ends with."""
        return f"{PREFIX}{self.step}/{self.host}.json"

    def document(self) -> bytes:
        """Return the bytes of the object."""
        return json.dumps(self._asdict()).encode()


def parse_marker(data: bytes) -> Marker | None:
    """Return the marker of an object; None if it is another object."""
    try:
        marker = Marker(**json.loads(data))
        files = {name: (int(size), str(etag)) for name, (size, etag) in marker.files.items()}
        hosts = tuple(map(str, marker.hosts))
        return Marker(str(marker.step), str(marker.host), hosts, int(marker.modified), files)
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def newest_complete(markers: Iterable[Marker], etags: Mapping[str, str]) -> str | None:
    """Return the complete step with the newest files; None if no step is complete.

    `etags`: of all objects, by name below the prefix, without quotes. Hosts that read the same markers and
    listing agree, because a step has one time: the latest of its hosts.
    """
    steps: dict[str, list[Marker]] = {}
    for marker in sorted(markers, key=lambda marker: marker.modified):
        steps.setdefault(marker.step, []).append(marker)
    complete = [
        (of_step[-1].modified, step)
        for step, of_step in steps.items()
        if set(of_step[-1].hosts) <= {marker.host for marker in of_step}
        and all(
            etags.get(name) == etag
            for marker in of_step
            if marker.host in of_step[-1].hosts  # those of a job of more hosts are of no account
            for name, (_, etag) in marker.files.items()
        )
    ]
    return max(complete, default=(0, None))[1]
