"""A trainer that reads all ranks of a channel in step, and saves the state of one rank's reader.

Each FIFO is read by a thread of its own, as by a process of a job, which reads a slice ahead. A global batch
is one line of JSON on standard output, written when every rank has taken its share, by its worker whose turn
it is:

    [EPOCH, STEP, [[name of record, ...] of rank 0, ...]]

A record is its name and zeros; a line is its name and full stops; a tar sample is one file in a folder of
that name.
`python -m tests.kit.stepping` takes the fields of `Training` as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tarfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, islice
from queue import Queue
from threading import Thread
from typing import Any, TypedDict

from streamer.readers import PipeReader, rank_channels
from streamer.readers.core.plain import open_channel
from streamer.readers.core.position import RankSteps
from streamer.trailer import read_trailer

FILE = "data.txt"
"""The only file of a tar sample, in a folder that is the record's name."""


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
    """FIFO whose reader gives the state."""
    load: bool = True
    """Whether the readers load the state, or begin where the sidecar does."""
    kind: str = "TFRecord"
    """Record format, `tar`, or `Join: tar`."""
    copies: int = 1
    """FIFOs of each rank, with the same bytes."""
    workers: int = 1
    """FIFOs of each copy, which take turns."""
    bases: list[str] = field(default_factory=list)
    """Base directories of the hosts; none: that of the environment."""


class Directories(TypedDict):
    """Those of a host."""

    pipe_dir: str
    config_dir: str
    state_dir: str


class TarReader:
    """A rank that reads archives as `tarfile` does. It has no state of its own: that is of its trailers."""

    def __init__(self, channel: str, directories: Directories, *, joined: bool, epoch: int) -> None:
        self._channel, self._directories, self._joined = channel, directories, joined
        self._epoch, self._taken = epoch, 0

    def _trailer(self) -> Any:
        trailer = read_trailer(self._directories["pipe_dir"], self._channel, self._epoch)
        assert trailer is not None
        return trailer

    def __len__(self) -> int:
        return int(self._trailer().records)

    @property
    def steps_per_epoch(self) -> int:
        return int(self._trailer().steps)

    def __iter__(self) -> Iterator[bytes]:
        self._taken = self._trailer().records_skipped
        with open_channel(self._channel, epoch=self._epoch, **self._directories) as stream:
            # The fewest bytes at once: a rank may not wait for bytes of its next slice.
            with tarfile.open(
                fileobj=stream, mode="r|", bufsize=tarfile.BLOCKSIZE, ignore_zeros=not self._joined
            ) as archive:
                for member in archive:
                    self._taken += 1
                    yield member.name.removesuffix(FILE).encode()
            while stream.read(1 << 16):
                pass
        self._epoch, self._taken = self._epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        rank = RankSteps.of(self._trailer())
        assert rank is not None
        return rank.state(self._epoch, self._taken).document()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The FIFO begins there."""


def readers_of(training: Training, epoch: int) -> list[Any]:
    """The readers of all FIFOs, host by host."""
    readers: list[Any] = []
    for base in training.bases or [os.environ["SAGEMAKER_BASE_DIR"]]:
        pipes, config, states = f"{base}/input/data", f"{base}/input/config", f"{base}/pipe_state"
        for name in rank_channels("train", config_dir=config):
            directories: Directories = {"pipe_dir": pipes, "config_dir": config, "state_dir": states}
            if training.kind.endswith("tar"):
                joined = training.kind != "tar"
                readers.append(TarReader(name, directories, joined=joined, epoch=epoch))
            else:
                readers.append(PipeReader(name, training.kind, **directories))
    return readers


def train(training: Training, report: Callable[[str], None]) -> None:
    """Read until the last epoch has ended, or `limit` steps were taken."""
    epoch = first = 0
    state = None
    if os.path.exists(training.path):
        with open(training.path, encoding="utf-8") as file:
            state = json.load(file)
        epoch, first = state["epoch"], state["step"]
    readers = readers_of(training, epoch)
    if state is not None and training.load:
        for reader in readers:
            reader.load_state_dict(state)
    hosts, workers = max(1, len(training.bases)), training.workers
    here = len(readers) // hosts
    turns = [
        [
            range(here * host, here * host + here)[here // workers * turn :][: here // workers]
            for host in range(hosts)
        ]
        for turn in range(workers)
    ]
    """For each worker, the numbers of the FIFOs that have a share in its steps."""
    saver, taken, saved = training.saver % len(readers), 0, None
    while epoch < training.epochs:
        with ThreadPoolExecutor(len(readers)) as threads:
            records = [*threads.map(len, readers)][: here : here // workers]
        steps = readers[0].steps_per_epoch
        slices = [_read_ahead(reader, sum(records) // steps) for reader in readers]
        for step in range(first, steps):
            fifos = [*chain(*turns[step % workers])]
            names, states = [], {}
            for fifo in fifos:
                share, states[fifo] = _next(slices[fifo])
                names.append(_names(share))
            firsts = names[:: training.copies]
            if names != [each for each in firsts for _ in range(training.copies)]:
                raise RuntimeError(f"step {step}: copies differ: {names}")
            report(json.dumps([epoch, step, firsts]))
            saved, taken = states.get(saver, saved), taken + 1
            if saved is not None and taken % training.save_every == 0:
                save(training.path, saved)
            if taken == training.limit:
                return
        if any(_next(each)[0] for each in slices):
            raise RuntimeError(f"epoch {epoch} has more than {steps} steps")
        epoch, first = epoch + 1, 0


def _read_ahead(reader: Any, size: int) -> Queue[Any]:
    """Read the reader's next epoch in a thread: slices of `size` records, the last one empty, and states."""
    slices = Queue[Any](1)

    def read() -> None:
        try:
            records = iter(reader)
            while share := list(islice(records, size)):
                slices.put((share, reader.state_dict()))
            slices.put(([], None))
        except BaseException as error:  # noqa: BLE001 - it is raised in the other thread
            slices.put(error)

    Thread(target=read, daemon=True).start()
    return slices


def _next(slices: Queue[Any]) -> Any:
    if isinstance(found := slices.get(), BaseException):
        raise found
    return found


def _names(records: list[bytes]) -> list[str]:
    return [record.rstrip(b"\0.").decode() for record in records]


def save(path: str, state: dict[str, Any]) -> None:
    """Replace the file of the state whole; keep the state before as `PATH.before`."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path + ".old")  # of a trainer that was killed here
    with contextlib.suppress(FileNotFoundError):
        os.link(path, path + ".old")
        os.replace(path + ".old", path + ".before")
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(state, file)
    os.replace(path + ".new", path)


if __name__ == "__main__":
    train(Training(**json.loads(sys.argv[1])), lambda line: print(line, flush=True))
