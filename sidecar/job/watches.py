"""Watches the channels while a job runs, and logs what nobody else sees: each function runs until cancelled.

remind          FIFOs of failed channels that are held open: their trainer waits until an operator acts, and
operators read the end of a log
log_held_back   FIFOs that other FIFOs of their stream wait for. A program that reads the FIFO of one rank to
its end before it opens that of the next one waits for ever: the stream begins an epoch when
each FIFO has a reader
watch_storage   channels whose requests fail, while their trainers wait for bytes. The log has no line for a
request
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from sidecar.job.failures import advice
from sidecar.process.logs import WaitLog, log

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sidecar.observe.state import JobState
    from streamer.relay.channel import Channel

REMIND_EVERY = 300.0
"""Seconds between two reminders about a FIFO."""
HELD_BACK_AFTER = 20.0
"""Seconds for which a reader waits for other FIFOs before the log names them. The processes of a job open
their FIFOs within some seconds of each other."""


async def remind(channels: Mapping[str, Channel]) -> None:
    """Log every FIFO that is held, each `REMIND_EVERY` seconds, until cancelled."""
    while True:
        await asyncio.sleep(REMIND_EVERY)
        for name, channel in channels.items():
            failure = channel.failure
            if failure is not None and failure.fifo == "held":
                log.error(
                    "still held",
                    channel=name,
                    seconds=round(time.monotonic() - failure.at),
                    error=str(failure.error),
                    do=advice(failure.error, mendable=channel.mendable),
                )


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


async def watch_storage(state: JobState) -> None:
    """Log the channels that wait for storage.

    Since the last snapshot, requests of such a channel have failed, and no request has succeeded.
    """
    before: dict[str, tuple[int, int, float]] = {}
    """By channel, requests that succeeded and that failed, and the seconds that delivery waited for bytes."""
    waits: dict[str, tuple[float, WaitLog]] = {}
    """By channel that waits, since when, and the log of the wait."""
    while True:
        for name, now in state.statistics().items():
            ended, starved = now.counts["requests"], now.seconds["starved"]
            ok = ended["ok"]
            failed = ended.total() - ok - ended["cancelled"]
            ok_before, failed_before, starved_before = before.get(name, (0, 0, 0.0))
            before[name] = ok, failed, starved
            if ok > ok_before:
                if name in waits:
                    seconds = round(time.monotonic() - waits.pop(name)[0])
                    log.info("storage responds again", channel=name, seconds=seconds)
            elif failed > failed_before and starved > starved_before and now.errors:
                if name not in waits:
                    wait = WaitLog(give_up_after=state.job.penstock.give_up_after, channel=name)
                    waits[name] = time.monotonic(), wait
                waits[name][1].waiting(now.errors[-1].text)
        await state.history.following()
