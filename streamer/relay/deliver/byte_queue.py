"""Queue of byte pieces in memory, from which an outlet takes as many bytes as it accepts."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from itertools import islice

from streamer.linux import ALL

_MAX_VECTORS = 64
"""Pieces passed to one writev(2); the kernel allows 1,024."""


class ByteQueue:
    """Queue of byte pieces that drain into a descriptor; a `streamer.sink.outlet.Drainable`."""

    def __init__(self, pieces: Sequence[bytes | memoryview]) -> None:
        self._left = deque(memoryview(piece) for piece in pieces if piece)

    def __bool__(self) -> bool:
        return bool(self._left)

    def drain_into(self, fd: int, most: int = ALL) -> int:
        vectors: list[memoryview] = []
        size = 0
        for piece in islice(self._left, _MAX_VECTORS):
            vectors.append(piece[: most - size])
            size += len(vectors[-1])
        count = left = os.writev(fd, vectors)
        while left:
            first = self._left[0]
            if left < len(first):
                self._left[0] = first[left:]
                break
            left -= len(self._left.popleft())
        return count
