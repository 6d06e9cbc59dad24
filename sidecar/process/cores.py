"""The number of cores that this process may use: its affinity, and the CPU limits of its cgroups."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from sidecar.process.memory import cgroup_files

if TYPE_CHECKING:
    from collections.abc import Iterator


def granted_cores() -> int:
    """Return the least of this process's affinity and the limits of its cgroups, at least 1.

    Source: Control Group v2, "CPU"; in v1 `cpu.cfs_quota_us`.
    """
    return max(1, int(min(len(os.sched_getaffinity(0)), *_quotas(), float("inf"))))


def _quotas() -> Iterator[float]:
    for path in cgroup_files("cpu.max", ("cpu", "cpu.cfs_quota_us"), "/"):
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
