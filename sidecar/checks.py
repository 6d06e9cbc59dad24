"""What `penstock doctor` looks at on this machine: memory, pipes, open files, the FIFO directory.

A check is a plain function that answers one `Finding`. None leaves anything behind.
"""

from __future__ import annotations

import contextlib
import os
import resource
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sidecar.exits import Exit
from sidecar.memory import memory_limit
from streamer.relay.pipes import PIPE_SIZE, pipe_allowance
from streamer.units import MIB, human_bytes

if TYPE_CHECKING:
    from sidecar.config import Job
    from sidecar.runtime import Layout

State = Literal["ok", "warning", "failure"]
ENOUGH_FILES = 4096
"""Open files that lanes, their pipes and FIFOs of an ordinary job need."""
BESIDE_BUDGET = 200 * MIB
"""Bytes that the process takes besides the budget, with room to spare."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found; `fix` is what to do, empty if nothing."""

    check: str
    state: State
    text: str
    fix: str = ""
    code: int = 0
    """The exit code that a failure asks for."""


def memory(job: Job) -> Finding:
    """The budget against what cgroup and machine allow; pipes and sockets are charged to it too."""
    limit, budget = memory_limit(), job.budget
    text = f"{human_bytes(budget)} budget of {human_bytes(limit)} that this process may use"
    if budget + BESIDE_BUDGET > limit:
        return Finding(
            "memory",
            "failure",
            text,
            "Raise the container's memory limit, or lower MemoryBudget.",
            code=Exit.LOCAL,
        )
    if 2 * budget + BESIDE_BUDGET > limit:
        fix = "Socket buffers may take as much again: lower MemoryBudget, or raise the container's limit."
        return Finding("memory", "warning", text, fix)
    return Finding("memory", "ok", text)


def pipes(job: Job) -> Finding:
    """What the kernel grants this user (pipe(7))."""
    fifos = max(1, sum(len(job.fifos(channel)) for channel in job.channels("Pipe")))
    allowance = pipe_allowance()
    with open("/proc/sys/fs/pipe-max-size", encoding="ascii") as file:
        largest = int(file.read())
    said = "no limit" if allowance is None else human_bytes(allowance)
    text = f"pipes of up to {human_bytes(largest)}, {said} in all, for {fifos} FIFOs"
    if largest < PIPE_SIZE:
        return Finding("pipes", "warning", text, "Set fs.pipe-max-size to 1048576: smaller FIFOs cost CPU.")
    if allowance is not None and allowance < 4 * fifos * PIPE_SIZE:
        fix = f"Set fs.pipe-user-pages-soft to {4 * fifos * PIPE_SIZE // os.sysconf('SC_PAGE_SIZE')} or more."
        return Finding("pipes", "warning", text, fix)
    return Finding("pipes", "ok", text)


def open_files() -> Finding:
    """The hard limit; the sidecar raises the soft one by itself."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = "no limit" if hard == resource.RLIM_INFINITY else f"at most {hard}"
    if hard != resource.RLIM_INFINITY and hard < ENOUGH_FILES:
        return Finding("open files", "warning", text, f"Raise the hard limit (ulimit -Hn) to {ENOUGH_FILES}.")
    return Finding("open files", "ok", text)


def fifo_directory(layout: Layout) -> Finding:
    """Whether a FIFO can be made where they will be, or in the nearest directory that is there."""
    place = layout.data
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    path = os.path.join(place, f".penstock-doctor-{os.getpid()}")
    fix = "Set Penstock.BaseDirectory to a directory that this user may write, on a local file system."
    try:
        os.mkfifo(path, 0o600)
    except OSError as error:
        why = f"{place}: {error.strerror}"
        return Finding("FIFO directory", "failure", why, fix, code=Exit.LOCAL)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
    text = layout.data if place == layout.data else f"{layout.data}, to be made in {place}"
    if exposed := layout.exposure():
        fix = "Own the directory and let nobody else write it, unless every user of this machine is trusted."
        return Finding("FIFO directory", "warning", "; ".join(exposed), fix)
    return Finding("FIFO directory", "ok", text)
