"""Write ends of FIFOs, held by this process or by a keeper that continues after this process ends.

`LocalWriteEnds` opens a FIFO in a thread that blocks in open(2) until a reader opens it, because polling with
O_NONBLOCK misses a reader that opens and closes at once (contract §1.7-1). To cancel a blocked open,
`LocalWriteEnds` opens the read end and keeps it until the thread has returned. If no descriptor is left for
that, the thread stays blocked: it is a daemon, so it does not keep the process from ending.

`KeeperWriteEnds` makes the keeper (`streamer.helpers.keeper`) open the FIFO, and gets the write end of a pipe
from which the keeper moves bytes to the FIFO. Bytes that such an outlet has accepted may still be in the
pipe, so `settle` must return before an epoch is published as complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import threading
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

from streamer.errors import ReaderGone, SinkError
from streamer.linux import descriptor_path, thread_remedy
from streamer.sink.outlet import PipeOutlet

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamer.helpers.keeper_client import KeeperClient
    from streamer.plan import Position, ResumePoint


WRITE_END = os.O_WRONLY | os.O_CLOEXEC
"""Flags of open(2) for a FIFO's write end."""


class WriteEnds(Protocol):
    """Write ends of one channel's FIFOs, one at a time."""

    @property
    def lasting(self) -> bool:
        """Whether open write ends survive the end of this process."""

    async def open(self, position: Position, path_fd: int, *, on_gone: Callable[[], None]) -> PipeOutlet:
        """Wait for a reader of the FIFO that `path_fd` (O_PATH) refers to; return the outlet to write to.

        `position`: position of the next byte. Raises SinkError, and ReaderGone if a reader has come and left
        while no sidecar ran. A cancelled call leaves no open descriptor.
        """

    async def regain(self, position: Position, fd: int) -> None:
        """Make the next `open` return at once, for a reader that opened the FIFO after another had left it.

        `fd`: write end of the FIFO, which has had no byte; this object owns it from now on. Raises SinkError.
        """

    async def settle(self) -> int | None:
        """Wait until the FIFO has accepted all bytes of its outlet; return how many, None if not counted.

        Raises ReaderGone if the reader leaves first, SinkError if the keeper has died.
        """

    def mark(self, mark: ResumePoint) -> None:
        """Store a resume point, for a sidecar that resumes this epoch."""

    def done(self) -> None:
        """Close the FIFO, after its epoch has ended and its outlet is closed."""

    def leave(self, position: Position, path_fd: int, outlet: PipeOutlet | None) -> None:
        """Give the next sidecar the FIFO that `path_fd` (O_PATH) refers to, because this process ends.

        `outlet`: the FIFO's outlet, if a reader has come; it has accepted all bytes up to `position`. Raises
        SinkError.
        """

    def close(self) -> None:
        """Release the write ends, because the channel has ended."""


