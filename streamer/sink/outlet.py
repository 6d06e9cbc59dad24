"""Outlets: the descriptors that streams are written to, a FIFO's write end or a plain file.

`PipeOutlet` owns one non-blocking write end of a pipe and closes it once. Between writes the reader may empty
the pipe or close its end. A private epoll object, which the event loop watches, reports both: a closed reader
is EPOLLERR even if no event is requested (epoll_ctl(2)), so the outlet notices it at once and not only at the
next write. The nested epoll behaves the same on asyncio and uvloop, whose own writer callback reports such an
error differently. `push` never blocks; only `writable` waits.

If the kernel refuses a write (no memory, an I/O error), the write is repeated every SHORT_OF_MEMORY seconds
for at most `give_up_after` seconds. `on_short` is called when that begins and, with None, when it ends.
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

from streamer.errors import ReaderGone, Shortage
from streamer.linux import ALL, bytes_unread, is_ready, set_pipe_size
from streamer.sink.stdout import refused

if TYPE_CHECKING:
    from collections.abc import Callable


SHORT_OF_MEMORY = 0.05
"""Seconds before a write that the kernel refused is repeated."""


LOOKS = tuple(0.001 * 1.5**index for index in range(10))
"""Seconds between looks at a pipe that its reader empties, 0.1 s in all.

