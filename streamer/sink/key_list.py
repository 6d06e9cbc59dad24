"""Writes the key list of one epoch, in step with its FIFO.

    object starts, in plan order ─▶ `reach`, before bytes are written ─▶ lines appended to the file

`reach` writes the lines of all objects that begin in the next bytes of the plan. If the stream has the plan's
bytes at the plan's offsets, it writes the lines of further objects too (`ahead`), so most calls write
nothing. If objects are inflated, replaced or skipped on delivery, an object's offset in the stream is known
only when its first byte is delivered.

A sidecar that takes over a FIFO goes on with the file. It leaves out the lines that are in it, and a last
line that is not whole.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from streamer.errors import Shortage
from streamer.key_list import KeyListLine, encoded, first_line, parse_first_line, parsed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from streamer.plan import ObjectStart

AHEAD = 128
"""Lines that are written at a time if the offsets are known."""


class KeyListWriter:
    """The key list of one epoch; its owner closes it once."""

    def __init__(
        self, path: str, run: str, starts: Iterator[ObjectStart | None], *, ahead: bool, held: bool
    ) -> None:
        """`starts`: the objects in plan order, from the one that has the FIFO's first byte; None while the
        next one is unknown. `ahead`: offsets in the stream are those of the plan. `held`: go on with the
        file. Raises OSError, Shortage, and ValueError if the file is no key list of `run`.
        """
        self._path = path
        self._starts = starts
        self._ahead = ahead
        self._begun = False
        self._next: ObjectStart | None = None
        self._last: KeyListLine | None = None
        """Last line that the file has from an earlier sidecar, until the objects after it are reached."""
        if not held:
            _remove(path)
        flags = os.O_RDWR if held else os.O_WRONLY | os.O_CREAT | os.O_EXCL
        self._fd = os.open(path, flags | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            if held:
                self._last = _last_line(self._fd, run)
            else:
                self._append(first_line(run))
        except BaseException:
            os.close(self._fd)
            raise

    def reach(self, consumed: int, count: int, delivered: int) -> None:
        """Write the lines of the objects that begin in `count` bytes of the plan from `consumed` on.

        Call it before these bytes are written. `delivered`: offset of the first of them in the stream. Raises
        Shortage.
        """
        if self._next is None:
            self._advance()  # an open plan may know its next object by now
        end = consumed + count
        start = self._next
        if start is None or start.offset >= end:
            return
        lines: list[bytes] = []
        left = AHEAD if self._ahead else 0
        while start is not None and (start.offset < end or left > 0):
            left -= 1
            offset = delivered
            # An object before `consumed` was skipped on delivery, or began before the FIFO's first byte.
            if self._ahead or not self._begun or start.offset > consumed:
                offset += start.offset - consumed
            self._begun = True
            line = KeyListLine(offset, start.number, start.key, start.bucket)
            if self._is_new(line):
                lines.append(encoded(line))
            start = self._advance()
        if lines:
            self._append(b"".join(lines))

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _advance(self) -> ObjectStart | None:
        self._next = next(self._starts, None)
        return self._next

    def _is_new(self, line: KeyListLine) -> bool:
        last = self._last
        if last is None:
            return True
        if line.offset > last.offset:
            self._last = None
            return True
        if line == last:
            self._last = None
        return False

    def _append(self, text: bytes) -> None:
        try:
            while text:  # a full disk shortens a write, and refuses the next one
                text = text[os.write(self._fd, text) :]
        except OSError as error:
            raise Shortage(
                f"{self._path}: {error.strerror}; free space on that file system, or remove RecordKeys"
            ) from error


def _last_line(fd: int, run: str) -> KeyListLine | None:
    """Return the last whole line; cut off the bytes after it."""
    os.lseek(fd, 0, os.SEEK_SET)
    with open(fd, "rb", closefd=False) as file:
        text = file.read()
    whole = text[: text.rfind(b"\n") + 1]
    lines = whole.splitlines()
    if not lines or parse_first_line(lines[0]) != run:
        raise ValueError("it is not the key list of this run")
    os.ftruncate(fd, len(whole))
    return parsed(lines[-1]) if len(lines) > 1 else None


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
