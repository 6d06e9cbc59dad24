"""The state file of a channel: the index of its next FIFO, for all readers of one container.

The files are the incumbent's, so its readers and these can follow each other (contract §6.2):

    <state_dir>/.<channel>-pipe_mode-state   ASCII index of the next FIFO
    <state_dir>/.<channel>-pipe_mode-lock    locked by flock(2) while the state file is read or written

The incumbent reads the index without the lock and increments it in a second step, so two processes can get
the same FIFO. `EpochState.take` does both under the lock, so no two readers get the same epoch. No reader
waits for a FIFO under the lock. A reader that could not open its FIFO gives the epoch back, unless another
reader has taken the next one.

`claim` refuses a channel to a rank if another rank of the job reads it: the two would train on every second
epoch each, without an error. Launchers set an environment variable to the rank of a process on its host. A
process that takes an epoch locks its rank's byte of the lock file, for reading, until the process ends. The
lock belongs to the open file description (F_OFD_SETLK of fcntl(2)), so forks share it. It is independent of
`flock` on the same file.

    another rank's byte is locked   a process of that rank is alive and has read the channel: an error
    this rank's byte is locked      by a worker or an evaluation of the same rank: both may read in turn

Processes without a rank may read in turn. One that starts to read while another is alive logs a warning,
unless `multiprocessing` has started it. On a file system without such locks nothing is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import sys
from typing import TYPE_CHECKING

from streamer.errors import ChannelError
from streamer.launchers import MOST, RANKS
from streamer.linux import lock_byte, locked_byte
from streamer.trailer import replace_file

if TYPE_CHECKING:
    from collections.abc import Iterator


logger = logging.getLogger("penstock")


_held: dict[tuple[str, int], int] = {}
"""By lock file and byte, the descriptor that has the lock; forks inherit it."""


def claim(lock_file: str, channel: str) -> None:
    """Lock the byte of this process's rank, with the channel's lock held.

    Raises ChannelError if another rank has locked its own.
    """
    variable, rank = _rank()
    base = (RANKS.index(variable) + 1) * MOST if variable else 0
    key = lock_file, base + rank
    if key in _held:
        return
    with contextlib.suppress(OSError), contextlib.ExitStack() as undo:
        fd = os.open(lock_file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        undo.callback(os.close, fd)
        if variable:
            for start, count in (base, rank), (base + rank + 1, MOST - rank - 1):
                if count and (other := locked_byte(fd, start, count)) is not None:
                    raise ChannelError(
                        f"{variable} {other - base} reads channel {channel}, and {variable} {rank} requests "
                        f"its next epoch, so neither rank would get all epochs; {_advice(channel)}"
                    )
        elif not _is_worker() and locked_byte(fd, 0) is not None:
            logger.warning(
                "another running process has read channel %s; each epoch goes to one of them only",
                channel,
            )
        lock_byte(fd, base + rank, shared=True)
        undo.pop_all()
        _held[key] = fd


def _advice(channel: str) -> str:
    """Return what to do; another thing for the FIFO of a rank."""
    whole, _, rank = channel.rpartition("-")
    if whole and rank.isdigit():
        return f"{channel} is the FIFO of one rank of channel {whole}: let each rank read its own"
    return (
        "give each rank its own FIFO (`Ranks` in the job file, and "
        f'rank_channels("{channel}")), or set `epoch`'
    )


def _rank() -> tuple[str, int]:
    """Return the rank variable that is set, and this process's rank on its host; "" and 0 without one."""
    for variable in RANKS:
        rank = os.environ.get(variable, "")
        if rank and variable == "TF_CONFIG":
            rank = _task(rank)
        if rank.isascii() and rank.isdigit() and int(rank) < MOST:
            return variable, int(rank)
    return "", 0


def _task(text: str) -> str:
    """Return the number of the task in TF_CONFIG, the chief before the workers; empty if it has none."""
    with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):
        document = json.loads(text)
        kind, index, tasks = document["task"]["type"], int(document["task"]["index"]), document["cluster"]
        return str(index + (len(tasks.get("chief", ())) if kind == "worker" else 0))
    return ""


def _is_worker() -> bool:
    """Return whether `multiprocessing` has started this process. Does not import that module."""
    module = sys.modules.get("multiprocessing.process")
    return module is not None and module.parent_process() is not None


class EpochState:
    """The state file of one channel. Every method raises ChannelError if the file cannot be used."""

    def __init__(self, state_dir: str, channel: str) -> None:
        self._channel = channel
        self.path = os.path.join(state_dir, f".{channel}-pipe_mode-state")
        self._lock = os.path.join(state_dir, f".{channel}-pipe_mode-lock")

    def prepare(self) -> None:
        """Make the directory if it is missing; root gives it to the owner of the directory above it."""
        directory = os.path.dirname(self.path)
        try:
            os.makedirs(os.path.dirname(directory) or ".", exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory)
                above = os.stat(os.path.dirname(directory) or ".")
                if os.geteuid() == 0:
                    os.chown(directory, above.st_uid, above.st_gid)
        except OSError as error:
            raise ChannelError(f"cannot make the state directory: {error}") from error

    def take(self) -> int:
        """Take the next epoch for the caller and return it; no other reader gets it.

        Raises ChannelError also if another rank of the job reads the channel (`claim`).
        """
        with self._locked():
            claim(self._lock, self._channel)
            epoch = self._read()
            self._write(epoch + 1)
        return epoch

    def peek(self) -> int:
        """Return the next epoch without taking it."""
        with self._locked():
            return self._read()

    def put(self, epoch: int) -> None:
        """Make `epoch` the next one."""
        with self._locked():
            self._write(epoch)

    def give_back(self, epoch: int) -> None:
        """Undo the `take` that returned `epoch`, if no later epoch has been taken."""
        with self._locked():
            if self._read() == epoch + 1:
                self._write(epoch)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self.prepare()
        try:
            fd = os.open(self._lock, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                yield
            finally:
                os.close(fd)
        except OSError as error:
            raise ChannelError(f"cannot use the state file {self.path}: {error}") from error

    def _read(self) -> int:
        try:
            with open(self.path, "rb") as file:
                text = file.read(64)
        except FileNotFoundError:
            return 0
        if not text.strip().isdigit():
            raise ChannelError(f"the state file {self.path} holds {text!r}, not an index: delete it")
        return int(text)

    def _write(self, epoch: int) -> None:
        # replace_file renames: a crash leaves the old index or the new one, never an empty file.
        replace_file(self.path, b"%d" % epoch, mode=0o666)
