"""System calls of another process, stopped one by one: seccomp's user notification (seccomp_unotify(2)).

Before a process begins its work it installs a filter (`install`). The filter stops every call of the chosen
numbers until the holder of its descriptor (`Listener`) lets the call go on, answers it with an errno in the
kernel's place, or kills the process. All other calls run at full speed. Threads and children of the process
are under the filter, too. Nothing is traced, so signals and waits are untouched.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct
from dataclasses import dataclass

from tests.machines.crash.calls import NUMBERS, UNCOUNTED

CONTROL_FD = 1000
"""The socket through which the filter's descriptor leaves the process; sendmsg(2) on it is never stopped."""
_AUDIT_ARCH_X86_64 = 0xC000003E
_ALLOW, _NOTIFY = 0x7FFF0000, 0x7FC00000
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ARCH_AT, _NUMBER_AT, _FIRST_ARGUMENT_AT = 4, 0, 16
_SECCOMP, _SET_MODE_FILTER, _NEW_LISTENER, _WAIT_KILLABLE = 317, 1, 1 << 3, 1 << 5
_PR_SET_NO_NEW_PRIVS = 38
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_CONTINUE = 1
_BY_OPERATION = {
    NUMBERS["epoll_ctl"]: {1: "add"},
    NUMBERS["fcntl"]: {0: "dup", 1030: "dup", 1031: "size of a pipe"},
}
_NOTIFICATION = struct.Struct("=QIIiIQ6Q")
_RESPONSE = struct.Struct("=QqiI")


def _program(calls: list[int] | None) -> list[tuple[int, int, int, int]]:
    """Notify of these calls, or of all but the uncounted ones; of what comes from another ABI, none."""
    chosen = [NUMBERS[name] for name in UNCOUNTED] if calls is None else calls
    of_chosen, of_others = (_ALLOW, _NOTIFY) if calls is None else (_NOTIFY, _ALLOW)
    sendmsg = NUMBERS["sendmsg"]
    of_sendmsg = of_chosen if sendmsg in chosen else of_others
    count = len(chosen)
    return [
        (_LOAD, 0, 0, _ARCH_AT),
        (_JUMP_EQUAL, 1, 0, _AUDIT_ARCH_X86_64),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_JUMP_EQUAL, 0, 4, sendmsg),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        (_JUMP_EQUAL, 0, 1, CONTROL_FD),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, of_sendmsg),
        *((_JUMP_EQUAL, count - index, 0, number) for index, number in enumerate(chosen)),
        (_RETURN, 0, 0, of_others),
        (_RETURN, 0, 0, of_chosen),
    ]


def install(calls: list[str] | None) -> None:
    """Put this process under a filter, and send its descriptor through `CONTROL_FD`. Raises OSError.

    `calls`: names of those to be notified of; None for all that count.
    """
    numbers = None if calls is None else [NUMBERS[name] for name in calls]
    program = b"".join(struct.pack("=HBBI", *each) for each in _program(numbers))
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    control = socket.socket(fileno=CONTROL_FD)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    listener = libc.syscall(_SECCOMP, _SET_MODE_FILTER, _NEW_LISTENER | _WAIT_KILLABLE, header)
    if listener < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    socket.send_fds(control, [b"filter"], [listener])
    control.detach()
    os.close(listener)


@dataclass(frozen=True, slots=True)
class Stopped:
    """A call that waits for an answer."""

    id: int
    thread: int
    number: int
    arguments: tuple[int, ...]


class Listener:
    """Holds a filter's descriptor; close it to let all calls fail with ENOSYS."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def receive(self) -> Stopped | None:
        """The next call that waits; None if its process has died meanwhile."""
        buffer = bytearray(_NOTIFICATION.size)
        try:
            fcntl.ioctl(self.fd, _RECEIVE, buffer)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EINTR):
                return None
            raise
        number_id, thread, _, number, _, _, *arguments = _NOTIFICATION.unpack(buffer)
        return Stopped(number_id, thread, number, tuple(arguments))

    def answer(self, stopped: Stopped, error: int = 0) -> None:
        """Let the call go on, or fail with `error`."""
        flags = 0 if error else _CONTINUE
        try:
            fcntl.ioctl(self.fd, _SEND, _RESPONSE.pack(stopped.id, 0, -error, flags))
        except OSError as failure:
            if failure.errno not in (errno.ENOENT, errno.EINPROGRESS):  # a signal or the end took it away
                raise

    def close(self) -> None:
        os.close(self.fd)


def group_of(thread: int) -> int:
    """The process that a thread belongs to; 0 if it is gone."""
    try:
        with open(f"/proc/{thread}/status", encoding="ascii") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("Tgid:"))
    except (OSError, StopIteration):
        return 0


def kind_of(stopped: Stopped) -> str:
    """What decides how a call may fail: its operation, or what its first argument is a descriptor of.

    That is a socket (of a network), unix (another socket), pipe, file or other.
    """
    if stopped.number == NUMBERS["prlimit64"]:
        return "set" if stopped.arguments[2] else "get"
    if stopped.number in _BY_OPERATION:
        return _BY_OPERATION[stopped.number].get(stopped.arguments[1] & 0xFFFFFFFF, "other")
    return _descriptor(stopped.thread, stopped.arguments[0] & 0xFFFFFFFF)


def _descriptor(thread: int, fd: int) -> str:
    try:
        target = os.readlink(f"/proc/{thread}/fd/{fd}")
    except OSError:
        return "other"
    if target.startswith("socket:"):
        return _family(thread, fd)
    if target.startswith("pipe:"):
        return "pipe"
    if target.startswith("anon_inode:"):
        return "other"
    if target.rpartition("/")[2].rpartition("_")[2].isdigit():
        return "pipe"  # a FIFO, by its name
    return "file" if target.startswith("/") else "other"


def _family(thread: int, fd: int) -> str:
    """Which kind of socket it is; `socket` if this process may not look."""
    try:
        pidfd = os.pidfd_open(group_of(thread))
    except OSError:
        return "socket"
    copy = ctypes.CDLL(None).syscall(NUMBERS["pidfd_getfd"], pidfd, fd, 0)
    os.close(pidfd)
    if copy < 0:
        return "socket"
    with socket.socket(fileno=copy) as ours:
        return "unix" if ours.family == socket.AF_UNIX else "socket"
