"""A program in a real pseudo-terminal, and the screen that a person would see there."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
from collections.abc import Callable, Iterator, Sequence

from tests.kit.patience import Patience

_CONTROL = re.compile(r"\x1b\[([?>]?)([0-9;]*)([A-Za-z])|\x1b[()][A-Z0-9]|\x1b[=>78]")


class Screen:
    """The cells of a terminal that understands what full-screen programs commonly send."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self.alternate = False
        self.written = ""
        """Everything that was written, with its control sequences."""
        self._left = ""
        self.clear()

    def clear(self) -> None:
        self._cells = [[" "] * self.columns for _ in range(self.rows)]
        self._row = self._column = 0

    @property
    def lines(self) -> list[str]:
        return ["".join(row).rstrip() for row in self._cells]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def write(self, text: str) -> None:
        self.written += text
        text = self._left + text
        position = 0
        while position < len(text):
            character = text[position]
            if character == "\x1b":
                if (found := _CONTROL.match(text, position)) is None:
                    break  # the rest of the sequence is still to come
                self._control(found[1] or "", found[2] or "", found[3] or "")
                position = found.end()
                continue
            position += 1
            if character == "\n":
                self._down()
            elif character == "\r":
                self._column = 0
            elif character >= " ":
                if self._column == self.columns:
                    self._down()
                    self._column = 0
                self._cells[self._row][self._column] = character
                self._column += 1
        self._left = text[position:]

    def _down(self) -> None:
        if self._row < self.rows - 1:
            self._row += 1
        else:
            self._cells = [*self._cells[1:], [" "] * self.columns]

    def _control(self, private: str, numbers: str, final: str) -> None:
        values = [int(each) if each else 0 for each in numbers.split(";")]
        if private == "?" and 1049 in values:
            self.alternate = final == "h"
            self.clear()
        elif final == "H":
            self._row = min(max(values[0], 1), self.rows) - 1
            self._column = min(max(values[1] if len(values) > 1 else 1, 1), self.columns) - 1
        elif final == "A":
            self._row = max(0, self._row - max(values[0], 1))
        elif final == "J" and values[0] == 2:
            self._cells = [[" "] * self.columns for _ in range(self.rows)]
        elif final == "K":
            begin = 0 if values[0] == 2 else self._column
            self._cells[self._row][begin:] = [" "] * (self.columns - begin)


class Terminal:
    """A running program whose standard streams are a pseudo-terminal."""

    def __init__(self, process: subprocess.Popen[bytes], fd: int, screen: Screen) -> None:
        self.process, self.screen = process, screen
        self._fd = fd
        self._decode = codecs.getincrementaldecoder("utf-8")().decode

    def press(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def resize(self, columns: int, rows: int) -> None:
        """Change the size; the kernel sends SIGWINCH."""
        self.screen.columns, self.screen.rows = columns, rows
        self.screen.clear()
        _set_size(self._fd, columns, rows)

    def wait_for(self, condition: Callable[[Screen], bool]) -> Screen:
        """Read until the screen is so; fails when the program ends before or writes nothing for a minute."""
        patience = Patience(60)
        while not condition(self.screen):
            if not self._read(1) or patience.exhausted():
                raise AssertionError(f"the screen never was so:\n{self.screen.text}")
        return self.screen

    def end(self) -> int:
        """Read until the program ends; return its exit code."""
        while self._read(None):
            pass
        return self.process.wait()

    def _read(self, seconds: float | None) -> bool:
        """Read what has come. Returns False when the program has ended."""
        if not select.select([self._fd], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self._fd, 1 << 16)
        except OSError:  # EIO: no process has the terminal open any more
            return False
        self.screen.write(self._decode(data))
        return bool(data)


def _set_size(fd: int, columns: int, rows: int) -> None:
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


@contextlib.contextmanager
def terminal(command: Sequence[str], *, columns: int, rows: int, **variables: str) -> Iterator[Terminal]:
    """Run a command in a terminal of this size, as its foreground process; killed at the end of the block."""
    ours, theirs = pty.openpty()
    _set_size(theirs, columns, rows)
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    environment |= {"TERM": "xterm-256color", **variables}

    # setsid makes the terminal the controlling one, so that the kernel sends SIGWINCH and Ctrl-C's SIGINT.
    process = subprocess.Popen(
        ["setsid", "--ctty", *command], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours, Screen(columns, rows))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        process.wait()
        os.close(ours)
