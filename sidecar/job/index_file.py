"""Writes the record index of a channel into a file of a local folder: `<folder>/<channel>.index`.

    open_index ─▶ lock, read, cut off a torn end ─▶ append rows ... ─▶ tidy: one rename

Rows are appended while objects are scanned, so a build that is killed loses what it has not appended yet, and
the next one goes on from there. `tidy` rewrites the file, flushed and by a rename, if it has rows that do not
count any more. One process writes: it has the lock (flock(2)) of the file that the name stands for.

The event loop of a build writes: a block of rows is some KiB, and nothing but the scan is on the loop. A job
that learns an index (`sidecar.job.index_learning`) appends in a thread, and the offsets stay in the file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
from typing import TYPE_CHECKING

from sidecar.job.stored_index import OpenIndex, StoredIndex, check_kind, unreadable
from streamer.errors import SinkError
from streamer.formats.record_index import Damaged, RecordIndex, block

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from streamer.formats.record_format import RecordFormat
    from streamer.formats.record_index import IndexedObject

ROWS_A_BLOCK = 1 << 16
"""Maximum rows of a block of a rewritten file."""


class _WrittenFile(OpenIndex):
    """The file that this process writes, of which `IndexFile` owns the descriptor."""

    why_changed = "this process writes it; remove it, and run `penstock index build`"

    @property
    def size(self) -> int:
        return os.fstat(self._fd).st_size


class IndexFile:
    """An index and its file, which this process has locked; made by `open_index`."""

    def __init__(self, path: str, fd: int, index: RecordIndex, source: _WrittenFile | None = None) -> None:
        """`fd`: the locked file, at its end; `close` closes it. `source`: the file, if it has the offsets."""
        self.path = path
        self.index = index
        self.writes = 0
        """Number of changes of the file since it was opened."""
        self._fd = fd
        self._source = source
        self._appending = threading.Lock()

    def close(self) -> None:
        """Close the file, which ends the lock."""
        os.close(self._fd)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self._fd).st_size

    def append(self, rows: Sequence[IndexedObject]) -> None:
        """Add rows to the index and its file, in any thread. Raises SinkError, with the file as before."""
        with self._appending:
            before = self.size
            try:
                with _writing(self.path):
                    _write_all(self._fd, block(rows))
                if self._source is not None and self.index.read_on(self._source, before) != self.size:
                    raise self._source.changed()
            except SinkError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, before)
                    os.lseek(self._fd, before, os.SEEK_SET)
                raise
            if self._source is None:
                for row in rows:
                    self.index.add(row)
            self.writes += 1

    def snapshot(self) -> tuple[StoredIndex, int]:
        """Return the file as it is now, whole blocks alone, and its `writes`. Raises SinkError."""
        with self._appending, _writing(self.path):
            return StoredIndex(self.path, os.dup(self._fd)), self.writes

    def tidy(self, names: Sequence[int]) -> None:
        """Leave the rows of these objects, in this order, and no others. Raises SinkError, KeyError."""
        index = self.index
        if not index.replaced and index.names() == names:
            with _writing(self.path):
                os.fsync(self._fd)
            return
        tidied = RecordIndex(index.format, index.stride)
        temporary = f"{self.path}.tmp"  # this process has the lock, so no other one writes it
        with _writing(temporary), contextlib.ExitStack() as closing:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            closing.callback(os.close, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _write_all(fd, index.header())
                for start in range(0, len(names), ROWS_A_BLOCK):
                    rows = [_present(index, name) for name in names[start : start + ROWS_A_BLOCK]]
                    _write_all(fd, block(rows))
                    for row in rows:
                        tidied.add(row)
                os.fsync(fd)
                os.rename(temporary, self.path)
            except BaseException:
                os.unlink(temporary)
                raise
            closing.pop_all()
        os.close(self._fd)
        self.index, self._fd = tidied, fd
        self.writes += 1


def _present(index: RecordIndex, name: int) -> IndexedObject:
    row = index.get(name)
    if row is None:
        raise KeyError(name)
    return row


@contextlib.contextmanager
def open_index(
    path: str,
    record_format: RecordFormat,
    stride: int,
    *,
    name: str | None = None,
    stored: bool = False,
) -> Iterator[IndexFile]:
    """Open the index at `path` for writing, or make it; lock it until the end of the block.

    Cuts off the end of a file whose writer was killed. `name`: of the index in errors, if the file is a copy.
    `stored`: the offsets stay in the file, and `tidy` must not be called. Raises SinkError; ConfigError if
    the index is of another format.
    """
    with _writing(path):
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        fd = _locked(path)
    source = _WrittenFile(path, fd)
    file = IndexFile(path, fd, RecordIndex(record_format, stride), source if stored else None)
    try:
        with _writing(path):
            if not (size := source.size):
                _write_all(fd, file.index.header())
                file.writes += 1
            try:
                if stored:
                    file.index, end = RecordIndex.open(source)
                else:
                    file.index, end = RecordIndex.read(source.read(0, source.size))
            except Damaged as error:
                raise unreadable(name or path, error) from None
            check_kind(name or path, file.index, record_format, stride)
            file.writes += size > end
            os.ftruncate(fd, end)
            os.lseek(fd, end, os.SEEK_SET)
        yield file
    finally:
        file.close()


def _locked(path: str) -> int:
    """Open and lock the file of this name, or make it. Raises SinkError, OSError."""
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            fd = os.open(path, flags, 0o644)
        except OSError as error:
            if error.errno == errno.ELOOP and os.path.islink(path):
                raise SinkError(
                    f"{path} is a symbolic link, and a record index is not written through one, because a "
                    "rename replaces it; remove the link, or name the directory of the file that it leads to"
                ) from error
            raise
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise SinkError(  # noqa: TRY301 - the descriptor is closed below
                    f"{path} is no file; remove it, or name another directory for the record index"
                )
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                now = os.stat(path, follow_symlinks=False)
                if (now.st_dev, now.st_ino) == (status.st_dev, status.st_ino):
                    return fd
        except BlockingIOError:
            os.close(fd)
            raise SinkError(
                f"another process writes {path}: an index build, or a job with LearnIndex; wait for its end"
            ) from None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # the process that had the lock has renamed another file to this name


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


@contextlib.contextmanager
def _writing(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SinkError(f"cannot write the record index {path}: {error.strerror}") from error
