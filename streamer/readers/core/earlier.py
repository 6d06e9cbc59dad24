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
from typing import TYPE_CHECKING

from streamer.readers.core.late import fifos_of, trailer_of
from streamer.readers.core.read_end import ReadEnd

if TYPE_CHECKING:
    from streamer.readers.core.proof import Proof

logger = logging.getLogger("penstock")


class EarlierEpochs:
    """FIFOs of the epochs before that of `proof`, which are opened and closed; the owner closes it."""

    def __init__(self, proof: Proof) -> None:
        self._proof = proof
        self._open: dict[str, ReadEnd] = {}
        """By path. Each stays open until the sidecar has seen it and withdrawn the name."""

    def leave(self) -> None:
        """Open each FIFO that is offered, and close each that the sidecar has withdrawn."""
        for epoch, path, withdrawn in fifos_of(self._proof):
            trailer = trailer_of(self._proof, epoch)
            offered = not withdrawn and trailer is not None and trailer.state == "open"
            if epoch < self._proof.epoch and offered and path not in self._open:
                with contextlib.suppress(OSError):
                    self._open[path] = ReadEnd(path)
                    logger.warning(
                        "%s is left unread, because the state is in epoch %d, where --resume would begin",
                        os.path.basename(path),
                        self._proof.epoch,
                    )
        for path in [each for each in self._open if not os.path.lexists(each)]:
            self._open.pop(path).close()

    def close(self) -> None:
        """Close what is open. Safe to call again."""
        while self._open:
            self._open.popitem()[1].close()
