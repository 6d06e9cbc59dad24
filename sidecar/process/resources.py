"""Memory and cores that this process may use, and the memory that a sidecar takes.

The limits of a container are the lowest of its cgroup and the cgroups above it (Control Group v2, "Memory"
and "CPU"; in v1 `memory.limit_in_bytes` and `cpu.cfs_quota_us`). The kernel charges the pages of pipes and
sockets to the container, so bytes that splice(2) keeps out of the process count too. A socket buffer takes up
to twice the bytes that are in it.

    process and connections  + FIFOs           + memory budget   + sockets
    base, 32 KiB a request     1 MiB for each    parts in flight   beside full buffers

The kernel kills the process that exceeds its limit, so this sum (`Footprint`) is a bound, found by
measurement: private pages, kernel memory and sockets of a sidecar whose readers paused and then read as fast
as they could, at 1 to 40 FIFOs, budgets of 40 to 512 MiB and 20 to 256 requests, on a machine that fills
buffers faster than readers empty them. The bound is 5 to 20 % above what was measured. The plan is left out:
millions of objects take more (`PlanMemory`).

Buffers stay allocated when their bytes are delivered, while the next parts arrive in sockets. Parts of more
than 1 MiB wait in their sockets instead of buffers, so this counts for small budgets only (`_SOCKETS`).
"""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamer.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

LEAST, MOST = 64 * MIB, 512 * MIB
"""Bounds of the default memory budget."""
UPLOAD_PARTS = 8
"""Most parts that the uploader has in memory, of 8 MiB but of objects of more than 80 GB."""
_BASE = {"splice": 44 * MIB, "buffered": 56 * MIB, "aiobotocore": 112 * MIB}
"""Process and libraries, by transport. `buffered` has 10 MiB for objects that are inflated."""
_FILES = 10 * MIB
"""Pages of programs and libraries that must stay in memory."""
_FIFO = {"splice": 256 * KIB, "buffered": 1152 * KIB, "aiobotocore": 1152 * KIB}
"""A channel and its FIFO. Pages that splice(2) moves from a socket into a FIFO are charged to nobody."""
_REQUEST = 32 * KIB
"""A connection, its TLS state and what the kernel keeps for it."""
_KEEPER, _KEEPER_PIPE = 8 * MIB, 1 * MIB
_UPLOADER = 72 * MIB + UPLOAD_PARTS * 8 * MIB
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
    uploads: bool = False
    """Whether the sidecar starts an uploader, which has the same limit."""

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
            + (_UPLOADER if self.uploads else 0)
        )

    def needed(self, budget: int) -> int:
        """Return the bytes that the sidecar may take with this memory budget, in whole MiB."""
        sockets = min(budget // 2, _SOCKETS) if self.transport == "buffered" else 0
        return -(-(self.fixed + budget + sockets) // MIB) * MIB

    def largest_budget(self, limit: int) -> int:
        """Return the largest memory budget, in whole MiB, that the limit allows; 0 if it allows none."""
        left = max(0, limit // MIB * MIB - self.fixed)
        if self.transport == "buffered":
            left -= min(-(-left // 3), _SOCKETS)
        return left // MIB * MIB


def default_budget(limit: int) -> int:
    """Return the default memory budget under a memory limit: a quarter of it, within bounds."""
    return max(LEAST, min(MOST, limit // 4 // MIB * MIB))


def memory_limit(root: str = "/") -> int:
    """Return the least of the machine's memory and the limits of this process's cgroups, in bytes.

    `root`: the directory with `proc` and `sys`.
    """
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _cgroup_files("memory.max", ("memory", "memory.limit_in_bytes"), root):
        try:
            with open(path, encoding="ascii") as file:
                text = file.read().strip()
        except OSError:
            continue
        if text.isdecimal():  # "max" means no limit
            limits.append(int(text))
    return min(limits)


def granted_cores() -> int:
    """Return the least of this process's affinity and the limits of its cgroups, at least 1."""
    return max(1, int(min(len(os.sched_getaffinity(0)), *_quotas(), float("inf"))))


def _quotas() -> Iterator[float]:
    for path in _cgroup_files("cpu.max", ("cpu", "cpu.cfs_quota_us"), "/"):
        try:
            with open(path, encoding="ascii") as file:
                fields = file.read().split()
            if len(fields) == 1 and path.endswith("cpu.cfs_quota_us"):
                with open(path.replace("quota", "period"), encoding="ascii") as file:
                    fields += file.read().split()
            quota, period = (int(field) for field in fields)
        except (OSError, ValueError):  # "max" means no limit
            continue
        if quota > 0 and period > 0:
            yield quota / period


def _cgroup_files(name: str, old: tuple[str, str], root: str) -> Iterator[str]:
    """Yield the paths of a file of this process's cgroups and those above (cgroups(7), /proc/[pid]/cgroup).

    `name`: of the file in v2. `old`: controller and name of the file in v1.
    """
    try:
        with open(os.path.join(root, "proc/self/cgroup"), encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError:
        return
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            base, found = "sys/fs/cgroup", name
        elif old[0] in controllers.split(","):
            base, found = f"sys/fs/cgroup/{old[0]}", old[1]
        else:
            continue
        directories = [part for part in path.split("/") if part]
        for depth in range(len(directories), -1, -1):
            yield os.path.join(root, base, *directories[:depth], found)


def freeze_gc() -> None:
    """Exclude all objects so far from garbage collection.

    This saves an eighth of the CPU time while bytes move. No collection runs first: it would block the loop
    for 60 ms when readers connect, and would free next to nothing.
    """
    gc.freeze()
