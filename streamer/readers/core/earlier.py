"""Leaves the epochs before the one in which a loaded state begins.

A trainer saves its checkpoint before the file of `--resume`. If it is killed between the two, and an epoch
ended there, the sidecar offers the epoch before the checkpoint's, and then waits for its reader. So a reader
with a state opens the FIFO of that epoch and closes it, which ends the epoch (contract §1.3), until its own
epoch is offered. It leaves no FIFO that has a reader: such a FIFO has no name that is offered.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from typing import TYPE_CHECKING

from streamer.trailer import parse_fifo_name, read_trailer

if TYPE_CHECKING:
    from streamer.readers.core.proof import Proof

logger = logging.getLogger("penstock")


class EarlierEpochs:
    """FIFOs of the epochs before that of `proof`, which are opened and closed; the owner closes it."""

    def __init__(self, proof: Proof) -> None:
        self._proof = proof
        self._open: dict[str, int] = {}
        """Descriptors by path. Each stays open until the sidecar has seen it and withdrawn the name."""

    def leave(self) -> None:
        """Open each FIFO that is offered, and close each that the sidecar has withdrawn."""
        for path in self._offered():
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
                if not stat.S_ISFIFO(os.fstat(fd).st_mode):
                    os.close(fd)
                    continue
                self._open[path] = fd
                logger.warning(
                    "%s is left unread, because the state is in epoch %d; --resume with that state begins "
                    "there",
                    os.path.basename(path),
                    self._proof.epoch,
                )
        for path in [each for each in self._open if not os.path.lexists(each)]:
            os.close(self._open.pop(path))

    def _offered(self) -> list[str]:
        """Return the paths of FIFOs that a sidecar offers and this object does not have open."""
        found, directory = [], self._proof.directory
        with contextlib.suppress(OSError):
            for name in os.listdir(directory):
                channel, epoch = parse_fifo_name(name) or ("", 0)
                path = os.path.join(directory, name)
                if f"{channel}_" != self._proof.prefix or epoch >= self._proof.epoch or name.startswith("."):
                    continue
                with contextlib.suppress(OSError, ValueError):
                    trailer = read_trailer(directory, channel, epoch)
                    if trailer is not None and trailer.state == "open" and path not in self._open:
                        found.append(path)
        return found

    def close(self) -> None:
        """Close what is open. Safe to call again."""
        while self._open:
            os.close(self._open.popitem()[1])
