"""Standard output and standard error of the commands.

Writing to standard output raises SinkError for a full disk or a closed descriptor, and ReaderGone if the
reader has closed the pipe, whichever library writes. Writing to standard error never fails: a log line that
cannot be written must neither end an epoch nor change an exit code.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

from streamer.sink.stdout import refused

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


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
    """Standard error that ignores errors."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return memoryview(data).nbytes


def _text(raw: io.FileIO, replaced: TextIO | None) -> io.TextIOWrapper:
    encoding = "utf-8" if replaced is None else replaced.encoding
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=encoding, errors="backslashreplace", line_buffering=True
    )
