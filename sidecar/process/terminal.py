"""The terminal of a command in the foreground: whether there is one, and a question at it."""

from __future__ import annotations

import os
import sys
import termios
from typing import TYPE_CHECKING

from streamer.file_reads import outside

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

LONGEST = 86_400.0
"""Most seconds that an answer may take."""


def in_foreground() -> bool:
    """Return whether Ctrl-C in a terminal signals this process group, and so its children too."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False


def asking() -> Callable[[str], Awaitable[str]] | None:
    """Return what asks for a secret at the terminal; None if nobody can be asked."""
    return _ask if in_foreground() else None


async def _ask(prompt: str) -> str:
    """Return what is typed, without an echo. If this is cancelled, the terminal has its echo back."""
    from getpass import getpass

    usual = termios.tcgetattr(sys.stdin)
    try:
        return await outside(getpass, prompt, seconds=LONGEST)
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, usual)
