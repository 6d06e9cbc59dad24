"""Which FIFO of a channel is next, remembered across objects and processes of one container.

The incumbent's files, so that old and new readers may follow each other (contract §6.2):

    <state_dir>/.<channel>-pipe_mode-state   ASCII index of the next FIFO
    <state_dir>/.<channel>-pipe_mode-lock    flock'ed while the state file is read or written

The incumbent reads the index without the lock and increments it in a second step, so two processes can get
the same FIFO. Here an epoch is taken in one locked step, and no two readers get the same one. The lock is
held for a read and a write, never while a FIFO is waited for; an epoch whose FIFO could not be opened is
given back, unless the next one has been taken already.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import TYPE_CHECKING

from streamer.errors import ChannelError
from streamer.readers.core.rank_claim import claim
from streamer.trailer import replace_file

if TYPE_CHECKING:
    from collections.abc import Iterator


class EpochState:
    """The state file of one channel. Every method raises ChannelError if it cannot be used."""

    def __init__(self, state_dir: str, channel: str) -> None:
        self._channel = channel
        self.path = os.path.join(state_dir, f".{channel}-pipe_mode-state")
        self._lock = os.path.join(state_dir, f".{channel}-pipe_mode-lock")

    def prepare(self) -> None:
        """Make the directory if it is missing."""
        try:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
        except OSError as error:
            raise ChannelError(f"cannot make the state directory: {error}") from error

    def take(self) -> int:
        """The next epoch, which is now the caller's: no other reader gets it.

        Raises ChannelError, too, if another rank of the job reads the channel
        (`streamer.readers.core.rank_claim`).
        """
        with self._locked():
            claim(self._lock, self._channel)
            epoch = self._read()
            self._write(epoch + 1)
        return epoch

    def peek(self) -> int:
        """The next epoch, which stays the next."""
        with self._locked():
            return self._read()

    def put(self, epoch: int) -> None:
        """Have `epoch` be the next."""
        with self._locked():
            self._write(epoch)

    def give_back(self, epoch: int) -> None:
        """Undo the `take` that gave `epoch`, if it was the last one."""
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
        # By rename, so that a crash leaves the old index or the new one and never an empty file.
        replace_file(self.path, b"%d" % epoch, mode=0o666)