class Opener:
    """A daemon thread that opens FIFOs for writing, one after the other."""

    def __init__(self, name: str) -> None:
        """Start the thread. Raises RuntimeError if it cannot be started."""
        self._asked: SimpleQueue[tuple[Future[int], str] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def open(self, path: str) -> Future[int]:
        """Return the future write end of a FIFO; the thread blocks until somebody reads it."""
        opening: Future[int] = Future()
        self._asked.put((opening, path))
        return opening

    def close(self) -> None:
        """End the thread when it has opened what was asked for."""
        self._asked.put(None)

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            opening, path = asked
            if not opening.set_running_or_notify_cancel():
                continue
            try:
                fd = os.open(path, WRITE_END)
            except OSError as error:
                opening.set_exception(error)
            else:
                opening.set_result(fd)


class LocalWriteEnds:
    """`WriteEnds` that close when this process ends."""

    lasting = False

    def __init__(self, channel: str) -> None:
        """Start the thread that waits for readers. Raises SinkError if it cannot be started."""
        self._channel = channel
        self.successor_keeper: tuple[KeeperClient, str] | None = None
        """Keeper to which `leave` hands open FIFOs, and the plan's digest."""
        self._fd = -1
        """Write end of a FIFO whose reader has come, until its outlet exists."""
        try:
            self._opener = Opener(f"open {channel}")  # now: later, with readers waiting, it may fail
        except RuntimeError as error:
            raise SinkError(
                f"no thread can be started that waits for the reader of channel {channel} ({error}): "
                f"{thread_remedy()}"
            ) from error

    async def open(self, position: Position, path_fd: int, *, on_gone: Callable[[], None]) -> PipeOutlet:
        del position
        # Made before the open: if no descriptor were left afterwards, the reader would see an end.
        epoll = select.epoll()
        try:
            if self._fd < 0:
                self._fd = await self._opened(os.dup(path_fd))  # the thread may still use it after a cancel
            outlet = PipeOutlet(self._fd, on_gone=on_gone, epoll=epoll)
        except BaseException:
            epoll.close()
            raise
        self._fd = -1
        return outlet

    async def _opened(self, path_fd: int) -> int:
        """Open the write end, close `path_fd`, and return the write end."""
        opening = self._opener.open(descriptor_path(path_fd))
        try:
            fd = await asyncio.wrap_future(opening)
        except asyncio.CancelledError:
            # The read end would look like a reader to the keeper, so the thread stays blocked until exit.
            if self.successor_keeper is None:
                self._release(opening, path_fd)
            raise
        except OSError:
            os.close(path_fd)
            raise
        os.close(path_fd)
        return fd

    @staticmethod
    def _release(opening: Future[int], path_fd: int) -> None:
        """Unblock the thread in open(2) if possible; close all descriptors when it has returned."""
        fds = [path_fd]
        with contextlib.suppress(OSError):
            fds.append(os.open(descriptor_path(path_fd), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))

        def close_all(opened: Future[int]) -> None:
            for fd in fds:
                os.close(fd)
            if not opened.cancelled() and opened.exception() is None:
                os.close(opened.result())

        opening.add_done_callback(close_all)

    async def regain(self, position: Position, fd: int) -> None:
        """See `WriteEnds`. `open` will return `fd`."""
        del position
        self._fd = fd

    async def settle(self) -> int | None:
        """See `WriteEnds`. Returns at once, because the outlet is the FIFO itself."""
        return None

    def mark(self, mark: ResumePoint) -> None:
        """See `WriteEnds`. Stores nothing: no sidecar resumes an epoch that ends with this process."""

    def done(self) -> None:
        """See `WriteEnds`. Does nothing: closing the outlet closed the FIFO."""

    def leave(self, position: Position, path_fd: int, outlet: PipeOutlet | None) -> None:
        """See `WriteEnds`. Gives the FIFO to `successor_keeper`."""
        if self.successor_keeper is None:
            raise RuntimeError("nobody is there to leave a FIFO to")
        keeper, digest = self.successor_keeper
        if outlet is None:
            keeper.expect(self._channel, position, path_fd, digest=digest)
        else:
            keeper.adopt(self._channel, position, outlet.detach(), digest=digest)

    def close(self) -> None:
        self._opener.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class KeeperWriteEnds:
    """`WriteEnds` that a keeper holds."""

    def __init__(self, keeper: KeeperClient, channel: str, *, digest: Callable[[], str]) -> None:
        """`digest` returns the present digest of the plan, which may grow."""
        self._keeper = keeper
        self._channel = channel
        self._digest = digest

    @property
    def lasting(self) -> bool:
        """See `WriteEnds`. True while the keeper runs."""
        return self._keeper.lives

    async def open(self, position: Position, path_fd: int, *, on_gone: Callable[[], None]) -> PipeOutlet:
        epoll = select.epoll()
        try:
            fd = await self._keeper.open(self._channel, position, path_fd, digest=self._digest())
        except BaseException:
            epoll.close()
            raise
        try:
            return PipeOutlet(fd, on_gone=on_gone, epoll=epoll)
        except BaseException:
            epoll.close()
            os.close(fd)  # the keeper holds the FIFO and returns another descriptor next time
            raise

    async def regain(self, position: Position, fd: int) -> None:
        self._keeper.done(self._channel)  # it has closed the FIFO when the other reader left
        self._keeper.adopt(self._channel, position, fd, digest=self._digest())
        await self._keeper.flush()

    async def settle(self) -> int | None:
        held = await self._keeper.settle(self._channel)
        if held.state == "gone":
            raise ReaderGone("the reader closed the pipe")
        return held.accepted

    def mark(self, mark: ResumePoint) -> None:
        self._keeper.mark(self._channel, mark)

    def done(self) -> None:
        with contextlib.suppress(SinkError):  # a dead keeper holds nothing open
            self._keeper.done(self._channel)

    def leave(self, position: Position, path_fd: int, outlet: PipeOutlet | None) -> None:
        """See `WriteEnds`. The keeper has the FIFO already."""
        del position, path_fd
        if outlet is not None:
            outlet.close()

    def close(self) -> None:
        with contextlib.suppress(SinkError):
            self._keeper.forget(self._channel)
