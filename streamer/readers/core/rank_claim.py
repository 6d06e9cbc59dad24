"""Refuses a channel to a rank if another rank of the job reads it.

The state file gives each epoch to one reader. Two ranks that read one channel would therefore train on every
second epoch each, without an error. Launchers set an environment variable to the rank of a process on its
host. A process that takes an epoch locks its rank's byte of the channel's lock file, for reading, until the
process ends. The lock belongs to the open file description (F_OFD_SETLK of fcntl(2)), so forks share it. It
is independent of `flock` on the same file.

    another rank's byte is locked   a process of that rank is alive and has read the channel: an error
    this rank's byte is locked      by a worker or an evaluation of the same rank: both may read in turn

Processes without a rank may read in turn. One that starts to read while another is alive logs a warning,
unless `multiprocessing` has started it.

The caller holds the channel's lock (`streamer.readers.core.state`). On a file system without such locks
nothing is refused.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys

from streamer.errors import ChannelError
from streamer.linux import lock_byte, locked_byte

logger = logging.getLogger("penstock")

VARIABLES = (
    "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "HOROVOD_LOCAL_RANK",
    "SLURM_LOCALID",
    "RANK",
)
"""Rank variables of torchrun and DeepSpeed, Open MPI, MPICH and Intel MPI, Horovod, Slurm; the first that is
set counts."""
_RANKS = 1 << 20
"""Bytes of the lock file for each variable; byte r is that of rank r."""

_held: dict[tuple[str, int], int] = {}
"""By lock file and byte, the descriptor that has the lock; forks inherit it."""


def claim(lock_file: str, channel: str) -> None:
    """Lock the byte of this process's rank. Raises ChannelError if another rank has locked its own."""
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
                if count and (other := locked_byte(fd, start, count)) is not None:
                    raise ChannelError(
                        f"{variable} {other - base} reads channel {channel}, and {variable} {rank} requests "
                        "its next epoch, so neither rank would get all epochs; give each rank its own FIFO "
                        f'(`Ranks` in the job file, and rank_channels("{channel}")), or set `epoch`'
                    )
        elif not _is_worker() and locked_byte(fd, 0) is not None:
            logger.warning(
                "another running process has read channel %s; each epoch goes to one of them only",
                channel,
            )
        lock_byte(fd, base + rank, shared=True)
        undo.pop_all()
        _held[key] = fd


def _rank() -> tuple[str, int]:
    """Return the rank variable that is set, and this process's rank on its host; "" and 0 without one."""
    for variable in VARIABLES:
        rank = os.environ.get(variable, "")
        if rank.isascii() and rank.isdigit() and int(rank) < _RANKS:
            return variable, int(rank)
    return "", 0


def _is_worker() -> bool:
    """Return whether `multiprocessing` has started this process. Does not import that module."""
    module = sys.modules.get("multiprocessing.process")
    return module is not None and module.parent_process() is not None
