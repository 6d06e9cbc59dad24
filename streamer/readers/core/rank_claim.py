"""Refuses that two ranks of a job take the epochs of one channel between them.

A rank that asks for the next epoch gets one that no other has, so two ranks that read one channel would each
train on every second epoch, and neither would notice. Launchers set an environment variable to the rank
of a process on its host. A process that takes an epoch locks one byte of the channel's lock file, for
reading and until it ends: the byte of its rank. It locks by open file description (F_OFD_SETLK of fcntl(2)),
so forks share the lock, and it has nothing to do with `flock` on that file.

    a byte of another rank is locked   a process of that rank lives and has read the channel: an error
    this rank's byte is locked         a worker or an evaluation of the same rank: they may read in turn

Processes without a rank may be meant to read in turn, so they may. One that reads while another is alive
logs a warning, unless it is a worker of a program (`multiprocessing`).

The caller holds the channel's lock (`streamer.readers.core.state`). Where the file system has no such locks,
nothing is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import struct
import sys

from streamer.errors import ChannelError

logger = logging.getLogger("penstock")

VARIABLES = (
    "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "HOROVOD_LOCAL_RANK",
    "SLURM_LOCALID",
    "RANK",
)
"""Of torchrun and DeepSpeed, Open MPI, MPICH and Intel MPI, Horovod, Slurm; the first that is set counts."""
_RANKS = 1 << 20
"""Bytes of each variable: rank r has the r-th."""
_FLOCK = struct.Struct("hhqqi0q")
"""struct flock: type, whence, start, length, process."""

_held: dict[tuple[str, int], int] = {}
"""By lock file and byte, the descriptor that holds the lock; forks inherit it."""


def claim(lock_file: str, channel: str) -> None:
    """Lock the byte of this process's rank. Raises ChannelError if another rank does."""
    variable, rank = _rank()
    base = (VARIABLES.index(variable) + 1) * _RANKS if variable else 0
    key = lock_file, base + rank
    if key in _held:
        return
    with contextlib.suppress(OSError), contextlib.ExitStack() as undo:
        fd = os.open(lock_file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        undo.callback(os.close, fd)
        if variable:
            for start, count in (base, rank), (base + rank + 1, _RANKS - rank - 1):
                if count and (other := _locked(fd, start, count)) is not None:
                    raise ChannelError(
                        f"{variable} {other - base} reads channel {channel}, and {variable} {rank} asks for "
                        "its next epoch, so neither would get all epochs: give each rank a FIFO of its own "
                        f'(`Ranks` in the job file, and rank_channels("{channel}")), or name the epoch'
                    )
        elif not _is_worker() and _locked(fd, 0, 1) is not None:
            logger.warning(
                "another process has read channel %s and is alive: an epoch goes to one of the two only",
                channel,
            )
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, base + rank, 1, 0))
        undo.pop_all()
        _held[key] = fd


def _rank() -> tuple[str, int]:
    """The variable that says which rank of this host this is, and the rank; none, and 0."""
    for variable in VARIABLES:
        rank = os.environ.get(variable, "")
        if rank.isascii() and rank.isdigit() and int(rank) < _RANKS:
            return variable, int(rank)
    return "", 0


def _is_worker() -> bool:
    """Whether `multiprocessing` has started this process; the module is not loaded just to ask."""
    module = sys.modules.get("multiprocessing.process")
    return module is not None and module.parent_process() is not None


def _locked(fd: int, start: int, count: int) -> int | None:
    """Return the first of `count` bytes from `start` that another process has locked, if any."""
    request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, count, 0)
    kind, _, first, _, _ = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, request))
    return None if kind == fcntl.F_UNLCK else int(first)
