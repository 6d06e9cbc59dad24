"""Takes a snapshot of each channel every second and measures the lag of the event loop.

One task wakes four times a second; the delay of a wake-up is the lag of the loop. Every fourth wake-up takes
the snapshots, in a few microseconds a channel, and notifies the clients of `/events`. The snapshots of one
minute are kept.
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

WAKE_EVERY = 0.25
"""Seconds between wake-ups."""
WAKES_PER_SAMPLE = 4
"""Wake-ups from one snapshot to the next: one snapshot a second."""
MOST_SAMPLES = 61
"""Number of snapshots that are kept of each channel: one minute."""
LAG_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class ChannelHistory:
    """Snapshots of all channels. `statistics`: returns the statistics of every channel."""

    def __init__(self, statistics: Callable[[], dict[str, ChannelStatistics]]) -> None:
        self._statistics = statistics
        self._samples: dict[str, deque[Sample]] = {}
        self.lag = Durations(LAG_BOUNDS)
        """Delays of the wake-ups."""
        self._next = asyncio.Event()

    async def run(self) -> None:
        """Take snapshots and measure the lag until cancelled."""
        loop = asyncio.get_running_loop()
        count = 0
        while True:
            due = loop.time() + WAKE_EVERY
            await asyncio.sleep(WAKE_EVERY)
            self.lag.add(max(0.0, loop.time() - due))
            if count % WAKES_PER_SAMPLE == 0:
                self.take()
            count += 1

    def take(self) -> None:
        """Take a snapshot now, and wake every `following`."""
        now = time.monotonic()
        for name, statistics in self._statistics().items():
            samples = self._samples.setdefault(name, deque(maxlen=MOST_SAMPLES))
            samples.append(Sample.of(statistics, now))
        self._next.set()
        self._next = asyncio.Event()

    async def following(self) -> None:
        """Wait for the next snapshot."""
        await self._next.wait()

    def bottleneck(self, channel: str) -> Bottleneck:
        """Return the bottleneck of the last minute, or since the start if that is less."""
        first, last = self._span(channel)
        if first is None or last is None:
            return Bottleneck("idle", "just started")
        return diagnose(first, last)

    def eta(self, channel: str) -> float | None:
        """Return the seconds until the end of the epoch; None if no byte moves or while listing."""
        first, last = self._span(channel)
        return None if first is None or last is None else eta(first, last)

    def shares(self, channel: str) -> dict[str, float]:
        """Return, by state, the share of the last minute that the channel spent in it."""
        first, last = self._span(channel)
        return {} if first is None or last is None else shares(first, last)

    def rates(self, channel: str) -> list[float]:
        """Return the bytes that each second moved into the FIFO, the latest second last."""
        samples = list(self._samples.get(channel, ()))
        return [rate(before, after) for before, after in pairwise(samples)]

    def _span(self, channel: str) -> tuple[Sample | None, Sample | None]:
        """Return the first and the last snapshot."""
        samples = self._samples.get(channel)
        return (samples[0], samples[-1]) if samples else (None, None)
