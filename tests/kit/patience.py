"""Deadlines that count progress: a busy machine cannot shorten them, and a hang still ends.

Wall time says little about processes that share the machine with others. A deadline therefore ends a wait
only if the test's processes have made no progress for that long. Progress is CPU time of this process and
its descendants, at least `LEAST_SHARE` of the wall time. A test that only polls uses less; a program that
loads its modules uses more, even beside several busy programs. A test that is busy and never ends is ended
after `MOST_PERIODS` deadlines.

    Patience(seconds).exhausted()   for loops that look again and again
    patiently(seconds)              for a block of coroutine code
    the timer of pytest-timeout     for every test, set by tests/conftest.py

A test that waits for another process needs no timeout of its own: the test's deadline ends the wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator

LEAST_SHARE = 0.02
"""Share of one core: the CPU time in a period that counts as progress."""
MOST_PERIODS = 10

_TICK = os.sysconf("SC_CLK_TCK")


class Patience:
    """A deadline of `seconds` without progress of a process; it begins when it is made."""

    def __init__(self, seconds: float, pid: int | None = None) -> None:
        """`pid`: None for this process."""
        self.seconds = seconds
        self._pid = pid
        self._periods = 0
        self._ended = False
        self._began = time.monotonic()
        self._used = sum(os.times()[:4]) if pid is None else cpu_seconds(pid)

    def exhausted(self) -> bool:
        """Whether a whole period has passed in which nothing progressed; from then on always.

        Cheap before the period's end.
        """
        now = time.monotonic()
        if self._ended or now - self._began < self.seconds:
            return self._ended
        used = cpu_seconds(self._pid)
        idle = used - self._used < LEAST_SHARE * (now - self._began)
        self._periods += 1
        self._ended = idle or self._periods == MOST_PERIODS
        self._began, self._used = now, used
        return self._ended


def cpu_seconds(pid: int | None = None) -> float:
    """CPU seconds of a process (this one) and its descendants; also of processes that it has waited for."""
    children: dict[int, list[int]] = defaultdict(list)
    used: dict[int, float] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", encoding="latin-1") as file:
            fields = file.read().rpartition(")")[2].split()  # from the third on; see proc_pid_stat(5)
            children[int(fields[1])].append(int(name))
            used[int(name)] = sum(map(int, fields[11:15])) / _TICK
    total, found = 0.0, [pid or os.getpid()]
    while found:
        each = found.pop()
        total += used.get(each, 0.0)
        found += children[each]
    return total


@contextlib.asynccontextmanager
async def progress_timeout(seconds: float) -> AsyncIterator[None]:
    """Raise TimeoutError if the block runs out of patience."""
    loop, patience = asyncio.get_running_loop(), Patience(seconds)
    timer: asyncio.TimerHandle
    async with asyncio.timeout(None) as scope:

        def look() -> None:
            nonlocal timer
            if patience.exhausted():
                scope.reschedule(loop.time())
            else:
                timer = loop.call_later(seconds, look)

        timer = loop.call_later(seconds, look)
        try:
            yield
        finally:
            timer.cancel()
