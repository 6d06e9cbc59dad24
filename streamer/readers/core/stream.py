"""One epoch's FIFO as a binary file whose end is proven.

    Opening   waits for the FIFO and opens it
    ReadEnd   reads it; distinguishes a FIFO without a writer from one that has ended
    Proof     reads the trailer, and judges what it states

A read blocks its caller alone, at most `patience` seconds; nothing else of the process waits.

The end of file must be proven (`streamer.readers.core.proof`). After a failure the sidecar keeps its write
end open, because a close would look like a proper end to foreign readers, and a FIFO has no sign for an
error. So a reader that waits for bytes, in `poll`, reads the trailer once a second and raises the error in
it.

The stream ends in one of three ways: 0 bytes (proven, or a FIFO without proof, or a plain file),
`TruncatedStream` (every further read raises the same error), or `close` by the reader at any time, which is
allowed (contract §1.3) and raises nothing.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import time
from typing import TYPE_CHECKING

from streamer.errors import PenstockError
from streamer.readers.core.opening import Opening
from streamer.readers.core.proof import Proof, has_writer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from _typeshed import WriteableBuffer

    from streamer.readers.core.read_end import ReadEnd
    from streamer.trailer import Trailer

_CHECK_S = 1.0
"""Seconds between two reads of the trailer while no bytes come."""
_READ_ALL = 1 << 20


class PipeStream(io.RawIOBase):
    """The bytes of one epoch: `<dir>/<channel>_<epoch>`, or any file that can be read.

    `open()` or the first read opens the FIFO. The constructor does not, so a stream that is never read uses
    up no epoch. A sidecar's FIFO and the pipe of `penstock cat` have a proof. A file without a proof
    (SageMaker's own FIFOs, other programs' pipes, regular files) ends at its end of file, unless `proof` is
    set. To read lines or small pieces, wrap the stream in `io.BufferedReader`.

    `timeout`: seconds to wait until the FIFO exists, and then until it is opened for writing.
    `patience`: seconds after which a read without bytes returns None, as non-blocking files do; None to wait
    as long as the writer takes. `hint`: end of the error text if the FIFO does not appear. `unused`: called
    once if the stream is closed, or fails, before any writer has seen it. `proof`: whether an end without a
    proof is an error.
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
        self._read_end: ReadEnd | None = None
        """None before `open`."""
        self._timeout = timeout
        self.patience = patience
        """Seconds that a read waits at most; None for as long as the writer takes."""
        self._deadline = 0.0
        """Time until which the open FIFO must have a writer."""
        self._begun = False
        self._ended = False
        self._failure: PenstockError | None = None
        self._next_check = 0.0
        self._proof = Proof(self.name, required=proof)
        self._opening = Opening(self.name, self._proof, timeout=timeout, hint=hint, unused=unused)

    def __repr__(self) -> str:
        due = "" if self.bytes_total is None else f" of {self.bytes_total}"
        state = "closed" if self.closed else "ended" if self._ended else "open" if self._read_end else "new"
        return f"<PipeStream {self.name} [{state}: {self.received}{due} bytes]>"

    @property
    def trailer(self) -> Trailer | None:
        """The trailer as last read; None if there is none. Before `begin` it may be of an earlier run."""
        return self._proof.trailer

    @property
    def digest(self) -> str:
        """Digest of the plan, by the trailer as last read; empty without one."""
        return self.trailer.digest if self.trailer else ""

    @property
    def epoch(self) -> int:
        """Epoch in the FIFO's name; 0 for any other name."""
        return self._proof.epoch

    @property
    def key_list_path(self) -> str | None:
        """Path of the epoch's key list (`streamer.key_list`), which may not exist; None for other names."""
        return self._proof.key_list_path

    @property
    def ended(self) -> bool:
        """Whether a read has reached the end, which is proven."""
        return self._ended

    @property
    def start_offset(self) -> int:
        """Offset in the epoch of the FIFO's first byte; not 0 if the sidecar resumed. See `begin`."""
        return 0 if self.trailer is None else self.trailer.bytes_skipped

    @property
    def bytes_total(self) -> int | None:
        """Bytes of the whole epoch; None if the number is not known before its end. See `begin`."""
        return None if self.trailer is None else self.trailer.bytes_total

    def leave_earlier(self) -> None:
        """Leave the epochs before this one that the sidecar offers, because a loaded state is in this one."""
        self._opening.leaves_earlier = True

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        if self._read_end is None:
            raise io.UnsupportedOperation("the stream is not open")
        return self._read_end.fd

    def offered(self, over: Callable[[], bool]) -> Trailer | None:
        """Wait until the FIFO exists, without opening it, or `over` is true; return its trailer, if any.

        Raises ChannelError if the FIFO does not appear within `timeout` seconds, StreamError if its trailer
        cannot be read.
        """
        self._opening.wait(over)
        self._proof.look()
        return self.trailer

    def open(self, wait: float | None = None) -> bool:
        """Open the FIFO once it exists; return whether it is open after at most `wait` seconds.

        Raises ChannelError if the FIFO does not appear within `timeout` seconds of the first call or cannot
        be read, StreamError if its trailer cannot be read.
        """
        self._check()
        if self._read_end is None:
            with self._judged():
                self._attach(self._opening.open(wait))
        return self._read_end is not None

    def open_withdrawn(self) -> bool:
        """Open the FIFO that another process of this reader has opened; return whether it is open.

        It is not if its epoch has ended. Raises as `open`.
        """
        with self._judged():
            self._attach(self._opening.open_withdrawn())
        return self._read_end is not None

    def begin(self, wait: float | None = None) -> bool:
        """Open the FIFO and wait at most `wait` seconds for its first byte or end; return whether it came.

        `trailer`, `start_offset` and `bytes_total` are certainly the writer's only after that, because a
        reader may open the FIFO before the sidecar does. Takes no byte. Raises as `open` and `readinto` do.
        """
        give_up = None if wait is None else time.monotonic() + wait
        if not self.open(wait):
            return False
        if self._ended or self._begun:
            return True
        poller = select.poll()
        poller.register(self.fileno(), select.POLLIN)
        # After the deadline readinto decides, because it distinguishes a silent writer from no writer.
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

    def wait_for_plan(self, wait: float | None = None) -> bool:
        """Wait at most `wait` seconds until the sidecar has listed the whole plan; return whether it has.

        Takes no byte, and ends if the writer leaves. Raises as `readinto` does if the sidecar fails.
        """
        give_up = None if wait is None else time.monotonic() + wait
        poller = select.poll()
        poller.register(self.fileno(), 0)  # reports only that no writer is left
        while self.trailer is not None and self.trailer.grows:
            now = time.monotonic()
            self._look_at_source(now)
            if not self.trailer.grows:
                break
            if give_up is not None and now >= give_up:
                return False
            if poller.poll(1000 * max(0.0, min(self._next_check, give_up or self._next_check) - now)):
                with self._judged():
                    self._proof.look()  # a trailer changes before its FIFO ends
                break
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int | None:
        """Wait for the first byte and read the bytes that have arrived; return their number, 0 at the end.

        Returns None, only with `patience`, if no byte has arrived. Raises TruncatedStream if the FIFO ended
        before its epoch, ChannelError as `open` does and if no process opened the FIFO for writing within
        `timeout` seconds, StreamError if the trailer cannot be read.
        """
        return self.readv([memoryview(buffer).cast("B")])

    def readv(self, views: list[memoryview]) -> int | None:
        """Fill several buffers of bytes, one after the other, as `readinto` fills one."""
        self._check()
        if self._ended:
            return 0
        started = time.monotonic()
        if self._read_end is None and not self.open(self.patience):
            return None
        if not any(views) or self._read_end is None:
            return 0
        end = self._read_end
        give_up = None if self.patience is None else started + self.patience
        end.expect()
        while (taken := end.read(views)) is None:
            now = time.monotonic()
            self._look(now)
            until = self._next_check if give_up is None else min(self._next_check, give_up)
            if not end.wait(max(0.0, until - now)) and give_up is not None and time.monotonic() >= give_up:
                return None
        if taken == 0:
            return self._end()
        with self._judged():
            self._proof.begin()
        self.received += taken
        return taken

    def readall(self) -> bytes:
        """Return the rest of the epoch."""
        chunks = []
        while chunk := self.read(_READ_ALL):
            chunks.append(chunk)
        return b"".join(chunks)

    def close(self) -> None:
        """Close the FIFO. If the epoch has not ended, the sidecar goes on to the next epoch."""
        if not self.closed:
            if self._read_end is not None:
                self._read_end.close()
                self._read_end = None
            self._opening.end()
            super().close()

    def _check(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on closed file")
        if self._failure is not None:
            raise self._failure

    def _fail(self, failure: PenstockError) -> PenstockError:
        self._failure = failure
        if self._read_end is None:
            self._opening.end()
        return failure

    def _attach(self, end: ReadEnd | None) -> None:
        if end is not None:
            self._read_end = end
            now = time.monotonic()
            self._deadline = now + self._timeout
            self._next_check = now + _CHECK_S

    def _look(self, now: float) -> None:
        """Raise, while no bytes come, if the sidecar has failed or no writer has come in time."""
        self._look_at_source(now)
        end = self._read_end
        if end is not None and end.is_fifo and not end.has_writer and now >= self._deadline:
            raise self._fail(self._opening.no_writer())

    def _look_at_source(self, now: float) -> None:
        if now >= self._next_check:
            self._next_check = now + _CHECK_S
            with self._judged():
                self._proof.check_source(self.received)
            end = self._read_end
            if end is None or self._begun or end.has_writer or has_writer(end.fd):
                self._opening.look_for_sidecar()
            else:
                self._opening.tell(f"{self.name} has no writer", self._deadline)

    def _end(self) -> int:
        with self._judged():
            self._proof.check_end(self.received)
        self._ended = True
        return 0

    @contextlib.contextmanager
    def _judged(self) -> Iterator[None]:
        """Keep an error of the block, which every later read raises again."""
        try:
            yield
        except PenstockError as error:
            raise self._fail(error) from error.__cause__
