"""A stream whose reads are of chosen sizes."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Pieces(io.RawIOBase):
    """A stream that gives its bytes in pieces of the given sizes; a size of 0 is "nothing for now"."""

    def __init__(self, data: bytes, sizes: Iterable[int]) -> None:
        self.left = data
        self.sizes = iter(sizes)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int | None:
        room = memoryview(buffer)
        size = next(self.sizes, None)
        if size == 0:
            return None
        count = len(room) if size is None else min(size, len(room))
        piece, self.left = self.left[:count], self.left[count:]
        room[: len(piece)] = piece
        return len(piece)

    def readv(self, views: list[memoryview]) -> int | None:
        """Read one piece into several buffers."""
        memory = bytearray(min(len(self.left), sum(map(len, views))))
        count = self.readinto(memory)
        begin = 0
        for view in views:
            part = memory[begin : begin + len(view)][: max(0, (count or 0) - begin)]
            view[: len(part)] = part
            begin += len(view)
        return count
