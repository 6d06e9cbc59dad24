"""The FIFOs of one channel, one per epoch, in the order that every known reader needs.

    prepare(n)   mkfifo n and its `open` trailer                   before n is offered, or n-1 ends
    open(n)      wait until a reader has opened it                 `streamer.sink.write_ends` says how
    conclude(n)  prepare(n+1); trailer of n; unlink n              so that at the reader's EOF of n
    retire(n)    close n                                           n is gone and n+1 is there

This order is contract §1.5: a reader may open n+1 before it closes n, another lists the directory for the
lowest number, a third gives n+1 two seconds to appear. The next `open` must follow at once, without waiting
for the reader to close n.

What this machine refuses (no space, no permission, a disk that fails) is Shortage. Until `conclude` has
returned the write end stays open, since closing it would look like an end to the reader.

Opening goes through an O_PATH descriptor taken at creation, so the FIFO that was made is the one that is
opened, whatever happens to its name meanwhile.

A FIFO is never used twice: bytes left in it would reach the next reader (contract §1.7-4). With a FIFO whose
write end outlived its sidecar `resume` goes on. That sidecar may have died between any two steps of its end;
the trailer, replaced before the rest, then says that what is left of it is due.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from dataclasses import replace
from typing import TYPE_CHECKING

from streamer.errors import Shortage, SinkError
from streamer.linux import descriptor_path
from streamer.sink.outlet import PipeOutlet
from streamer.sink.write_ends import LocalWriteEnds, WriteEnds
from streamer.trailer import Trailer, fifo_path, read_trailer, trailer_path, write_trailer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from streamer.plan import Position

_LACKS = {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""Errors that mean a lack of space, descriptors or memory."""
KEPT_TRAILERS = 64
"""Trailers of the last epochs that stay readable; a reader looks at its own within an epoch."""


def check_name(path: str) -> None:
    """Refuse what has the name of a FIFO and is none of ours. Raises Shortage."""
    with contextlib.suppress(FileNotFoundError):
        _check(path, os.lstat(path))


def _check(path: str, found: os.stat_result) -> None:
    if not stat.S_ISFIFO(found.st_mode) or found.st_uid != os.geteuid():
        raise Shortage(f"{path} exists and is not a FIFO of ours; remove it or rename the channel")


