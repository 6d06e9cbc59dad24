"""A stream whose reads are of chosen sizes."""

from __future__ import annotations

import io


class Pieces(io.RawIOBase):
    """A stream that gives its bytes in pieces of the given sizes; a size of 0 is "nothing for now"."""

    def __init__(self, data, sizes):
        self.left = data
        self.sizes = iter(sizes)

    def readable(self):
        return True

    def readinto(self, buffer):
        size = next(self.sizes, len(buffer))
        if size == 0:
            return None
        piece, self.left = self.left[: min(size, len(buffer))], self.left[min(size, len(buffer)) :]
        buffer[: len(piece)] = piece
        return len(piece)
