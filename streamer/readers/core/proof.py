"""What proves that the end of an open stream is the end of its epoch.

    trailer   beside a FIFO, by its name; of `/dev/stdin` and of a link, by the name that /proc knows
    mark      on the pipe of `penstock cat`, which has no name (`streamer.trailer`)

A reader may open a FIFO before there is a sidecar. Then no trailer lies beside it, or one of an earlier run.
A sidecar publishes its own trailer before it opens the FIFO for writing, so the trailer that lies there when
the first bytes have come, or the end has, is the writer's own. `begin` takes that one; its `bytes_skipped`
and `bytes_total` hold from then on, and not before. If the trailer of epoch 0 lay there, with state `failed`,
when the reader opened the FIFO, it is an earlier run's as long as no process has the FIFO open for writing.
(A sidecar that fails publishes such a trailer for the next epoch too, which has no writer.)

A FIFO promises a proof if this reader has ever seen a trailer beside it, or if there are trailers of other
epochs of its channel. The trailer is looked at after every read, once a second while no bytes come, and at
the end. From the first byte to the end it must be of one run: a sidecar that is killed and started again
writes the epoch anew into the FIFO that is still open.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import stat

from streamer.errors import StreamError, TruncatedStream
from streamer.trailer import Trailer, has_trailers, mark_of, read_trailer, trailer_path

logger = logging.getLogger("penstock")

_NAME = re.compile(r"(?P<channel>.+)_(?P<epoch>0|[1-9][0-9]*)")
_DELETED = " (deleted)"
_NONBLOCK = 2
"""SPLICE_F_NONBLOCK, of splice(2)."""


class Proof:
    """The proof of one stream. Every method raises StreamError if the trailer cannot be read."""

    def __init__(self, name: str, *, required: bool = False) -> None:
        """`name`: the path that the stream is opened by. `required`: a stream without a proof is an error."""
        self.trailer: Trailer | None = None
        """The trailer as last seen."""
        self._name = name
        self._required = required
        self._fd = -1
        self._fifo = False
        self._stamp: tuple[int, int] | None = None
        """Of the trailer that was read last: its inode, and when that changed."""
        self._first_stamp: tuple[int, int] | None = None
        """The stamp of the trailer that lay there when the stream was opened."""
        self._run: str | None = None
        """The run of the trailer under which the stream began; None before it began."""
        self.directory, self.base, self._identity = _located(name)

    def __repr__(self) -> str:
        state = "unknown" if self.trailer is None else self.trailer.state
        return f"<Proof of {self.base} [{state}]>"

    @property
    def epoch(self) -> int:
        """The epoch by the FIFO's name; 0 for what is named otherwise."""
        return 0 if self._identity is None else int(self._identity["epoch"])

    @property
    def prefix(self) -> str:
        """What the names of all FIFOs of the channel begin with."""
        return self.base if self._identity is None else f"{self._identity['channel']}_"

    def attach(self, fd: int) -> None:
        """Take the stream's open descriptor, which stays the caller's, and look at the trailer."""
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
        """Whether a sidecar offered this FIFO, or others of its channel in this directory."""
        if self.trailer is not None or self._identity is None:
            return self.trailer is not None
        with contextlib.suppress(OSError):  # a directory that is gone or cannot be listed shows none
            return has_trailers(self.directory, self._identity["channel"])
        return False

    def look(self) -> bool:
        """Read the trailer if it is another one than was read last; whether there is one."""
        if self._identity is None:
            return False
        channel, epoch = self._identity["channel"], self.epoch
        try:
            status = os.stat(trailer_path(self.directory, channel, epoch))
            if (stamp := (status.st_ino, status.st_ctime_ns)) == self._stamp:
                return True
            trailer = read_trailer(self.directory, channel, epoch)
        except FileNotFoundError:
            self._stamp = None
            return False
        except (OSError, ValueError) as error:
            raise StreamError(f"the end of {self.base} cannot be proven: {error}") from error
        if trailer is None:
            return False
        self.trailer, self._stamp = trailer, stamp
        return True

    def begin(self) -> bool:
        """Look at the trailer once bytes have come or the end has; whether there is one.

        Raises TruncatedStream if it is of another run than when the stream began.
        """
        there = self.look()
        run = self.trailer.run if there and self.trailer else ""
        if self._run is None:
            self._run = run
            if self._fifo and not self._promised and mark_of(self._fd) == "none":
                logger.info("%s has no trailer: its end of file cannot be proven", self._name)
        elif there and run != self._run:
            raise TruncatedStream(
                f"{self.base} is written by another sidecar than it was begun by: the one that began it died"
            )
        return there

    def genuine(self, taken: int, received: int) -> int:
        """How many of the `taken` bytes, which follow `received` others, are of the epoch.

        Raises TruncatedStream if none of them is, and as `begin`.
        """
        there = self.begin()
        trailer = self.trailer
        if not there or trailer is None or trailer.state != "failed":
            return taken
        left = trailer.bytes_delivered - received
        if left <= 0:
            raise TruncatedStream(self._broken(trailer, received))
        return min(taken, left)

    def check_source(self, received: int) -> None:
        """While no bytes come: raise TruncatedStream if none will."""
        if not self._says_failed():
            return
        early = self._run is None and self.epoch == 0 and self._stamp == self._first_stamp
        if early and not (has_writer(self._fd) and self._says_failed()):  # a writer has published its own
            return
        if self.trailer is not None:
            raise TruncatedStream(self._broken(self.trailer, received))

    def _says_failed(self) -> bool:
        """Whether the trailer, as it is now, says that no more bytes will come."""
        return self.look() and self.trailer is not None and self.trailer.state in ("failed", "stopped")

    def check_end(self, received: int) -> None:
        """Raise TruncatedStream unless the end of file, after `received` bytes, is that of the epoch."""
        there, trailer = self.begin(), self.trailer
        if there and trailer is not None:
            if trailer.state != "complete" or trailer.bytes_delivered != received:
                raise TruncatedStream(self._broken(trailer, received))
            return
        if self._promised:
            raise TruncatedStream(
                f"{self.base} ended after {received} bytes and its trailer is gone: "
                "nothing proves that this is the end"
            )
        mark = mark_of(self._fd)
        if mark == "promised":
            raise TruncatedStream(
                f"{self.base} ended after {received} bytes, and its writer promised more: if that was "
                "`penstock cat`, its standard error and exit code say why"
            )
        if mark == "none" and self._required:
            raise TruncatedStream(
                f"{self.base} ended after {received} bytes, and nothing proves that this is the end: "
                "its writer must be `penstock run`, or `penstock cat` with this pipe as its standard output"
            )

    def _broken(self, trailer: Trailer, received: int) -> str:
        total = trailer.bytes_delivered if trailer.state == "complete" else trailer.bytes_total
        why = {
            "open": "the sidecar died",
            "complete": "the sidecar delivered them all, so another process reads this FIFO too",
            "abandoned": "the sidecar saw the reader leave; did another process read this FIFO too?",
            "failed": "the source failed",
            "stopped": "the sidecar was told to stop",
        }[trailer.state]
        error = f": {trailer.error}" if trailer.error else ""
        due = "" if total is None else f" of {total}"
        return f"received {received}{due} bytes of {self.base}: {why}{error}"


def has_writer(fd: int) -> bool:
    """Whether anybody has the FIFO open for writing; takes no byte.

    tee(2) of a FIFO returns 0 if no process has, else the bytes that are there, or EAGAIN.
    """
    read_end, write_end = os.pipe()
    try:
        count: int = ctypes.CDLL(None, use_errno=True).tee(fd, write_end, ctypes.c_size_t(1), _NONBLOCK)
        return count != 0
    finally:
        os.close(read_end)
        os.close(write_end)


def _located(path: str) -> tuple[str, str, re.Match[str] | None]:
    """Directory and name of a path, and the name's parts if it is that of a FIFO of a channel."""
    directory, base = os.path.split(path)
    return directory or ".", base, _NAME.fullmatch(base)
