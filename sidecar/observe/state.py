"""State of a running job and its last minute, for metrics, status page, `/limits` and log lines.

The supervisor writes the state. Observers import this module, and neither the supervisor nor each other.

One task of the history wakes four times a second; the delay of a wake-up is the lag of the event loop. Every
fourth wake-up takes a snapshot of each channel, in a few microseconds, and notifies the clients of `/events`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from sidecar.observe.advice import advice
from sidecar.observe.bottleneck import Bottleneck, Sample, diagnose, eta, rate, shares
from sidecar.process.resources import memory_limit
from streamer.plan.record_plan import RecordPlan
from streamer.relay.channel import Channel
from streamer.relay.statistics import Counts, Durations, no_counts
from streamer.schedule.bandwidth import Bandwidth
from streamer.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sidecar.config.hosts import Hosts
    from sidecar.config.job import Job
    from sidecar.observe.uploads import UploadFigures
    from streamer.errors import SinkError, SourceError
    from streamer.relay.statistics import ChannelStatistics
    from streamer.relay.transport import Transport
    from streamer.schedule.budget import MemoryBudget

Phase = Literal["starting", "ready", "waiting", "failed", "ending"]
WAKE_EVERY = 0.25
"""Seconds between wake-ups."""
WAKES_PER_SAMPLE = 4
"""Wake-ups from one snapshot to the next: one snapshot a second."""
MOST_SAMPLES = 61
"""Number of snapshots that are kept of each channel: one minute."""
LAG_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


@dataclass(slots=True)
class PlanningStep:
    """How far the plan of one channel is."""

    doing: Literal["listing", "manifest", "record index", "digest"]
    """Listing a prefix, reading a manifest and finding its objects, comparing these with the record index,
    or computing the digest."""
    entries: int = 0
    """Entries so far."""
    waiting: str = ""
    """What planning waits for, and why; empty unless storage or credentials are unavailable."""

    def __str__(self) -> str:
        if self.waiting:
            return self.waiting
        return f"{_DOING[self.doing]}, {counted(self.entries, 'entry', 'entries')} so far"


@dataclass(frozen=True, slots=True)
class DownloadStatistics:
    """Snapshot of the download of one File channel."""

    written_bytes: int = 0
    """Bytes that this process has written, in stream order and without a gap."""
    files: int = 0
    """Files that this process has written to their end."""
    progress: float = 0.0
    """Downloaded share of the channel's bytes, earlier starts included."""
    counts: Counts = field(default_factory=no_counts)
    """`requests`: ranged GETs that have ended, by outcome."""


_DOING = {
    "listing": "listing the objects",
    "manifest": "reading the manifest",
    "record index": "comparing the objects with the record index",
    "digest": "computing the plan's digest",
}


class ChannelHistory:
    """Snapshots of all channels. `statistics`: returns the statistics of every channel."""

    def __init__(self, statistics: Callable[[], dict[str, ChannelStatistics]]) -> None:
        self._statistics = statistics
        self._samples: dict[str, deque[Sample]] = {}
        self.lag = Durations(LAG_BOUNDS)
        """Delays of the wake-ups."""
        self._taken: dict[str, tuple[int, float]] = {}
        """By channel, the bytes that its reader has taken, and when it last took some or there were none."""
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
            samples.append(Sample.of(statistics, now, untaken=self._untaken(name, statistics, now)))
        self._next.set()
        self._next = asyncio.Event()

    async def following(self) -> None:
        """Wait for the next snapshot."""
        await self._next.wait()

    def _untaken(self, channel: str, statistics: ChannelStatistics, now: float) -> float:
        taken = statistics.written_bytes - statistics.fifo_bytes
        before, since = self._taken.get(channel, (-1, now))
        if taken != before or not statistics.reader_connected or not statistics.fifo_bytes:
            since = now
        self._taken[channel] = taken, since
        return now - since

    def untaken(self, channel: str) -> float:
        """Return the seconds for which the reader has taken no byte of a FIFO that has some; else 0."""
        _, last = self._span(channel)
        return 0.0 if last is None else last.untaken

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


