"""A trainer that reads all ranks of a channel in step, and saves the state of one rank's reader.

Each rank is a thread with a reader of its own, as each would be a process of a job. A global batch is one
line of JSON on standard output, written when every rank has taken its share:

    [EPOCH, STEP, [[name of record, ...] of rank 0, ...]]

A record is its name and zeros. `python -m tests.kit.stepping` takes the fields of `Training` as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

from streamer.readers import PipeReader, rank_channels


@dataclass(frozen=True)
class Training:
    """What one run of the trainer does."""

    path: str
    """Where the state is saved, and loaded from if it is there."""
    epochs: int = 1
    limit: int | None = None
    """Steps after which the trainer leaves; None: it reads to the end."""
    save_every: int = 1
    """Steps between two states that are saved."""
    saver: int = 0
    """Rank whose reader gives the state."""
    load: bool = True
    """Whether the readers load the state, or begin where the sidecar does."""


def train(training: Training, report: Callable[[str], None]) -> None:
    """Read until the last epoch has ended, or `limit` steps were taken."""
    channels = rank_channels("train")
    readers = [PipeReader(name, "TFRecord") for name in channels]
    epoch = step = 0
    if os.path.exists(training.path):
        with open(training.path, encoding="utf-8") as file:
            state = json.load(file)
        epoch, step = state["epoch"], state["step"]
        if training.load:
            for reader in readers:
                reader.load_state_dict(state)
    taken = 0
    with ThreadPoolExecutor(len(readers)) as threads:
        while epoch < training.epochs:
            passes = [iter(reader) for reader in readers]
            size, *_ = threads.map(_slice, readers)
            while True:
                shares: list[list[bytes]] = list(threads.map(list, [islice(each, size) for each in passes]))
                if not any(shares):
                    break
                report(json.dumps([epoch, step, [_names(share) for share in shares]]))
                step, taken = step + 1, taken + 1
                if taken % training.save_every == 0:
                    save(training.path, readers[training.saver % len(readers)].state_dict())
                if taken == training.limit:
                    return
            epoch, step = epoch + 1, 0


def _names(records: list[bytes]) -> list[str]:
    return [record.rstrip(b"\0").decode() for record in records]


def _slice(reader: PipeReader) -> int:
    return len(reader) // reader.steps_per_epoch


def save(path: str, state: dict[str, Any]) -> None:
    """Replace the file of the state whole."""
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(state, file)
    os.replace(path + ".new", path)


if __name__ == "__main__":
    train(Training(**json.loads(sys.argv[1])), lambda line: print(line, flush=True))
