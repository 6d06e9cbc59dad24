"""The memory that a sidecar may take, and the largest memory budget that a limit leaves. Pure.

    process and connections  + FIFOs           + memory budget   + sockets
    base, 32 KiB a request     1 MiB for each    parts in flight   beside full buffers

The kernel charges pages, pipes and socket buffers to the container and kills the process that exceeds its
limit. So the sum is a bound, found by measurement: private pages, kernel memory and sockets of a sidecar
whose readers paused and then read as fast as they could, at 1 to 40 FIFOs, budgets of 40 to 512 MiB and 20 to
256 requests, on a machine that fills buffers faster than readers empty them. The bound is 5 to 20 % above
what was measured. The plan is left out: millions of objects take more (`PlanMemory`).

Buffers stay allocated when their bytes are delivered, while the next parts arrive in sockets. Parts of more
than 1 MiB wait in their sockets instead of buffers, so this counts for small budgets only (`_SOCKETS`).
"""

from __future__ import annotations

from dataclasses import dataclass

from streamer.units import KIB, MIB

_BASE = {"splice": 44 * MIB, "buffered": 56 * MIB, "aiobotocore": 112 * MIB}
"""Process and libraries, by transport. `buffered` has 10 MiB for objects that are inflated."""
_FILES = 10 * MIB
"""Pages of programs and libraries that must stay in memory."""
_FIFO = {"splice": 256 * KIB, "buffered": 1152 * KIB, "aiobotocore": 1152 * KIB}
"""A channel and its FIFO. Pages that splice(2) moves from a socket into a FIFO are charged to nobody."""
_REQUEST = 32 * KIB
"""A connection, its TLS state and what the kernel keeps for it."""
_KEEPER, _KEEPER_PIPE = 8 * MIB, 1 * MIB
_SOCKETS = 32 * MIB
"""Most bytes in sockets while the buffers of the whole budget stay allocated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What a sidecar's memory depends on, but for the memory budget."""

    transport: str
    """`splice` if every channel is spliced; `buffered` if one is read."""
    fifos: int
    requests: int
    """Most requests in flight."""
    keeper: bool = False
    """Whether the sidecar starts a keeper, which has the same limit."""

    @property
    def fixed(self) -> int:
        """Bytes without the memory budget."""
        keeper = _KEEPER + self.fifos * _KEEPER_PIPE if self.keeper else 0
        return (
            _BASE[self.transport]
            + _FILES
            + self.fifos * _FIFO[self.transport]
            + self.requests * _REQUEST
            + keeper
        )

    @property
    def _buffers(self) -> bool:
        """Whether bytes wait in buffers."""
        return self.transport == "buffered"

    def needed(self, budget: int) -> int:
        """Return the bytes that the sidecar may take with this memory budget, in whole MiB."""
        sockets = min(budget // 2, _SOCKETS) if self._buffers else 0
        return -(-(self.fixed + budget + sockets) // MIB) * MIB

    def largest_budget(self, limit: int) -> int:
        """Return the largest memory budget, in whole MiB, that the limit allows; 0 if it allows none."""
        left = max(0, limit // MIB * MIB - self.fixed)
        if self._buffers:
            left -= min(-(-left // 3), _SOCKETS)
        return left // MIB * MIB
