"""A question at the terminal of a command in the foreground."""

from __future__ import annotations

import sys
import termios
from typing import TYPE_CHECKING

from streamer.file_reads import outside
from streamer.finish import in_foreground

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

LONGEST = 86_400.0
"""Most seconds that an answer may take."""


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
