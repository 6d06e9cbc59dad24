r"""Text lines: records that end at ``\n`` (contract §6.3, §5.4).

As in SageMaker's reader, the ``\n`` is not part of the record, a ``\r`` before it is, blank lines are
records, and bytes after the last ``\n`` are the last record.
"""

from __future__ import annotations

from itertools import accumulate

from streamer.errors import CorruptRecord
from streamer.formats.window import BLOCK_BYTES, RecordReader, Source

LONG = 1024
"""Mean bytes of a list's lines from which each next line is looked for: `split` compares byte by byte."""


class LineReader(RecordReader):
    """Reads the lines of a stream. Any bytes are lines, so no line is corrupt or cut by the end.

    Raises CorruptRecord only if the stream begins as another format does (`streamer.formats.signatures`).
    """

    what = "line"
    kind = "lines"

    def __init__(self, source: Source, *, block_bytes: int = BLOCK_BYTES) -> None:
        super().__init__(source, block_bytes=block_bytes)
        self._searched = 0
        """Bytes from `_start` without a line end, so that a long line is searched once."""
        self._long = False
        """Whether the last lines were long."""

    def _forget(self) -> None:
        self._searched = 0

    def _cut(self) -> list[bytes]:
        if (why := self._foreign()) is not None:
            self._fault = CorruptRecord(f"the stream does not begin with a line of text: {why}")
            return []
        last = self._buffer.rfind(b"\n", self._start + self._searched, self._end)
        if last < 0:
            self._searched = self._end - self._start
            return []
        lines = self._found(last) if self._long else bytes(self._view[self._start : last]).split(b"\n")
        self._long = last - self._start >= LONG * len(lines)
        if self.starts is not None:
            sizes = (len(line) + 1 for line in lines[:-1])
            self.starts.extend(accumulate(sizes, initial=self._base + self._start))
        self._start = last + 1
        self._searched = self._end - self._start
        return lines

    def _found(self, last: int) -> list[bytes]:
        """Return the lines, the last of which ends at index `last`."""
        find, view, start = self._buffer.find, self._view, self._start
        lines = []
        while start <= last:
            stop = find(b"\n", start, last + 1)
            lines.append(bytes(view[start:stop]))
            start = stop + 1
        return lines

    def _finish(self) -> list[bytes]:
        if self._start == self._end:
            return []
        last = bytes(self._view[self._start : self._end])
        if self.starts is not None:
            self.starts.append(self._base + self._start)
        self._start = self._end
        return [last]
