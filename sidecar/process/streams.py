"""Standard output and standard error of the commands.

Writing to standard output raises SinkError for a full disk or a closed descriptor, and ReaderGone if the
reader has closed the pipe, whichever library writes. Writing to standard error never fails: a log line that
cannot be written must neither end an epoch nor change an exit code. Nor does it wait for long: if nobody
reads the pipe and it is full, lines are dropped, since the event loop writes them, and every FIFO would stand
still.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from typing import TYPE_CHECKING, TextIO

from streamer.sink.stdout import refused

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

PATIENCE = 1.0
"""Seconds for which a line waits until standard error has room."""


def guard() -> None:
    """Replace `sys.stdout` and `sys.stderr`; open the standard descriptors that the parent has closed."""
    for fd, flags in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(fd)
        except OSError:
            # os.open returns the lowest free number, which otherwise the next file or socket would get.
            # Descriptor 1 is read-only, so that writing to it fails (EBADF).
            os.set_inheritable(os.open(os.devnull, flags), True)  # noqa: FBT003
    sys.stdout = _text(_Output(1, "wb", closefd=False), sys.stdout)
    sys.stderr = _text(_Errors(2, "wb", closefd=False), sys.stderr)


class _Output(io.FileIO):
    """Standard output that raises PenstockError. After the first error it discards all further output."""

    _failed = False

    def write(self, data: ReadableBuffer, /) -> int:
        if self._failed:  # the buffered writer flushes again when the interpreter ends
            return memoryview(data).nbytes
        try:
            return super().write(data) or 0
        except OSError as error:
            self._failed = True
            raise refused(error) from error


class _Errors(io.FileIO):
    """Standard error that ignores errors, and drops what it cannot write within PATIENCE."""

    dropped = 0
    """Bytes dropped since the last report."""
    stuck = False
    """Whether the last write was dropped, in whole or in part: nobody reads, or the disk is full."""
    _ended = True
    """Whether the last byte written ends a line."""
    _cut = False
    """Whether the rest of the last line was dropped."""

    def write(self, data: ReadableBuffer, /) -> int:
        view = memoryview(data).cast("B")
        try:
            if self._cut and self._has_room():
                self._cut = not super().write(b"\n")
            written = super().write(view[: select.PIPE_BUF]) if self._has_room() else None
        except OSError:
            written, self.stuck = None, True
        if written:
            self._ended = view[written - 1] == ord("\n")
            return written
        self.dropped += view.nbytes
        self._cut = not self._ended
        return view.nbytes

    def _has_room(self) -> bool:
        """Wait until PIPE_BUF bytes can be written, but not again while nobody reads (poll(2), pipe(7))."""
        poller = select.poll()
        poller.register(self.fileno(), select.POLLOUT)
        with contextlib.suppress(OSError):  # ENOMEM, EINVAL under RLIMIT_NOFILE 0: no reason to lose a line
            self.stuck = not poller.poll(0 if self.stuck else 1000 * PATIENCE)
        return not self.stuck


def take_dropped() -> int:
    """Return the bytes that standard error has dropped since the last call; 0 while it still drops."""
    raw = getattr(getattr(sys.stderr, "buffer", None), "raw", None)
    if not isinstance(raw, _Errors) or raw.stuck:
        return 0
    dropped, raw.dropped = raw.dropped, 0
    return dropped


def _text(raw: io.FileIO, replaced: TextIO | None) -> io.TextIOWrapper:
    encoding = "utf-8" if replaced is None else replaced.encoding
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=encoding, errors="backslashreplace", line_buffering=True
    )
