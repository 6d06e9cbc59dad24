"""Exit codes of the `penstock` command, a public interface; docs/reference/exit-codes.md lists them.

`local_error` recognises errors of the machine or its limits: system calls, memory, threads, and modules that
cannot be loaded, because Python turns the failed system call into an ImportError. A command loads its modules
when it is called, so such an error may come before its event loop runs.
"""

from __future__ import annotations

import errno
from enum import IntEnum

from streamer.errors import (
    ConfigError,
    CorruptObject,
    Denied,
    GaveUp,
    Mismatch,
    Missing,
    PenstockError,
    PlanRefused,
    ReaderGone,
    SinkError,
    SourceChanged,
    SourceError,
    WrongEndpoint,
)
from streamer.linux import thread_remedy

_ERRNOS = {
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN),
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ESTALE, errno.EREMOTEIO, errno.ENODEV, errno.ENXIO, errno.ENOSYS),
}
"""Errors of system calls that the machine or its limits cause: shortages, disks, file systems, filters."""
_NO_THREAD = "can't start new thread"


class Exit(IntEnum):
    """Exit codes, each with its meaning."""

    OK = 0
    BUG = 1
    """An error that Penstock did not expect; the traceback is in the log."""
    CONFIG = 2
    """The job file or the command line cannot be carried out as written, or names a wrong endpoint."""
    DENIED = 3
    """Credentials are absent, wrong or insufficient."""
    MISSING = 4
    """A bucket or an object does not exist, or a prefix matches no object."""
    UNREACHABLE = 5
    """The endpoint did not answer, or answered wrongly, for `GiveUpAfter` seconds."""
    CHANGED = 6
    """An object was replaced or deleted after it was listed, or a held FIFO is of another plan."""
    LOCAL = 7
    """The FIFO directory, a FIFO, a port or a limit of this machine is at fault."""
    CORRUPT = 8
    """An object is corrupt: it cannot be inflated, or its bytes do not match its checksum."""
    NOT_UPLOADED = 9
    """Something of value was not uploaded: files, a model, output or checkpoints. The log names it."""
    NOT_FOUND = 127
    """`exec`: the command does not exist, as in a shell."""
    INTERRUPTED = 130
    """Ctrl-C, or a second signal, ended the process at once."""
    READER_GONE = 141
    """The reader of standard output closed it early; a shell reports SIGPIPE with the same code."""


def exit_code(error: PenstockError) -> Exit:  # noqa: PLR0911 - a table; the first error that fits decides
    """Return the exit code for an error that ends the process."""
    if isinstance(error, (ConfigError, PlanRefused, WrongEndpoint)):
        return Exit.CONFIG
    if isinstance(error, ReaderGone):
        return Exit.READER_GONE
    if isinstance(error, SinkError):
        return Exit.LOCAL
    if isinstance(error, GaveUp) and isinstance(error.__cause__, Denied):
        return Exit.DENIED
    if isinstance(error, Denied):
        return Exit.DENIED
    if isinstance(error, Missing):
        return Exit.MISSING
    if isinstance(error, SourceChanged):
        return Exit.CHANGED
    if isinstance(error, (CorruptObject, Mismatch)):
        return Exit.CORRUPT
    if isinstance(error, SourceError):
        return Exit.UNREACHABLE
    return Exit.BUG


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
