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
import json
import logging
import os
import sys

from streamer.errors import ChannelError
from streamer.launchers import MOST, RANKS
from streamer.linux import lock_byte, locked_byte

logger = logging.getLogger("penstock")


_held: dict[tuple[str, int], int] = {}
"""By lock file and byte, the descriptor that has the lock; forks inherit it."""


def claim(lock_file: str, channel: str) -> None:
    """Lock the byte of this process's rank. Raises ChannelError if another rank has locked its own."""
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
