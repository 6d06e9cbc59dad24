"""A memory limit that the kernel holds: a cgroup of our own, below the one that we are in.

Below it, so that whatever bounds us goes on doing so. Version 1 charges pages and, once it has a limit of its
own, sockets' memory apart from them; version 2 charges both to one sum. Neither charges pages that splice(2)
moves from a socket into a pipe: they were the network's when they came.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from streamer.units import MIB

PATIENCE = 5.0
"""Seconds that the kernel may take to let go of those that were in a cgroup."""


class NoCgroup(Exception):
    """No cgroup with a limit of memory can be made here; the text says why."""


@dataclass(frozen=True, slots=True)
class Cgroup:
    """A cgroup with a limit of memory."""

    path: str
    version: int

    def join(self) -> None:
        """Put this process into it: what a child does before it becomes another program."""
        _write(self.path, "cgroup.procs", os.getpid())

    @property
    def peak(self) -> int:
        """Bytes that were charged at the most, those of sockets left out where they are apart."""
        return _read(self.path, "memory.peak" if self.version == 2 else "memory.max_usage_in_bytes")

    @property
    def sockets(self) -> int | None:
        """Of sockets, bytes that were charged at the most; None where they are in `peak`."""
        return None if self.version == 2 else _read(self.path, "memory.kmem.tcp.max_usage_in_bytes")

    @property
    def killed(self) -> int:
        """Processes that the kernel killed because of the limit."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        with open(os.path.join(self.path, name), encoding="ascii") as file:
            return int(dict(line.split() for line in file)["oom_kill"])


@contextlib.contextmanager
def limited(limit: int) -> Iterator[Cgroup]:
    """A cgroup that may have `limit` bytes, removed at the end; its processes must be gone by then.

    Raises NoCgroup.
    """
    version, above = _ours()
    path = os.path.join(above, f"penstock-{os.getpid()}-{limit // MIB}")
    with contextlib.suppress(OSError):
        os.rmdir(path)  # of an earlier process of our number
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
    """Repeat what the kernel refuses while it still clears up."""
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
    """The version of the memory controller and the directory of our cgroup, as far as it may have others."""
    with open("/proc/self/cgroup", encoding="ascii") as file:
        found = [line.rstrip("\n").split(":", 2) for line in file]
    for _, controllers, path in found:
        if "memory" in controllers.split(","):
            return 1, f"/sys/fs/cgroup/memory{path}"
    for _, controllers, path in found:
        if not controllers and os.path.exists("/sys/fs/cgroup/cgroup.controllers"):
            # A cgroup of version 2 that has processes cannot have others with limits; the one above it can.
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
