"""The choice of transport: who fetches, into which stages, in parts of what size.

The best that applies is chosen by itself: bodies left in the kernel, else copied once by a client of our
own, else aiobotocore. `reason` says in words why this one runs.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal

from streamer.errors import ConfigError
from streamer.relay.pipes import PIPE_SIZE, PipeStages, pipe_allowance
from streamer.relay.stages import BUFFER_SIZE, BufferPool, MemoryStages, Stages
from streamer.source.client import OwnSource, why_not, why_not_splice
from streamer.source.portable import PortableSource
from streamer.source.ranges import RangeSource
from streamer.source.session import Clients, tls_context
from streamer.source.signing import RangeSigner
from streamer.units import MIB

MOST_CONNECTIONS = 32
"""Per channel, of any transport's default."""

OTHER_FILES = 32
"""Descriptors a channel needs besides pipes and connections: FIFOs, epoll, its part of the process's."""

Wish = Literal["auto", "portable", "copying", "kernel"]


@dataclass(frozen=True, slots=True)
class Transport:
    """A way to fetch, and the numbers that suit it."""

    source: RangeSource
    reason: str
    spliced: bool
    buffered: bool
    """Whether bodies are read into buffers of ours."""
    part_size: int
    """Measured best: 8 MiB where a request costs 1.6 ms of CPU, 4 MiB where it costs 0.2."""
    connections: int
    """Requests in flight per channel."""
    pipe_bytes: int = 0
    """Bytes of pipes that each channel may have, whatever its budget."""
    _buffers: BufferPool = field(default_factory=BufferPool)

    @property
    def name(self) -> str:
        return self.source.name

    def stages(self, budget: int) -> Stages:
        """Stages for a channel with `budget` bytes."""
        if not self.spliced:
            return MemoryStages(budget, self._buffers, unit=BUFFER_SIZE if self.buffered else 1)
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
    portable = PortableSource(clients.data, clients.reading)
    share = _pipe_share(channels, connections or MOST_CONNECTIONS)
    no_client = why_not(clients.data, buckets)
    no_splice = no_client or _no_splice(clients, min(share, budget), to_pipes=to_pipes)
    obstacle = {"kernel": no_splice, "copying": no_client}.get(wish)
    if obstacle:
        raise ConfigError(f"the {wish} transport is asked for, but {obstacle}; use auto or portable")
    if wish == "portable" or no_client:
        yield Transport(
            portable,
            no_client or "asked for",
            spliced=False,
            buffered=False,
            part_size=8 * MIB,
            connections=16,
        )
        return
    splice = wish != "copying" and no_splice is None
    url = clients.data.meta.endpoint_url
    source = OwnSource(
        RangeSigner(clients.data, clients.credentials, anonymous=clients.anonymous, reading=clients.reading),
        portable,
        splice=splice,
        tls=tls_context(clients.ca_bundle) if url.startswith("https://") else None,
    )
    try:
        yield Transport(
            source,
            "plain HTTP to pipes" if splice else no_splice or "asked for",
            spliced=splice,
            buffered=not splice,
            part_size=4 * MIB,
            connections=MOST_CONNECTIONS if splice else 16,
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


def _no_splice(clients: Clients, room: int, *, to_pipes: bool) -> str | None:
    if not to_pipes:
        return "the output is not a pipe"
    if obstacle := why_not_splice(clients.data.meta.endpoint_url):
        return obstacle
    if room < 2 * PIPE_SIZE:
        return (
            "a channel may have less than two pipes of 1 MiB; raise MemoryBudget, `ulimit -n` or, "
            "for users without privilege, /proc/sys/fs/pipe-user-pages-soft"
        )
    return None
