"""The memory limit of this process, the default memory budget, and what the garbage collector leaves out.

The limit of a container is the lowest of its cgroup and the cgroups above it (Control Group v2, "Memory"; in
v1 `memory.limit_in_bytes`). The kernel charges the pages of pipes and sockets to the container, so bytes that
splice(2) keeps out of the process count too. A socket buffer takes up to twice the bytes that are in it.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

from streamer.units import MIB

LEAST, MOST = 64 * MIB, 512 * MIB
"""Bounds of the default memory budget."""


def default_budget(limit: int) -> int:
    """Return the default memory budget under a memory limit: a quarter of it, within bounds."""
    return max(LEAST, min(MOST, limit // 4 // MIB * MIB))


def memory_limit(root: str = "/") -> int:
    """Return the least of the machine's memory and the limits of this process's cgroups, in bytes.

    `root`: the directory with `proc` and `sys`.
    """
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in cgroup_files("memory.max", ("memory", "memory.limit_in_bytes"), root):
        try:
            with open(path, encoding="ascii") as file:
                text = file.read().strip()
        except OSError:
            continue
        if text.isdecimal():  # "max" means no limit
            limits.append(int(text))
    return min(limits)


def cgroup_files(name: str, old: tuple[str, str], root: str) -> Iterator[str]:
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
