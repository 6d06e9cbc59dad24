"""Records of a fixed size, one after the other without a frame, as `fixed:BYTES` names them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamer.formats.ahead import Frame
from streamer.formats.window import BLOCK_BYTES, RecordReader

if TYPE_CHECKING:
    from streamer.formats.window import Source


class FixedReader(RecordReader):
    """Reads records of `size` bytes each. Nothing in the bytes shows where a record begins."""

    def __init__(self, source: Source, size: int, *, block_bytes: int = BLOCK_BYTES) -> None:
        super().__init__(source, block_bytes=block_bytes)
        if size < 1:
            raise ValueError(f"a record has at least 1 byte, not {size}")
        self.what = f"record of {size} bytes"
        self._size = size

    def _cut(self) -> list[bytes]:
        batch: list[bytes] = []
        if self._ahead and not self._cut_ahead(batch):
            return batch
        view, size, start = self._view, self._size, self._start
        self._start = end = self._end - (self._end - start) % size
        if self.starts is not None:
            self.starts.extend(range(self._base + start, self._base + end, size))
        self._frame, self._wanted = Frame(0, size, 0, repeated=True), size
        return batch + [bytes(view[each : each + size]) for each in range(start, end, size)]
