"""One epoch's FIFO as a binary file whose end is proven.

A reader opens the FIFO non-blocking, for a blocking open without a writer hangs for ever. It then has to
tell four states apart that look alike to `read` (contract §1.7-6, checked on Linux 6.18):

    no writer yet           read gives 0 bytes, poll stays silent
    writer, no data         read raises EAGAIN, poll stays silent
    data                    poll says POLLIN
    writer came and went    read gives 0 bytes, poll says POLLHUP

So 0 bytes are the end of file only under POLLHUP, or after a writer was seen (EAGAIN or data).

The end of file is then compared with the trailer (`streamer.trailer`). A failed sidecar holds its end open
instead of closing it, because a close would look like a proper end to foreign readers; a FIFO cannot say
"error". So a reader that waits for bytes looks at the trailer once a second, and raises what it says.
Waiting itself costs nothing: it is `poll`. A sidecar may also end a failed epoch by bytes that no reader of
records accepts. Those are not given out: where the trailer announces that they may come, it is looked at
after each read.

The stream ends in one of three ways: 0 bytes (proven, or a FIFO without proof, or a plain file),
`TruncatedStream` (it broke, says why, and says so again if asked again), or `close` by the reader at any
time, which is legal (contract §1.3) and raises nothing.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import select
import stat
import time
from typing import TYPE_CHECKING

from streamer.errors import ChannelError, PenstockError, StreamError, TruncatedStream
from streamer.readers.arrival import Arrival
from streamer.trailer import Trailer, read_trailer, trailer_path

if TYPE_CHECKING:
    from collections.abc import Callable

    from _typeshed import WriteableBuffer

logger = logging.getLogger("penstock")

_NAME = re.compile(r"(?P<channel>.+)_(?P<epoch>0|[1-9][0-9]*)")
STDIN = "/dev/stdin"
_LOOK = 1.0
"""Seconds between two looks at the trailer while no bytes come."""
_READ_ALL = 1 << 20


class PipeStream(io.RawIOBase):
    """The bytes of one epoch: `<dir>/<channel>_<epoch>`, or any file that can be read.

    The constructor does nothing but remember; the FIFO is opened by `open()` or by the first read, so a
    stream that is made and thrown away consumes no epoch. A FIFO has a proof if a trailer lies beside it
    when it is opened. Without one (SageMaker's own FIFOs), and for regular files and /dev/stdin, the end
    of file is taken as the end. To read lines or small pieces, wrap it in `io.BufferedReader`.

    `timeout`: seconds to wait until the FIFO exists, and then until somebody opens it for writing.
    `patience`: seconds after which a read that has nothing returns None, as non-blocking files do; by
    default it waits as long as the writer takes. `hint` ends the error text when the FIFO does not appear.
    `unused` is called once if the stream is closed, or fails, without any writer having seen it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        timeout: float = 120.0,
        patience: float | None = None,
        hint: str = "",
        unused: Callable[[], None] | None = None,
    ) -> None:
        self.name = os.fspath(path)
        self.mode = "rb"
        self.received = 0
        """Bytes read so far."""
        self.trailer: Trailer | None = None
        """The trailer as last seen; None for a source without proof."""
        self._fd = -1
        self._timeout = timeout
        self._patience = patience
        self._hint = hint
        self._unused = unused
        self._arrival: Arrival | None = None
        self._deadline = 0.0
        self._used = False
        """Whether a writer may have seen this reader, so that the epoch counts as read."""
        self._fifo = False
        self._nonblocking = False
        self._writer_seen = False
        self._ended = False
        self._failure: PenstockError | None = None
        self._next_look = 0.0
        self._stamp = (0, 0)
        """Of the trailer, when it was last read for what it says of the bytes behind a failure."""
        directory, self._base = os.path.split(self.name)
        self._directory = directory or "."
        self._identity = _NAME.fullmatch(self._base)

    def __repr__(self) -> str:
        total = None if self.trailer is None else self.trailer.bytes_total
        due = "" if total is None else f" of {total}"
        state = "closed" if self.closed else "ended" if self._ended else "open" if self._fd >= 0 else "new"
        return f"<PipeStream {self.name} [{state}: {self.received}{due} bytes]>"

    @property
    def epoch(self) -> int:
        """The epoch that the FIFO is of, by its name; 0 for what is named otherwise."""
        return 0 if self._identity is None else int(self._identity["epoch"])

    @property
    def begun_at(self) -> int:
        """The byte of the epoch that the FIFO begins with; not 0 where a sidecar resumed. Known once open."""
        return 0 if self.trailer is None else self.trailer.bytes_skipped

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        if self._fd < 0:
            raise io.UnsupportedOperation("the stream is not open")
        return self._fd

    def open(self, wait: float | None = None) -> bool:
        """Open the FIFO once it exists; whether it is open after at most `wait` seconds.

        Raises ChannelError if it did not appear within `timeout` seconds of the first call, or cannot be
        read; StreamError if its trailer cannot be.
        """
        self._check()
        if self._fd >= 0:
            return True
        if self._arrival is None:
            self._arrival = Arrival(self.name)
            self._deadline = time.monotonic() + self._timeout
        while True:
            left = max(0.0, self._deadline - time.monotonic())
            if not self._arrival.wait(left if wait is None else min(left, wait)):
                if time.monotonic() < self._deadline:
                    return False
                raise self._fail(ChannelError(self._absent()))
            try:
                self._attach()
            except FileNotFoundError:
                continue  # removed between the look and the open: wait for the next one
            except OSError as error:
                raise self._fail(ChannelError(f"cannot read {self.name}: {error.strerror}")) from error
            return True

    def readinto(self, buffer: WriteableBuffer, /) -> int | None:
        """Fill `buffer` with what is there, waiting for the first byte; 0 at the proven end.

        None only with `patience`. Raises TruncatedStream if the epoch ended before its end, ChannelError
        as `open` does, and if nobody opened the FIFO for writing within `timeout` seconds; StreamError if the
        trailer cannot be read.
        """
        self._check()
        if self._ended:
            return 0
        started = time.monotonic()
        if self._fd < 0 and not self.open(self._patience):
            return None
        view = memoryview(buffer).cast("B")
        if not view:
            return 0
        give_up = None if self._patience is None else started + self._patience
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        hung_up = not self._fifo
        ready = self._nonblocking
        while True:
            if ready or hung_up:
                taken = self._take(view)
                if taken and (taken := self._genuine(taken)):
                    self.received += taken
                    return taken
                if taken == 0 and (hung_up or self._writer_seen):
                    return self._end()
            now = time.monotonic()
            self._look(now)
            until = self._next_look if give_up is None else min(self._next_look, give_up)
            events = poller.poll(max(0.0, until - now) * 1000)
            hung_up = any(event & select.POLLHUP for _, event in events)
            ready = bool(events)
            if not events and give_up is not None and time.monotonic() >= give_up:
                return None

    def readall(self) -> bytes:
        """The rest of the epoch."""
        chunks = []
        while chunk := self.read(_READ_ALL):
            chunks.append(chunk)
        return b"".join(chunks)

    def close(self) -> None:
        """Let go of the FIFO; before its end, this tells the writer to go on to the next epoch."""
        if not self.closed:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)
            self._settle(unused=not self._used)
            super().close()

    def _check(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on closed file")
        if self._failure is not None:
            raise self._failure

    def _fail(self, failure: PenstockError) -> PenstockError:
        self._failure = failure
        if self._fd < 0:
            self._settle(unused=not self._used)
        return failure

    def _settle(self, *, unused: bool) -> None:
        if self._arrival is not None:
            self._arrival.close()
        if unused and self._unused is not None:
            callback, self._unused = self._unused, None
            callback()

    def _attach(self) -> None:
        if self.name == STDIN:
            # Opened anew, a pipe whose writer has already left would look like one without a writer yet.
            # Its flags are shared with other processes, so it stays as blocking as it is.
            fd = os.dup(0)
        else:
            fd = os.open(self.name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self._examine(fd)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        self._settle(unused=False)
        now = time.monotonic()
        self._deadline = now + self._timeout
        self._next_look = now + _LOOK

    def _examine(self, fd: int) -> None:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise self._fail(
                ChannelError(f"{self.name} is a directory: that is a File channel, not a Pipe channel")
            )
        self._used = True
        self._fifo = stat.S_ISFIFO(mode)
        self._nonblocking = not os.get_blocking(fd)
        if self._fifo and self._identity is not None:
            self.trailer = self._read_trailer()
            if self.trailer is None:
                logger.info("%s has no trailer: its end of file cannot be proven", self.name)

    def _take(self, view: memoryview) -> int | None:
        """Bytes read without waiting; 0 if there is no writer (any more), None if it has written nothing.

        Takes all that is there, for one small pipe must not make many small blocks.
        """
        taken = 0
        while taken < len(view):
            try:
                count = os.readv(self._fd, [view[taken:]])
            except BlockingIOError:
                self._writer_seen = True
                return taken or None
            if count == 0:
                return taken
            self._writer_seen = True
            taken += count
            if not self._nonblocking:
                break
        return taken

    def _genuine(self, taken: int) -> int:
        """How many of the bytes just read are of the epoch. Raises TruncatedStream if none of them is."""
        trailer = self.trailer
        if trailer is None or not trailer.poison:
            return taken
        with contextlib.suppress(OSError):  # it cannot be looked at: the end will tell
            found = os.stat(trailer_path(self._directory, trailer.channel, trailer.epoch))
            if (stamp := (found.st_ino, found.st_mtime_ns)) != self._stamp:
                self._stamp = stamp
                self.trailer = trailer = self._read_trailer() or trailer
        if trailer.verdict != "failed":
            return taken
        left = trailer.bytes_delivered - self.received
        if left <= 0:
            raise self._fail(TruncatedStream(self._broken(trailer)))
        return min(taken, left)

    def _look(self, now: float) -> None:
        """While no bytes come: has the sidecar failed, or has nobody come to write at all?"""
        if now < self._next_look:
            return
        self._next_look = now + _LOOK
        if self.trailer is not None:
            self.trailer = self._read_trailer() or self.trailer
            if self.trailer.verdict in ("failed", "stopped"):
                raise self._fail(TruncatedStream(self._broken(self.trailer)))
        if self._fifo and not self._writer_seen and now >= self._deadline:
            self._settle(unused=True)
            raise self._fail(
                ChannelError(
                    f"nobody opened {self.name} for writing in {self._timeout:g} s: is the sidecar alive?"
                )
            )

    def _end(self) -> int:
        if self.trailer is not None:
            last = self._read_trailer()
            if last is None:
                raise self._fail(
                    TruncatedStream(
                        f"{self._base} ended after {self.received} bytes and its trailer is gone: "
                        "nothing proves that this is the end"
                    )
                )
            self.trailer = last
            if last.verdict != "complete" or last.bytes_delivered != self.received:
                raise self._fail(TruncatedStream(self._broken(last)))
        self._ended = True
        return 0

    def _broken(self, trailer: Trailer) -> str:
        total = trailer.bytes_delivered if trailer.verdict == "complete" else trailer.bytes_total
        why = {
            "open": "the sidecar died",
            "complete": "the sidecar delivered them all, so another process reads this FIFO too",
            "abandoned": "the sidecar saw the reader leave; did another process read this FIFO too?",
            "failed": "the source failed",
            "stopped": "the sidecar was told to stop",
        }[trailer.verdict]
        said = f": {trailer.error}" if trailer.error else ""
        due = "" if total is None else f" of {total}"
        return f"received {self.received}{due} bytes of {self._base}: {why}{said}"

    def _read_trailer(self) -> Trailer | None:
        if self._identity is None:
            return None
        channel, epoch = self._identity["channel"], int(self._identity["epoch"])
        try:
            return read_trailer(self._directory, channel, epoch)
        except (OSError, ValueError) as error:
            raise self._fail(StreamError(f"the end of {self._base} cannot be proven: {error}")) from error

    def _absent(self) -> str:
        prefix = self._base if self._identity is None else f"{self._identity['channel']}_"
        try:
            there = sorted(name for name in os.listdir(self._directory) if name.startswith(prefix))
            offer = f"the directory offers {', '.join(there) or 'nothing of this channel'}"
        except OSError as error:
            offer = f"the directory cannot be read: {error.strerror}"
        with contextlib.suppress(StreamError):
            if (last := self._read_trailer()) is not None:
                offer += f", and the trailer of {self._base} says '{last.verdict}'"
        hint = f": {self._hint}" if self._hint else ""
        return f"{self._base} did not appear in {self._directory} in {self._timeout:g} s; {offer}{hint}"
