"""State of one channel, and the thread that waits for its reader."""

from __future__ import annotations

import _thread
import contextlib
import os
from collections.abc import Callable

from streamer.helpers.keeper.protocol import STATE_FIELDS
from streamer.linux import bytes_unread, descriptor_path


def close_all(*fds: int) -> None:
    """Close the descriptors that are not -1. Linux frees a descriptor whatever close(2) returns."""
    for fd in fds:
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


class HeldChannel:
    """One channel: its epoch, and the epoch's FIFO once a reader has opened it."""

    def __init__(self, name: str, epoch: int, digest: str, skipped: int) -> None:
        self.name = name
        self.epoch = epoch
        self.digest = digest
        self.skipped = skipped
        """Bytes of the epoch before the FIFO's first byte."""
        self.mark: list[int] | None = None
        """The sidecar's resume point, stored for the next sidecar and not interpreted."""
        self.state = "idle"
        self.moved = 0
        """Bytes that the FIFO has accepted."""
        self.settling = False
        self.wanted = False
        """Whether the connected sidecar waits for the reader."""
        self.opening: PendingOpen | None = None
        self.fifo = self.read_fd = self.write_fd = -1
        self.untouched = -1
        """FIFO whose reader left before its first byte.

        Another reader may open it until the sidecar has withdrawn it, and would take a close for an end.
        """
        self.full: bool | None = None
        """Whether the keeper waits for room in the FIFO, not for bytes in the pipe; None if for neither."""

    @property
    def accepted(self) -> int:
        """Bytes that the FIFO has accepted or will accept; exact while no sidecar writes."""
        return self.moved + (bytes_unread(self.read_fd) if self.fifo >= 0 else 0)

    def account(self) -> dict[str, object]:
        """Return the channel's state as messages carry it. Raises OSError."""
        return {name: getattr(self, name) for name in STATE_FIELDS}

    def create_pipe(self) -> None:
        """Create the pipe that the sidecar writes and the keeper reads. Raises OSError."""
        self.read_fd, self.write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def begin_next_epoch(self) -> None:
        """Go to the next epoch, after every descriptor of this one has been closed."""
        self.settling = self.wanted = False
        self.epoch, self.moved, self.skipped, self.mark = self.epoch + 1, 0, 0, None

    def pause(self) -> tuple[int, ...]:
        """Return the descriptors that the pump watches; as `Subject`."""
        self.full = None
        return self.fifo, self.read_fd


class PendingOpen:
    """A thread that blocks in open(2) of one FIFO and then calls `arrived` with itself."""

    def __init__(
        self,
        channel: HeldChannel,
        path_fd: int,
        inode: tuple[int, int],
        arrived: Callable[[PendingOpen], None],
    ) -> None:
        """Start the thread and take ownership of `path_fd`; raise RuntimeError if no thread can start."""
        self.channel = channel
        self.path_fd = path_fd
        self.inode = inode
        self.fd = self.read_end = -1
        self.error: Exception | None = None
        self.over = False
        """Whether the keeper has handled the result."""
        self._arrived = arrived
        _thread.start_new_thread(self._open, ())

    def _open(self) -> None:
        try:
            self.fd = os.open(descriptor_path(self.path_fd), os.O_WRONLY | os.O_CLOEXEC)
        except Exception as error:  # noqa: BLE001 - the keeper reports every error to the sidecar
            self.error = error
        self._arrived(self)

    def release(self) -> None:
        """Open the read end, so that the thread returns from open(2). Raises OSError."""
        if not self.over and self.read_end < 0:
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
            self.read_end = os.open(descriptor_path(self.path_fd), flags)

    def finish(self) -> None:
        """Close what the thread needed; `fd` stays open."""
        self.over = True
        close_all(self.path_fd, self.read_end)
        self.path_fd = self.read_end = -1

    def pause(self) -> tuple[int, ...]:
        """See `Subject`. Returns no descriptor, because it watches no descriptor."""
        return ()
