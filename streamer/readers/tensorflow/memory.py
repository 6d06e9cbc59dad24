"""Has glibc keep the memory of large records instead of giving it back to the kernel each time.

A record of 128 KiB or more is, by default, a mapping of its own: mapped when it is made, unmapped when the
training step drops it, and every page of it faulted in anew, half a million faults for each GB. Smaller ones
suffer alike where the top of a thread's heap is trimmed again and again. With both thresholds raised the
allocator reuses what it has, and the faults are gone; the price is that up to `KEPT_BYTES` of freed memory
for each heap stay with the process.

The setting is the process's, so the user's own has priority: nothing is done if the environment holds
`MALLOC_MMAP_THRESHOLD_`, `MALLOC_TRIM_THRESHOLD_` or `GLIBC_TUNABLES`, with another C library, or
with `PENSTOCK_MALLOPT=0`.
"""

from __future__ import annotations

import ctypes
import functools
import os

from streamer.units import MIB

MAPPED_BYTES = 32 * MIB
"""From this size on an allocation is a mapping of its own; the most that glibc takes (mallopt(3))."""
KEPT_BYTES = 128 * MIB
SWITCH = "PENSTOCK_MALLOPT"

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


@functools.cache
def keep_memory() -> bool:
    """Raise the thresholds, once; whether it was done."""
    if os.environ.get(SWITCH) == "0" or any(name in os.environ for name in _SETTINGS):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES) and libc.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))
