"""The sidecar's memory of its last minute, and how promptly its loop turns.

One task beats four times a second: how late a beat comes is the lag of the loop. Every fourth takes a
snapshot of each channel, a few microseconds a channel, and wakes those who follow. Nothing else waits for it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING

from sidecar.observe.bottleneck import Bottleneck, Sample, diagnose, eta, rate, shares
from streamer.relay.statistics import Durations

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamer.relay.statistics import ChannelStatistics

BEAT = 0.25
"""Seconds between beats."""
BEATS = 4
"""Beats between snapshots: one a second."""
KEPT = 61
"""Snapshots: a minute of them."""
LAG_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class ChannelHistory:
    """Of the channels whose snapshots `look` takes."""

    def __init__(self, look: Callable[[], dict[str, ChannelStatistics]]) -> None:
        self._look = look
        self._moments: dict[str, deque[Sample]] = {}
        self.lag = Durations(LAG_BOUNDS)
        """How late beats came."""
        self._next = asyncio.Event()

    async def run(self) -> None:
        """Beat until cancelled."""
        loop = asyncio.get_running_loop()
        count = 0
        while True:
            due = loop.time() + BEAT
            await asyncio.sleep(BEAT)
            self.lag.add(max(0.0, loop.time() - due))
            if count % BEATS == 0:
                self.take()
            count += 1

    def take(self) -> None:
        """Take a snapshot now, and wake those who follow."""
        now = time.monotonic()
        for name, statistics in self._look().items():
            kept = self._moments.setdefault(name, deque(maxlen=KEPT))
            kept.append(Sample.of(statistics, now))
        self._next.set()
        self._next = asyncio.Event()

    async def following(self) -> None:
        """Wait for the next snapshot."""
        await self._next.wait()

    def bottleneck(self, channel: str) -> Bottleneck:
        """Of the last minute, or what there is of it."""
        first, last = self._span(channel)
        if first is None or last is None:
            return Bottleneck("idle", "just started")
        return diagnose(first, last)

    def eta(self, channel: str) -> float | None:
        """Seconds until the epoch is delivered; None while nothing moves."""
        first, last = self._span(channel)
        return None if first is None or last is None else eta(first, last)

    def shares(self, channel: str) -> dict[str, float]:
        """Of the last minute, the part spent in each state."""
        first, last = self._span(channel)
        return {} if first is None or last is None else shares(first, last)

    def rates(self, channel: str) -> list[float]:
        """Bytes per second into the FIFO, second by second, the latest at the end."""
        kept = list(self._moments.get(channel, ()))
        return [rate(before, after) for before, after in pairwise(kept)]

    def _span(self, channel: str) -> tuple[Sample | None, Sample | None]:
        kept = self._moments.get(channel)
        return (kept[0], kept[-1]) if kept else (None, None)
