"""Cuts a stream of objects into pieces of files. Pure.

    stream    ──────── batch ────────┤──────── batch ────────┤     what one writer moves at a time
    files     ── a ──┤─ b ─┤──────────── c ──────────┤─ d ─┤       one for each object, in stream order

Several writers write at once, so batches, and the pieces of one file, are written in any order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from streamer.relay.files.target import TargetFile


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
