"""The FIFOs of one channel, one per epoch, in the order that every known reader needs.

    prepare(n)   mkfifo n and its `open` trailer                   before n is offered, or n-1 ends
    open(n)      a thread blocks in open(2) until a reader comes   the one blocking call
    retire(n)    prepare(n+1); trailer of n; unlink n; close n     so that at the reader's EOF of n
                                                                   n is gone and n+1 is there

The order of `retire` is contract §1.5: a reader may open n+1 before it closes n, another lists the
directory for the lowest number, a third gives n+1 two seconds to appear. The next `open` must follow
at once, without waiting for the reader to close n.

Opening is blocking in a thread of its own, because polling with O_NONBLOCK misses a reader that opens
and closes at once (contract §1.7-1). It goes through an O_PATH descriptor taken at creation, so the
FIFO that was made is the one that is opened, whatever happens to its name meanwhile. A blocked open is
released by opening the read side and keeping it until the thread has returned.

A FIFO is never used twice: bytes left in it would reach the next reader (contract §1.7-4).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import stat
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from streamer.errors import SinkError
from streamer.sink.outlet import PipeOutlet
from streamer.trailer import Trailer, fifo_path, trailer_path, write_trailer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KEPT_TRAILERS = 64
"""Trailers of the last epochs that stay readable; a reader looks at its own within an epoch."""


def _by_descriptor(path_fd: int) -> str:
    """A path that leads to the inode of an O_PATH descriptor, whatever its own path is now (open(2))."""
    return f"/proc/self/fd/{path_fd}"


class FifoDirectory:
    """The FIFOs of one channel in `directory`. Not safe for two processes: see `sidecar.runtime`."""

    def __init__(
        self, directory: str, channel: str, *, opening: Callable[[int], Trailer], mode: int = 0o640
    ) -> None:
        """`opening` makes the `open` trailer of an epoch."""
        self._directory = directory
        self._channel = channel
        self._opening = opening
        self._mode = mode
        self._fifos: dict[int, int] = {}
        """By epoch, an O_PATH descriptor of its FIFO: names the inode, opens nothing."""
        self._unproven: set[int] = set()
        """Epochs whose trailer says `open`."""
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"open {channel}")

    def clear(self) -> None:
        """Remove what an earlier run left: FIFOs of any epoch but 0, and all trailers.

        FIFO 0 is kept if it is one, since a reader may be waiting in it already. Raises SinkError if
        something that is not ours has the name.
        """
        ours = re.compile(rf"\.?{re.escape(self._channel)}_(\d+)(\.penstock\.json(\.\d+\.tmp)?)?")
        with _mapped(self._directory):
            for name in os.listdir(self._directory):
                match = ours.fullmatch(name)
                if match is None:
                    continue
                path = os.path.join(self._directory, name)
                stale_trailer = name.startswith(".") and match[2] is not None
                stale_fifo = match[2] is None and match[1] != "0" and stat.S_ISFIFO(os.lstat(path).st_mode)
                if stale_trailer or stale_fifo:
                    os.unlink(path)

    def prepare(self, epoch: int) -> None:
        """Make the epoch's FIFO and its `open` trailer, unless they are there. Raises SinkError."""
        if epoch in self._fifos:
            return
        path = fifo_path(self._directory, self._channel, epoch)
        with _mapped(path):
            self.publish(self._opening(epoch))
            with contextlib.suppress(FileExistsError):
                os.mkfifo(path, self._mode)
            path_fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
            found = os.fstat(path_fd)
            if not stat.S_ISFIFO(found.st_mode) or found.st_uid != os.geteuid():
                os.close(path_fd)
                raise SinkError(f"{path} exists and is not a FIFO of ours; remove it or rename the channel")
            self._fifos[epoch] = path_fd
            # mkfifo(3) applies the umask; the mode is for the trainer's user or group.
            os.chmod(_by_descriptor(path_fd), self._mode)

    async def open(self, epoch: int, *, on_gone: Callable[[], None]) -> PipeOutlet:
        """Wait for a reader of the epoch's FIFO, for as long as it takes; return the write end.

        Raises SinkError. Cancelling it releases the blocked thread and leaves no descriptor behind.
        """
        path_fd = os.dup(self._fifos[epoch])  # the thread may outlive this channel by a moment
        opening = self._executor.submit(os.open, _by_descriptor(path_fd), os.O_WRONLY | os.O_CLOEXEC)
        try:
            with _mapped(fifo_path(self._directory, self._channel, epoch)):
                fd = await asyncio.wrap_future(opening)
        except asyncio.CancelledError:
            self._release(opening, path_fd)
            raise
        except SinkError:
            os.close(path_fd)
            raise
        os.close(path_fd)
        return PipeOutlet(fd, on_gone=on_gone)

    @staticmethod
    def _release(opening: Future[int], path_fd: int) -> None:
        """Wake the thread blocked in open(2); it closes everything when it has returned."""
        read_end = os.open(_by_descriptor(path_fd), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)

        def close_all(opened: Future[int]) -> None:
            os.close(read_end)
            os.close(path_fd)
            if not opened.cancelled() and opened.exception() is None:
                os.close(opened.result())

        opening.add_done_callback(close_all)

    def retire(self, epoch: int, outlet: PipeOutlet, trailer: Trailer, *, successor: bool = True) -> None:
        """End the epoch with `trailer`: the next FIFO appears, this one goes, its write end closes.

        Without `successor` the channel ends here. Raises SinkError, with the write end closed all the same.
        """
        try:
            with _mapped(fifo_path(self._directory, self._channel, epoch)):
                if successor:
                    self.prepare(epoch + 1)
                self.publish(trailer)
                self._remove(epoch)
                if epoch >= KEPT_TRAILERS:
                    self._unlink(trailer_path(self._directory, self._channel, epoch - KEPT_TRAILERS))
        finally:
            outlet.close()

    def publish(self, trailer: Trailer) -> None:
        """Replace the epoch's trailer. Raises SinkError."""
        with _mapped(self._directory):
            write_trailer(self._directory, trailer)
        if trailer.verdict == "open":
            self._unproven.add(trailer.epoch)
        else:
            self._unproven.discard(trailer.epoch)

    def close(self, *, forget: bool = False) -> None:
        """Remove the FIFOs and the trailers of epochs never begun; end the opening thread.

        With `forget`, every trailer goes.
        """
        self._executor.shutdown(wait=False, cancel_futures=True)
        for epoch in list(self._fifos):
            with contextlib.suppress(OSError):
                self._remove(epoch)
        for epoch in self._unproven:
            with contextlib.suppress(OSError):
                self._unlink(trailer_path(self._directory, self._channel, epoch))
        if forget:
            with contextlib.suppress(SinkError, OSError):
                self.clear()

    def _remove(self, epoch: int) -> None:
        os.close(self._fifos.pop(epoch))
        self._unlink(fifo_path(self._directory, self._channel, epoch))

    @staticmethod
    def _unlink(path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


@contextlib.contextmanager
def _mapped(path: str) -> Iterator[None]:
    """OSError becomes SinkError naming the path."""
    try:
        yield
    except OSError as error:
        raise SinkError(
            f"{path}: {error.strerror or error}; check that the directory exists and is writable"
        ) from error
