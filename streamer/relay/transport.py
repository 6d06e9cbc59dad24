"""Chooses the transport: the client that fetches, the stages, the part size.

The order of preference is `splice` (bodies stay in the kernel), `buffered` (this package's own HTTP client
copies them once), `aiobotocore`. The first that is possible is chosen. `Transport.reason` states why.
Requests and pipes share the process's open files, which limit both.
"""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from streamer.aio import thread_worked
from streamer.errors import ConfigError, SinkError
from streamer.linux import PIPE_SIZE, pipe_allowance
from streamer.plan import Plan
from streamer.relay.staging.buffers import BUFFER_SIZE, BufferPool, BufferStages, TappedStages
from streamer.relay.staging.pipes import PipePool, PipeStages
from streamer.relay.staging.stage import Stages
from streamer.relay.staging.taps import Tap
from streamer.retry import RetryPolicy
from streamer.s3.aiobotocore_source import AiobotocoreSource
from streamer.s3.client.session import Clients
from streamer.s3.http.connection import largest_window
from streamer.s3.http_source import HttpSource, tls_context, why_not, why_not_splice
from streamer.s3.range_gets import LeftToAiobotocore
from streamer.s3.ranges import RangeSource, ignore
from streamer.s3.signing.requests import RangeSigner
from streamer.schedule.budget import MemoryBudget
from streamer.schedule.concurrency import LARGEST_PART, MOST_REQUESTS, WORTH, ConcurrencyController
from streamer.schedule.hedging import Hedging
from streamer.units import MIB, counted

HEDGED = 0.05
"""Default fraction of all bytes that hedges may fetch a second time."""

INFLATED = "compressed objects are inflated in memory"
"""Reason of a channel to read its bytes into memory."""

Wish = Literal["auto", "aiobotocore", "buffered", "splice"]


@dataclass(frozen=True, slots=True)
class Transport:
    """Source of bodies, and the memory, pipes and buffers that all channels use together."""

    source: RangeSource
    name: str
    """`splice`, `buffered` or `aiobotocore`; with `splice`, some channels may still have their bytes read."""
    reason: str
    """Why this transport was chosen."""
    memory_budget: MemoryBudget
    pipes: PipePool | None
    """Pipes that hold spliced bodies; None: all bodies are read into buffers."""
    buffers: BufferPool
    """Buffers that bodies are read into."""
    few_files: str = ""
    """Warning, with a remedy, if the limit of open files reduces the connections; else empty."""

    def stages(self, why_read: str | None = None) -> Stages:
        """Return the stages of one more channel. `why_read`: reason why its bytes must be read, or None."""
        quota = self.memory_budget.quota()
        if self.pipes is None or why_read:
            return BufferStages(quota, self.buffers)
        return PipeStages(quota, self.pipes)

    def tapped(self, stages: Stages, tap: Tap) -> TappedStages:
        """Return these stages of one channel, so that `tap` sees the bytes that it wants."""
        read = stages if isinstance(stages, BufferStages) else BufferStages(stages.quota, self.buffers)
        return TappedStages(stages, read, tap)


