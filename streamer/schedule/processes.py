"""Decides how many engine processes `Processes: auto` starts. Pure."""

from __future__ import annotations

MOST = 8
"""Most engine processes unless the job file asks for more: about 16 GB/s over TLS."""
FEWEST = 2
"""A single engine takes 0.75 CPU-s/GB of its core over TLS, as much as one process without engines does in
all, so it is no faster."""
CORES_EACH = 4
"""Cores for each engine process. The trainer needs most of them."""


def automatic(cores: int, *, tls: bool) -> int:
    """Return the number of engine processes on a machine with `cores` cores.

    None without TLS: the kernel moves plain bodies, and one process is enough for about 10 GB/s.
    """
    engines = min(MOST, cores // CORES_EACH)
    return engines if tls and engines >= FEWEST else 0
