"""How much memory this process may use, and what of it is for bytes in flight where nobody has said so.

A container's limit is its cgroup's or that of any cgroup above it (Control Group v2, "Memory"; for v1
`memory.limit_in_bytes`). The kernel charges a container for the pages of its pipes and sockets too, so
bytes that never enter this process count all the same, and socket buffers take up to twice their bytes.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

from streamer.units import MIB

LEAST, MOST = 64 * MIB, 512 * MIB
COLLECT_AFTER = 50_000
"""Objects made and not freed before the collector looks for cycles; some 10 MB if all were garbage."""


def default_budget(limit: int) -> int:
    """Bytes in flight under a limit of memory: a quarter of it, within bounds."""
    return max(LEAST, min(MOST, limit // 4 // MIB * MIB))


def memory_limit(root: str = "/") -> int:
    """Bytes: the least of the machine's memory and the limits of this process's cgroups.

    `root` is where `proc` and `sys` are.
    """
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _limit_files(root):
        try:
            with open(path, encoding="ascii") as file:
                text = file.read().strip()
        except OSError:
            continue
        if text.isdecimal():  # "max" is none
            limits.append(int(text))
    return min(limits)


def _limit_files(root: str) -> Iterator[str]:
    """The files that may hold a limit: of every cgroup from ours upwards (cgroups(7), /proc/[pid]/cgroup)."""
    try:
        with open(os.path.join(root, "proc/self/cgroup"), encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError:
        return
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            base, name = "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, name = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        steps = [step for step in path.split("/") if step]
        for depth in range(len(steps), -1, -1):
            yield os.path.join(root, base, *steps[:depth], name)


def freeze_gc() -> None:
    """What is loaded by now stays: collections need not walk it while bytes move (an eighth of the CPU).

    What a request makes goes by reference counts, so collections may be rare: another eighth of the CPU
    where objects are small. There is no collection first: it would hold the loop for 60 ms, at the moment
    when readers come, and find next to nothing after those that ran while modules were imported.
    """
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER)
