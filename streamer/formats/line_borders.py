"""Finds the lines of an object without splitting it.

    long lines     `bytes.find` of each line end
    short lines    `bytes.count` over long steps, and `bytes.find` shortly before an indexed line

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamer.formats.borders import STRIDE, BadRecord, BorderScanner
from streamer.formats.signatures import LOOKED_AT, recognised

if TYPE_CHECKING:
    from streamer.formats.borders import Block

_LONG_LINE = 512
"""Mean bytes of a line above which a search for each line end is faster than counting line ends."""


class LineScanner(BorderScanner):
    r"""Finds lines: records that end at ``\n``, the last one also at the end of the object."""

    def __init__(self, *, stride: int = STRIDE) -> None:
        super().__init__(stride=stride)
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
            if (foreign := recognised(self._head)) is not None:
                raise BadRecord(f"no line of text begins here: {foreign}", 0)
        if self._fresh:
            self._begin(base)
        # A line end that is the block's last byte begins a line only if further bytes come.
        self._fresh = text[-1:] == b"\n"
        end = len(text) - 1
        if base + end > _LONG_LINE * self.records:
            self._search(text, base, end)
        else:
            self._count(text, base, end)

    def _begin(self, offset: int) -> None:
        if not self.records % self.stride:
            self.offsets.append(offset)
        self.records += 1

    def _search(self, text: bytes, base: int, end: int) -> None:
        """Search each line end before `end`."""
        find, records, stride, at = text.find, self.records, self.stride, 0
        while (at := find(b"\n", at, end) + 1) > 0:
            if not records % stride:
                self.offsets.append(base + at)
            records += 1
        self.records = records

    def _count(self, text: bytes, base: int, end: int) -> None:
        """Count the line ends before `end`, and search only those before an indexed line."""
        at = 0
        while True:
            nth = -self.records % self.stride + 1
            at, counted = _after_nth(text, at, end, nth, (base + end) / self.records)
            if counted < nth:
                self.records += counted
                return
            self.records += nth - 1
            self._begin(base + at)

    def finish(self) -> int:
        return self.fed


def _after_nth(text: bytes, start: int, end: int, nth: int, mean: float) -> tuple[int, int]:
    """Return the offset after the nth line end of text[start:end], and `nth`; or `end` and their number.

    `mean`: the expected bytes of a line. Counts most line ends in long steps, and searches the last ones.
    """
    left = nth
    while left > 8 and start < end:
        step = min(end, start + max(64, int(left * mean * 0.9)))
        while (counted := text.count(b"\n", start, step)) >= left:
            if counted < 2 * left or step - start <= 128:
                break
            step = start + (step - start) // 2
        if counted >= left:
            break
        left -= counted
        start = step
    while left:
        found = text.find(b"\n", start, end)
        if found < 0:
            return end, nth - left
        start = found + 1
        left -= 1
    return start, nth
