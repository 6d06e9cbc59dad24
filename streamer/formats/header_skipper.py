"""Joins objects without their headers: the first bytes of each, as many as the channel says."""

from __future__ import annotations

from streamer.formats.join import Joiner, NotJoinable
from streamer.units import counted

SKIP = "skip:"
"""Begin of the name of this way to join objects; the number of bytes follows."""


class HeaderSkipper(Joiner):
    """Leaves out the first `size` bytes of each object."""

    def __init__(self, size: int) -> None:
        self._size = self._left = size
        """`_left`: bytes of the current object's header that have not arrived."""

    def begin(self) -> None:
        self._left = self._size

    def feed(self, data: bytes) -> list[bytes | memoryview]:
        skipped = min(self._left, len(data))
        self._left -= skipped
        return [memoryview(data)[skipped:]] if skipped < len(data) else []

    def end(self) -> bytes:
        if self._left:
            whole = self._size - self._left
            raise NotJoinable(
                f"the object has {counted(whole, 'byte')}, and SkipBytes leaves out {self._size}", whole
            )
        return b""

    def finish(self) -> bytes:
        return b""
