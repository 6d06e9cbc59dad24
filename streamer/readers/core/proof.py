"""Proves that the end of an open stream is the end of its epoch.

    trailer   file beside a FIFO, found by the FIFO's name; for `/dev/stdin` and links, by the name in /proc
    mark      on the pipe of `penstock cat`, which has no name (`streamer.trailer`)

A reader may open a FIFO before a sidecar runs. Then the FIFO has no trailer, or that of an earlier run. A
sidecar publishes its own trailer before it opens the FIFO for writing, so the trailer at the first byte, or
at the end, is the writer's own. `begin` reads that one; `bytes_skipped` and `bytes_total` are valid from then
on. A trailer of epoch 0 with state `failed` that existed when the reader opened the FIFO is an earlier run's
as long as no process has the FIFO open for writing. (A sidecar that fails publishes such a trailer for the
next epoch too, which has no writer.)

A FIFO must have a proof if this reader has ever seen its trailer, or if there are trailers of other epochs of
its channel. The reader checks the trailer after every read, once a second while no bytes come, and at the
end. From the first byte to the end the trailer must be of one run: a sidecar that is killed and restarted
writes the epoch anew into the FIFO that is still open.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat

from streamer.errors import StreamError, TruncatedStream
from streamer.key_list import key_list_path
from streamer.linux import tee
from streamer.trailer import (
    Trailer,
    fifo_path,
    has_trailers,
    mark_of,
    parse_fifo_name,
    read_trailer,
    trailer_path,
    withdrawn_path,
)
from streamer.units import counted

logger = logging.getLogger("penstock")

_DELETED = " (deleted)"


class Proof:
    """The proof of one stream. Every method raises StreamError if the trailer cannot be read."""

    def __init__(self, name: str, *, required: bool = False) -> None:
        """`name`: the path of the stream. `required`: a stream without a proof is an error."""
        self.trailer: Trailer | None = None
        """The trailer as last read."""
        self._name = name
        self._required = required
        self._fd = -1
        self._fifo = False
        self._stamp: tuple[int, int] | None = None
        """Inode and change time of the trailer that was read last."""
        self._first_stamp: tuple[int, int] | None = None
        """Stamp of the trailer that existed when the stream was opened."""
        self._run: str | None = None
        """Run of the trailer at the stream's first byte; None before it."""
        self.directory, self.base, self._identity = _located(name)

    def __repr__(self) -> str:
        state = "unknown" if self.trailer is None else self.trailer.state
        return f"<Proof of {self.base} [{state}]>"

    @property
    def epoch(self) -> int:
        """Epoch in the FIFO's name; 0 for any other name."""
        return 0 if self._identity is None else self._identity[1]

    @property
    def prefix(self) -> str:
        """Prefix of the names of all FIFOs of the channel."""
        return self.base if self._identity is None else f"{self._identity[0]}_"

    @property
    def key_list_path(self) -> str | None:
        """Path of the epoch's key list; None for a path that is not that of a channel's FIFO."""
        if self._identity is None:
            return None
        return key_list_path(self.directory, *self._identity)

    @property
    def withdrawn_path(self) -> str | None:
        """Path of the FIFO once its reader has come; None for a path that is not that of a channel's FIFO."""
        return None if self._identity is None else withdrawn_path(self.directory, *self._identity)

    def attach(self, fd: int) -> None:
        """Use the stream's open descriptor, which stays the caller's, and read the trailer."""
        self._fd = fd
        self._fifo = stat.S_ISFIFO(os.fstat(fd).st_mode)
        if not self._fifo:
            self._identity = None
        elif self._identity is None:
            with contextlib.suppress(OSError):
                located = _located(os.readlink(f"/proc/self/fd/{fd}").removesuffix(_DELETED))
                if located[2] is not None:
                    self.directory, self.base, self._identity = located
        self.look()
        self._first_stamp = self._stamp

    @property
    def _promised(self) -> bool:
        """Whether a sidecar offered this FIFO, or other FIFOs of its channel in this directory."""
        if self.trailer is not None or self._identity is None:
            return self.trailer is not None
        with contextlib.suppress(OSError):  # a directory that is gone or cannot be listed has no trailers
            return has_trailers(self.directory, self._identity[0])
        return False

    def look(self) -> bool:
        """Read the trailer if it has changed since it was read last; return whether there is one."""
        if self._identity is None:
            return False
        try:
            status = os.stat(trailer_path(self.directory, *self._identity))
            if (stamp := (status.st_ino, status.st_ctime_ns)) == self._stamp:
                return True
            trailer = read_trailer(self.directory, *self._identity)
        except FileNotFoundError:
            self._stamp = None
            return False
        except (OSError, ValueError) as error:
            raise StreamError(f"the end of {self.base} cannot be proven: {error}") from error
        if trailer is None:
            return False
        self.trailer, self._stamp = trailer, stamp
        return True

    def epochs_before(self) -> int | None:
        """Return the number of the channel's epochs, by the trailer of the epoch before; None: no limit."""
        if self._identity is not None and self._identity[1]:
            with contextlib.suppress(OSError, ValueError):
                before = read_trailer(self.directory, self._identity[0], self._identity[1] - 1)
                return None if before is None else before.epochs
        return None

    def begin(self) -> bool:
        """Read the trailer after the first bytes, or the end, have come; return whether there is one.

        Raises TruncatedStream if the trailer is of another run than at the stream's first byte.
        """
        there = self.look()
        run = self.trailer.run if there and self.trailer else ""
        if self._run is None:
            self._run = run
            if self._fifo and not self._promised and mark_of(self._fd) == "none":
                logger.info("%s has no trailer: its end of file cannot be proven", self._name)
        elif there and run != self._run:
            raise TruncatedStream(
                f"the sidecar that began to write {self.base} died, and another one writes it from the "
                "start; start the trainer again"
            )
        return there

    def check_source(self, received: int) -> None:
        """Check the trailer while no bytes come. Raises TruncatedStream if no more bytes will come."""
        if not self._says_failed():
            return
        early = self._run is None and self.epoch == 0 and self._stamp == self._first_stamp
        # A writer publishes its own trailer before it opens the FIFO.
        if early and not (has_writer(self._fd) and self._says_failed()):
            return
        if self.trailer is not None:
            raise TruncatedStream(self._broken(self.trailer, received))

    def _says_failed(self) -> bool:
        """Return whether the present trailer states that no more bytes will come."""
        return self.look() and self.trailer is not None and self.trailer.state in ("failed", "stopped")

    def check_end(self, received: int) -> None:
        """Raise TruncatedStream unless the end of file, after `received` bytes, is proven the epoch's end."""
        there, trailer = self.begin(), self.trailer
        if there and trailer is not None:
            if trailer.state != "complete" or trailer.bytes_delivered != received:
                raise TruncatedStream(self._broken(trailer, received))
            return
        if self._promised:
            raise TruncatedStream(
                f"{self.base} ended after {counted(received, 'byte')} and its trailer is gone: "
                "nothing proves that this is the end"
            )
        mark = mark_of(self._fd)
        if mark == "promised":
            raise TruncatedStream(
                f"{self.base} ended after {counted(received, 'byte')}, and its writer promised more; if the "
                "writer was `penstock cat`, its standard error and exit code have the reason"
            )
        if mark == "none" and self._required:
            raise TruncatedStream(
                f"{self.base} ended after {counted(received, 'byte')}, and nothing proves that this is the "
                "end: its writer must be `penstock run`, or `penstock cat` with this pipe as its standard "
                "output"
            )

    def _broken(self, trailer: Trailer, received: int) -> str:
        total = trailer.bytes_delivered if trailer.state == "complete" else trailer.bytes_total
        why = {
            "open": "the sidecar died",
            "complete": "the sidecar delivered all of them, so another process reads this FIFO too",
            "abandoned": "a reader closed the FIFO early; check whether another process reads this FIFO too",
            "failed": "the source failed",
            "stopped": "the sidecar was stopped before the end of the epoch",
        }[trailer.state]
        error = f": {trailer.error}" if trailer.error else ""
        count = counted(received, "byte") if total is None else f"{received} of {counted(total, 'byte')}"
        return f"received {count} of {self.base}: {why}{error}"


def has_writer(fd: int) -> bool:
    """Return whether any process has the FIFO open for writing. Takes no byte.

    tee(2) of a FIFO returns 0 if no process has, else the number of bytes in the FIFO, or EAGAIN.
    """
    read_end, write_end = os.pipe()
    try:
        return tee(fd, write_end, 1) > 0
    except OSError:  # EAGAIN: a writer, and no byte
        return True
    finally:
        os.close(read_end)
        os.close(write_end)


def _located(path: str) -> tuple[str, str, tuple[str, int] | None]:
    """Return a path's directory and name; also channel and epoch, if the name is that of a channel's FIFO.

    The name of a withdrawn FIFO is the name under which it was offered.
    """
    directory, base = os.path.split(path)
    identity = parse_fifo_name(base)
    if identity is not None:
        base = os.path.basename(fifo_path(directory, *identity))
    return directory or ".", base, identity