class JobState:
    """State of one job on this host."""

    def __init__(self, job: Job, hosts: Hosts, *, restarts: bool = True) -> None:
        """`job`: the job with this host's channels only. `restarts`: whether `penstock restart` can help."""
        self._restarts = restarts
        self.began = time.time()
        """Unix time in seconds."""
        self.job = job
        self.hosts = hosts
        self.memory_limit = memory_limit()
        """Bytes that this process may use."""
        self.sources = {
            name: ", ".join(map(str, channel.sources))
            for channel in job.channels("Pipe")
            for name in job.fifos(channel)
        }
        """By FIFO, the S3 URIs of its channel."""
        self.directory = ""
        """Directory of the FIFOs."""
        self.bandwidth = {
            channel.channel_name: Bandwidth(channel.penstock.bandwidth) for channel in job.channels("Pipe")
        }
        """Bandwidth limits by channel; the FIFOs of a channel share its limit."""
        self.transport = "none"
        self.reason = ""
        """Reason for the choice of the transport."""
        self.memory_budget: MemoryBudget | None = None
        """Memory budget of all channels; None until the transport is open."""
        self.control_requests: Counter[str] = Counter()
        """Number of requests other than those for parts, by operation."""
        self.unjoined: dict[str, str] = {}
        """What to do about end marks, by FIFO whose objects have some, or lack a last line feed (empty)."""
        self.waiting = ""
        """Why the job waits for credentials before it plans; empty unless it does."""
        self.planning_seconds = 0.0
        self.planning: dict[str, PlanningStep] = {}
        """By channel, how far its plan is; a channel whose plan is made is not there."""
        self.downloading: Callable[[], str] | None = None
        """Returns the progress of a File channel's download, in one line; None while no download runs."""
        self.downloads: dict[str, Callable[[], DownloadStatistics]] = {}
        """By File channel whose download has begun, or has ended, how to take its snapshot."""
        self.uploads: Callable[[], UploadFigures] | None = None
        """Returns a snapshot of the uploader; None if the job uploads nothing."""
        self.channels: dict[str, Channel] = {}
        """Channels by FIFO."""
        self.learnt: dict[str, Mapping[str, int]] = {}
        """By FIFO of a channel that learns its record index, objects by outcome: learnt or refused."""
        self.offered = False
        """Whether every channel offers its FIFO; false again while the job ends."""
        self.started = False
        """Whether every channel has ever offered its FIFO."""
        self.failed = asyncio.Event()
        """Set when the first channel has failed for good."""
        self.history = ChannelHistory(self.statistics)

    def record_plans(self) -> dict[str, RecordPlan]:
        """Return the plan of this host for each channel that ranks share by record, once it is offered."""
        found = {}
        for config in self.job.channels("Pipe"):
            channel = self.channels.get(self.job.fifos(config)[0])
            if channel is not None and isinstance(channel.spec.plan, RecordPlan):
                found[config.channel_name] = channel.spec.plan.host
        return found

    def note_transport(self, transport: Transport) -> None:
        """Note the transport of all channels."""
        self.transport, self.reason = transport.name, transport.reason
        self.memory_budget = transport.memory_budget

    @property
    def phase(self) -> Phase:
        """Phase of the job: planning, FIFOs offered, waiting for this machine, failed, or ending."""
        if any(channel.error for channel in self.channels.values()):
            return "failed"
        if not self.started:
            return "starting"
        if not self.offered:
            return "ending"
        return "waiting" if any(channel.refusal for channel in self.channels.values()) else "ready"

    @property
    def ready(self) -> bool:
        return self.phase == "ready"

    def why_not_ready(self) -> str:
        """Return, in one line for a probe, why the job is not ready. Called only while it is not."""
        channels = self.channels.items()
        reasons = [f"{name}: {channel.error}" for name, channel in channels if channel.error]
        reasons += [
            f"{name}: waiting for this machine: {channel.refusal}"
            for name, channel in channels
            if channel.refusal and not channel.error
        ]
        if reasons:
            return "; ".join(reasons)
        if self.started:
            return "the job is ending: the sidecar offers no further epoch"
        if self.downloading is not None:
            return self.downloading()
        return self.planning_text() or self.waiting or "the job is starting: the sidecar offers no FIFO yet"

    def planning_text(self) -> str:
        """Return, in one line, how far the plans are; empty if all are made."""
        return "; ".join(f"{channel}: {step}" for channel, step in self.planning.items())

    def advice(self, channel: Channel) -> str:
        """Return what to do about a failed channel; empty for another."""
        if channel.error is None:
            return ""
        return advice(channel.error, mendable=channel.mendable and self._restarts)

    @property
    def failure(self) -> tuple[str, SourceError | SinkError] | None:
        """Return the first failed channel, in the order of the job file, and its error; None without one."""
        failed = ((name, channel.error) for name, channel in self.channels.items())
        return next(((name, error) for name, error in failed if error is not None), None)

    def statistics(self) -> dict[str, ChannelStatistics]:
        """Return a snapshot of every channel, by FIFO."""
        return {name: channel.statistics() for name, channel in self.channels.items()}

    def download_statistics(self) -> dict[str, DownloadStatistics]:
        """Return a snapshot of the download of every File channel, by channel."""
        names = [channel.channel_name for channel in self.job.channels("File")]
        return {name: self.downloads.get(name, DownloadStatistics)() for name in names}
