"""Forbids core dumps of this process, and access to its memory by other processes of the same user.

The memory contains credentials and the bytes of objects. PR_SET_DUMPABLE (prctl(2)) works wherever the kernel
would write a dump; the kernel ignores RLIMIT_CORE where core_pattern is a pipe, as with systemd and apport.
It also makes root the owner of /proc/PID/environ, mem and fd, so another process of the same user, such as
the trainer, can neither read the environment nor attach a debugger. The process itself can still use
/proc/self/fd.

execve(2) resets the setting: the trainer of `penstock exec` and the keeper can dump core as usual, and a
restarted sidecar forbids dumps again.
"""

from __future__ import annotations

import ctypes
import os

from streamer.errors import SinkError

PR_SET_DUMPABLE = 4
"""From <linux/prctl.h>."""


def forbid_dumps() -> None:
    """Forbid core dumps until this process ends or executes another program. Raises SinkError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0):
        why = os.strerror(ctypes.get_errno())
        raise SinkError(f"cannot forbid core dumps ({why}); let the container's seccomp profile allow prctl")
