"""Runs a command on uvloop, after it has started every thread that the event loop will need.

The machine may refuse a new thread (pids.max of a cgroup, RLIMIT_NPROC, RLIMIT_AS). In mid-stream that would
be worst: libuv ends the process by abort(3), and an executor loses the work. So `run` starts the threads
first: those of the default executor (planning, inflating, files) and of libuv (name resolution). If the
machine grants fewer threads than wanted, the executor is smaller. If it grants too few, `run` raises
SinkError before any FIFO is offered. `streamer.sink.write_ends` starts the threads that wait for readers.
"""

from __future__ import annotations

import asyncio
import contextlib
import encodings.idna  # noqa: F401 - of names; uvloop reports a failed import as an unknown encoding
import os
import socket
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import uvloop

from sidecar.process.exits import local_error
from streamer.errors import PenstockError, SinkError
from streamer.linux import thread_remedy
from streamer.units import counted

if TYPE_CHECKING:
    from collections.abc import Coroutine

MOST = 32
"""Most threads of the executor; below that, the number of processors and four more, as Python's default."""
LIBUV = 4
"""Most threads of libuv: libuv's own default."""
_LIBUV_SIZE = "UV_THREADPOOL_SIZE"


class _Loop(uvloop.Loop):
    """uvloop's loop without the thread that it starts at its end to wait for the executor.

    Also without the tracebacks of TLS handshakes for which no request waits any more.
    """

    def set_default_executor(self, executor: Any) -> None:
        self._executor = executor
        super().set_default_executor(executor)

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ASYNC109, ARG002
        """Wait until the executor's threads have finished. Blocks the idle loop."""
        if executor := getattr(self, "_executor", None):
            executor.shutdown(wait=True)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Report an error of a callback, unless it is one of a handshake whose request has ended.

        uvloop sends the last bytes of a handshake one turn of the loop later. If the connection is closed by
        then, it calls this method with a RuntimeError. If the request was cancelled, nobody retrieves the
        handshake's error.
        """
        if not _is_late_handshake(context):
            super().call_exception_handler(context)


def _is_late_handshake(context: dict[str, Any]) -> bool:
    """Return whether a handshake failed that was abandoned, or that wrote to its own closed connection."""
    if context.get("message") == "Future exception was never retrieved":
        return isinstance(context.get("exception"), ssl.SSLError | ConnectionError)
    return (
        context.get("message") == "Fatal error on SSL protocol"
        and isinstance(context.get("exception"), RuntimeError)
        and repr(context.get("transport")) in str(context["exception"])
    )


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run `work` to its end and return its result. Unwraps a PenstockError from exception groups.

    Raises SinkError for a system call that failed because of the machine or its limits (`local_error`).
    """
    try:
        with asyncio.Runner(loop_factory=_Loop) as runner:
            try:
                runner.get_loop().set_default_executor(_start_threads(runner))
            except BaseException:
                work.close()
                raise
            return runner.run(work)
    except BaseExceptionGroup as group:
        if explained := _first_penstock_error(group) or local_error(group):
            raise explained from group
        raise
    except (OSError, RuntimeError, ImportError, MemoryError) as error:
        if (explained := local_error(error)) is not None:
            raise explained from error
        raise


def _first_penstock_error(group: BaseExceptionGroup[BaseException]) -> PenstockError | None:
    """Return the first PenstockError of a group, None if the group has any other error."""
    first: PenstockError | None = None
    for member in group.exceptions:
        error = _first_penstock_error(member) if isinstance(member, BaseExceptionGroup) else member
        if not isinstance(error, PenstockError):
            return None
        first = first or error
    return first


def _start_threads(runner: asyncio.Runner) -> ThreadPoolExecutor:
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
        f"this machine allows the sidecar {counted(granted, 'more thread')}, and it needs {wanted}: "
        f"{thread_remedy()}"
    )


def grantable(most: int) -> int:
    """Start and end up to `most` threads; return how many could be started."""
    end = threading.Event()
    started: list[threading.Thread] = []
    try:
        for number in range(most):
            thread = threading.Thread(target=end.wait, name=f"probe {number}")
            thread.start()
            started.append(thread)
    except RuntimeError:
        pass  # "can't start new thread": the machine grants no more
    finally:
        end.set()
        for thread in started:
            thread.join()
    return len(started)


def start_all(executor: ThreadPoolExecutor, count: int) -> None:
    """Start all threads of `executor`. Raises SinkError if one cannot be started.

    An executor starts a thread for each piece of work while no thread is idle, and a barrier keeps all busy.
    """
    barrier = threading.Barrier(count + 1)
    started = 0
    try:
        while started < count:
            executor.submit(barrier.wait)
            started += 1
    except RuntimeError as error:
        barrier.abort()
        executor.shutdown(wait=False, cancel_futures=True)
        raise _too_few(started, f"{count} for its event loop") from error
    barrier.wait()


def _start_libuv(runner: asyncio.Runner, count: int) -> None:
    """Start libuv's threads: `count`, or the number that the user has set in UV_THREADPOOL_SIZE."""
    unset = _LIBUV_SIZE not in os.environ
    if unset:
        os.putenv(_LIBUV_SIZE, str(count))  # not os.environ, which a trainer would inherit
    try:
        runner.run(_use_libuv())
    finally:
        if unset:
            os.unsetenv(_LIBUV_SIZE)


async def _use_libuv() -> None:
    """Submit work to libuv's threads, so that libuv starts all of them. Resolves no name."""
    numeric = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
    with contextlib.suppress(OSError):  # the threads have started nevertheless
        await asyncio.get_running_loop().getnameinfo(("127.0.0.1", 1), numeric)
