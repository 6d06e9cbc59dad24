r"""Joins texts: the bytes of all objects in order, each of which ends with a line feed.

An object that lacks the ``\n`` at its end gets one, or its last line and the first line of the next object
would be one line. JSON Lines allows such objects (jsonlines.org), and ``"\n".join`` writes them.
"""

from __future__ import annotations

from streamer.formats.join import Joiner

LINE_FEED = b"\n"


class LineJoiner(Joiner):
    """Ends the last line of each object."""

    def __init__(self) -> None:
        self._last = LINE_FEED
        """Last byte of the current object so far; a line feed before its first one."""

    def begin(self) -> None:
        self._last = LINE_FEED

    def feed(self, data: bytes) -> list[bytes | memoryview]:
        self._last = data[-1:] or self._last
        return [data]

    def end(self) -> bytes:
        return b"" if self._last == LINE_FEED else LINE_FEED

    def finish(self) -> bytes:
        return b""
