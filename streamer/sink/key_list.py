"""Writes the key list of one epoch, in step with its FIFO.

    object starts, in plan order ─▶ `reach`, before bytes are written ─▶ lines appended to the file

`reach` writes the lines of all objects that begin in the next bytes of the plan. If the stream has the plan's
bytes at the plan's offsets, it writes the lines of further objects too (`ahead`), so most calls write
nothing. If objects are inflated, replaced or skipped on delivery, an object's offset in the stream is known
only when its first byte is delivered.

If the machine refuses a line (no space), the same call may be repeated. It goes on after the last byte that
has been written.

A sidecar that takes over a FIFO goes on with the file. It leaves out the lines that are in it, and cuts off a
last line that is not whole. It reads two blocks of the file, and walks over the plan to the first new line.
This takes some microseconds per object before that line, so the owner makes the writer in a thread.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from streamer.directory import Directory
from streamer.errors import Shortage
from streamer.key_list import (
    KeyListLine,
    encoded,
    first_line,
    parse_first_line,
    parsed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from streamer.plan import ObjectStart

AHEAD = 128
"""Lines that are written at a time if the offsets are known."""
BLOCK = 1 << 16
"""Bytes at the start and at the end of a file in which its first and its last line are looked for: keys have
at most 1,024 bytes."""
MOST_LINES = 1 << 12
"""Most lines in one write."""
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class KeyListWriter:
    """The key list of one epoch; its owner closes it once."""

    def __init__(
        self,
        path: str,
        run: str,
        starts: Callable[[int], Iterator[ObjectStart | None]],
        *,
        first: int,
        consumed: int,
        ahead: bool,
        held: bool,
    ) -> None:
        """`starts` returns the objects in plan order from the one that has a byte; None while the next one is
        unknown. `first`: the FIFO's first byte, or `consumed`. `consumed`: first byte that is delivered next.
        `ahead`: offsets in the stream are those of the plan; the lines up to `consumed` are written.
        `held`: go on with the file. Raises OSError, Shortage, and ValueError if the file is no key list of
        `run`.
        """
        self._path = path
        self._ahead = ahead
        self._begun = False
        self._next: ObjectStart | None = None
        self._last: KeyListLine | None = None
        """Last line that the file has from an earlier sidecar, until the objects after it are reached."""
        self._unwritten = b""
        """Text of whole lines, the first perhaps begun, that the machine has refused to write."""
        folder, name = os.path.split(path)
        with Directory.at(folder) as directory:
            if not held:
                directory.remove(name)
            self._fd = directory.open(name, os.O_RDWR | os.O_APPEND) if held else directory.create(name)
        try:
            if held and not _has_part_of(first_line(run), self._fd):
                size, self._last = _last_line(self._fd, run)
                os.ftruncate(self._fd, size)
            else:  # a sidecar may be killed, or its disk be full, before the end of the first line
                os.ftruncate(self._fd, 0)
                self._append(first_line(run))
            if ahead and self._last is not None:
                first = self._last.offset - 1  # several objects may begin at the last line's offset
            self._starts = starts(first)
            self._advance()
            if ahead:
                self.reach(consumed, 1, consumed)
        except BaseException:
            os.close(self._fd)
            raise

    def reach(self, consumed: int, count: int, delivered: int) -> None:
        """Write the lines of the objects that begin in `count` bytes of the plan from `consumed` on.

        Call it before these bytes are written. `delivered`: offset of the first of them in the stream. Raises
        Shortage; the caller then repeats the same call until it succeeds.
        """
        self.flush()
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
            start = self._advance()
            if self._is_new(line):
                lines.append(encoded(line))
                if len(lines) == MOST_LINES:
                    text = b"".join(lines)
                    lines.clear()
                    self._append(text)
        if lines:
            self._append(b"".join(lines))

    def flush(self) -> None:
        """Write the lines that the machine has refused. Raises Shortage."""
        try:
            while self._unwritten:  # a full disk shortens a write, and refuses the next one
                self._unwritten = self._unwritten[os.write(self._fd, self._unwritten) :]
        except OSError as error:
            raise Shortage(
                f"{self._path}: {error.strerror}; free space on that file system, or remove RecordKeys"
            ) from error

    def close(self) -> None:
        """Close the file; lines that the machine has refused are dropped."""
        self._unwritten = b""
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
        self._unwritten += text
        self.flush()


def _has_part_of(line: bytes, fd: int) -> bool:
    """Return whether a file has nothing but the first bytes of `line`, or nothing. Raises OSError."""
    begin = os.pread(fd, len(line), 0)
    return len(begin) < len(line) and line.startswith(begin)


def _last_line(fd: int, run: str) -> tuple[int, KeyListLine | None]:
    """Return the size of a key list's whole lines, and the last line, if it has any.

    Raises OSError, and ValueError if the file is not the key list of `run`.
    """
    first, end, _ = os.pread(fd, BLOCK, 0).partition(b"\n")
    if run != parse_first_line(first + end):
        raise ValueError("it is not the key list of this run")
    start = len(first) + 1
    begin = max(start, os.fstat(fd).st_size - BLOCK)
    block = os.pread(fd, BLOCK, begin)
    size = block.rfind(b"\n") + 1
    last = block.rfind(b"\n", 0, max(size - 1, 0)) + 1
    if begin > start and not last:
        raise ValueError(f"its last {BLOCK} bytes have no whole line")
    return begin + size, parsed(block[last:size]) if size else None
