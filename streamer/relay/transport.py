"""The choice of transport: who fetches, into which stages, in parts of what size.

The kernel transport is chosen by itself wherever it applies; `reason` says in words why this one runs.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal

from streamer.errors import ConfigError
from streamer.relay.pipes import PIPE_SIZE, PipeStages, pipe_allowance
from streamer.relay.stages import MemoryStages, Stages
from streamer.source.kernel import KernelSource, why_not
from streamer.source.portable import PortableSource
from streamer.source.ranges import RangeSource
from streamer.source.session import Clients
from streamer.source.signing import RangeSigner
from streamer.units import MIB

MOST_CONNECTIONS = 32
"""Per channel, of any transport's default."""

OTHER_FILES = 32
"""Descriptors a channel needs besides pipes and connections: FIFOs, epoll, its part of the process's."""

Wish = Literal["auto", "portable", "kernel"]


@dataclass(frozen=True, slots=True)
class Transport:
    """A way to fetch, and the numbers that suit it."""

    source: RangeSource
    reason: str
    spliced: bool
    part_size: int
    """Measured best: 8 MiB where a request costs 1.6 ms of CPU, 4 MiB where it costs 0.2."""
    connections: int
    """Requests in flight per channel."""
    pipe_bytes: int = 0
    """Bytes of pipes that each channel may have, whatever its budget."""

    @property
    def name(self) -> str:
        return self.source.name

    def stages(self, budget: int) -> Stages:
        """Stages for a channel with `budget` bytes."""
        if not self.spliced:
            return MemoryStages(budget)
        return PipeStages(min(budget, self.pipe_bytes))


@contextlib.asynccontextmanager
async def open_transport(
    clients: Clients,
    *,
    wish: Wish,
    buckets: set[str],
    channels: int,
    budget: int,
    connections: int | None = None,
    to_pipes: bool = True,
) -> AsyncIterator[Transport]:
    """The transport for these buckets, until the end of the block.

    `budget`, `connections`: for each channel; the latter if not the transport's own default.
    `to_pipes`: whether all sinks are pipes. Raises ConfigError if `wish` is `kernel` and it cannot be.
    """
    portable = PortableSource(clients.data)
    share = _pipe_share(channels, connections or MOST_CONNECTIONS)
    obstacle = _obstacle(clients, buckets, min(share, budget), to_pipes=to_pipes)
    if wish == "kernel" and obstacle:
        raise ConfigError(f"the kernel transport is asked for, but {obstacle}; use auto or portable")
    if wish == "portable" or obstacle:
        yield Transport(
            portable,
            obstacle or "asked for",
            spliced=False,
            part_size=8 * MIB,
            connections=16,
        )
        return
    signer = RangeSigner(clients.data, clients.credentials, anonymous=clients.anonymous)
    source = KernelSource(signer, portable)
    try:
        yield Transport(
            source,
            "plain HTTP to pipes",
            spliced=True,
            part_size=4 * MIB,
            connections=MOST_CONNECTIONS,
            pipe_bytes=share,
        )
    finally:
        source.close()


def _pipe_share(channels: int, connections: int) -> int:
    """Bytes of pipes that each channel may have: by the user's pipe pages, and by open files.

    A channel's FIFO takes pipe pages too, for a moment two of them; a pipe takes two descriptors.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    by_files = (files // channels - connections - OTHER_FILES) // 2 * PIPE_SIZE
    allowance = pipe_allowance()
    return by_files if allowance is None else min(by_files, allowance // channels - 2 * PIPE_SIZE)


def _obstacle(clients: Clients, buckets: set[str], room: int, *, to_pipes: bool) -> str | None:
    if not to_pipes:
        return "the output is not a pipe"
    if obstacle := why_not(clients.data.meta.endpoint_url, buckets):
        return obstacle
    if room < 2 * PIPE_SIZE:
        return (
            "a channel may have less than two pipes of 1 MiB; raise MemoryBudget, `ulimit -n` or, "
            "for users without privilege, /proc/sys/fs/pipe-user-pages-soft"
        )
    return None
