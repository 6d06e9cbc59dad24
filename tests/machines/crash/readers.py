"""Readers of a run, in threads: Penstock's own, and one that knows of no trailers."""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

from streamer.errors import PenstockError
from streamer.readers.core.arrival import Arrival
from streamer.readers.core.stream import PipeStream
from tests.machines.crash.shapes import EPOCHS

_STEP = 1 << 17
_LOOK = 0.25
"""Seconds between two looks at whether to give up."""


@dataclass
class Got:
    """What a reader has of one epoch."""

    data: bytearray = field(default_factory=bytearray)
    ended: bool = False
    """Whether the stream ended without an error."""
    error: str = ""
    trailer: str = ""
    """The trailer's state right after a foreign reader's end."""


class Reader:
    """Reads the epochs of one FIFO name, one after the other, until one does not end as it should."""

    def __init__(self, data: Path, name: str, *, foreign: bool, wake_fd: int) -> None:
        """`wake_fd`: an eventfd that is told of progress."""
        self.name = name
        self.foreign = foreign
        self.epochs: list[Got] = []
        self.done = False
        self.given_up = False
        """Whether it was told to read no more, since nobody will write."""
        self._waits_in = -1
        self._data = data
        self._wake_fd = wake_fd
        self._thread = threading.Thread(target=self._read, name=f"reader of {name}", daemon=True)

    def __repr__(self) -> str:
        return f"<{'foreign ' * self.foreign}reader of {self.name}: {[len(got.data) for got in self.epochs]}>"

    def start(self) -> None:
        self._thread.start()

    @property
    def received(self) -> int:
        return sum(len(got.data) for got in self.epochs)

    def give_up(self) -> None:
        """Have it end, whatever it waits for."""
        self.given_up = True
        if (path_fd := self._waits_in) >= 0:  # blocked in open(2); the FIFO's name may be gone
            with contextlib.suppress(OSError):
                os.close(os.open(f"/proc/self/fd/{path_fd}", os.O_WRONLY | os.O_NONBLOCK))

    def join(self, seconds: float) -> bool:
        """Whether the thread has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _path(self, epoch: int) -> Path:
        return self._data / f"{self.name}_{epoch}"

    def _read(self) -> None:
        try:
            for epoch in range(EPOCHS):
                got = Got()
                self.epochs.append(got)
                (self._read_foreign if self.foreign else self._read_ours)(epoch, got)
                if not got.ended or self.given_up:
                    break
        finally:
            self.done = True
            os.eventfd_write(self._wake_fd, 1)

    def _took(self, got: Got, data: bytes) -> None:
        got.data += data
        os.eventfd_write(self._wake_fd, 1)

    def _read_ours(self, epoch: int, got: Got) -> None:
        try:
            with PipeStream(self._path(epoch), patience=_LOOK) as stream:
                while not self.given_up:
                    data = stream.read(_STEP)
                    if data == b"":
                        got.ended = True
                        return
                    if data is not None:
                        self._took(got, data)
        except PenstockError as error:
            got.error = str(error)

    def _read_foreign(self, epoch: int, got: Got) -> None:
        path = self._path(epoch)
        arrival = Arrival(str(path))
        try:
            while not arrival.wait(_LOOK):
                if self.given_up:
                    return
        finally:
            arrival.close()
        try:
            path_fd = os.open(path, os.O_PATH)
        except FileNotFoundError:
            got.error = "the FIFO has gone"
            return
        self._waits_in = path_fd
        try:
            if self.given_up:
                return
            fd = os.open(f"/proc/self/fd/{path_fd}", os.O_RDONLY)
        finally:
            self._waits_in = -1
            os.close(path_fd)
        try:
            while data := os.read(fd, _STEP):
                self._took(got, data)
            got.ended = not self.given_up
            got.trailer = trailer_state(self._data, self.name, epoch)
        finally:
            os.close(fd)


def trailer_state(data: Path, name: str, epoch: int) -> str:
    """What the trailer of an epoch says now; empty if there is none."""
    from streamer.trailer import read_trailer

    found = read_trailer(str(data), name, epoch)
    return "" if found is None else found.state