The reader sees the end of file late by half the time that it took for the last bytes, at most.
"""


class Drainable(Protocol):
    """Staged bytes that can be moved into a descriptor."""

    def drain_into(self, fd: int, most: int = ALL) -> int:
        """Move as many bytes as `fd` accepts now, at least one and at most `most`; return how many.

        Raises BlockingIOError if `fd` accepts none, BrokenPipeError if its reader has closed.
        """


class Outlet(Protocol):
    """A descriptor that a stream is written to; its owner closes it once."""

    @property
    def holding(self) -> bool:
        """Whether the outlet has accepted bytes that `writable` must move on, before it accepts more."""

    def push(self, source: Drainable) -> int:
        """Move bytes without waiting; return how many. Raises BlockingIOError if full, and ReaderGone."""

    async def writable(self) -> None:
        """Wait until bytes can be written. Raises ReaderGone if the reader closes."""

    @property
    def reader_gone(self) -> bool:
        """Whether the reader has closed its end."""

    def close(self) -> None:
        """Release the descriptor; further calls do nothing."""


class PipeOutlet:
    """The write end of a pipe or FIFO. `on_gone` is called once when the reader closes its end."""

    holding = False

    def __init__(self, fd: int, *, on_gone: Callable[[], None], epoll: select.epoll | None = None) -> None:
        """`epoll`: epoll object to use and to close; default: a new one."""
        os.set_blocking(fd, False)
        self._fd = fd
        self._on_gone = on_gone
        self.reader_gone = False
        self._short_since: float | None = None
        """Time since which the kernel has refused every write, although the pipe may not be full."""
        self._short = False
        """Whether the kernel refused the last write."""
        self.give_up_after = math.inf
        """Seconds for which the kernel may refuse writes."""
        self.on_short: Callable[[Shortage | None], None] | None = None
        """Called when the kernel begins to refuse writes, and with None when it accepts one again."""
        self._waiter: asyncio.Future[None] | None = None
        self.capacity = set_pipe_size(fd)
        """Size of the pipe in bytes, as the kernel granted it."""
        self._epoll = epoll or select.epoll()
        self._epoll.register(fd, 0)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._epoll.fileno(), self._on_event)

    def __repr__(self) -> str:
        state = "closed" if self._fd < 0 else "reader gone" if self.reader_gone else "open"
        return f"<PipeOutlet {state}, {self.capacity} bytes>"

    @property
    def refused(self) -> bool:
        """Whether the kernel refused the last write."""
        return self._short

    @property
    def unread(self) -> int:
        """Bytes in the pipe that its reader, the trainer or the keeper, has not read."""
        return 0 if self._fd < 0 else bytes_unread(self._fd)

    def drain(self, source: Drainable) -> int:
        """Move bytes without waiting; return how many. Raises OSError, which only `push` can handle.

        A worker thread may call it while the outlet's owner waits for that thread.
        """
        return source.drain_into(self._fd)

    def push(self, source: Drainable, most: int = ALL) -> int:
        """Move at most `most` bytes; see `Outlet.push`."""
        try:
            count = source.drain_into(self._fd, most)
        except BlockingIOError:  # the pipe is full; the kernel did not refuse
            if self._short_since is not None:
                self._accepted()
            raise
        except BrokenPipeError as error:
            raise ReaderGone("the reader closed the pipe") from error
        except OSError as error:
            self._refused(error)
            raise BlockingIOError(errno.EAGAIN, "the pipe takes nothing now") from error
        if self._short_since is not None:
            self._accepted()
        return count

    def _accepted(self) -> None:
        """Note that the kernel refuses no write any more."""
        self._short_since = None
        if self.on_short is not None:
            self.on_short(None)

    def _refused(self, error: OSError) -> None:
        """Note that the kernel refused a write. Raises Shortage after `give_up_after` seconds."""
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
        if self.reader_gone:
            raise ReaderGone("the reader closed the pipe")
        if self._short:  # no event reports that the kernel accepts writes again
            self._short = False
            await asyncio.sleep(SHORT_OF_MEMORY)
        if self._waiter is not None:
            raise RuntimeError("two tasks wait for one pipe")
        self._waiter = self._loop.create_future()
        try:
            self._epoll.modify(self._fd, select.EPOLLOUT | select.EPOLLONESHOT)
            await self._waiter
        except OSError as error:
            self._refused(error)  # the caller repeats `push` and `writable`
        finally:
            self._waiter = None

    def _on_event(self) -> None:
        for _, events in self._epoll.poll(0):
            if events & (select.EPOLLERR | select.EPOLLHUP):
                self.note_gone()
                return
            # EPOLLONESHOT has disabled the registration, errors included; watch for errors again.
            with contextlib.suppress(OSError):  # the next push notices that the reader has gone
                self._epoll.modify(self._fd, 0)
            self._wake(None)

    async def read_up(self) -> None:
        """See the function `read_up`."""
        await read_up(self._fd)

    def look(self) -> bool:
        """Return whether the reader has closed its end by now; events may show it later."""
        if not self.reader_gone and is_ready(self._fd, 0):
            self.note_gone()
        return self.reader_gone

    def note_gone(self) -> None:
        """Note that the reader has closed its end; a write may show it before epoll does."""
        if self.reader_gone:
            return
        self._unwatch()  # the condition persists, and the loop would spin
        self.reader_gone = True
        self._wake(ReaderGone("the reader closed the pipe"))
        self._on_gone()

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
        """Return the descriptor, which the caller then owns. Raises ValueError if it is closed."""
        if self._fd < 0:
            raise ValueError("the outlet is closed")
        fd, self._fd = self._fd, -1
        self._unwatch()
        return fd

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self.detach())


async def read_up(fd: int) -> None:
    """Wait until the reader of a pipe has taken every byte, but not longer than the sum of `LOOKS`.

    `fd`: a write end. Raises ReaderGone if the reader leaves bytes in the pipe. No event tells a writer that
    a pipe is empty, and after the close nobody can count what is in it.
    """
    for seconds in (*LOOKS, 0.0):
        gone = is_ready(fd, 0)  # first: what is unread after it stays unread
        if not (unread := bytes_unread(fd)):
            return
        if gone:
            raise ReaderGone(f"the reader closed the pipe and left {unread} bytes in it")
        await asyncio.sleep(seconds)


class FileOutlet:
    """Standard output that is a regular file, a terminal or a socket; the caller keeps the descriptor.

    Regular files are always ready (poll(2)); a write goes to the page cache. A terminal or socket may be
    non-blocking, since its open file is shared with other programs. Only `penstock cat` uses this, with one
    channel in the process.
    """

    reader_gone = False
    holding = False

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
        writable = asyncio.Event()
        loop.add_writer(self._fd, writable.set)
        try:
            await writable.wait()
        finally:
            loop.remove_writer(self._fd)

    def close(self) -> None:
        self._fd = -1
