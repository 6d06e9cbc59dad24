"""No core dump of this process, and no look into its memory by others of the same user.

The memory holds credentials and the bytes of objects. PR_SET_DUMPABLE (prctl(2)) is the one switch that
holds wherever the kernel would put a dump: RLIMIT_CORE is ignored where core_pattern is a pipe, as it is
with systemd and apport. It also makes root the owner of /proc/PID/environ, mem and fd, so another process
of the same user, such as a trainer beside the sidecar, can neither read the environment nor attach a
debugger. A process's own descriptors stay open to it under /proc/self/fd.

execve(2) sets it back, so the trainer of `penstock exec` and the keeper dump as ever, with their limits as
they were, and a sidecar that begins anew forbids it anew.
"""

from __future__ import annotations

import ctypes
import os

from streamer.errors import SinkError

PR_SET_DUMPABLE = 4
"""From <linux/prctl.h>."""


def forbid_dumps() -> None:
    """Forbid it to the kernel, until this process ends or becomes another program. Raises SinkError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0):
        why = os.strerror(ctypes.get_errno())
        raise SinkError(f"cannot forbid core dumps ({why}); let the container's seccomp profile allow prctl")
