"""The open file of a record index: `<folder>/<channel>.index`, or an unnamed copy of an object of S3.

A job, `verify` and `show` open it (`open_stored`), and plans read offsets when they need them. A build, and a
job that learns an index, write it (`sidecar.index.file`).
"""

from __future__ import annotations

import contextlib
import os
import stat
import weakref
from typing import TYPE_CHECKING

from streamer.errors import ConfigError, SinkError
from streamer.formats.record_index import Damaged, RecordIndex, read_header

if TYPE_CHECKING:
    from collections.abc import Iterator

    from streamer.formats.record_format import RecordFormat


class StoredIndex:
    """The open file of an index; an `IndexSource`. A read takes microseconds, from the page cache.

    The descriptor is closed by `close`, or when nothing refers to this object any more, because plans, which
    are not closed, read it. It stays valid if a build replaces the file.
    """

    def __init__(self, path: str, fd: int) -> None:
        """`path`: or URI, for texts."""
        self.path = path
        self.size = os.fstat(fd).st_size
        """Bytes of the file when it was opened; a writer sets it."""
        self.fd = fd
        self.close = weakref.finalize(self, os.close, fd)

    def read(self, position: int, count: int) -> bytes:
        """See `IndexSource.read`. Raises SinkError."""
        try:
            data = os.pread(self.fd, count, position)
            while len(data) < count and (rest := os.pread(self.fd, count - len(data), position + len(data))):
                data += rest
        except OSError as error:
            raise SinkError(f"cannot read the record index {self.path}: {error.strerror}") from error
        if len(data) < count:
            raise self.changed()
        return data

    def changed(self) -> SinkError:
        return SinkError(
            f"the record index {self.path} was overwritten while it was in use; put a new index in "
            "its place by a rename, or let `penstock index build` write it, and start again"
        )

    def index(self, *, growing: bool = False) -> RecordIndex:
        """Return the index. `growing`: the file may end in a block that is not whole. Raises SinkError."""
        with self._reading():
            index = RecordIndex(self)
        if index.end < self.size and not growing:
            raise SinkError(
                f"the record index {self.path} is damaged at byte {index.end}: its build was interrupted, or "
                "goes on; run `penstock index build` again, which keeps what is whole"
            )
        return index

    def format(self) -> RecordFormat:
        """Return the record format. Raises SinkError."""
        with self._reading():
            return read_header(self)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except Damaged as error:
            raise SinkError(
                f"{self.path} cannot be read as a record index: {error}; remove it, or name another directory"
            ) from None


def open_stored(path: str, *, name: str | None = None) -> StoredIndex | None:
    """Open the file of the index at `path`; None if there is no file. Raises SinkError.

    A FIFO in its place is no file, and does not block. `name`: of the index in errors, if the file is a copy.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise SinkError(f"cannot read the record index {path}: {error.strerror}") from error
    stored = StoredIndex(name or path, fd)
    return stored if stat.S_ISREG(os.fstat(fd).st_mode) else None


def check_format(path: str, index: RecordIndex, record_format: RecordFormat) -> None:
    """Raise ConfigError unless the index is of this format."""
    if index.format != record_format:
        raise ConfigError(
            f"the record index {path} is of {index.format}, and not of {record_format}; remove it, or name "
            "another directory"
        )
