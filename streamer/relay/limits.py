"""Limits of requests and pipes, which share the process's open files."""

from __future__ import annotations

import resource
from dataclasses import dataclass

from streamer.aio import thread_worked
from streamer.errors import SinkError
from streamer.linux import PIPE_SIZE, pipe_allowance
from streamer.schedule.concurrency import LARGEST_PART, MOST_REQUESTS, WORTH, ConcurrencyController
from streamer.units import counted

OWN_FILES, CHANNEL_FILES = 48, 8
"""File descriptors set aside for the process, and for each channel. Pipes and connections for parts get the
rest: a channel without a FIFO or trailer stops, but one with fewer connections is only slower."""
ENOUGH_FILES = 65_536
"""Soft limit of open files that the process sets, up to the hard limit; the usual soft limit is 1,024."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits set by the job file and by the limit of open files."""

    requests_in_flight: int | None
    part_size: int | None
    fit: int
    """Requests that the limit of open files allows; as many files are left for pipes."""

    @property
    def most(self) -> int:
        return min(self.requests_in_flight or MOST_REQUESTS, self.fit)

    @property
    def bounded(self) -> str:
        """Value of `Transport.few_files`."""
        if self.most == (self.requests_in_flight or MOST_REQUESTS):
            return ""
        return (
            f"at most {counted(self.most, 'connection')} fit into the limit of open files; raise `ulimit -n`"
        )

    def concurrency(
        self,
        requests_in_flight: int,
        part_size: int,
        *,
        largest_part: int = LARGEST_PART,
        worth: float = WORTH,
    ) -> ConcurrencyController:
        """Return the controller; the arguments are start values, which the job file's values replace."""
        return ConcurrencyController(
            min(self.requests_in_flight or requests_in_flight, self.most),
            self.part_size or part_size,
            fixed_limit=self.requests_in_flight is not None,
            fixed_part=self.part_size is not None,
            most=min(self.most, MOST_REQUESTS),
            largest_part=largest_part,
            worth=worth,
            worked=thread_worked,
        )


def open_files(channels: int) -> int:
    """Raise the soft limit of open files; return how many requests and pipes may use.

    Raises SinkError if they are fewer than two per channel.
    """
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < ENOUGH_FILES:
        files = ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_FILES)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
        except (OSError, ValueError):  # a seccomp profile may forbid this: use the limit as it is
            files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    left = files - OWN_FILES - channels * CHANNEL_FILES
    if left < 2 * channels:
        least = OWN_FILES + channels * (CHANNEL_FILES + 2)
        raise SinkError(
            f"{files} open files are too few for {counted(channels, 'FIFO')}; raise `ulimit -n` to {least}"
        )
    return left


def pipe_limits(channels: int, files: int) -> tuple[int, int]:
    """Return the bytes of pipes that the user may have, and how many pipes `files` allows (two files each).

    FIFOs take pipe pages too; a channel may briefly have two FIFOs.
    """
    most = files // 2
    allowance = pipe_allowance()
    by_files = most * PIPE_SIZE
    return by_files if allowance is None else min(by_files, allowance - 2 * channels * PIPE_SIZE), most
