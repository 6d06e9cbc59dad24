"""One line of a terminal that shows how far a command is, redrawn in place.

`progress_line` shows it while a block runs, from `FIRST_AFTER` seconds on, so that short commands show none.
It is shown only if standard error is a terminal that moves its cursor: never in a pipe, a file or a log. A
timer of the event loop redraws it. It is erased before each event of the log, and at the end of the block. A
terminal that takes no output, as after Ctrl-S, is not written to, because that would stop the event loop.

Colours are not used, and nothing is imported for it: `rich` would take a tenth of a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import sys
from typing import TYPE_CHECKING

from streamer.escaping import escape_control
from streamer.secrets import redact
from streamer.units import decimal_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FIRST_AFTER = 1.0
"""Seconds before the line is drawn for the first time."""
REDRAWN_EVERY = 0.25
"""Seconds between two drawings."""
ERASE = "\r\x1b[K"
"""Moves the cursor to the first column and erases the line (ECMA-48)."""


@contextlib.contextmanager
def progress_line(describe: Callable[[], str], *, quiet: bool) -> Iterator[None]:
    """Show the line while the block runs, which must be in a coroutine. `describe` returns its text.

    `quiet`: show nothing.
    """
    if quiet or not sys.stderr.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        yield
        return
    line = _Line(describe)
    for handler in logging.getLogger().handlers:
        handler.addFilter(line)
    try:
        yield
    finally:
        for handler in logging.getLogger().handlers:
            handler.removeFilter(line)
        line.close()


def transferred(moved: int, total: int, seconds: float, *, before: int = 0) -> str:
    """Return the progress of a transfer: bytes, share, rate, time left.

    `moved`: bytes in `seconds` seconds. `before`: bytes that an earlier start has moved.
    """
    done = before + moved
    text = f"{decimal_bytes(done)} of {decimal_bytes(total)}"
    if not moved or not total or seconds <= 0:
        return text
    left = (total - done) * seconds / moved
    minutes, rest = divmod(round(left), 60)
    hours, minutes = divmod(minutes, 60)
    remaining = f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
    return f"{text} ({done * 100 // total} %), {decimal_bytes(moved / seconds)}/s, {remaining} left"


class _Line(logging.Filter):
    """The line on standard error, and the filter of the log that erases it before an event."""

    def __init__(self, describe: Callable[[], str]) -> None:
        super().__init__()
        self._describe = describe
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(FIRST_AFTER, self._draw)
        self._shown = False

    def filter(self, _: logging.LogRecord) -> bool:
        """Erase the line; the next drawing is below the event."""
        self._erase()
        return True

    def close(self) -> None:
        """Erase the line for good."""
        self._timer.cancel()
        self._erase()

    def _draw(self) -> None:
        self._timer = self._loop.call_later(REDRAWN_EVERY, self._draw)
        with contextlib.suppress(OSError):
            columns = os.get_terminal_size(sys.stderr.fileno()).columns
            self._shown = self._write(redact(escape_control(self._describe()))[: columns - 1]) or self._shown

    def _erase(self) -> None:
        if self._shown:
            self._shown = False
            with contextlib.suppress(OSError):
                self._write("")

    def _write(self, text: str) -> bool:
        """Put the text in the place of the line; return whether the terminal has taken it. Raises OSError."""
        if not select.select([], [sys.stderr], [], 0)[1]:
            return False
        sys.stderr.write(ERASE + text)
        sys.stderr.flush()
        return True
