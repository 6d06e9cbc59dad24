"""Reads files that a user names, in a thread that nothing waits for longer than a limit.

open(2) of a FIFO blocks until a process opens it for writing, and any call blocks on a mount whose server
does not respond. Neither can be interrupted from within. So a daemon thread makes these calls: the caller
gives up after a while with an error that names the file, and the interpreter ends without the thread.

A file that is read again later must not be a FIFO, because its bytes can be read once only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
PATIENCE = 30.0
"""Seconds within which a file must be read."""
_NULL = os.makedev(1, 3)
"""Device number of /dev/null (null(4))."""


class OutsideCall(Generic[T]):
    """A call that may never return, in a daemon thread."""

    def __init__(self, call: Callable[[], T]) -> None:
        """Start the call. If the machine grants no thread, make it here."""
        self._call = call
        self._listeners: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._value: list[T] = []
        self._error: BaseException | None = None
        self.ended = False
        """Whether the call has returned or raised."""
        self._thread = threading.Thread(target=self._run, name="outside call", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # "can't start new thread"
            self._run()

    def __repr__(self) -> str:
        return f"<OutsideCall {'ended' if self.ended else 'running'}>"

    def _run(self) -> None:
        try:
            self._value.append(self._call())
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            self._error = error
        with self._lock:
            self.ended = True
        for listener in self._listeners:
            listener()

    def when_ended(self, listener: Callable[[], None]) -> None:
        """Call `listener` when the call has ended, in its thread; at once if it has ended already."""
        with self._lock:
            if not self.ended:
                self._listeners.append(listener)
                return
        listener()

    def wait(self, seconds: float) -> None:
        """Wait for the end of the call. Raises TimeoutError."""
        if not self.ended:
            self._thread.join(seconds)
        if not self.ended:
            raise too_late(seconds)

    def result(self) -> T:
        """Return the result of a call that has ended, or raise its error."""
        if self._error is not None:
            raise self._error
        return self._value[0]


def too_late(seconds: float) -> TimeoutError:
    """Return the error of a file that was not read in time."""
    return TimeoutError(
        errno.ETIMEDOUT,
        f"not read within {seconds:g} s: a FIFO that no process writes, or a mount that does not respond",
    )


async def outside(call: Callable[..., T], *arguments: object, seconds: float = PATIENCE) -> T:
    """Run `call`, which may never return, in a daemon thread. If cancelled, leave the thread to itself.

    Raises TimeoutError after `seconds`.
    """
    return await ended(OutsideCall(partial(call, *arguments)), seconds)


async def ended(running: OutsideCall[T], seconds: float) -> T:
    """Return the result of a call when it has ended. Raises its error; TimeoutError after `seconds`."""
    import asyncio  # takes 60 ms, and some commands have no event loop

    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(done.set)

    running.when_ended(wake)
    try:
        async with asyncio.timeout(seconds):
            await done.wait()
    except TimeoutError:
        raise too_late(seconds) from None
    return running.result()


def read_file(path: str, size: int = -1, *, again: bool = False, seconds: float = PATIENCE) -> bytes:
    """Return the file's first `size` bytes, or all.

    `again`: the file is read again later, so a FIFO is refused. Raises OSError; TimeoutError after `seconds`.
    """
    call = OutsideCall(partial(read_here, path, size, again=again))
    call.wait(seconds)
    return call.result()


def read_here(path: str, size: int = -1, *, again: bool = False) -> bytes:
    """Return the same, read in the calling thread. Raises OSError."""
    with open(path, "rb", opener=_open_at_once if again else None) as file:
        if again and not _lasts(os.fstat(file.fileno())):
            raise OSError(errno.ESPIPE, "no regular file, so it cannot be read again; copy it into one", path)
        return file.read(size)


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without waiting for the writer of a FIFO."""
    return os.open(path, flags | os.O_NONBLOCK)


def _lasts(status: os.stat_result) -> bool:
    """Return whether a file can be read again: a regular one, or /dev/null."""
    return stat.S_ISREG(status.st_mode) or status.st_rdev == _NULL
