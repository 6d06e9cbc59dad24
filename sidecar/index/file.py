"""Writes the record index of a channel into a file of a local folder: `<folder>/<channel>.index`.

    open_index ─▶ lock, read, cut off a torn end ─▶ append rows ... ─▶ tidy: one rename

Rows are appended while objects are scanned, so a build that is killed loses what it has not appended yet, and
the next one goes on from there. `tidy` rewrites the file, flushed and by a rename, if it has rows that do not
count any more. One process writes: it has the lock (flock(2)) of the file that the name stands for.

The event loop of a build writes: a block of rows is some KiB, and nothing but the scan is on the loop. A job
that learns an index (`sidecar.index.learning`) appends in a thread.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
from typing import TYPE_CHECKING

from sidecar.index.stored import StoredIndex, check_format
from streamer.errors import SinkError
from streamer.formats.record_index import HEADER_BYTES, block, header

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from streamer.formats.record_format import RecordFormat
    from streamer.formats.record_index import IndexedObject, RecordIndex

ROWS_A_BLOCK = 1 << 16
"""Maximum rows of a block of a rewritten file."""


class IndexFile:
    """An index and its file, which this process has locked; made by `open_index`."""

    def __init__(self, path: str, stored: StoredIndex, index: RecordIndex) -> None:
        """`stored`: the locked file; `close` closes it. `index`: all its rows."""
        self.path = path
        self.index = index
        self.writes = 0
        """Number of changes of the file since it was opened."""
        self._stored = stored
        self._appending = threading.Lock()

    def close(self) -> None:
        """Close the file, which ends the lock."""
        self._stored.close()

    @property
    def name(self) -> str:
        """Path of the file, or URI of the object that it is a copy of."""
        return self._stored.path

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._stored.size

    def append(self, rows: Sequence[IndexedObject]) -> None:
        """Add rows to the index and its file, in any thread. Raises SinkError, with the file as before."""
        stored, fd = self._stored, self._stored.fd
        with self._appending:
            before = stored.size
            if os.fstat(fd).st_size != before:
                raise stored.changed()
            try:
                with _writing(self.path):
                    write_all(fd, block(rows))
                    stored.size = os.fstat(fd).st_size
                self.index.read_on()
                if self.index.end != stored.size:
                    raise stored.changed()
            except SinkError:
                stored.size = before
                with contextlib.suppress(OSError):
                    os.ftruncate(fd, before)
                    os.lseek(fd, before, os.SEEK_SET)
                raise
            self.writes += 1

    def snapshot(self) -> tuple[StoredIndex, int]:
        """Return the file as it is now, whole blocks alone, and its `writes`. Raises SinkError."""
        with self._appending, _writing(self.path):
            return StoredIndex(self.path, os.dup(self._stored.fd)), self.writes

    def tidy(self, names: Sequence[int]) -> None:
        """Leave the rows of these objects, in this order, and no others. Raises SinkError, KeyError."""
        index = self.index
        if not index.replaced and index.names() == names:
            with _writing(self.path):
                os.fsync(self._stored.fd)
            return
        temporary = f"{self.path}.tmp"  # this process has the lock, so no other one writes it
        with _writing(temporary):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            tidied = StoredIndex(self._stored.path, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                write_all(fd, header(index.format))
                for start in range(0, len(names), ROWS_A_BLOCK):
                    write_all(fd, block(map(index.row, names[start : start + ROWS_A_BLOCK])))
                os.fsync(fd)
                tidied.size = os.fstat(fd).st_size
                self.index = tidied.index()
                os.rename(temporary, self.path)
            except BaseException:
                self.index = index
                tidied.close()
                os.unlink(temporary)
                raise
        self._stored.close()
        self._stored = tidied
        self.writes += 1


@contextlib.contextmanager
def open_index(path: str, record_format: RecordFormat, *, name: str | None = None) -> Iterator[IndexFile]:
    """Open the index at `path` for writing, or make it; lock it until the end of the block.

    Cuts off the end of a file whose writer was killed. `name`: of the index in errors, if the file is a copy.
    Raises SinkError; ConfigError if the index is of another format.
    """
    with _writing(path):
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        stored = StoredIndex(name or path, _locked(path))
    try:
        with _writing(path):
            changed = not stored.size
            if changed:
                write_all(stored.fd, header(record_format))
                stored.size = HEADER_BYTES
            index = stored.index(growing=True)
            check_format(stored.path, index, record_format)
            changed |= stored.size > index.end
            os.ftruncate(stored.fd, index.end)
            os.lseek(stored.fd, index.end, os.SEEK_SET)
            stored.size = index.end
        file = IndexFile(path, stored, index)
        file.writes += changed
        try:
            yield file
        finally:
            file.close()
    finally:
        stored.close()


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
                f"another process writes {path}: an index build, or a job that learns it; wait for its end"
            ) from None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # the process that had the lock has renamed another file to this name


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all bytes at the position of `fd`. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


@contextlib.contextmanager
def _writing(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SinkError(f"cannot write the record index {path}: {error.strerror}") from error
