"""Linux system calls that several packages use: pipes, their limits, unread bytes, free memory, core dumps.

The keeper imports this module in an interpreter without site-packages.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import select
import struct
import termios
from typing import Any

from streamer.units import MIB

PIPE_SIZE = 1 << 20
"""Default of /proc/sys/fs/pipe-max-size, in bytes: the largest pipe of an unprivileged process."""
PR_SET_DUMPABLE = 4
"""From <linux/prctl.h>."""
ALL = 1 << 62
"""Default limit of the bytes to move: more than there are."""
SPLICE_FLAGS = os.SPLICE_F_NONBLOCK | os.SPLICE_F_MOVE
_UNLIMITED_CAPABILITIES = (1 << 24) | (1 << 21)
"""CAP_SYS_RESOURCE, CAP_SYS_ADMIN: either lifts the limit on pipe pages (pipe(7))."""


def descriptor_path(fd: int) -> str:
    """Return a path to the inode of a descriptor; it stays valid when the file is renamed (proc(5))."""
    return f"/proc/self/fd/{fd}"


def has_pidfds() -> bool:
    """Return whether the kernel has pidfd_open(2), which Linux has since 5.3 and some sandboxes lack."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def bytes_unread(fd: int) -> int:
    """Return the number of unread bytes in a pipe (FIONREAD, pipe(7)) or TCP socket (SIOCINQ, tcp(7))."""
    return int(struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0"))[0])


def release_free_memory() -> None:
    """Return the free pages of the heap to the system, if the C library can (malloc_trim(3)). Takes 1 ms."""
    import ctypes  # takes 2 ms, and the keeper does not need it

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def forbid_dumps() -> None:
    """Forbid core dumps of this process, and access to its memory by other processes of the same user.

    The memory contains credentials and the bytes of objects. PR_SET_DUMPABLE (prctl(2)) works wherever the
    kernel would write a dump; the kernel ignores RLIMIT_CORE where core_pattern is a pipe, as with systemd
    and apport. It also makes root the owner of /proc/PID/environ, mem and fd, so another process of the same
    user, such as the trainer, can neither read the environment nor attach a debugger. The process itself can
    still use /proc/self/fd.

    fork(2) passes the setting on, execve(2) resets it: the trainer of `penstock exec` and the keeper, which
    has no credentials, can dump core. A restarted sidecar and the template of engines call this again.
    Raises SinkError.
    """
    import ctypes  # takes 2 ms, and the keeper does not need it

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0):
        from streamer.errors import SinkError  # the keeper does not need it

        why = os.strerror(ctypes.get_errno())
        raise SinkError(f"cannot forbid core dumps ({why}); let the container's seccomp profile allow prctl")


def tee(fd_in: int, fd_out: int, count: int) -> int:
    """Copy at most `count` bytes of one pipe to another without consuming them (tee(2)); return how many.

    Raises as `os.splice`, which Python has and tee(2) it has not.
    """
    copied = _tee()(fd_in, fd_out, count, SPLICE_FLAGS)
    if copied < 0:
        import ctypes

        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return int(copied)


@functools.cache
def _tee() -> Any:
    import ctypes  # takes 2 ms, and the keeper does not need it

    call = ctypes.CDLL(None, use_errno=True).tee
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_size_t, ctypes.c_uint]
    call.restype = ctypes.c_ssize_t
    return call


def set_pipe_size(fd: int, size: int = PIPE_SIZE, *, least: int = 128 * 1024) -> int:
    """Ask for a pipe of `size` bytes, then for halves of it down to `least`; return the pipe's size.

    Past a user's 64 MiB of pipe pages F_SETPIPE_SZ answers EPERM and the pipe keeps its size (pipe(7)).
    """
    while size >= least:
        with contextlib.suppress(OSError):
            return fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, size)
        size //= 2
    return fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ)


def is_ready(fd: int, events: int) -> bool:
    """Return whether poll(2) now reports one of `events`, an error, or that the other end is closed."""
    poller = select.poll()
    poller.register(fd, events)
    return bool(poller.poll(0))


def largest_pipe() -> int:
    """Return /proc/sys/fs/pipe-max-size in bytes. Raises OSError."""
    with open("/proc/sys/fs/pipe-max-size", encoding="ascii") as file:
        return int(file.read())


def pipe_allowance() -> int | None:
    """Return the total bytes of pipes that this user may have; None if there is no limit."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            capabilities = next(int(line.split()[1], 16) for line in status if line.startswith("CapEff:"))
        with open("/proc/sys/fs/pipe-user-pages-soft", encoding="ascii") as limit:
            pages = int(limit.read())
    except (OSError, ValueError, StopIteration):
        return 64 * MIB
    unlimited = capabilities & _UNLIMITED_CAPABILITIES or pages == 0
    return None if unlimited else pages * os.sysconf("SC_PAGE_SIZE")
