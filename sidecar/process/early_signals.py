"""Signals that arrive while no event loop can handle them: kept until `sidecar.process.signals` does.

Imports take some tenths of a second. Until then SIGTERM would end the process without an exit code of ours,
and the kernel would drop it for process 1 of a container, which has no default actions (pid_namespaces(7)).
A restart by execve(2) has such a time, too.

    keep ─ imports ─▶ handled … ─ the loop ends ─▶ pass_on, execve ─▶ keep ─ imports ─▶ handled

This module imports little, because the entry point imports it first.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

INTERRUPTED = 130
"""`sidecar.process.exits.Exit.INTERRUPTED`, which takes longer to import."""
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_KEPT = (*STOPS, signal.SIGUSR2)
kept: list[int] = []
"""Signals that wait for a handler."""


def keep() -> None:
    """Keep the signals from now on; a second one that ends the process does so at once.

    Ctrl-C stays a KeyboardInterrupt.
    """
    for number in _KEPT:
        if number != signal.SIGINT and not ignored(number):
            signal.signal(number, _note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _KEPT)  # blocked by `pass_on` of the program before


def ignored(number: int) -> bool:
    """Return whether the program that started this one wants the signal ignored, as nohup(1) does."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


def _note(number: int, _frame: FrameType | None) -> None:
    if number in STOPS and number in kept:
        os._exit(INTERRUPTED)
    kept.append(number)


def pass_on() -> None:
    """Block the signals, and leave those that are kept to the program that execve(2) starts next.

    The kernel passes on which signals are blocked, and which of those wait (execve(2)).
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _KEPT)
    for number in kept:
        signal.raise_signal(number)
