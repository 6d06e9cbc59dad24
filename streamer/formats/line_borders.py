"""Finds the lines of an object without splitting it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamer.formats.borders import BadRecord, BorderScanner
from streamer.formats.signatures import LOOKED_AT, foreign

if TYPE_CHECKING:
    from streamer.formats.borders import Block


class LineScanner(BorderScanner):
    r"""Finds lines: records that end at ``\n``, the last one also at the end of the object."""

    def __init__(self) -> None:
        super().__init__()
        self._fresh = True
        """Whether the next byte is the first of a line."""
        self._head = b""
        """The object's first bytes, at most `LOOKED_AT`."""

    def feed(self, data: Block) -> None:
        if not len(data):
            return
        text, base = bytes(data), self.fed
        self.fed += len(text)
        if base < LOOKED_AT:
            self._head += text[: LOOKED_AT - base]
            if (other := foreign(self._head, "lines")) is not None:
                raise BadRecord(f"no line of text begins here: {other.refusal('lines')}", 0)
        found = self.offsets.append
        if self._fresh:
            found(base)
        # A line end that is the block's last byte begins a line only if further bytes come.
        self._fresh = text[-1:] == b"\n"
        find, at, end = text.find, 0, len(text) - 1
        while (at := find(b"\n", at, end) + 1) > 0:
            found(base + at)

    def finish(self) -> int:
        return self.fed
