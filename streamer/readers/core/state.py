"""The state file of a channel: the index of its next FIFO, for all readers of one container.

The files are the incumbent's, so its readers and these can follow each other (contract §6.2):

    <state_dir>/.<channel>-pipe_mode-state   ASCII index of the next FIFO
    <state_dir>/.<channel>-pipe_mode-lock    locked by flock(2) while the state file is read or written

The incumbent reads the index without the lock and increments it in a second step, so two processes can get
the same FIFO. `EpochState.take` does both under the lock, so no two readers get the same epoch. No reader
waits for a FIFO under the lock. A reader that could not open its FIFO gives the epoch back, unless another
reader has taken the next one.
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

        Raises ChannelError also if another rank of the job reads the channel
        (`streamer.readers.core.rank_claim`).
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
