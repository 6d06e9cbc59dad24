"""Linux system calls that Python's library lacks, or that several packages use: pipes, their limits, unread
bytes, changes of a directory, free memory, core dumps.

Readers and sidecar share this module. The keeper imports it in an interpreter without site-packages.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import resource
import select
import struct
import termios
from typing import Any

from streamer.units import MIB, human_bytes

PIPE_SIZE = 1 << 20
"""Default of /proc/sys/fs/pipe-max-size, in bytes: the largest pipe of an unprivileged process."""
PR_SET_DUMPABLE = 4
"""From <linux/prctl.h>."""
ALL = 1 << 62
"""Default limit of the bytes to move: more than there are."""
SPLICE_FLAGS = os.SPLICE_F_NONBLOCK | os.SPLICE_F_MOVE
_UNLIMITED_CAPABILITIES = (1 << 24) | (1 << 21)
"""CAP_SYS_RESOURCE, CAP_SYS_ADMIN: either lifts the limit on pipe pages (pipe(7))."""
_ARRIVALS = 0x80 | 0x100 | 0x1000000
"""IN_MOVED_TO, IN_CREATE, IN_ONLYDIR (inotify(7))."""
_LOSSES = 0x40 | 0x80 | 0x200 | 0x400 | 0x800 | 0x1000000
"""IN_MOVED_FROM, IN_MOVED_TO, IN_DELETE, IN_DELETE_SELF, IN_MOVE_SELF, IN_ONLYDIR (inotify(7))."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""From <malloc.h>."""
_FLOCK = struct.Struct("hhqqi0q")
"""struct flock: type, whence, start, length, process."""
_EVENT = struct.Struct("iIII")
"""struct inotify_event: wd, mask, cookie, len."""
CLOSED, MOVED_IN, CREATED, LOST, IGNORED, IS_DIRECTORY = 0x8, 0x80, 0x100, 0x4000, 0x8000, 0x40000000
"""IN_CLOSE_WRITE, IN_MOVED_TO, IN_CREATE; IN_Q_OVERFLOW, IN_IGNORED, IN_ISDIR (inotify(7))."""


@functools.cache
def _libc() -> Any:
    import ctypes  # takes 2 ms, and the keeper does not need it

    return ctypes.CDLL(None, use_errno=True)


def _last_error() -> OSError:
    """Return the error of the last call of `_libc` that failed in this thread."""
    import ctypes

    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def descriptor_path(fd: int) -> str:
    """Return a path to the inode of a descriptor; it stays valid when the file is renamed (proc(5))."""
    return f"/proc/self/fd/{fd}"


def watch_for_arrivals(directory: str) -> int | None:
    """Return a descriptor that is readable once a name comes into `directory`; None without inotify(7).

    It is absent where the directory does not exist, and where the kernel, a sandbox or a limit forbids it.
    """
    try:
        fd = open_inotify()
    except OSError:
        return None
    try:
        _add_watch(fd, directory, _ARRIVALS)
    except OSError:
        os.close(fd)
        return None
    return fd


def open_inotify() -> int:
    """Return the descriptor of a new inotify(7) instance, which does not block. Raises OSError."""
    fd = int(_libc().inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    if fd < 0:
        raise _last_error()
    return fd


def watch_for_losses(inotify: int, directory: str) -> None:
    """Watch for names of `directory` that are removed, renamed or replaced. Raises OSError.

    Watching the same directory again changes nothing.
    """
    _add_watch(inotify, directory, _LOSSES)


def watch_for_files(inotify: int, directory: str) -> int:
    """Watch for files that are closed after writing, and names that are made or moved in; return its number.

    A directory that is watched already keeps its number, under another name too. Raises OSError.
    """
    return _add_watch(inotify, directory, CLOSED | MOVED_IN | CREATED | 0x1000000)


def _add_watch(inotify: int, directory: str, events: int) -> int:
    watch = int(_libc().inotify_add_watch(inotify, os.fsencode(directory), events))
    if watch < 0:
        raise _last_error()
    return watch


def changed_names(inotify: int) -> set[bytes]:
    """Read all events; return their names. An empty one concerns every name of a directory."""
    return {name for _, _, name in read_events(inotify)}


def read_events(inotify: int) -> list[tuple[int, int, bytes]]:
    """Read all events; return the number of the watch, the kind, and the name of each."""
    events = []
    with contextlib.suppress(BlockingIOError):
        while data := os.read(inotify, 1 << 16):
            begin = 0
            while begin < len(data):
                watch, kind, _, length = _EVENT.unpack_from(data, begin)
                begin += _EVENT.size + length
                events.append((watch, kind, data[begin - length : begin].rstrip(b"\0")))
    return events


def lock_byte(fd: int, byte: int, *, shared: bool = False) -> None:
    """Lock a byte of a file until its open file description ends (F_OFD_SETLK of fcntl(2)). Raises OSError.

    Forks share the lock. It is independent of `flock` on the same file.
    """
    kind = fcntl.F_RDLCK if shared else fcntl.F_WRLCK
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))


