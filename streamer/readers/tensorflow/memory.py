"""Sets glibc to reuse the memory of large records instead of returning it to the kernel each time.

By default a record of 128 KiB or more has its own mapping, which glibc maps when the record is made and
unmaps when the training step drops it: half a million page faults for each GB. Smaller records cause faults
too where glibc trims the top of a thread's heap repeatedly. With both thresholds raised glibc reuses its
memory without these faults, and up to `KEPT_BYTES` of freed memory for each heap stay with the process.

The setting is the process's, so the user's own has priority: nothing is set if the environment has
`MALLOC_MMAP_THRESHOLD_`, `MALLOC_TRIM_THRESHOLD_` or `GLIBC_TUNABLES`, with another C library, or
with `PENSTOCK_MALLOPT=0`.
"""

from __future__ import annotations

import ctypes
import functools
import os

from streamer.units import MIB

MAPPED_BYTES = 32 * MIB
"""Bytes from which an allocation has its own mapping; the largest value that glibc accepts (mallopt(3))."""
KEPT_BYTES = 128 * MIB
SWITCH = "PENSTOCK_MALLOPT"

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


@functools.cache
def keep_memory() -> bool:
    """Raise the thresholds once; return whether they are raised."""
    if os.environ.get(SWITCH) == "0" or any(name in os.environ for name in _SETTINGS):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES) and libc.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))
