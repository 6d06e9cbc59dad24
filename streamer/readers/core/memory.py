"""Sets glibc to reuse the memory of records instead of returning it to the kernel each time.

By default a record of 128 KiB or more has its own mapping, which glibc maps when the record is made and
unmaps when the training step drops it: half a million page faults for each GB. Smaller records cause faults
too where glibc trims the top of a heap after each list: ten records of 100 kB read by a new process cost
100,000 for each GB, and twice the CPU time. With both thresholds raised glibc reuses its memory without these
faults, and up to `KEPT_BYTES` of freed memory for each heap stay with the process.

Each epoch of a TensorFlow dataset has threads of its own, and glibc may give them another heap, by default up
to eight for each core. So the memory that stays grew from epoch to epoch. With at most one heap for each
core, threads of a later epoch find the heaps, and the freed memory, of earlier ones. glibc takes the limit
only while the process has at most eight heaps.

The setting is the process's, so the user's own has priority: nothing is set if the environment has
`MALLOC_MMAP_THRESHOLD_`, `MALLOC_TRIM_THRESHOLD_` or `GLIBC_TUNABLES`, with another C library, or
with `PENSTOCK_MALLOPT=0`. With `MALLOC_ARENA_MAX` in the environment the number of heaps is the user's.
"""

from __future__ import annotations

import functools
import os

from streamer.linux import keep_free_memory, limit_heaps
from streamer.units import MIB

MAPPED_BYTES = 32 * MIB
"""Bytes from which an allocation has its own mapping; the largest value that glibc accepts (mallopt(3))."""
KEPT_BYTES = 128 * MIB
SWITCH = "PENSTOCK_MALLOPT"

FEWEST_HEAPS = 2

_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


@functools.cache
def keep_memory() -> bool:
    """Raise the thresholds, once; return whether that was done."""
    if os.environ.get(SWITCH) == "0" or any(name in os.environ for name in _SETTINGS):
        return False
    return keep_free_memory(MAPPED_BYTES, KEPT_BYTES)


@functools.cache
def keep_memory_of_threads() -> bool:
    """Call `keep_memory`, and limit the heaps, for a reader whose epochs have threads of their own."""
    kept = keep_memory()
    if kept and "MALLOC_ARENA_MAX" not in os.environ:
        limit_heaps(max(FEWEST_HEAPS, len(os.sched_getaffinity(0))))
    return kept
