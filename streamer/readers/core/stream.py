"""One epoch's FIFO as a binary file whose end is proven.

A reader opens the FIFO non-blocking, for a blocking open without a writer hangs for ever. It then has to
tell four states apart that look alike to `read` (contract §1.7-6, checked on Linux 6.18):

    no writer yet           read gives 0 bytes, poll stays silent
    writer, no data         read raises EAGAIN, poll stays silent
    data                    poll says POLLIN
    writer came and went    read gives 0 bytes, poll says POLLHUP

So 0 bytes are the end of file only under POLLHUP, or after a writer was seen (EAGAIN or data).

The end of file must then be proven (`streamer.readers.core.proof`). A failed sidecar holds its end open
instead of closing it, because a close would look like a proper end to foreign readers; a FIFO cannot say
"error". So a reader that waits for bytes looks at the trailer once a second, and raises what it says.
Waiting itself costs nothing: it is `poll`. A sidecar may also end a failed epoch by bytes that no reader of
records accepts. Those are not given out: the trailer is looked at after each read.

The stream ends in one of three ways: 0 bytes (proven, or a FIFO without proof, or a plain file),
`TruncatedStream` (it broke; every further read raises the same error), or `close` by the reader at any
time, which is legal (contract §1.3) and raises nothing.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import stat
import time
from typing import TYPE_CHECKING

from streamer.errors import ChannelError, PenstockError, StreamError
from streamer.readers.core.arrival import Arrival
from streamer.readers.core.proof import Proof

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from _typeshed import WriteableBuffer

    from streamer.trailer import Trailer

STDIN = "/dev/stdin"
_CHECK_S = 1.0
"""Seconds between two reads of the trailer while no bytes come."""
_READ_ALL = 1 << 20


class PipeStream(io.RawIOBase):
    """The bytes of one epoch: `<dir>/<channel>_<epoch>`, or any file that can be read.

    `open()` or the first read opens the FIFO, not the constructor, so a stream that is made and thrown away
    uses up no epoch. A FIFO of a sidecar and the pipe of `penstock cat`
    have a proof. Of what has none (SageMaker's own FIFOs, other programs' pipes, regular files) the end of
    file is taken as the end, unless `proof`. To read lines or small pieces, wrap it in `io.BufferedReader`.

    `timeout`: seconds to wait until the FIFO exists, and then until it is opened for writing.
    `patience`: seconds after which a read that has nothing returns None, as non-blocking files do; by
    default it waits as long as the writer takes. `hint` ends the error text when the FIFO does not appear.
    `unused` is called once if the stream is closed, or fails, without any writer having seen it. `proof`:
    an end that nothing proves is an error.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        timeout: float = 120.0,
        patience: float | None = None,
        hint: str = "",
        unused: Callable[[], None] | None = None,
        proof: bool = False,
    ) -> None:
        self.name = os.fspath(path)
        self.mode = "rb"
        self.received = 0
        """Bytes read so far."""
        self._fd = -1
        self._timeout = timeout
        self.patience = patience
        """Seconds that a read waits at most; None if it waits as long as the writer takes."""
        self._hint = hint
        self._unused = unused
        self._arrival: Arrival | None = None
        self._deadline = 0.0
        self._used = False
        """Whether a writer may have seen this reader, so that the epoch counts as read."""
        self._fifo = False
        self._nonblocking = False
        self._writer_seen = False
        self._begun = False
        self._ended = False
        self._failure: PenstockError | None = None
        self._next_check = 0.0
        self._proof = Proof(self.name, required=proof)

    def __repr__(self) -> str:
        due = "" if self.bytes_total is None else f" of {self.bytes_total}"
        state = "closed" if self.closed else "ended" if self._ended else "open" if self._fd >= 0 else "new"
        return f"<PipeStream {self.name} [{state}: {self.received}{due} bytes]>"

    @property
    def trailer(self) -> Trailer | None:
        """The trailer as last seen; None if there is none. Before `begin` it may be of an earlier run."""
        return self._proof.trailer

    @property
    def epoch(self) -> int:
        """The epoch that the FIFO is of, by its name; 0 for what is named otherwise."""
        return self._proof.epoch

    @property
    def start_offset(self) -> int:
        """Offset in the epoch of the FIFO's first byte; not 0 where a sidecar resumed. See `begin`."""
        return 0 if self.trailer is None else self.trailer.bytes_skipped

    @property
    def bytes_total(self) -> int | None:
        """Bytes of the whole epoch; None if they are not known before its end. See `begin`."""
        return None if self.trailer is None else self.trailer.bytes_total

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

    def begin(self, wait: float | None = None) -> bool:
        """Open the FIFO and wait until its first byte or its end has come; whether that was within `wait` s.

        Only then `trailer`, `start_offset` and `bytes_total` are surely those of the FIFO's writer: a reader
        may come before the sidecar. Takes no byte. Raises as `open` and `readinto` do.
        """
        give_up = None if wait is None else time.monotonic() + wait
        if not self.open(wait):
            return False
        if self._ended or self._begun:
            return True
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        # Past the deadline readinto decides: it can tell a writer without bytes from none.
        while not poller.poll(0) and (now := time.monotonic()) < self._deadline:
            if give_up is not None and now >= give_up:
                return False
            self._look_at_source(now)
            until = min(self._next_check, self._deadline, give_up or self._deadline)
            poller.poll(max(0.0, until - now) * 1000)
        with self._judged():
            self._proof.begin()
        self._begun = True
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int | None:
        """Fill `buffer` with what is there, waiting for the first byte; 0 at the proven end.

        None only with `patience`. Raises TruncatedStream if the epoch ended before its end, ChannelError
        as `open` does, and if no process opened the FIFO for writing within `timeout` seconds; StreamError if
        the trailer cannot be read.
        """
        self._check()
        if self._ended:
            return 0
        started = time.monotonic()
        if self._fd < 0 and not self.open(self.patience):
            return None
        view = memoryview(buffer).cast("B")
        if not view:
            return 0
        give_up = None if self.patience is None else started + self.patience
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        hung_up = not self._fifo
        ready = self._nonblocking
        while True:
            if ready or hung_up:
                taken = self._take(view)
                if taken:
                    with self._judged():
                        taken = self._proof.genuine(taken, self.received)
                    self.received += taken
                    return taken
                if taken == 0 and (hung_up or self._writer_seen):
                    return self._end()
            now = time.monotonic()
            self._look(now)
            until = self._next_check if give_up is None else min(self._next_check, give_up)
            events = poller.poll(max(0.0, until - now) * 1000)
            hung_up = any(event & select.POLLHUP for _, event in events)
            ready = bool(events) or (self._nonblocking and not self._writer_seen)
            if not events and give_up is not None and time.monotonic() >= give_up:
                return None

    def readall(self) -> bytes:
        """The rest of the epoch."""
        chunks = []
        while chunk := self.read(_READ_ALL):
            chunks.append(chunk)
        return b"".join(chunks)

    def close(self) -> None:
        """Close the FIFO. Before its end, the sidecar then goes on to the next epoch."""
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
        self._next_check = now + _CHECK_S

    def _examine(self, fd: int) -> None:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise self._fail(
                ChannelError(f"{self.name} is a directory: that is a File channel, not a Pipe channel")
            )
        self._used = True
        self._fifo = stat.S_ISFIFO(mode)
        self._nonblocking = not os.get_blocking(fd)
        # A pipe that was open already has had its writer.
        self._writer_seen = self.name == STDIN
        with self._judged():
            self._proof.attach(fd)

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

    def _look(self, now: float) -> None:
        """While no bytes come: raise if the sidecar has failed, or if no writer has come in time."""
        self._look_at_source(now)
        if self._fifo and not self._writer_seen and now >= self._deadline:
            self._settle(unused=True)
            trailer = self.trailer
            state = f"; its trailer says '{trailer.state}'" if trailer else ""
            if trailer and trailer.error:
                state += f": {trailer.error}"
            raise self._fail(
                ChannelError(
                    f"nobody opened {self.name} for writing in {self._timeout:g} s: is the sidecar alive?"
                    f"{state}"
                )
            )

    def _look_at_source(self, now: float) -> None:
        if now >= self._next_check:
            self._next_check = now + _CHECK_S
            with self._judged():
                self._proof.check_source(self.received)

    def _end(self) -> int:
        with self._judged():
            self._proof.check_end(self.received)
        self._ended = True
        return 0

    @contextlib.contextmanager
    def _judged(self) -> Iterator[None]:
        """Keep what is raised as the stream's failure from then on."""
        try:
            yield
        except PenstockError as error:
            raise self._fail(error) from error.__cause__

    def _absent(self) -> str:
        proof = self._proof
        try:
            names = sorted(name for name in os.listdir(proof.directory) if name.startswith(proof.prefix))
            offer = f"the directory offers {', '.join(names) or 'nothing of this channel'}"
        except OSError as error:
            offer = f"the directory cannot be read: {error.strerror}"
        with contextlib.suppress(StreamError):
            if proof.look() and proof.trailer:
                offer += f", and the trailer of {proof.base} says '{proof.trailer.state}'"
        hint = f": {self._hint}" if self._hint else ""
        return f"{proof.base} did not appear in {proof.directory} in {self._timeout:g} s; {offer}{hint}"
