"""Checks of `penstock doctor` on this machine: memory, pipes, files, indexes, steps, directory, port, disk.

Each check is a function that returns one `Finding` and leaves the machine as it was.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sidecar.job import rehearsal
from sidecar.process.exits import exit_code
from sidecar.process.resources import memory_limit
from sidecar.records.rank_advice import unequal_steps
from streamer.errors import PenstockError, SinkError
from streamer.linux import PIPE_SIZE, largest_pipe, pipe_allowance
from streamer.units import human_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sidecar.config.hosts import Hosts
    from sidecar.config.job import Job
    from sidecar.config.request import ChannelConfig
    from sidecar.job.layout import Layout
    from streamer.plan import Plan

State = Literal["ok", "warning", "failure"]
ENOUGH_FILES = 4096
"""Open files that the requests, their pipes and the FIFOs of an ordinary job need."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check. `fix`: what to do; empty if nothing."""

    check: str
    state: State
    text: str
    fix: str = ""
    code: int = 0
    """Exit code of a failure."""


def memory(job: Job) -> Finding:
    """Compare what the job may take with the limit of cgroup and machine, which counts pipes and sockets."""
    try:
        text = rehearsal.memory(job, job.footprint())
    except SinkError as error:
        return refused(
            "memory", error, "Raise the container's memory limit, or lower MemoryBudget or RequestsInFlight."
        )
    if job.footprint(keeper=True).needed(job.budget) > memory_limit():
        fix = "A keeper does not fit too: raise the container's limit, or lower MemoryBudget."
        return Finding("memory", "warning", text, fix)
    return Finding("memory", "ok", text)


def pipes(job: Job) -> Finding:
    """Compare the kernel's pipe limits of this user with the FIFOs of the job (pipe(7))."""
    fifos = sum(len(job.fifos(channel)) for channel in job.channels("Pipe"))
    if not fifos:
        return Finding("pipes", "ok", "the job has no FIFOs: every channel is in File mode")
    allowance = pipe_allowance()
    largest = largest_pipe()
    in_all = "no limit" if allowance is None else human_bytes(allowance)
    text = (
        f"pipes of up to {human_bytes(largest)}, {in_all} in all, for {fifos} FIFO{'' if fifos == 1 else 's'}"
    )
    if largest < PIPE_SIZE:
        return Finding("pipes", "warning", text, "Set fs.pipe-max-size to 1048576: smaller FIFOs cost CPU.")
    if allowance is not None and allowance < 4 * fifos * PIPE_SIZE:
        fix = f"Set fs.pipe-user-pages-soft to {4 * fifos * PIPE_SIZE // os.sysconf('SC_PAGE_SIZE')} or more."
        return Finding("pipes", "warning", text, fix)
    return Finding("pipes", "ok", text)


def open_files(job: Job) -> Finding:
    """Check the hard limit of open files. The sidecar raises the soft limit itself."""
    try:
        rehearsal.files(job)
    except SinkError as error:
        return refused("open files", error, "Raise the hard limit (ulimit -Hn) to the number in the text.")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = "no limit" if hard == resource.RLIM_INFINITY else f"at most {hard}"
    if hard != resource.RLIM_INFINITY and hard < ENOUGH_FILES:
        return Finding("open files", "warning", text, f"Raise the hard limit (ulimit -Hn) to {ENOUGH_FILES}.")
    return Finding("open files", "ok", text)


def fifo_directory(job: Job, layout: Layout) -> Finding:
    """Try to make, lock and write the directory tree, as `run` will."""
    exists = os.path.isdir(layout.data)
    try:
        rehearsal.directory(job, layout)
    except SinkError as error:
        fix = "Set Penstock.BaseDirectory to a directory that this user may write, on a local file system."
        return refused("FIFO directory", error, fix)
    if exposed := layout.exposure():
        fix = "Own the directory and let nobody else write it, unless every user of this machine is trusted."
        return Finding("FIFO directory", "warning", "; ".join(exposed), fix)
    return Finding("FIFO directory", "ok", layout.data if exists else f"{layout.data}, to be made")


async def admin_port(job: Job, *, any_free: bool) -> Finding:
    """Check that the admin server can listen. `any_free`: on any free port if the job names none."""
    try:
        return Finding("admin port", "ok", await rehearsal.port(job, 0 if any_free else rehearsal.ADMIN_PORT))
    except PenstockError as error:
        fix = (
            "Stop what listens there, or set Admin.Port; `penstock exec` takes any free port if it is unset."
        )
        advice = "Write a token into the file (openssl rand -hex 16), or correct Admin.TokenFile."
        return refused("admin port", error, fix if isinstance(error, SinkError) else advice)


def steps(channel: ChannelConfig, hosts: Hosts) -> Finding | None:
    """Say that the ranks of a channel have unequal numbers of steps, if they have."""
    unequal = unequal_steps(channel, hosts=len(hosts.names))
    return None if unequal is None else Finding(f"steps {channel.channel_name}", "ok", *unequal)


def disk(layout: Layout, plans: Mapping[str, Plan]) -> Finding:
    """Check that the File channels of these plans fit on the disk."""
    try:
        return Finding("disk", "ok", rehearsal.disk(layout, plans))
    except SinkError as error:
        return refused("disk", error, "Free space there, or put Penstock.BaseDirectory on a larger disk.")


def refused(check: str, error: PenstockError, fix: str) -> Finding:
    """Return a failure for an error that would end `run` too."""
    return Finding(check, "failure", str(error), fix, code=exit_code(error))
