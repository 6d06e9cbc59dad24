"""Who holds the write ends of FIFOs: this process, or a keeper that outlives it.

`LocalWriteEnds` opens a FIFO itself, in a thread that blocks in open(2) until a reader comes, because polling
with O_NONBLOCK misses a reader that opens and closes at once (contract §1.7-1). A blocked open is released by
opening the read side and keeping it until the thread has returned.

`KeeperWriteEnds` asks the keeper (`streamer.helpers.keeper`) to do so, and gets the write end of a pipe that
the keeper empties into the FIFO. What such an outlet has accepted may still be in that pipe, so `settle`
comes before any word that an epoch is complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from streamer.errors import ReaderGone, SinkError
from streamer.linux import descriptor_path
from streamer.sink.outlet import PipeOutlet

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamer.helpers.keeper_client import KeeperClient
    from streamer.plan import Position, ResumePoint


class WriteEnds(Protocol):
    """The write ends of one channel's FIFOs, one at a time."""

    @property
    def lasting(self) -> bool:
        """Whether what is open stays so when this process ends, unless it is closed."""

    async def open(self, position: Position, path_fd: int, *, on_gone: Callable[[], None]) -> PipeOutlet:
        """Wait for a reader of the FIFO that the O_PATH descriptor names; return what to write into.

        `position`: the place in the stream of the next byte. Raises SinkError; ReaderGone if a reader came
        and left while no sidecar was there. Cancelling it leaves no descriptor behind.
        """

    async def settle(self) -> int | None:
        """Wait until the FIFO has all that its outlet accepted; how many bytes, if this knows.

        Raises ReaderGone when the reader leaves instead, SinkError if that cannot be known any more.
        """

    def mark(self, mark: ResumePoint) -> None:
        """Remember where an inflated object begins, for whoever continues this epoch."""

    def done(self) -> None:
        """The epoch is over and its outlet closed: close the FIFO."""

    def leave(self, position: Position, path_fd: int, outlet: PipeOutlet | None) -> None:
        """Let another go on with the FIFO that the O_PATH descriptor names: this process ends.

        `outlet`: of its reader, if one has come; it has accepted all up to `position`. Raises SinkError.
        """

    def close(self) -> None:
        """The channel is over."""


class LocalWriteEnds:
    """Write ends that live and die with this process."""

    lasting = False

    def __init__(self, channel: str) -> None:
        """Raises SinkError if the machine grants no thread that waits for the reader."""
        self._channel = channel
        self.successor_keeper: tuple[KeeperClient, str] | None = None
        """A keeper that gets what is open when this process leaves, and the plan's digest."""
        self._fd = -1
        """The write end of a FIFO whose reader has come, until there is an outlet for it."""
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"open {channel}")
        try:
            self._executor.submit(int)  # starts the thread, which may be refused later, when readers wait
        except RuntimeError as error:
            raise SinkError(
                f"no thread can be started that waits for the reader of channel {channel} ({error}): raise "
                "pids.max of the cgroup (a container's PID limit) or the limit of processes (ulimit -u)"
            ) from error

    async def open(self, position: Position, path_fd: int, *, on_gone: Callable[[], None]) -> PipeOutlet:
        """As `WriteEnds`."""
        del position  # nobody but this process need know
        # Made before a reader can come: without a descriptor for it the reader would see an end.
        epoll = select.epoll()
        try:
            if self._fd < 0:
                self._fd = await self._opened(os.dup(path_fd))  # the thread may outlive this by a moment
            outlet = PipeOutlet(self._fd, on_gone=on_gone, epoll=epoll)
        except BaseException:
            epoll.close()
            raise
        self._fd = -1
        return outlet

    async def _opened(self, path_fd: int) -> int:
        """The write end, once a reader has come; `path_fd` is closed."""
        opening = self._executor.submit(os.open, descriptor_path(path_fd), os.O_WRONLY | os.O_CLOEXEC)
        try:
            fd = await asyncio.wrap_future(opening)
        except asyncio.CancelledError:
            # A release looks like a reader to the heir's open, so until the process is gone the thread waits.
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
        """Wake the thread blocked in open(2); it closes everything when it has returned."""
        read_end = os.open(descriptor_path(path_fd), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)

        def close_all(opened: Future[int]) -> None:
            os.close(read_end)
            os.close(path_fd)
            if not opened.cancelled() and opened.exception() is None:
                os.close(opened.result())

        opening.add_done_callback(close_all)

    async def settle(self) -> int | None:
        """As `WriteEnds`: an outlet of ours is the FIFO itself."""
        return None

    def mark(self, mark: ResumePoint) -> None:
        """As `WriteEnds`: nobody continues what ends with this process."""

    def done(self) -> None:
        """As `WriteEnds`: closing the outlet closed the FIFO."""

    def leave(self, position: Position, path_fd: int, outlet: PipeOutlet | None) -> None:
        """As `WriteEnds`: the heir gets it, before this process lets go."""
        if self.successor_keeper is None:
            raise RuntimeError("nobody is there to leave a FIFO to")
        keeper, digest = self.successor_keeper
        if outlet is None:
            keeper.expect(self._channel, position, path_fd, digest=digest)
        else:
            keeper.adopt(self._channel, position, outlet.detach(), digest=digest)

    def close(self) -> None:
        """As `WriteEnds`."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class KeeperWriteEnds:
    """Write ends that a keeper holds."""

    def __init__(self, keeper: KeeperClient, channel: str, *, digest: str) -> None:
        self._keeper = keeper
        self._channel = channel
        self._digest = digest

    @property
    def lasting(self) -> bool:
        """As `WriteEnds`: as long as the keeper lives."""
        return self._keeper.lives

    async def open(self, position: Position, path_fd: int, *, on_gone: Callable[[], None]) -> PipeOutlet:
        """As `WriteEnds`."""
        epoll = select.epoll()
        try:
            fd = await self._keeper.open(self._channel, position, path_fd, digest=self._digest)
        except BaseException:
            epoll.close()
            raise
        try:
            return PipeOutlet(fd, on_gone=on_gone, epoll=epoll)
        except BaseException:
            epoll.close()
            os.close(fd)  # the keeper has the FIFO, and gives another
            raise

    async def settle(self) -> int | None:
        """As `WriteEnds`."""
        held = await self._keeper.settle(self._channel)
        if held.state == "gone":
            raise ReaderGone("the reader closed the pipe")
        return held.accepted

    def mark(self, mark: ResumePoint) -> None:
        """As `WriteEnds`."""
        self._keeper.mark(self._channel, mark)

    def done(self) -> None:
        """As `WriteEnds`."""
        with contextlib.suppress(SinkError):  # a dead keeper holds nothing open
            self._keeper.done(self._channel)

    def leave(self, position: Position, path_fd: int, outlet: PipeOutlet | None) -> None:
        """As `WriteEnds`: the keeper has it all."""
        del position, path_fd
        if outlet is not None:
            outlet.close()

    def close(self) -> None:
        """As `WriteEnds`."""
        with contextlib.suppress(SinkError):
            self._keeper.forget(self._channel)
