"""Descriptors that bytes leave through: a FIFO's write end, or a plain file.

`PipeOutlet` owns one non-blocking write end of a pipe and closes it once. Two things can happen to it
without a write: the pipe gets room, and the reader goes. Both are learnt from a private epoll object
that is itself watched by the event loop: poll(2) reports a closed reader as POLLERR even when no event
is asked for, so a reader's exit is seen at once and not only at the next write, and a nested epoll
gives asyncio and uvloop the same behaviour (uvloop's own writer callback reports such an error
differently). `push` never blocks; only `writable` waits.

A kernel that refuses to write (no memory, an I/O error) is asked again every SHORT_OF_MEMORY seconds, for
`give_up_after` seconds at the most, and `on_short` is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
import select
import time
from typing import TYPE_CHECKING, Protocol

from streamer.errors import ReaderGone, Shortage, SinkError
from streamer.linux import bytes_unread, set_pipe_size

if TYPE_CHECKING:
    from collections.abc import Callable


SHORT_OF_MEMORY = 0.05
"""Seconds until a pipe is tried again that the kernel refused to write."""


class Drainable(Protocol):
    """Staged bytes that can be moved into a descriptor."""

    def drain_into(self, fd: int) -> int:
        """Move as many bytes as `fd` takes now, at least one; return how many.

        Raises BlockingIOError if it takes none, BrokenPipeError if nobody reads it.
        """


class Outlet(Protocol):
    """A descriptor that bytes leave through, closed once by its owner."""

    def push(self, source: Drainable) -> int:
        """Move bytes without waiting; BlockingIOError if there is no room, ReaderGone if no reader."""

    async def writable(self) -> None:
        """Wait for room. Raises ReaderGone when the reader closes instead."""

    @property
    def reader_gone(self) -> bool:
        """Whether the reader has closed its end."""

    def close(self) -> None:
        """Give the descriptor back; further calls do nothing."""


class PipeOutlet:
    """The write end of a pipe or FIFO. `on_gone` is called once when the reader closes its end."""

    def __init__(self, fd: int, *, on_gone: Callable[[], None], epoll: select.epoll | None = None) -> None:
        """`epoll`: one to use, and to close; made here unless given."""
        os.set_blocking(fd, False)
        self._fd = fd
        self._on_gone = on_gone
        self._gone = False
        self._short_since: float | None = None
        """When the kernel began to refuse what is pushed, though the pipe may have room."""
        self._short = False
        """Whether it refused what was pushed last."""
        self.give_up_after = math.inf
        """Seconds for which the kernel may refuse."""
        self.on_short: Callable[[Shortage], None] | None = None
        """Told when the kernel begins to refuse."""
        self._waiter: asyncio.Future[None] | None = None
        self.capacity = set_pipe_size(fd)
        """Bytes that the pipe holds; what the kernel granted."""
        self._epoll = epoll or select.epoll()
        self._epoll.register(fd, 0)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._epoll.fileno(), self._on_event)

    def __repr__(self) -> str:
        state = "closed" if self._fd < 0 else "reader gone" if self._gone else "open"
        return f"<PipeOutlet {state}, {self.capacity} bytes>"

    @property
    def reader_gone(self) -> bool:
        return self._gone

    @property
    def unread(self) -> int:
        """Bytes in the pipe; with a keeper, on their way to it."""
        return 0 if self._fd < 0 else bytes_unread(self._fd)

    def push(self, source: Drainable) -> int:
        try:
            count = source.drain_into(self._fd)
        except BlockingIOError:
            self._short_since = None  # the pipe is full, and the kernel well
            raise
        except BrokenPipeError as error:
            raise ReaderGone("the reader closed the pipe") from error
        except OSError as error:
            self._refused(error)
            raise BlockingIOError(errno.EAGAIN, "the pipe takes nothing now") from error
        self._short_since = None
        return count

    def _refused(self, error: OSError) -> None:
        """Note that the kernel refused and moved nothing. Raises Shortage after `give_up_after` seconds."""
        shortage = Shortage(
            f"the kernel refuses to write a FIFO: {error.strerror}; see to the machine's memory"
        )
        shortage.__cause__ = error
        now = time.monotonic()
        self._short = True
        if self._short_since is None:
            self._short_since = now
            if self.on_short is not None:
                self.on_short(shortage)
        elif now - self._short_since >= self.give_up_after:
            raise shortage

    async def writable(self) -> None:
        if self._gone:
            raise ReaderGone("the reader closed the pipe")
        if self._short:  # no event tells when the kernel has memory again
            self._short = False
            await asyncio.sleep(SHORT_OF_MEMORY)
        if self._waiter is not None:
            raise RuntimeError("two tasks wait for one pipe")
        self._waiter = self._loop.create_future()
        try:
            self._epoll.modify(self._fd, select.EPOLLOUT | select.EPOLLONESHOT)
            await self._waiter
        except OSError as error:
            self._refused(error)  # the caller pushes again, and waits again
        finally:
            self._waiter = None

    def _on_event(self) -> None:
        for _, events in self._epoll.poll(0):
            if events & (select.EPOLLERR | select.EPOLLHUP):
                # The condition stays true: stop watching, or the loop would spin on it.
                self._unwatch()
                self._gone = True
                self._wake(ReaderGone("the reader closed the pipe"))
                self._on_gone()
                return
            # One-shot disabled the whole registration, errors included; watch for those again.
            with contextlib.suppress(OSError):  # the next push notices that the reader has gone
                self._epoll.modify(self._fd, 0)
            self._wake(None)

    def _wake(self, error: ReaderGone | None) -> None:
        if self._waiter is None or self._waiter.done():
            return
        if error is None:
            self._waiter.set_result(None)
        else:
            self._waiter.set_exception(error)

    def _unwatch(self) -> None:
        if not self._epoll.closed:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()

    def detach(self) -> int:
        """The descriptor, now the caller's. Raises ValueError if it is closed."""
        if self._fd < 0:
            raise ValueError("the outlet is closed")
        fd, self._fd = self._fd, -1
        self._unwatch()
        return fd

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self.detach())


def refused(error: OSError) -> SinkError:
    """Our error for what standard output refuses."""
    if isinstance(error, (BrokenPipeError, ConnectionError)):
        return ReaderGone("nobody reads standard output")
    return SinkError(f"cannot write standard output: {error.strerror}")


class FileOutlet:
    """Standard output that is a regular file, a terminal or a socket; the caller keeps the descriptor.

    Regular files are always ready (poll(2)); a write goes to the page cache. A terminal or socket may be
    non-blocking, since its open file is shared with other programs. Only `penstock cat` uses this, with one
    channel in the process.
    """

    reader_gone = False

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def push(self, source: Drainable) -> int:
        try:
            return source.drain_into(self._fd)
        except BlockingIOError:
            raise
        except OSError as error:
            raise refused(error) from error

    async def writable(self) -> None:
        loop = asyncio.get_running_loop()
        room = asyncio.Event()
        loop.add_writer(self._fd, room.set)
        try:
            await room.wait()
        finally:
            loop.remove_writer(self._fd)

    def close(self) -> None:
        self._fd = -1
