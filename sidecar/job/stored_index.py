"""Reads the record index of a channel from a file of a local folder: `<folder>/<channel>.index`.

`read_index` reads it whole. A job opens it (`open_stored`), and its plans read offsets when they need them.
`sidecar.job.index_file` writes such files.
"""

from __future__ import annotations

import os
import stat
import weakref
from typing import TYPE_CHECKING, ClassVar, TypeVar

from streamer.errors import ConfigError, SinkError
from streamer.formats.record_index import Damaged, RecordIndex

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamer.formats.record_format import RecordFormat

Source = TypeVar("Source")


def read_index(path: str) -> RecordIndex:
    """Return the index at `path`. Raises ConfigError if there is none, SinkError if it is damaged."""
    data = _bytes_of(path)
    if data is None:
        raise absent(path, "--from", "penstock index build")
    return _whole(path, RecordIndex.read, data, len(data))


def open_stored(path: str, *, named_by: str, build: str) -> StoredIndex:
    """Open the file of the index at `path`. Raises ConfigError if there is none, SinkError.

    `named_by`: the option or key that names the folder. `build`: the command that makes the index.
    """
    try:
        fd = _open(path)
        if fd is None:
            raise absent(path, named_by, build)
        return StoredIndex(path, fd)
    except OSError as error:
        raise SinkError(f"cannot read the record index {path}: {error.strerror}") from error


class OpenIndex:
    """The open file of an index; an `IndexSource`. A subclass says who closes it, and has its `size`."""

    why_changed: ClassVar[str]
    """When the file was overwritten, and what to do."""

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd

    def read(self, position: int, count: int) -> bytes:
        """See `IndexSource.read`. Raises SinkError."""
        try:
            data = os.pread(self._fd, count, position)
            while len(data) < count and (rest := os.pread(self._fd, count - len(data), position + len(data))):
                data += rest
        except OSError as error:
            raise SinkError(f"cannot read the record index {self.path}: {error.strerror}") from error
        if len(data) < count:
            raise self.changed()
        return data

    def changed(self) -> SinkError:
        return SinkError(f"the record index {self.path} was overwritten while {self.why_changed}")


class StoredIndex(OpenIndex):
    """The open file of an index, whose offsets are read when they are needed.

    The descriptor is closed when nothing refers to this object any more, because plans, which are not closed,
    read it. It stays valid if a build replaces the file. A read takes microseconds, from the page cache.
    """

    why_changed = (
        "the job reads it; put a new index in its place by a rename, or let `penstock index build` write it, "
        "and start the job again"
    )

    def __init__(self, path: str, fd: int) -> None:
        super().__init__(path, fd)
        weakref.finalize(self, os.close, fd)
        self.size = os.fstat(fd).st_size

    def index(self) -> RecordIndex:
        """Return the index. Raises SinkError if it is damaged."""
        return _whole(self.path, RecordIndex.open, self, self.size)

    def index_so_far(self) -> RecordIndex:
        """Return the index of a file that a process may append to. Raises SinkError if it is damaged."""
        try:
            return RecordIndex.open(self)[0]
        except Damaged as error:
            raise unreadable(self.path, error) from None


def _whole(
    path: str, load: Callable[[Source], tuple[RecordIndex, int]], source: Source, size: int
) -> RecordIndex:
    """Return the index that `load` makes. Raises SinkError if it has an end that is damaged."""
    try:
        index, end = load(source)
    except Damaged as error:
        raise unreadable(path, error) from None
    if end < size:
        raise SinkError(
            f"the record index {path} is damaged at byte {end}: its build was interrupted, or goes on; run "
            "`penstock index build` again, which keeps what is whole"
        )
    return index


def absent(path: str, named_by: str, build: str) -> ConfigError:
    """Return the error that there is no index. `named_by`, `build`: as for `open_stored`."""
    return ConfigError(f"there is no record index {path}: make it by `{build}`, or correct {named_by}")


def unreadable(path: str, error: Damaged) -> SinkError:
    """Return the error that a file is no index."""
    return SinkError(
        f"{path} cannot be read as a record index: {error}; remove it, or name another directory"
    )


def kind_of_index(path: str, name: str) -> tuple[RecordFormat, int] | None:
    """Return record format and stride of the index at `path`; None if there is none. Raises SinkError.

    `name`: as for `open_index`.
    """
    data = _bytes_of(path, RecordIndex.HEADER_BYTES)
    if not data:
        return None
    try:
        index, _ = RecordIndex.read(data)
    except Damaged as error:
        raise unreadable(name, error) from None
    return index.format, index.stride


def _open(path: str) -> int | None:
    """Open a file for reading; return its descriptor, or None if there is no file. Raises OSError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return None


def _bytes_of(path: str, most: int = -1) -> bytes | None:
    """Return the first `most` bytes of a file, or all; None if there is no file. Raises SinkError.

    A FIFO in its place is no file, and does not block.
    """
    try:
        fd = _open(path)
        if fd is None:
            return None
        with open(fd, "rb") as file:
            return file.read(most)
    except OSError as error:
        raise SinkError(f"cannot read the record index {path}: {error.strerror}") from error


def check_kind(path: str, index: RecordIndex, record_format: RecordFormat, stride: int) -> None:
    """Raise ConfigError unless the index is of this format and stride."""
    if (index.format, index.stride) != (record_format, stride):
        raise ConfigError(
            f"the record index {path} is of {index.format} and has {_every(index.stride)}, and not "
            f"of {record_format} with {_every(stride)}; remove it, or name another directory"
        )


def _every(stride: int) -> str:
    """Return a stride in words."""
    return "every record" if stride == 1 else f"1 record of {stride}"
