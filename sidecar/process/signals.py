"""Signals as awaitable events, restored at the end.

The first SIGTERM or SIGINT asks for an orderly end, the second for an end now; a third kills the
process without any clean-up, for the case that the clean-up is what hangs. SIGUSR2 asks `penstock run` to
start itself anew.
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
    """What the signals so far have asked for."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.now = asyncio.Event()
        self.restart = asyncio.Event()

    def note(self, number: signal.Signals) -> None:
        if number == signal.SIGUSR2:
            log.info("signal, restarting", signal=number.name)
            self.restart.set()
            return
        if self.now.is_set():
            os._exit(Exit.INTERRUPTED)
        if self.asked.is_set():
            log.warning("second signal, ending now", signal=number.name)
            self.now.set()
        else:
            log.info("signal, draining", signal=number.name)
            self.asked.set()


@contextlib.contextmanager
def handled(numbers: tuple[signal.Signals, ...], note: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Call `note` on the loop for each of these signals until the end of the block."""
    loop = asyncio.get_running_loop()
    for number in numbers:
        loop.add_signal_handler(number, note, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
