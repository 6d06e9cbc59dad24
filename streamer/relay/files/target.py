"""Files that several threads write, in any order: each has its name only once it is whole.

    stream    ──────── batch ────────┤──────── batch ────────┤     what one writer moves at a time
    files     ── a ──┤─ b ─┤──────────── c ──────────┤─ d ─┤       one for each object, in stream order

`PieceCutter` cuts the batches into pieces of files.

    parts/17 ─ rename, after its last byte ─▶ tree/sub/name

Until then a file has a number in a directory of its own, and stays open: its bytes go to the file that was
made, whatever other users do to the name. So a file of the tree is a whole one, whenever the process is
killed.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, NamedTuple

from streamer.errors import SinkError
from streamer.linux import SPLICE_FLAGS, write_remedy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from streamer.directory import Directory


class TargetFile:
    """A file to write; its owner closes it, which does nothing once it is whole."""

    __slots__ = ("_fd", "_left", "_lock", "_number", "_parts", "_tree", "path", "size")

    def __init__(self, path: str, size: int, *, number: int, parts: Directory, tree: Directory) -> None:
        """`path`: relative to `tree`. `number`: name of the file in `parts`, on the same file system."""
        self.path = path
        self.size = size
        self._number = str(number)
        self._parts = parts
        self._tree = tree
        self._left = size
        """Bytes that are not written."""
        self._fd = -1
        self._lock = threading.Lock()

    def write(self, pipe: int, start: int, end: int) -> bool:
        """Move bytes `start` to `end` from a pipe into the file; return whether the file is whole now.

        Each byte is written once; an empty file is "written" too. Raises SinkError.
        """
        try:
            with self._lock:
                if self._fd < 0:
                    self._fd = self._parts.create(self._number)
            at = start
            while at < end:
                at += os.splice(pipe, self._fd, end - at, offset_dst=at, flags=SPLICE_FLAGS)
            with self._lock:
                self._left -= end - start
                if self._left:
                    return False
            self.close()  # some file systems report now that the disk is full
            *folders, name = self.path.split("/")
            with self._tree.make(*folders) as folder:
                self._parts.move(self._number, folder, name)
        except OSError as error:
            raise cannot_write(os.path.join(self._tree.path, self.path), error) from error
        return True

    @property
    def whole(self) -> bool:
        """Whether every byte is written."""
        return not self._left

    def close(self) -> None:
        """Close the file, after the last `write` has returned. Raises OSError."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def cannot_write(path: str, error: OSError) -> SinkError:
    """Return the error of a file that this machine refuses to write."""
    remedy = write_remedy(error, "see to the disk, or set Penstock.BaseDirectory")
    return SinkError(
        f"cannot write {path}: {error.strerror}; {remedy}; the next start continues the download"
    )


class FilePiece(NamedTuple):
    """Bytes `start` (inclusive) to `end` (exclusive) of a file; none for an empty file."""

    file: TargetFile
    start: int
    end: int


class PieceCutter:
    """Cuts a stream into pieces of `files`, which are in stream order."""

    def __init__(self, files: Iterator[TargetFile]) -> None:
        self._files = files
        self._file: TargetFile | None = None
        self._at = 0
        """Next byte of the current file."""

    def cut(self, count: int) -> list[FilePiece]:
        """Return the pieces of the stream's next `count` bytes, and empty files before them.

        Raises ValueError if the files have fewer bytes.
        """
        pieces = []
        while count:
            if self._file is None and not self._next_file():
                raise ValueError(f"the stream has {count} bytes more than its files")
            file = self._file
            if file is None:
                raise RuntimeError("no file")
            end = min(self._at + count, file.size)
            pieces.append(FilePiece(file, self._at, end))
            count -= end - self._at
            self._at = end
            if end == file.size:
                self._file = None
        return pieces

    def rest(self) -> list[FilePiece]:
        """Return the empty files after the stream's last byte. Raises ValueError if bytes are missing."""
        pieces = []
        while self._file is not None or self._next_file():
            file = self._file
            if file is None or self._at < file.size:
                raise ValueError(f"the stream ended inside {file}")
            pieces.append(FilePiece(file, self._at, self._at))
            self._file = None
        return pieces

    def _next_file(self) -> bool:
        self._file = next(self._files, None)
        if self._file is None:
            return False
        self._at = 0
        return True
