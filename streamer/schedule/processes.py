"""Decides how many engine processes `Processes: auto` starts. Pure."""

from __future__ import annotations

MOST = 8
"""Most engine processes unless the job file asks for more: about 16 GB/s over TLS."""
CORES_EACH = 4
"""Cores for each engine process. The trainer needs most of them."""


def automatic(cores: int, *, tls: bool) -> int:
    """Return the number of engine processes on a machine with `cores` cores.

    None without TLS: the kernel moves plain bodies, and one process is enough for about 10 GB/s.
    """
    return min(MOST, cores // CORES_EACH) if tls else 0
