"""Makes, opens and removes a channel's FIFOs, one per epoch, in an order that all known readers accept.

    prepare(n)   write the `open` trailer of n, mkfifo n
    open(n)      wait until a reader has opened n (`streamer.sink.write_ends`)
    replaced(n)  wait meanwhile until the name of n leads elsewhere; then prepare(n) and open(n) are due again
    withdraw(n)  rename n to a name that only Penstock knows, before n gets its first byte
    regain(n)    keep n for a program that opened it after its reader had left and before `withdraw`
    conclude(n)  prepare(n+1), replace the trailer of n, unlink n
    retire(n)    close n; at the reader's end of file, the name of n is gone and n+1 exists

This order is contract §1.5: one reader opens n+1 before it closes n, another lists the directory for the
lowest number, a third waits two seconds for n+1 to appear. The next `open` must follow at once, without
waiting for the reader to close n. `streamer.sink.fifo_names` makes and removes the FIFOs themselves.

Failures of this machine (no space, no permission, a failing disk) raise Shortage. The write end stays open
until `conclude` has returned, because closing it would look like an end to the reader.

A FIFO is never used twice: bytes left in it would reach the next reader (contract §1.7-4). `resume` takes
over a FIFO that a keeper has held open after its sidecar died. The sidecar may have died between any two
steps of the epoch's end. It replaces the trailer before the other steps, so a final trailer shows that the
others are still due.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from dataclasses import replace
from typing import TYPE_CHECKING

from streamer.directory import Directory
from streamer.errors import ReaderGone, SinkError
from streamer.key_list import key_list_path
from streamer.sink.fifo_names import FifoNames, shortages
from streamer.sink.key_list import KeyListWriter
from streamer.sink.outlet import PipeOutlet, read_up
from streamer.sink.write_ends import LocalWriteEnds, WriteEnds
from streamer.trailer import Trailer, read_trailer, trailer_path, write_trailer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from streamer.plan import ObjectStart, Position
    from streamer.sink.fifo_names import NameWatch

KEPT_KEY_LISTS = 4
"""Number of last epochs whose key lists are kept; a reader may be in the epoch before the present one."""
KEPT_TRAILERS = 64
"""Number of last epochs whose trailers are kept; a reader reads its trailer within one epoch."""


class FifoDirectory:
    """FIFOs of one channel in `directory`. Only one process may use it: see `sidecar.job.layout`."""

    def __init__(
        self,
        directory: str,
        channel: str,
        *,
        opening: Callable[[int], Trailer],
        mode: int = 0o640,
        write_ends: WriteEnds | None = None,
        names: NameWatch | None = None,
    ) -> None:
        """`directory`: an absolute path without links, which every step checks (`streamer.directory`).

        `opening` returns the `open` trailer of an epoch. `write_ends`: default `LocalWriteEnds`. `names`
        watches `directory`. Default: a FIFO that is replaced is noticed when the next epoch begins.
        """
        self._directory = directory
        self._channel = channel
        self._open_trailer = opening
        self._names = FifoNames(directory, channel, mode=mode, watch=names)
        self._unproven: set[int] = set()
        """Epochs whose trailer is `open`."""
        self._run = secrets.token_hex(8)
        """Value of `Trailer.run`."""
        self._write_ends = write_ends or LocalWriteEnds(channel)

    @contextlib.contextmanager
    def _opened(self, path: str = "") -> Iterator[Directory]:
        """Open the directory for the block. Raises Shortage, with a path, for an OSError in it."""
        with shortages(path or self._directory), Directory.at(self._directory) as here:
            yield here

    def clear(self, *, begin: int = 0) -> None:
        """Remove the files of an earlier run: all trailers, withdrawn FIFOs, and FIFOs of epochs but `begin`.

        The FIFO of `begin` is kept, because a reader may already be blocked in opening it. Raises SinkError.
        """
        ours = re.compile(
            rf"\.?{re.escape(self._channel)}_([0-9]+)(\.penstock\.(json(\.[0-9]+\.tmp)?|keys|fifo))?"
        )
        with self._opened() as here:
            for name in here.names():
                match, status = ours.fullmatch(name), here.status(name)
                if match is None or status is None:
                    continue
                stale_file = name.startswith(".") and match[2] is not None
                stale_fifo = match[2] is None and match[1] != str(begin) and stat.S_ISFIFO(status.st_mode)
                if stale_file or stale_fifo:
                    here.remove(name)

    def path(self, epoch: int) -> str:
        """Return the path at which a reader finds the epoch's FIFO."""
        return self._names.path(epoch)

    def prepare(self, epoch: int) -> None:
        """Create the epoch's FIFO and its `open` trailer, unless they exist. Raises SinkError.

        The caller repeats this for the next FIFO when an epoch ends, and after `replaced`: a FIFO whose name
        was removed or replaced meanwhile would wait for a reader that can never open it.
        """
        with self._opened(self.path(epoch)) as here:
            if not self._names.kept(epoch):
                self.publish(self._open_trailer(epoch))
                self._names.make(epoch, here)

    def resume(self, epoch: int, *, successor: bool = True) -> int:
        """Take over from a sidecar that died in `epoch` or before its reader came; return the epoch due.

        If the epoch's trailer is final, the sidecar died while it ended the epoch, and this completes the
        remaining steps; `failed` is not final. Without `successor` no epoch comes after this one. Raises
        SinkError.
        """
        with self._opened() as here:
            unfinished = re.compile(rf"\.{re.escape(self._channel)}_[0-9]+\.penstock\.json\.[0-9]+\.tmp")
            for name in filter(unfinished.fullmatch, here.names()):
                here.remove(name)
            try:
                trailer = read_trailer(self._directory, self._channel, epoch)
            except ValueError as error:
                raise SinkError(f"{error}; remove it and start sidecar and trainer again") from error
            if trailer is not None:
                self._run = trailer.run
            ended = trailer is not None and trailer.state not in ("failed", "open")
            if not ended:
                if self._names.is_withdrawn(epoch, here):
                    self.publish(self._open_trailer(epoch))
                    self._names.hold_withdrawn(epoch, here)
                else:
                    self.prepare(epoch)
                return epoch
            if successor:
                self.prepare(epoch + 1)
            self._names.unlink(epoch, here)
            self._write_ends.done()
            return epoch + 1

    async def settle(self) -> int | None:
        """See `WriteEnds.settle`."""
        return await self._write_ends.settle()

    async def read_up(self, epoch: int, outlet: PipeOutlet) -> None:
        """Wait for the reader to take the last bytes, as `streamer.sink.outlet.read_up`, after `settle`.

        Raises ReaderGone if it leaves bytes in the FIFO, SinkError.
        """
        if not self._write_ends.lasting:
            await outlet.read_up()
            return
        with shortages(self.path(epoch)):
            fifo = self._names.write_end(epoch)  # the outlet is the pipe to the keeper
        if fifo is None:
            raise ReaderGone("the reader closed the pipe")
        try:
            await read_up(fifo)
        finally:
            os.close(fifo)

    async def open(self, position: Position, *, on_gone: Callable[[], None]) -> PipeOutlet:
        """Wait without limit for a reader of the epoch's FIFO; return the FIFO's outlet.

        Raises as `WriteEnds.open`.
        """
        epoch = position.epoch
        with shortages(self.path(epoch)):
            return await self._write_ends.open(position, self._names.fd(epoch), on_gone=on_gone)

    async def replaced(self, epoch: int) -> None:
        """See `FifoNames.replaced`. The caller then cancels `open`, and calls `prepare` and `open` again."""
        await self._names.replaced(epoch)

    def withdraw(self, epoch: int) -> None:
        """Take the name of an open FIFO away, so that no further reader opens it. Raises Shortage.

        The caller repeats the call until it succeeds, before the first byte of the epoch.
        """
        with self._opened(self.path(epoch)) as here:
            self._names.withdraw(epoch, here)

    async def regain(self, position: Position) -> bool:
        """Return whether a program reads a withdrawn FIFO whose reader has left; `open` is for it then.

        It has opened the FIFO after the reader left and before the FIFO was withdrawn. It would get an end of
        file without a byte, or wait for ever. Raises SinkError.
        """
        with shortages(self.path(position.epoch)):
            write_end = self._names.write_end(position.epoch)
        if write_end is not None:
            await self._write_ends.regain(position, write_end)
        return write_end is not None

    def conclude(self, trailer: Trailer, *, successor: bool = True) -> None:
        """Do the steps of the epoch's end that may fail: make the next FIFO, publish the trailer, unlink.

        Without `successor`, make no next FIFO. Raises Shortage; the caller may repeat the call, since the
        reader has not seen the end of file.
        """
        epoch = trailer.epoch
        if successor:
            self.prepare(epoch + 1)
        self.publish(trailer)
        with self._opened(self.path(epoch)) as here:
            self._names.unlink(epoch, here)

    def retire(self, epoch: int, outlet: PipeOutlet | None) -> None:
        """Close the write end, after `conclude`."""
        self._names.let_go(epoch)
        with contextlib.suppress(SinkError), self._opened() as here:  # an old file does no harm
            if epoch >= KEPT_TRAILERS:
                here.remove(trailer_path("", self._channel, epoch - KEPT_TRAILERS))
            if epoch >= KEPT_KEY_LISTS:
                here.remove(key_list_path("", self._channel, epoch - KEPT_KEY_LISTS))
        if outlet is not None:
            outlet.close()
        self._write_ends.done()

    def key_list(
        self,
        epoch: int,
        starts: Callable[[int], Iterator[ObjectStart | None]],
        *,
        first: int,
        consumed: int,
        ahead: bool,
        held: bool,
    ) -> KeyListWriter:
        """Begin the epoch's key list, or go on with it if the FIFO is `held`; see `KeyListWriter`.

        Takes some microseconds per object before `consumed`. Raises SinkError.
        """
        path = key_list_path(self._directory, self._channel, epoch)
        with shortages(path):
            held = held and os.path.exists(path)
            try:
                return KeyListWriter(
                    path, self._run, starts, first=first, consumed=consumed, ahead=ahead, held=held
                )
            except ValueError as error:
                raise SinkError(
                    f"{path} cannot be continued: {error}; remove it and start sidecar and trainer again"
                ) from error

    def publish(self, trailer: Trailer) -> None:
        """Replace the epoch's trailer. Raises SinkError."""
        with self._opened(trailer_path(self._directory, self._channel, trailer.epoch)) as here:
            write_trailer("", replace(trailer, run=self._run), dir_fd=here.fd)
        if trailer.state == "open":
            self._unproven.add(trailer.epoch)
        else:
            self._unproven.discard(trailer.epoch)

    def publish_openings(self) -> None:
        """Replace the `open` trailers, because the plan has grown. Raises SinkError."""
        for epoch in sorted(self._unproven):
            self.publish(self._open_trailer(epoch))

    def leave(self, position: Position, outlet: PipeOutlet | None) -> None:
        """Hand the open FIFO over and close this process's descriptors; names and trailers stay.

        Raises SinkError.
        """
        with shortages(self.path(position.epoch)):
            self._write_ends.leave(position, self._names.fd(position.epoch), outlet)
        self.let_go()

    def let_go(self) -> None:
        """Close the descriptors; names and trailers stay."""
        self._names.let_all_go()
        self._unproven.clear()

    def close(self, *, forget: bool = False) -> None:
        """Close the write ends; remove the FIFOs, and the trailers that are still `open`.

        With `forget`, remove every trailer.
        """
        self._write_ends.close()
        self._names.remove_all()
        while self._unproven:
            epoch = self._unproven.pop()
            with contextlib.suppress(SinkError), self._opened() as here:
                here.remove(trailer_path("", self._channel, epoch))
        if forget:
            with contextlib.suppress(SinkError):
                self.clear()
