"""Errors of the machine or its limits: system calls, memory, threads, modules that cannot be loaded.

A module that cannot be loaded is among them, because Python turns the failed system call into an ImportError.
A command loads its modules when it is called, so such an error may come before its event loop runs.
"""

from __future__ import annotations

import errno

from streamer.errors import SinkError
from streamer.linux import thread_remedy

_ERRNOS = {
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN),
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ESTALE, errno.EREMOTEIO, errno.ENODEV, errno.ENXIO, errno.ENOSYS),
}
"""Errors of system calls that the machine or its limits cause: shortages, disks, file systems, filters."""
_NO_THREAD = "can't start new thread"


def local_error(error: BaseException | None) -> SinkError | None:
    """Return a SinkError if `error`, an error in it or its cause is a failed system call; else None."""
    if error is None:
        return None
    if isinstance(error, OSError) and error.errno in _ERRNOS:
        return SinkError(
            f"a system call of the sidecar failed ({error.strerror}): check the limits of open files "
            "(ulimit -n), processes and memory, and the disk, and start the sidecar again"
        )
    if isinstance(error, RuntimeError) and str(error) == _NO_THREAD:
        return SinkError(f"no thread can be started: {thread_remedy()}")
    if isinstance(error, ImportError):
        return SinkError(
            f"cannot load a module ({error}): check the limits of open files (ulimit -n) and memory, and the "
            "disk, and start the sidecar again; if that does not help, install penstock-sidecar again"
        )
    if isinstance(error, MemoryError):
        return SinkError(
            "memory ran out: raise the limit (ulimit -v, or the container's), or see `penstock plan`"
        )
    if isinstance(error, BaseExceptionGroup):
        local_errors = [local_error(each) for each in error.exceptions]
        return local_errors[0] if all(local_errors) else None
    return local_error(error.__cause__ or error.__context__)
