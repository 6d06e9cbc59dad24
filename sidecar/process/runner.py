"""Runs a command on uvloop, with every thread that its event loop will need started beforehand.

A thread that cannot be started (pids.max of a cgroup, RLIMIT_NPROC) is worst in mid-stream: libuv ends the
process by abort(3), and an executor loses the work. So `run` starts the threads first: those of the default
executor (planning, inflating, files) and libuv's own (name resolution). Where the machine grants fewer than
wanted, the executor is smaller; where it grants too few to work at all, `run` raises SinkError, and nothing
has been offered yet. The threads that wait for readers are their owners' (`streamer.sink.write_ends`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import uvloop

from streamer.errors import PenstockError, SinkError

if TYPE_CHECKING:
    from collections.abc import Coroutine

MOST = 32
"""Threads of the executor at the most; else four more than processors, as Python's own default."""
LIBUV = 4
"""libuv's threads at the most, its own default."""
_WANTS = {
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN),
    *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES, errno.EPERM, errno.EROFS),
}
"""Errors of system calls that say what this machine lacks or forbids."""
_LIBUV_SIZE = "UV_THREADPOOL_SIZE"


class _Loop(uvloop.Loop):
    """uvloop's, but it starts no thread at its end to wait for those of the executor."""

    def set_default_executor(self, executor: Any) -> None:
        self._executor = executor
        super().set_default_executor(executor)

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ASYNC109, ARG002
        """Wait here for what the threads are doing, however long: nothing else runs any more."""
        if executor := getattr(self, "_executor", None):
            executor.shutdown(wait=True)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run `work` to its end. Raises a bare PenstockError where task groups would wrap it.

    What the operating system refuses for want of something, and nobody could wait for, is a SinkError; so is
    a module that cannot be loaded, because Python hides the failed system call behind an ImportError.
    """
    try:
        with asyncio.Runner(loop_factory=_Loop) as runner:
            try:
                runner.get_loop().set_default_executor(_threads(runner))
            except BaseException:
                work.close()
                raise
            return runner.run(work)
    except BaseExceptionGroup as group:
        if ours := _first(group) or _refusal(group):
            raise ours from group
        raise
    except (OSError, RuntimeError, ImportError) as error:
        if (ours := _refusal(error)) is not None:
            raise ours from error
        raise


def _refusal(error: BaseException | None) -> SinkError | None:
    """What a system call was refused for, if that is behind an error: an OSError in it or before it."""
    if error is None:
        return None
    if isinstance(error, OSError) and error.errno in _WANTS:
        return SinkError(
            f"the operating system refused what the sidecar needs ({error.strerror}): see to the limits of "
            "open files (ulimit -n), processes and memory, and to the disk, and start it again"
        )
    if isinstance(error, ImportError):
        return SinkError(
            f"cannot load a module ({error}): see to the limits of open files (ulimit -n) and memory, and to "
            "the disk, and start the sidecar again; if that does not help, install penstock-sidecar again"
        )
    if isinstance(error, BaseExceptionGroup):
        refusals = [_refusal(each) for each in error.exceptions]
        return refusals[0] if all(refusals) else None
    return _refusal(error.__cause__ or error.__context__)


def _first(group: BaseExceptionGroup[BaseException]) -> PenstockError | None:
    """The first error of ours in a group, if nothing else is in it."""
    found: PenstockError | None = None
    for error in group.exceptions:
        ours = _first(error) if isinstance(error, BaseExceptionGroup) else error
        if not isinstance(ours, PenstockError):
            return None
        found = found or ours
    return found


def _threads(runner: asyncio.Runner) -> ThreadPoolExecutor:
    """Start libuv's threads and an executor's; return the executor. Raises SinkError for too few."""
    wanted = min(MOST, (os.cpu_count() or 1) + 4)
    granted = grantable(wanted + LIBUV)
    if granted < 2:
        raise _too_few(granted, "2 at least and one for each channel")
    resolving = min(LIBUV, granted // 2)
    _start_libuv(runner, resolving)
    executor = ThreadPoolExecutor(min(wanted, granted - resolving), thread_name_prefix="asyncio")
    start_all(executor, min(wanted, granted - resolving))
    return executor


def _too_few(granted: int, wanted: str) -> SinkError:
    return SinkError(
        f"this machine lets the process start {granted} more threads, and it needs {wanted}: raise pids.max "
        "of the cgroup (a container's PID limit) or the limit of processes (ulimit -u)"
    )


def grantable(most: int) -> int:
    """How many threads can be started now, `most` at the most: by starting them."""
    enough = threading.Event()
    started: list[threading.Thread] = []
    try:
        for number in range(most):
            thread = threading.Thread(target=enough.wait, name=f"probe {number}")
            thread.start()
            started.append(thread)
    except RuntimeError:
        pass  # "can't start new thread": no more are granted
    finally:
        enough.set()
        for thread in started:
            thread.join()
    return len(started)


def start_all(executor: ThreadPoolExecutor, count: int) -> None:
    """Have all threads of `executor` start now: it starts one for each piece of work while none is idle.

    Raises SinkError if one is refused.
    """
    together = threading.Barrier(count + 1)
    started = 0
    try:
        while started < count:
            executor.submit(together.wait)
            started += 1
    except RuntimeError as error:
        together.abort()
        executor.shutdown(wait=False, cancel_futures=True)
        raise _too_few(started, f"{count} for its event loop") from error
    together.wait()


def _start_libuv(runner: asyncio.Runner, count: int) -> None:
    """Have libuv start its threads, so many unless the user has said how many."""
    own = _LIBUV_SIZE not in os.environ
    if own:
        os.putenv(_LIBUV_SIZE, str(count))  # not os.environ, which a trainer would inherit
    try:
        runner.run(_use_libuv())
    finally:
        if own:
            os.unsetenv(_LIBUV_SIZE)


async def _use_libuv() -> None:
    """Give libuv's threads their first work, for which libuv starts all of them. Looks no name up."""
    numeric = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
    with contextlib.suppress(OSError):  # the threads have started all the same
        await asyncio.get_running_loop().getnameinfo(("127.0.0.1", 1), numeric)
