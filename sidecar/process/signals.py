"""Signals as events to await.

The first SIGTERM or SIGINT requests an orderly end, the second an end at once. A third ends the process
without any clean-up, in case the clean-up hangs. SIGUSR2 requests a restart of `penstock run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import TYPE_CHECKING

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
    """Call `note` on the event loop for each of these signals, until the end of the block."""
    loop = asyncio.get_running_loop()
    for number in numbers:
        loop.add_signal_handler(number, note, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