class FifoDirectory:
    """The FIFOs of one channel in `directory`. Not safe for two processes: see `sidecar.job.layout`."""

    def __init__(
        self,
        directory: str,
        channel: str,
        *,
        opening: Callable[[int], Trailer],
        mode: int = 0o640,
        write_ends: WriteEnds | None = None,
    ) -> None:
        """`opening` makes the `open` trailer of an epoch; `write_ends` are this process's own unless
        given.
        """
        self._directory = directory
        self._channel = channel
        self._opening = opening
        self._mode = mode
        self._fifos: dict[int, int] = {}
        """By epoch, an O_PATH descriptor of its FIFO: names the inode, opens nothing."""
        self._unproven: set[int] = set()
        """Epochs whose trailer says `open`."""
        self._run = secrets.token_hex(8)
        """As of `Trailer.run`."""
        self._write_ends = write_ends or LocalWriteEnds(channel)

    def clear(self, *, begin: int = 0) -> None:
        """Remove what an earlier run left: FIFOs of any epoch but `begin`, and all trailers.

        That FIFO is kept if it is one, since a reader may be waiting in it already. Raises SinkError if
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
                stale_fifo = (
                    match[2] is None and match[1] != str(begin) and stat.S_ISFIFO(os.lstat(path).st_mode)
                )
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
            try:
                _check(path, os.fstat(path_fd))
                # mkfifo(3) applies the umask; the mode is for the trainer's user or group.
                os.chmod(descriptor_path(path_fd), self._mode)
            except (OSError, Shortage):
                os.close(path_fd)
                raise
            self._fifos[epoch] = path_fd

    def resume(self, epoch: int, *, accepted: int) -> int:
        """Take over from a sidecar that died in `epoch`, or before its reader came; return the epoch due.

        If the epoch's trailer has its last word already, the sidecar died while it retired the epoch, and the
        rest of that is done here. `failed` is not the last word, unless the FIFO has `accepted` more than the
        trailer says, and so what ends it. Raises SinkError.
        """
        with _mapped(self._directory):
            unfinished = re.compile(rf"\.{re.escape(self._channel)}_\d+\.penstock\.json\.\d+\.tmp")
            for name in filter(unfinished.fullmatch, os.listdir(self._directory)):
                os.unlink(os.path.join(self._directory, name))  # it died while it wrote a trailer
            try:
                found = read_trailer(self._directory, self._channel, epoch)
            except ValueError as error:
                raise SinkError(f"{error}; remove it and start sidecar and trainer again") from error
            if found is not None:
                self._run = found.run
            ended = found is not None and (
                found.bytes_delivered < accepted if found.state == "failed" else found.state != "open"
            )
            if not ended:
                self.prepare(epoch)
                return epoch
            self.prepare(epoch + 1)
            self._unlink(fifo_path(self._directory, self._channel, epoch))
            self._write_ends.done()
            return epoch + 1

    async def settle(self) -> int | None:
        """As `WriteEnds.settle`."""
        return await self._write_ends.settle()

    async def open(self, position: Position, *, on_gone: Callable[[], None]) -> PipeOutlet:
        """Wait for a reader of the epoch's FIFO, for as long as it takes; return what leads into it.

        As `WriteEnds.open`.
        """
        epoch = position.epoch
        with _mapped(fifo_path(self._directory, self._channel, epoch)):
            return await self._write_ends.open(position, self._fifos[epoch], on_gone=on_gone)

    def conclude(self, trailer: Trailer, *, successor: bool = True) -> None:
        """The part of the epoch's end that this machine may refuse: the next FIFO appears, this one goes.

        Without `successor` the channel ends here. Raises Shortage; it may be repeated then, and the reader
        has seen nothing of an end.
        """
        epoch = trailer.epoch
        if successor:
            self.prepare(epoch + 1)
        self.publish(trailer)
        path = fifo_path(self._directory, self._channel, epoch)
        with _mapped(path):
            self._unlink(path)

    def retire(self, epoch: int, outlet: PipeOutlet | None) -> None:
        """The rest of the epoch's end, after `conclude`: the write end closes."""
        if (path_fd := self._fifos.pop(epoch, None)) is not None:
            os.close(path_fd)
        if epoch >= KEPT_TRAILERS:
            with contextlib.suppress(OSError):  # one that is left harms nobody
                self._unlink(trailer_path(self._directory, self._channel, epoch - KEPT_TRAILERS))
        if outlet is not None:
            outlet.close()
        self._write_ends.done()

    def publish(self, trailer: Trailer) -> None:
        """Replace the epoch's trailer. Raises SinkError."""
        with _mapped(self._directory):
            write_trailer(self._directory, replace(trailer, run=self._run))
        if trailer.state == "open":
            self._unproven.add(trailer.epoch)
        else:
            self._unproven.discard(trailer.epoch)

    def leave(self, position: Position, outlet: PipeOutlet | None) -> None:
        """Give back what this process holds, and touch nothing that the next sidecar will find.

        As `WriteEnds.leave`; raises SinkError.
        """
        with _mapped(fifo_path(self._directory, self._channel, position.epoch)):
            self._write_ends.leave(position, self._fifos.get(position.epoch, -1), outlet)
        self.let_go()

    def let_go(self) -> None:
        """Give back the descriptors; names and trailers stay."""
        while self._fifos:
            os.close(self._fifos.popitem()[1])
        self._unproven.clear()

    def close(self, *, forget: bool = False) -> None:
        """Remove the FIFOs and the trailers of epochs never begun; let go of the write ends.

        With `forget`, every trailer goes.
        """
        self._write_ends.close()
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
    """OSError becomes Shortage naming the path."""
    try:
        yield
    except OSError as error:
        remedy = (
            "free space on that file system, or raise `ulimit -n`"
            if error.errno in _LACKS
            else "check that the directory exists and is writable"
        )
        raise Shortage(f"{path}: {error.strerror or error}; {remedy}") from error
