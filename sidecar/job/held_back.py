"""Logs the FIFOs of a shared stream that others wait for, such as one without a reader.

A program that reads the FIFO of one rank to its end before it opens that of the next one waits for ever: the
stream begins an epoch when each FIFO has a reader. So the line names the FIFOs and the remedy.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from sidecar.job.failures import REMIND_EVERY
from sidecar.process.logs import log

if TYPE_CHECKING:
    from collections.abc import Mapping

    from streamer.relay.channel import Channel

HELD_BACK_AFTER = 20.0
"""Seconds for which a reader waits for other FIFOs before the log names them. The processes of a job open
their FIFOs within some seconds of each other."""


async def log_held_back(channels: Mapping[str, Channel]) -> None:
    """Log which FIFOs a reader has waited for in `HELD_BACK_AFTER` seconds; repeat it until cancelled."""
    seen: dict[tuple[str, ...], dict[str, int]] = {}
    """By FIFOs that hold others back, those that wait for them, and the bytes that each has had."""
    due: dict[tuple[str, ...], float] = {}
    while True:
        await asyncio.sleep(HELD_BACK_AFTER / 4)
        now, found = time.monotonic(), _held_back(channels)
        for by, waiting in found.items():
            # A FIFO that has had a byte since was not held back all of that time.
            if not waiting.items() & seen.get(by, {}).items():
                due[by] = now + HELD_BACK_AFTER
            elif now >= due[by]:
                due[by] = now + REMIND_EVERY
                log.warning(
                    "held back",
                    by=list(by),
                    waiting=list(waiting),
                    why="FIFOs of one stream are filled in turn, and these are full or have no reader",
                    do="read them at the same time as the others; if the program reads rank after rank, set "
                    "Fetch: separately in Ranks",
                )
        seen = found


def _held_back(channels: Mapping[str, Channel]) -> dict[tuple[str, ...], dict[str, int]]:
    """Return, by FIFOs that hold others back, the empty FIFOs that wait for them, and their bytes so far."""
    found: dict[tuple[str, ...], dict[str, int]] = {}
    for name, channel in channels.items():
        if by := channel.held_back_by:
            now = channel.statistics()
            if not now.fifo_bytes:
                found.setdefault(by, {})[name] = now.written_bytes
    return found
