"""What one client is told to do in one run, as the JSON file that a peer's program reads."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """All objects of a bucket, in order, into a FIFO."""

    bucket: str
    keys: list[str]
    size: int
    """Bytes of every object."""
    fifo: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    url: str
    """Endpoint, path style."""
    ca_bundle: str | None
    """PEM file to verify an https endpoint with."""
    streams: list[Stream]
    setting: dict[str, Any]
    """What is tried out: how many requests at once, and the like; its keys are the peer's own."""

    def write(self, path: str) -> None:
        """Write as JSON."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file)


def read_task(path: str) -> Task:
    """The task in a file that `Task.write` made."""
    with open(path, encoding="utf-8") as file:
        document = json.load(file)
    streams = [Stream(**stream) for stream in document.pop("streams")]
    return Task(streams=streams, **document)
