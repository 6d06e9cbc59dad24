"""Makes a cgroup with a memory limit below the cgroup of this process, whose limits stay in force.

Version 1 charges pages and, once its separate limit is set, sockets' memory apart from them; version 2
charges both to one sum. Neither charges pages that splice(2) moves from a socket into a pipe, because the
network stack allocated them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from streamer.units import MIB

PATIENCE = 5.0
"""Seconds that the kernel may take to remove ended processes from a cgroup."""


class NoCgroup(Exception):
    """No cgroup with a memory limit can be made on this machine; the text names the reason."""


@dataclass(frozen=True, slots=True)
class Cgroup:
    """A cgroup with a memory limit."""

    path: str
    version: int

    @property
    def prefix(self) -> list[str]:
        """Words before a command that runs in the cgroup."""
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', os.path.join(self.path, "cgroup.procs")]

    @property
    def peak(self) -> int:
        """Most bytes charged at a time, without those of sockets if they are charged separately."""
        return _read(self.path, "memory.peak" if self.version == 2 else "memory.max_usage_in_bytes")

    @property
    def sockets(self) -> int | None:
        """Most bytes of sockets charged at a time; None if `peak` contains them."""
        return None if self.version == 2 else _read(self.path, "memory.kmem.tcp.max_usage_in_bytes")

    @property
    def killed(self) -> int:
        """Number of processes that the kernel killed because of the limit."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        with open(os.path.join(self.path, name), encoding="ascii") as file:
            return int(dict(line.split() for line in file)["oom_kill"])


@contextlib.contextmanager
def limited(limit: int) -> Iterator[Cgroup]:
    """Make a cgroup with a limit of `limit` bytes; remove it at the end, when its processes must have ended.

    Raises NoCgroup.
    """
    version, above = _ours()
    path = os.path.join(above, f"penstock-{os.getpid()}-{limit // MIB}")
    with contextlib.suppress(OSError):
        os.rmdir(path)  # left by an earlier process with the same process id
    try:
        os.mkdir(path)
    except OSError as error:
        raise NoCgroup(f"{above}: {error.strerror}") from error
    try:
        try:
            if version == 2:
                _write(path, "memory.max", limit)
                _write(path, "memory.swap.max", 0)
            else:
                _write(path, "memory.limit_in_bytes", limit)
                _write(path, "memory.kmem.tcp.limit_in_bytes", limit)
        except OSError as error:
            raise NoCgroup(f"{path} takes no limit of memory: {error.strerror}") from error
        yield Cgroup(path, version)
    finally:
        _retry_while_busy(lambda: os.rmdir(path))


def _retry_while_busy(step: Callable[[], None]) -> None:
    """Repeat `step` while the kernel refuses it as busy."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            step()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return


def _ours() -> tuple[int, str]:
    """Return the version of the memory controller and the directory in which a cgroup can be made."""
    with open("/proc/self/cgroup", encoding="ascii") as file:
        found = [line.rstrip("\n").split(":", 2) for line in file]
    for _, controllers, path in found:
        if "memory" in controllers.split(","):
            return 1, f"/sys/fs/cgroup/memory{path}"
    for _, controllers, path in found:
        if not controllers and os.path.exists("/sys/fs/cgroup/cgroup.controllers"):
            # A cgroup of version 2 with processes cannot contain cgroups with limits; its parent can.
            return 2, os.path.dirname(
                f"/sys/fs/cgroup{path}".rstrip("/")
            ) if path != "/" else "/sys/fs/cgroup"
    raise NoCgroup("no memory controller is mounted at /sys/fs/cgroup")


def _write(path: str, name: str, value: int) -> None:
    with open(os.path.join(path, name), "w", encoding="ascii") as file:
        file.write(str(value))


def _read(path: str, name: str) -> int:
    with open(os.path.join(path, name), encoding="ascii") as file:
        return int(file.read())
