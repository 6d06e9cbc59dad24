"""Helpers for asyncio: task groups, coroutines until the first ends, calls in a thread, and many sockets."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import select
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from streamer.cancellation import set_cancelled

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine
    from types import TracebackType


T = TypeVar("T")


class TaskGroup(asyncio.TaskGroup):  # noqa: TID251 - the one place
    """The TaskGroup of Python 3.13: its owner may go on after its failure, as with another attempt.

    An older one has two faults (CPython issue 116720). If a task fails while the owner waits for the others,
    the request that cancelled the owner stays counted: the next `asyncio.timeout` of Python 3.11.2 then ends
    with CancelledError in place of TimeoutError, and the owner is gone without an error. And an owner that is
    cancelled while a task fails goes on as if it had not been.
    """

    if sys.version_info < (3, 13):

        async def __aexit__(
            self,
            kind: type[BaseException] | None,
            error: BaseException | None,
            traceback: TracebackType | None,
        ) -> None:
            requested = self._requested()
            try:
                await super().__aexit__(kind, error, traceback)
            except BaseExceptionGroup:
                if (owner := asyncio.current_task()) is not None:
                    if self._requested() and not requested:
                        owner.uncancel()
                    if owner.cancelling():  # by another: let its next await raise CancelledError
                        owner.uncancel()
                        owner.cancel()
                raise

        def _requested(self) -> bool:
            """Return whether this group has cancelled its owner."""
            return bool(getattr(self, "_parent_cancel_requested"))  # noqa: B009 - typeshed lacks it


@contextlib.asynccontextmanager
async def time_limit(seconds: float | None) -> AsyncIterator[None]:
    """Raise TimeoutError if the block takes longer; in a task that is being cancelled, too.

    `asyncio.timeout` of Python 3.11.2 raises CancelledError there, and what had to follow is left out.
    """
    owner = asyncio.current_task()
    before = 0 if owner is None else owner.cancelling()
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except asyncio.CancelledError as error:
        if limit.expired() and owner is not None and owner.cancelling() == before:
            raise TimeoutError from error
        raise


@contextlib.asynccontextmanager
async def task_group() -> AsyncIterator[TaskGroup]:
    """Open a TaskGroup. An Exception that the block itself raises is raised outside the exception group.

    It does not cancel the tasks, as it would from a TaskGroup: the block cancels those that do not end by
    themselves, however it ends. Errors of tasks are raised in an exception group.
    """
    failure: Exception | None = None
    async with TaskGroup() as tasks:
        try:
            yield tasks
        except Exception as error:  # noqa: BLE001 - raised below, outside the exception group
            failure = error
    if failure is not None:
        raise failure


async def first_of(*runners: Coroutine[Any, Any, object]) -> None:
    """Run all coroutines until one has ended, and cancel the others. Raises as a TaskGroup does."""
    async with TaskGroup() as group:
        tasks = {group.create_task(runner) for runner in runners}
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()


async def readable(fd: int) -> None:
    """Wait until a descriptor can be read."""
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(fd, arrived.set)
    try:
        await arrived.wait()
    finally:
        loop.remove_reader(fd)


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
    """Run `call` in a worker thread. If cancelled, wait for its end, before the caller cleans up.

    A `call` that asks for it (`streamer.cancellation`) ends early then.
    """
    cancelled, context = threading.Event(), contextvars.copy_context()
    context.run(set_cancelled, cancelled.is_set)
    running = asyncio.get_running_loop().run_in_executor(None, partial(context.run, call, *arguments))
    await finished(running, cancelled.set)
    return running.result()


class WorkerThread:
    """One thread that runs call after call of one task; its owner closes it once.

    `in_thread` runs each call in another thread of its pool, and the processor's cache has no other thread's
    memory. The thread starts with the first call. If the machine grants no further thread, the calls run in
    that pool, whose threads the sidecar starts before it offers a FIFO.
    """

    def __init__(self, name: str) -> None:
        self._executor: ThreadPoolExecutor | None = ThreadPoolExecutor(1, name)
        self._started = False

    async def run(self, call: Callable[..., T], *arguments: object) -> T:
        """Run `call` in the thread. If cancelled, wait for its end, before the caller cleans up."""
        running = self.start(call, *arguments)
        await finished(running)
        return running.result()

    def start(self, call: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        """Begin to run `call` in the thread. Before the caller cleans up, it waits with `finished`."""
        if not self._started and self._executor is not None:
            try:
                self._executor.submit(_nothing)
            except RuntimeError:  # "can't start new thread"; what was submitted is dropped with the executor
                self._executor = None
            self._started = True
        return asyncio.get_running_loop().run_in_executor(self._executor, partial(call, *arguments))

    def close(self) -> None:
        """Let the thread end after the call that it runs. Further calls do nothing."""
        if self._executor is not None:
            self._executor.shutdown(wait=False)


def _nothing() -> None:
    """Start a thread, and nothing else."""


async def finished(running: asyncio.Future[Any], cancel: Callable[[], None] | None = None) -> None:
    """Wait for the end of `running`. If cancelled, still wait, and raise CancelledError then.

    `cancel`: called when this is cancelled, so that `running` ends early.
    """
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:  # not even a second one may free what the call uses
            cancelled = error
            if cancel is not None:
                cancel()
    if cancelled is not None:
        if not running.cancelled():
            running.exception()  # retrieved, so that asyncio does not log it
        raise cancelled


OnReadable = Callable[[], Callable[[], None] | None]
"""Called when a socket is readable; may return what is to be called next."""
AT_ONCE = 8
"""Most callbacks in one turn of the loop; 8 objects of 100 KB are as much as a FIFO accepts in one turn."""


class FairPoller:
    """Calls the callbacks of sockets that are readable, at their end or in error, a few per turn of the loop.

        socket, socket, socket ─→ epoll ─→ event loop ─→ AT_ONCE sockets a turn ─→ the callback of each

    An event loop calls the callbacks of all ready sockets before it runs anything else. With hundreds of
    small responses at once, delivery would wait for all of them: the FIFO would run empty while received
    bytes wait. This poller calls at most `AT_ONCE` callbacks in a turn of the loop; the other sockets stay
    ready (level-triggered; epoll takes them in turn, epoll(7)).

    This poller's epoll reports a socket in error until the error has been read. libuv reports it once and
    stops watching, so on uvloop an error after unread bytes was lost.

    A callback may return another one, which the poller calls next. So the code that reads a response does not
    call the stage that takes its body, and that calls the response again. A callback may close any socket,
    and a new socket may get the old number and an event of the old socket. So an event is a hint only: a
    callback must check its socket. An exception of a callback goes to the loop's exception handler.
    """

    def __init__(self) -> None:
        self._epoll: select.epoll | None = None
        self._on_readable: dict[int, OnReadable] = {}
        self._loop = asyncio.get_running_loop()

    def open(self) -> None:
        """Create the epoll object unless it exists. Raises OSError if no descriptor is left."""
        if self._epoll is None:
            self._epoll = select.epoll()
            self._loop.add_reader(self._epoll.fileno(), self._call_ready, self._epoll)

    def add(self, fd: int, on_readable: OnReadable) -> None:
        """Call `on_readable` whenever the socket is readable, until `remove` or another `add`.

        Call `open` before. Raises OSError if the kernel cannot watch another socket.
        """
        if self._epoll is not None:
            if fd not in self._on_readable:
                self._epoll.register(fd, select.EPOLLIN)
            self._on_readable[fd] = on_readable

    def remove(self, fd: int) -> None:
        """Stop watching a descriptor, which must still be open."""
        if self._on_readable.pop(fd, None) is not None and self._epoll is not None:
            self._epoll.unregister(fd)

    def _call_ready(self, epoll: select.epoll) -> None:
        for fd, _ in epoll.poll(0, AT_ONCE):
            # An earlier callback may have removed the socket.
            if (on_readable := self._on_readable.get(fd)) is None:
                continue
            try:
                if (then := on_readable()) is not None:
                    then()
            except Exception as error:  # noqa: BLE001 - one socket's error must not stop the others
                context = {"message": f"{on_readable!r} failed", "exception": error}
                self._loop.call_exception_handler(context)

    def close(self) -> None:
        """Stop watching all sockets."""
        if self._epoll is not None:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._epoll = None
            self._on_readable.clear()