def why_read(plan: Plan, *, check: bool = False) -> str | None:
    """Return why the bytes of a channel must be read into memory, or None if they may be spliced.

    `check`: objects are compared with checksums.
    """
    if plan.inflate:
        return INFLATED
    if plan.join:
        return "archives are joined in memory"
    return "checksums are computed in memory" if check else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportSpec:
    """Criteria for choosing a transport, and limits for all channels together."""

    buckets: set[str]
    channels: Sequence[str | None]
    """For each channel, why its bytes must be read into memory, or None if they may be spliced."""
    fifos: int = 0
    """Number of FIFOs, if several may share a channel's bytes; 0: one for each channel."""
    budget: int
    """Memory budget in bytes; spliced bytes in pipes count too."""
    wish: Wish = "auto"
    requests_in_flight: int | None = None
    """Fixed concurrency limit; None: adaptive."""
    part_size: int | None = None
    """Fixed part size in bytes; None: adaptive."""
    bandwidth: int | None = None
    """Bytes per second into all sinks; None: no limit."""
    hedge: float = HEDGED
    """Fraction of all bytes that hedges may fetch a second time."""
    to_pipes: bool = True
    """Whether all sinks are pipes; `splice` needs that."""
    cores: int = 1
    """Cores that this process may use; with one, nothing is inflated ahead."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    """Policy for failed requests, for a caller of `stream_once`."""
    on_fallback: Callable[[LeftToAiobotocore], None] = ignore
    """Called with the first error of each cause for which aiobotocore fetches instead of our own client."""


@contextlib.asynccontextmanager
async def open_transport(clients: Clients, spec: TransportSpec) -> AsyncIterator[Transport]:
    """Open the transport that suits `spec`; close it at the end of the block.

    Raises ConfigError if the transport that `spec.wish` names is impossible, SinkError if the limit of open
    files is too low.
    """
    fifos = max(spec.fifos, len(spec.channels))
    files = open_files(fifos)
    requests = RequestLimits(spec.requests_in_flight, spec.part_size, files // 2)
    pipe_budget, most_pipes = pipe_limits(fifos, files - requests.most)
    choice = _choose(clients, spec, pipe_budget)
    splice = choice.name == "splice"
    memory_budget = MemoryBudget(
        spec.budget,
        _concurrency(clients, requests, len(spec.channels), choice),
        members=len(spec.channels),
        hedging=Hedging(spec.hedge),
        unit=1 if splice else BUFFER_SIZE,
        inflating=spec.channels.count(INFLATED) if spec.cores > 1 else 0,
    )
    memory_budget.bandwidth.change(spec.bandwidth, time.monotonic())
    source: RangeSource = AiobotocoreSource(clients.data)
    async with contextlib.AsyncExitStack() as stack:
        pipes = None
        if splice:
            pipes = PipePool(pipe_budget, most=most_pipes)
            stack.callback(pipes.close)
        if choice.name != "aiobotocore":
            source = stack.enter_context(contextlib.closing(_http_source(clients, source, spec)))
        yield Transport(
            source, choice.name, choice.reason, memory_budget, pipes, BufferPool(), requests.bounded
        )


class _Choice(NamedTuple):
    """The transport that suits."""

    name: Literal["splice", "buffered", "aiobotocore"]
    reason: str


def _choose(clients: Clients, spec: TransportSpec, pipe_budget: int) -> _Choice:
    """Choose a transport. Raises ConfigError if the one that `spec.wish` names is impossible."""
    wish = spec.wish
    no_client = why_not(clients, spec.buckets)
    spliced = sum(why is None for why in spec.channels)
    no_splice = (
        no_client
        or (next(filter(None, spec.channels), None) if not spliced or wish == "splice" else None)
        or _no_splice(clients, min(spec.budget, pipe_budget), spliced, to_pipes=spec.to_pipes)
    )
    obstacle = {"splice": no_splice, "buffered": no_client}.get(wish)
    if obstacle:
        others = "auto or aiobotocore" if no_client else "auto, buffered or aiobotocore"
        raise ConfigError(f"the {wish} transport is asked for, but {obstacle}; use {others}")
    if wish == "aiobotocore" or no_client:
        return _Choice("aiobotocore", no_client or "asked for")
    splice = wish != "buffered" and no_splice is None
    reason = "plain HTTP to pipes" if splice else no_splice or "asked for"
    return _Choice("splice" if splice else "buffered", reason)


def _concurrency(
    clients: Clients, requests: RequestLimits, channels: int, choice: _Choice
) -> ConcurrencyController:
    if choice.name == "aiobotocore":
        return requests.concurrency(16, 8 * MIB)
    absorbed = _absorbed(tls=clients.over_tls)
    if choice.name == "splice":
        return requests.concurrency(max(64, 4 * channels), absorbed, largest_part=absorbed)
    # One thread reads all bodies: start with few requests, and let only a clear gain raise the limit.
    return requests.concurrency(max(8, channels), absorbed, largest_part=absorbed, worth=0.4)


def _http_source(clients: Clients, others: RangeSource, spec: TransportSpec) -> HttpSource:
    return HttpSource(
        RangeSigner.of(clients.data, clients),
        others,
        on_left=spec.on_fallback,
        tls=tls_context(clients.ca_bundle, clients.passed) if clients.over_tls else None,
        stall_timeout=clients.stall_timeout,
    )


def _absorbed(*, tls: bool) -> int:
    """Return how many bytes of a part its socket can hold until delivery reads them. `tls`: encrypted.

    Delivery would wait for the rest of a larger part at one connection's rate.
    """
    window = largest_window()
    body = window - window // 64 if tls else window
    return max(MIB, min(8 * MIB, body // MIB * MIB))


def _no_splice(clients: Clients, reserved_bytes: int, channels: int, *, to_pipes: bool) -> str | None:
    if not to_pipes:
        return "the output is not a pipe"
    if obstacle := why_not_splice(clients.endpoint_url):
        return obstacle
    if reserved_bytes < 2 * PIPE_SIZE * channels:
        return (
            "a channel may have less than two pipes of 1 MiB; raise MemoryBudget, `ulimit -n` or, "
            "for users without privilege, /proc/sys/fs/pipe-user-pages-soft"
        )
    return None


OWN_FILES, CHANNEL_FILES = 48, 8
"""File descriptors set aside for the process, and for each channel. Pipes and connections for parts get the
rest: a channel without a FIFO or trailer stops, but one with fewer connections is only slower."""
ENOUGH_FILES = 65_536
"""Soft limit of open files that the process sets, up to the hard limit; the usual soft limit is 1,024."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits set by the job file and by the limit of open files."""

    requests_in_flight: int | None
    part_size: int | None
    fit: int
    """Requests that the limit of open files allows; as many files are left for pipes."""

    @property
    def most(self) -> int:
        return min(self.requests_in_flight or MOST_REQUESTS, self.fit)

    @property
    def bounded(self) -> str:
        """Value of `Transport.few_files`."""
        if self.most == (self.requests_in_flight or MOST_REQUESTS):
            return ""
        return (
            f"at most {counted(self.most, 'connection')} fit into the limit of open files; raise `ulimit -n`"
        )

    def concurrency(
        self,
        requests_in_flight: int,
        part_size: int,
        *,
        largest_part: int = LARGEST_PART,
        worth: float = WORTH,
    ) -> ConcurrencyController:
        """Return the controller; the arguments are start values, which the job file's values replace."""
        return ConcurrencyController(
            min(self.requests_in_flight or requests_in_flight, self.most),
            self.part_size or part_size,
            fixed_limit=self.requests_in_flight is not None,
            fixed_part=self.part_size is not None,
            most=min(self.most, MOST_REQUESTS),
            largest_part=largest_part,
            worth=worth,
            worked=thread_worked,
        )


def open_files(channels: int) -> int:
    """Raise the soft limit of open files; return how many requests and pipes may use.

    Raises SinkError if they are fewer than two per channel.
    """
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < ENOUGH_FILES:
        files = ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_FILES)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
        except (OSError, ValueError):  # a seccomp profile may forbid this: use the limit as it is
            files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    left = files - OWN_FILES - channels * CHANNEL_FILES
    if left < 2 * channels:
        least = OWN_FILES + channels * (CHANNEL_FILES + 2)
        raise SinkError(
            f"{files} open files are too few for {counted(channels, 'FIFO')}; raise `ulimit -n` to {least}"
        )
    return left


def pipe_limits(channels: int, files: int) -> tuple[int, int]:
    """Return the bytes of pipes that the user may have, and how many pipes `files` allows (two files each).

    FIFOs take pipe pages too; a channel may briefly have two FIFOs.
    """
    most = files // 2
    allowance = pipe_allowance()
    by_files = most * PIPE_SIZE
    return by_files if allowance is None else min(by_files, allowance - 2 * channels * PIPE_SIZE), most
