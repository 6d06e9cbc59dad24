"""State of a running job, for metrics, status page, `/limits` and log lines.

The supervisor writes the state. Observers import this module, and neither the supervisor nor each other.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from sidecar.observe.history import ChannelHistory
from sidecar.process.resources import memory_limit
from streamer.plan.record_plan import RecordPlan
from streamer.relay.channel import Channel
from streamer.relay.statistics import Counts, no_counts
from streamer.schedule.bandwidth import Bandwidth
from streamer.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sidecar.config.hosts import Hosts
    from sidecar.config.job import Job
    from streamer.errors import SinkError, SourceError
    from streamer.relay.statistics import ChannelStatistics
    from streamer.relay.transport import Transport
    from streamer.schedule.budget import MemoryBudget

Phase = Literal["starting", "ready", "failed", "ending"]


@dataclass(slots=True)
class PlanningStep:
    """How far the plan of one channel is."""

    doing: Literal["listing", "manifest", "record index", "digest"]
    """Listing a prefix, reading a manifest and finding its objects, comparing these with the record index,
    or computing the digest."""
    entries: int = 0
    """Entries so far."""
    waiting: str = ""
    """Error for which planning waits; empty unless storage is unavailable."""

    def __str__(self) -> str:
        if self.waiting:
            return f"waiting for storage: {self.waiting}"
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


class JobState:
    """State of one job on this host."""

    def __init__(self, job: Job, hosts: Hosts) -> None:
        """`job`: the job with this host's channels only."""
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
        self.unjoined: set[str] = set()
        """FIFOs whose objects have end marks, or lack a last line feed, and are not joined."""
        self.planning_seconds = 0.0
        self.planning: dict[str, PlanningStep] = {}
        """By channel, how far its plan is; a channel whose plan is made is not there."""
        self.downloading: Callable[[], str] | None = None
        """Returns the progress of a File channel's download, in one line; None while no download runs."""
        self.downloads: dict[str, Callable[[], DownloadStatistics]] = {}
        """By File channel whose download has begun, or has ended, how to take its snapshot."""
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
        """Phase of the job: planning, FIFOs offered, a channel failed, or ending."""
        if any(channel.error for channel in self.channels.values()):
            return "failed"
        if not self.started:
            return "starting"
        return "ready" if self.offered else "ending"

    @property
    def ready(self) -> bool:
        return self.phase == "ready"

    def why_not_ready(self) -> str:
        """Return, in one line for a probe, why the job is not ready. Called only while it is not."""
        failed = [f"{name}: {channel.error}" for name, channel in self.channels.items() if channel.error]
        if failed:
            return "; ".join(failed)
        if self.started:
            return "the job is ending: the sidecar offers no further epoch"
        if self.downloading is not None:
            return self.downloading()
        return self.planning_text() or "the job is starting: the sidecar offers no FIFO yet"

    def planning_text(self) -> str:
        """Return, in one line, how far the plans are; empty if all are made."""
        return "; ".join(f"{channel}: {step}" for channel, step in self.planning.items())

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
