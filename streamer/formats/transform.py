r"""Transforms of an epoch's stream: for each object bytes in, bytes out and what follows it; then an end.

Programs that read tar streams stop at the first end mark, so they read only the first of several concatenated
objects and report success. Objects of text may lack the line feed after their last line; JSON Lines allows
that (jsonlines.org), and ``"\n".join`` writes it. A transform joins such objects into one stream:

    object a: members, end mark ─┐
    object b: members, end mark ─┴▶ JoinTar ─▶ members of a, members of b, end mark

Pure. `streamer.relay.deliver.transform_runner` runs them, and `wrap` makes a record of each object.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from streamer.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterable

Join = Literal["tar", "lines"]
"""Formats of joined objects. A plan also knows `skip:BYTES` (`SKIP`)."""
SKIP = "skip:"
"""Begin of the name of `SkipHeaders`; the number of bytes follows."""
LINE_FEED = b"\n"


class BadContent(ValueError):
    """The object is incomplete, of another format, or does not match the objects before it."""

    def __init__(self, message: str, offset: int | None = None) -> None:
        super().__init__(message)
        self.offset = offset
        """Offset of the fault in the object's content; None: the fault is of the whole object."""


class Transform:
    """Passes on the bytes of one epoch: for each object `begin`, `feed` in order, `end`; then `finish`.

    Subclasses change them. The owner of a transform closes it once.
    """

    def begin(self) -> None:
        """Start a new object with the next byte."""

    def feed(self, data: bytes | bytearray) -> Iterable[bytes | bytearray | memoryview]:
        """Return what the stream gets for the object's next bytes. Raises BadContent."""
        return [data]

    def end(self) -> Iterable[bytes]:
        """Check that the object is complete after its last byte, and return what the stream has after it.

        Raises BadContent.
        """
        return []

    def finish(self) -> bytes:
        """Return the bytes that end the stream after the last object."""
        return b""

    def close(self) -> None:
        """Drop what is kept of an object."""


class JoinLines(Transform):
    """Ends the last line of each object: else it would be one line with the first of the next object."""

    def __init__(self) -> None:
        self._last = LINE_FEED
        """Last byte of the current object so far; a line feed before its first one."""

    def begin(self) -> None:
        self._last = LINE_FEED

    def feed(self, data: bytes | bytearray) -> Iterable[bytes | bytearray]:
        self._last = bytes(data[-1:]) or self._last
        return [data]

    def end(self) -> Iterable[bytes]:
        return [] if self._last == LINE_FEED else [LINE_FEED]


class SkipHeaders(Transform):
    """Leaves out the first `size` bytes of each object."""

    def __init__(self, size: int) -> None:
        self._size = self._left = size
        """`_left`: bytes of the current object's header that have not arrived."""

    def begin(self) -> None:
        self._left = self._size

    def feed(self, data: bytes | bytearray) -> Iterable[memoryview]:
        skipped = min(self._left, len(data))
        self._left -= skipped
        return [memoryview(data)[skipped:]]

    def end(self) -> Iterable[bytes]:
        if self._left:
            whole = self._size - self._left
            raise BadContent(
                f"the object has {counted(whole, 'byte')}, and SkipBytes leaves out {self._size}", whole
            )
        return []
