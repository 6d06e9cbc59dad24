"""The choice of transport: who fetches, into which stages, in parts of what size.

The best that applies is chosen by itself: bodies left in the kernel, else copied once by a client of our
own, else aiobotocore. `reason` says in words why this one runs.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal

from streamer.errors import ConfigError, SinkError
from streamer.relay.allotment import Allotment
from streamer.relay.hedge import Hedging
from streamer.relay.memory import BUFFER_SIZE, BufferPool, MemoryStages
from streamer.relay.pace import LARGEST_PART, MOST_LANES, WORTH, Pace
from streamer.relay.pipes import PIPE_SIZE, PipePool, PipeStages, pipe_allowance
from streamer.relay.stages import Stages
from streamer.relay.threads import thread_worked
from streamer.source.client import OwnSource, why_not, why_not_splice
from streamer.source.lanes import largest_window
from streamer.source.portable import PortableSource
from streamer.source.ranges import RangeSource
from streamer.source.session import Clients, trust
from streamer.source.signing import RangeSigner
from streamer.units import MIB

OWN_FILES, CHANNEL_FILES = 48, 8
"""Descriptors that the process needs, and each channel, besides pipes and connections for parts, and that are
kept free of those: without a FIFO or a trailer a channel stands still, without a connection it is slower."""
ENOUGH_FILES = 65_536
"""Open files that we ask for, as far as the hard limit lets us; the default soft limit is often 1,024."""

HEDGED = 0.05
"""Of all bytes, those that hedges may fetch once more, if nobody says otherwise."""

Wish = Literal["auto", "portable", "copying", "kernel"]


@dataclass(frozen=True, slots=True)
class Transport:
    """A way to fetch, and what all channels together may use of it."""

    source: RangeSource
    reason: str
    allotment: Allotment
    pipes: PipePool | None = None
    """Where bodies stay in the kernel."""
    buffers: BufferPool | None = None
    """Where they are read into buffers of ours."""
    few_files: str = ""
    """How the limit of open files bounds lanes, if it does, and what to do."""

    @property
    def name(self) -> str:
        return self.source.name

    def stages(self) -> Stages:
        """Stages for one more channel."""
        share = self.allotment.share()
        if self.pipes is not None:
            return PipeStages(share, self.pipes)
        return MemoryStages(share, self.buffers)


@contextlib.asynccontextmanager
async def open_transport(
    clients: Clients,
    *,
    wish: Wish,
    buckets: set[str],
    channels: int,
    budget: int,
    connections: int | None = None,
    part_size: int | None = None,
    to_pipes: bool = True,
    inflate: bool = False,
    join: bool = False,
    check: bool = False,
    frame: bool = False,
    hedge: float = HEDGED,
) -> AsyncIterator[Transport]:
    """The transport for these buckets, until the end of the block.

    `budget` and `connections` are for all channels together. Where `connections` or `part_size` is not
    given, it adapts. `to_pipes`: whether all sinks are pipes. `inflate`: whether any channel's objects are
    inflated, which takes their bytes through memory; `join`: whether any channel's are joined, `check`:
    whether any channel's are compared with their checksums, and `frame`: whether any channel's records must
    be told apart, which all do so too. `hedge`: of all bytes, those that second requests for late parts may
    fetch once more. Raises ConfigError if what is wished cannot be, SinkError if open files are too few.
    """
    portable = PortableSource(clients.data, clients.credentials)
    hedging = Hedging(hedge)
    files = open_files(channels)
    lanes = _Lanes(connections, part_size, files // 2)
    pipe_budget, most_pipes = _pipe_limits(channels, files - lanes.most)
    no_client = why_not(clients.data, buckets)
    no_splice = (
        no_client
        or ("compressed objects are inflated in memory" if inflate else None)
        or ("archives are joined in memory" if join else None)
        or ("checksums are computed in memory" if check else None)
        or ("records are told apart in memory, for WhenFailed: poison" if frame else None)
        or _no_splice(clients, min(budget, pipe_budget), channels, to_pipes=to_pipes)
    )
    obstacle = {"kernel": no_splice, "copying": no_client}.get(wish)
    if obstacle:
        others = "auto or portable" if no_client else "auto, copying or portable"
        raise ConfigError(f"the {wish} transport is asked for, but {obstacle}; use {others}")
    if wish == "portable" or no_client:
        pace = lanes.pace(16, 8 * MIB)
        allotment = Allotment(budget, pace, members=channels, hedging=hedging)
        yield Transport(portable, no_client or "asked for", allotment, few_files=lanes.bounded)
        return
    splice = wish != "copying" and no_splice is None
    absorbed = _absorbed(tls=_over_tls(clients))
    async with _own_source(clients, portable, splice=splice) as source:
        if splice:
            pipes = PipePool(pipe_budget, most=most_pipes)
            pace = lanes.pace(max(64, 4 * channels), absorbed, largest_part=absorbed)
            try:
                allotment = Allotment(budget, pace, members=channels, hedging=hedging)
                yield Transport(
                    source, "plain HTTP to pipes", allotment, pipes=pipes, few_files=lanes.bounded
                )
            finally:
                pipes.close()
        else:
            # One thread reads all: begin with few, let need decide, and do not take a chance gain for need.
            pace = lanes.pace(max(8, channels), absorbed, largest_part=absorbed, worth=0.4)
            allotment = Allotment(budget, pace, members=channels, hedging=hedging, unit=BUFFER_SIZE)
            yield Transport(
                source,
                no_splice or "asked for",
                allotment,
                buffers=BufferPool(),
                few_files=lanes.bounded,
            )


@contextlib.asynccontextmanager
async def _own_source(
    clients: Clients, portable: PortableSource, *, splice: bool
) -> AsyncIterator[OwnSource]:
    source = OwnSource(
        RangeSigner(clients.data, clients.credentials, anonymous=clients.anonymous, reading=clients.reading),
        portable,
        splice=splice,
        tls=trust(clients.ca_bundle) if _over_tls(clients) else None,
        stall_timeout=clients.stall_timeout,
    )
    with contextlib.closing(source):
        yield source


def _absorbed(*, tls: bool) -> int:
    """Bytes of a part that a socket holds until its turn comes, encrypted if `tls`.

    For the rest, delivery would have to wait.
    """
    window = largest_window()
    body = window - window // 64 if tls else window
    return max(MIB, min(8 * MIB, body // MIB * MIB))


def _over_tls(clients: Clients) -> bool:
    url: str = clients.data.meta.endpoint_url
    return url.startswith("https://")


@dataclass(frozen=True, slots=True)
class _Lanes:
    """What was asked for."""

    connections: int | None
    part_size: int | None
    fit: int
    """Lanes that open files allow, as many left for pipes."""

    @property
    def most(self) -> int:
        return min(self.connections or MOST_LANES, self.fit)

    @property
    def bounded(self) -> str:
        """As `Transport.few_files`."""
        if self.most == (self.connections or MOST_LANES):
            return ""
        return f"at most {self.most} connections fit into the limit of open files; raise `ulimit -n`"

    def pace(
        self, connections: int, part_size: int, *, largest_part: int = LARGEST_PART, worth: float = WORTH
    ) -> Pace:
        """The pace that begins with what suits a transport, where nothing else is asked for."""
        return Pace(
            min(self.connections or connections, self.most),
            self.part_size or part_size,
            fixed_lanes=self.connections is not None,
            fixed_part=self.part_size is not None,
            most_lanes=min(self.most, MOST_LANES),
            largest_part=largest_part,
            worth=worth,
            worked=thread_worked,
        )


def open_files(channels: int) -> int:
    """Open files that lanes and pipes may have; the soft limit is raised. Raises SinkError for too few."""
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < ENOUGH_FILES:
        files = ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_FILES)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
        except (OSError, ValueError):  # forbidden, as a seccomp profile may: what there is must do
            files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    left = files - OWN_FILES - channels * CHANNEL_FILES
    if left < 2 * channels:
        least = OWN_FILES + channels * (CHANNEL_FILES + 2)
        raise SinkError(f"{files} open files are too few for {channels} FIFOs; raise `ulimit -n` to {least}")
    return left


def _pipe_limits(channels: int, files: int) -> tuple[int, int]:
    """Bytes of pipes that the user may have, and how many pipes so many open files allow (two each).

    A channel's FIFO takes pipe pages too, for a moment two of them.
    """
    most = files // 2
    allowance = pipe_allowance()
    by_files = most * PIPE_SIZE
    return by_files if allowance is None else min(by_files, allowance - 2 * channels * PIPE_SIZE), most


def _no_splice(clients: Clients, room: int, channels: int, *, to_pipes: bool) -> str | None:
    if not to_pipes:
        return "the output is not a pipe"
    if obstacle := why_not_splice(clients.data.meta.endpoint_url):
        return obstacle
    if room < 2 * PIPE_SIZE * channels:
        return (
            "a channel may have less than two pipes of 1 MiB; raise MemoryBudget, `ulimit -n` or, "
            "for users without privilege, /proc/sys/fs/pipe-user-pages-soft"
        )
    return None
