"""Signals as events to await.

The first of SIGTERM, SIGINT, SIGHUP and SIGQUIT requests an orderly end, the second an end at once. A third
ends the process without any clean-up, in case the clean-up hangs. SIGUSR2 requests a restart of `penstock
run`.

A signal is kept from the entry point on (`early_signals`). A handled one stays handled until the process has
ended, because the default action would replace the exit code; `sidecar.__main__` does the last part. While
the event loop and the interpreter end, the first request for an end is met already, and a second one ends
the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import TYPE_CHECKING

from sidecar.process.early_signals import STOPS, ignored, kept
from sidecar.process.exits import Exit
from sidecar.process.logs import log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Shutdown:
    """Events for the requests to end or to restart that signals have made so far."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.at_once = asyncio.Event()
        self.restart = asyncio.Event()

    def note(self, number: signal.Signals) -> None:
        """Set the events for a signal."""
        if number == signal.SIGUSR2:
            log.info("signal, restarting", signal=number.name)
            self.restart.set()
            return
        if self.at_once.is_set():
            os._exit(Exit.INTERRUPTED)
        if self.requested.is_set():
            log.warning("second signal, ending now", signal=number.name)
            self.at_once.set()
        else:
            log.info("signal, draining", signal=number.name)
            self.requested.set()


@contextlib.contextmanager
def handled(numbers: tuple[signal.Signals, ...], note: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Call `note` on the event loop for each of these signals, until the end of the block.

    Those that came before the block are noted, too. After the block, the second of `STOPS` ends the
    process; the other signals are kept for the next program, if there is one (`early_signals`).
    """
    loop = asyncio.get_running_loop()
    stops, over = 0, False
    numbers = tuple(number for number in numbers if not ignored(number))

    def receive(number: int, _frame: object) -> None:
        nonlocal stops
        stops += number in STOPS
        if not over:
            loop.call_soon_threadsafe(note, signal.Signals(number))
        elif number in STOPS and stops > 1:
            os._exit(Exit.INTERRUPTED)
        else:
            kept.append(number)

    for number in numbers:
        signal.signal(number, receive)
        signal.siginterrupt(number, False)  # noqa: FBT003 - positional only
    for early in [each for each in kept if each in numbers]:
        kept.remove(early)
        signal.raise_signal(early)
    try:
        yield
    finally:
        over = True
