"""The task of one client in one run: the JSON file that a peer's program reads."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A stream of all objects of a bucket, in order, into a FIFO."""

    bucket: str
    keys: list[str]
    size: int
    """Bytes of every object."""
    fifo: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    url: str
    """URL of the endpoint, path style."""
    ca_bundle: str | None
    """PEM file that verifies an https endpoint."""
    streams: list[Stream]
    gzip: bool = False
    """Whether the objects are compressed, and their inflated bytes are wanted."""
    setting: dict[str, Any]
    """Setting of the client, such as the number of requests in flight; the keys are the client's own."""

    def write(self, path: str) -> None:
        """Write the task as JSON."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file)


def read_task(path: str) -> Task:
    """Return the task in a file that `Task.write` made."""
    with open(path, encoding="utf-8") as file:
        document = json.load(file)
    streams = [Stream(**stream) for stream in document.pop("streams")]
    return Task(streams=streams, **document)
