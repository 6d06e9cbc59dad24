"""Cuts a stream of objects into pieces of files, and notes how far every file is written. Pure.

    stream    ──────── batch ────────┤──────── batch ────────┤     what one writer moves at a time
    files     ── a ──┤─ b ─┤──────────── c ──────────┤─ d ─┤       one for each object, in stream order

Several writers write at once, so batches are done in any order. `WrittenFiles` passes pieces on in stream
order: a piece counts as written when all bytes before it are.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class TargetFile:
    """A file to write."""

    path: str
    size: int
    """Bytes of the whole file."""
    first: int = 0
    """Bytes that the file has already, which are not in the stream."""
    note: str = ""
    """Name of the file's content in the journal."""


class Piece(NamedTuple):
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

    def cut(self, count: int) -> list[Piece]:
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
            pieces.append(Piece(file, self._at, end))
            count -= end - self._at
            self._at = end
            if end == file.size:
                self._file = None
        return pieces

    def rest(self) -> list[Piece]:
        """Return the empty files after the stream's last byte. Raises ValueError if bytes are missing."""
        pieces = []
        while self._file is not None or self._next_file():
            file = self._file
            if file is None or self._at < file.size:
                raise ValueError(f"the stream ended inside {file}")
            pieces.append(Piece(file, self._at, self._at))
            self._file = None
        return pieces

    def _next_file(self) -> bool:
        self._file = next(self._files, None)
        if self._file is None:
            return False
        self._at = self._file.first
        return True


@dataclass(eq=False, slots=True)
class Batch:
    """Pieces that one writer writes, in stream order."""

    pieces: list[Piece]
    written: bool = False


@dataclass(slots=True)
class WrittenFiles:
    """The batches that are not written yet, in stream order, and counts of what is."""

    files: int = 0
    """Number of whole files."""
    bytes: int = 0
    """Bytes written, without a gap."""
    _batches: deque[Batch] = field(default_factory=deque)

    def __len__(self) -> int:
        """Return the number of batches that are not written, or come after one that is not."""
        return len(self._batches)

    def begin(self, pieces: list[Piece]) -> Batch:
        """Note that a writer begins to write these pieces, which follow those of the last batch."""
        batch = Batch(pieces)
        self._batches.append(batch)
        return batch

    def ended(self, batch: Batch) -> Iterator[Piece]:
        """Note that a batch is written; yield the pieces that now have no gap before them, in order."""
        batch.written = True
        while self._batches and self._batches[0].written:
            for piece in self._batches.popleft().pieces:
                self.files += piece.end == piece.file.size
                self.bytes += piece.end - piece.start
                yield piece
