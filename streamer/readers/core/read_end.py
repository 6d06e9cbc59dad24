"""The read end of a FIFO, or any file that can be read: bytes, no bytes yet, or the end.

A reader opens the FIFO with O_NONBLOCK, because a blocking open waits for a writer without a time limit. It
distinguishes four states by read(2) and poll(2) together (contract §1.7-6, checked on Linux 6.18):

    no writer yet           read returns 0 bytes, poll reports nothing
    writer, no data         read raises EAGAIN, poll reports nothing
    data                    poll reports POLLIN
    writer came and left    read returns 0 bytes, poll reports POLLHUP

So 0 bytes are the end of file only with POLLHUP, or after a writer was seen (EAGAIN or data).

A process that is forked in mid-epoch, such as a DataLoader worker or a member of a pool, closes its copies:
an epoch ends early when the last one is closed, so the next epoch would wait for that process.
"""

from __future__ import annotations

import errno
import os
import select
import stat

from streamer.errors import ChannelError

STDIN = "/dev/stdin"
_open: set[ReadEnd] = set()
"""The read ends that this process has opened and not closed."""


class ReadEnd:
    """An open file, which its owner closes once."""

    def __init__(self, path: str, *, has_writer: bool = False) -> None:
        """Open `path`. `has_writer`: whether it is known to have had a writer. Raises OSError."""
        if path == STDIN:
            # If this reopened the pipe, a writer that has left would look like one that has not come.
            # Other processes share the pipe's flags, so this does not set O_NONBLOCK.
            self.fd = os.dup(0)
        else:
            self.fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        _open.add(self)
        mode = os.fstat(self.fd).st_mode
        if stat.S_ISDIR(mode):
            self.close()
            raise IsADirectoryError(path)
        self.is_fifo = stat.S_ISFIFO(mode)
        self.has_writer = has_writer
        """Whether a writer was seen."""
        self._nonblocking = not os.get_blocking(self.fd)
        self._poller = select.poll()
        self._poller.register(self.fd, select.POLLIN)
        self.expect()

    def close(self) -> None:
        """Close the file. Safe to call again."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            _open.discard(self)
            os.close(fd)

    def expect(self) -> None:
        """Let the next `read` try, without a `wait` before, if that cannot block."""
        self._ready, self._hung_up = self._nonblocking, not self.is_fifo

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` for bytes or the end; return whether either came."""
        events = self._poller.poll(seconds * 1000)
        self._hung_up = any(event & select.POLLHUP for _, event in events)
        self._ready = bool(events) or (self._nonblocking and not self.has_writer)
        return bool(events)

    def read(self, views: list[memoryview]) -> int | None:
        """Read without waiting; return the number of bytes, 0 at the end, None if there are none yet.

        Reads until the pipe is empty or `views` are full, so that a small pipe does not make small blocks.
        """
        if not (self._ready or self._hung_up):
            return None
        taken, size = 0, sum(map(len, views))
        while taken < size:
            try:
                count = os.readv(self.fd, views)
            except BlockingIOError:
                self.has_writer = True
                return taken or None
            except OSError as error:
                if error.errno == errno.EBADF and self.fd < 0:
                    raise ChannelError(
                        "this process was forked from the one that reads the FIFO, so its copy is closed: "
                        "begin the epoch in the process that reads it"
                    ) from None
                raise
            if count == 0:
                return taken or (0 if self._hung_up or self.has_writer else None)
            self.has_writer = True
            taken += count
            if not self._nonblocking:
                break
            if taken < size:
                views = _after(views, count)
        return taken


def _close_copies() -> None:
    """Close the copies of the parent's read ends in a process that was forked."""
    for end in list(_open):
        end.close()


os.register_at_fork(after_in_child=_close_copies)


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """Return the views without the first `count` bytes."""
    number = 0
    while count >= len(views[number]):
        count -= len(views[number])
        number += 1
    return [views[number][count:], *views[number + 1 :]]