def locked_byte(fd: int, start: int, count: int = 1) -> int | None:
    """Return the first of `count` bytes from `start` that another description has locked, if any, without
    a lock of its own. Raises OSError.
    """
    request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, count, 0)
    kind, _, first, _, _ = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, request))
    return None if kind == fcntl.F_UNLCK else int(first)


def sync_file_system(directory: int) -> None:
    """Write the file system of the directory of a descriptor to its disk (syncfs(2)). Raises OSError."""
    fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)  # not O_PATH
    try:
        if _libc().syncfs(fd):
            raise _last_error()
    finally:
        os.close(fd)


def bytes_unread(fd: int) -> int:
    """Return the number of unread bytes in a pipe (FIONREAD, pipe(7)) or TCP socket (SIOCINQ, tcp(7))."""
    return int(struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0"))[0])


def release_free_memory() -> None:
    """Return the free pages of the heap to the system, if the C library can (malloc_trim(3)). Takes 1 ms."""
    trim = getattr(_libc(), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_free_memory(block: int, total: int) -> bool:
    """Let the C library reuse freed memory (mallopt(3)); return whether it can, as glibc can.

    `block`: largest block that is reused, in bytes. `total`: bytes that are kept in each heap.

    By default glibc returns large blocks, and what is free at the end of the heap, to the system, by limits
    that depend on what was freed before. Each page of the next block is a page fault then, and zeroed.
    """
    mallopt = getattr(_libc(), "mallopt", None)
    return mallopt is not None and bool(
        mallopt(_M_MMAP_THRESHOLD, block) and mallopt(_M_TRIM_THRESHOLD, total)
    )


def limit_heaps(number: int) -> None:
    """Let threads share `number` heaps, if the C library is glibc (mallopt(3))."""
    mallopt = getattr(_libc(), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, number)


def forbid_dumps() -> None:
    """Forbid core dumps of this process, and access to its memory by other processes of the same user.

    The memory contains credentials and the bytes of objects. PR_SET_DUMPABLE (prctl(2)) works wherever the
    kernel would write a dump; the kernel ignores RLIMIT_CORE where core_pattern is a pipe, as with systemd
    and apport. It also makes root the owner of /proc/PID/environ, mem and fd, so another process of the same
    user, such as the trainer, can neither read the environment nor attach a debugger. The process itself can
    still use /proc/self/fd.

    fork(2) passes the setting on, execve(2) resets it: the trainer of `penstock exec` and the keeper, which
    has no credentials, can dump core. A restarted sidecar calls this again.
    Raises SinkError.
    """
    if _libc().prctl(PR_SET_DUMPABLE, 0, 0, 0, 0):
        from streamer.errors import SinkError  # the keeper does not need it

        why = _last_error().strerror
        raise SinkError(f"cannot forbid core dumps ({why}); let the container's seccomp profile allow prctl")


def tee(fd_in: int, fd_out: int, count: int) -> int:
    """Copy at most `count` bytes of one pipe to another without consuming them (tee(2)); return how many.

    Raises as `os.splice`, which Python has and tee(2) it has not.
    """
    copied = _tee()(fd_in, fd_out, count, SPLICE_FLAGS)
    if copied < 0:
        raise _last_error()
    return int(copied)


@functools.cache
def _tee() -> Any:
    import ctypes

    call = _libc().tee
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


class Pipe:
    """A pipe of this process that does not block, and the number of bytes in it."""

    __slots__ = ("count", "read_fd", "size", "write_fd")

    def __init__(self, size: int = PIPE_SIZE, *, least: int = 128 * 1024) -> None:
        """Make the pipe; `size` and `least` as for `set_pipe_size`. Raises OSError."""
        self.read_fd, self.write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.count = 0
        self.size = set_pipe_size(self.write_fd, size, least=least)

    def close(self) -> None:
        """Close both ends."""
        os.close(self.read_fd)
        os.close(self.write_fd)


def thread_remedy() -> str:
    """Return what to raise if no thread can be started, as text.

    pthread_create(3) gives one error for a limit of tasks and for a stack that finds no room.
    """
    tasks = "pids.max of the cgroup (a container's PID limit) or the limit of processes (ulimit -u)"
    for kind, name in (
        (resource.RLIMIT_AS, "address space (ulimit -v)"),
        (resource.RLIMIT_DATA, "data (ulimit -d)"),
    ):
        room, _ = resource.getrlimit(kind)
        if room != resource.RLIM_INFINITY:
            return (
                f"raise the limit of {name}, which is {human_bytes(room)} and must hold a stack "
                f"for each thread, or, if that does not help, {tasks}"
            )
    return f"raise {tasks}"


def write_remedy(error: OSError, otherwise: str) -> str:
    """Return what to do about a file that cannot be written, as text: `otherwise`, or a limit to raise."""
    return "raise the limit of file sizes (ulimit -f)" if error.errno == errno.EFBIG else otherwise


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
