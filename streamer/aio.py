"""Helpers for asyncio: run coroutines until the first ends, call functions in a worker thread."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")


async def first_of(*runners: Coroutine[Any, Any, object]) -> None:
    """Run all coroutines until one has ended, and cancel the others. Raises as a TaskGroup does."""
    async with asyncio.TaskGroup() as group:
        tasks = {group.create_task(runner) for runner in runners}
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()


def thread_worked() -> float:
    """Return the seconds that the calling thread has run or waited for a processor, in total.

    If the kernel has no sched-stats, the waiting is not included.
    """
    try:
        with open("/proc/thread-self/schedstat", "rb", buffering=0) as file:
            run, waited, _ = file.read(100).split()
    except (OSError, ValueError):
        return time.thread_time()
    return (int(run) + int(waited)) / 1e9


async def in_thread(call: Callable[..., T], *arguments: object) -> T:
    """Run `call` in a worker thread. If cancelled, wait for its end, before the caller cleans up."""
    running = asyncio.get_running_loop().run_in_executor(None, partial(call, *arguments))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # retrieved, so that asyncio does not log it; the cancellation is raised
        raise
