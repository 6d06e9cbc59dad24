"""Standard output and standard error of the commands.

A full disk or a closed descriptor behind standard output is an error of this machine (`SinkError`), and a
reader that has left is `ReaderGone`, whichever library writes. Standard error never fails: a log that cannot
be written must not end an epoch, nor change an exit code.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

from streamer.sink.outlet import refused

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def guard() -> None:
    """Replace `sys.stdout` and `sys.stderr`; open what the parent process has closed."""
    for fd, flags in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(fd)
        except OSError:
            # The lowest free number, which the next file or socket would get. Writing to 1 fails (EBADF).
            os.set_inheritable(os.open(os.devnull, flags), True)  # noqa: FBT003
    sys.stdout = _text(_Output(1, "wb", closefd=False), sys.stdout)
    sys.stderr = _text(_Errors(2, "wb", closefd=False), sys.stderr)


class _Output(io.FileIO):
    """Standard output, whose failures are ours. After the first one the rest is discarded."""

    _failed = False

    def write(self, data: ReadableBuffer, /) -> int:
        if self._failed:  # the buffer above flushes again when the interpreter ends
            return memoryview(data).nbytes
        try:
            return super().write(data) or 0
        except OSError as error:
            self._failed = True
            raise refused(error) from error


class _Errors(io.FileIO):
    """Standard error, which accepts everything."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return memoryview(data).nbytes


def _text(raw: io.FileIO, before: TextIO | None) -> io.TextIOWrapper:
    encoding = "utf-8" if before is None else before.encoding
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=encoding, errors="backslashreplace", line_buffering=True
    )
