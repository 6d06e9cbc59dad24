"""An outlet whose bytes become files: delivery fills pipes, threads empty them into the files.

    delivery ─splice or writev→ pipe ─splice, in a thread→ file       up to `WRITERS` pipes at once

A write to a disk may block for seconds (dirty pages, a slow disk), and the event loop must not. So delivery,
on the loop, moves bytes into an empty pipe, which never blocks. A full pipe is one batch: a thread splices
the bytes to their offsets in the files. Delivery goes on with the next free pipe, or waits for one in
`writable`. A batch of small objects is many files, and a large file is many batches, which several threads
write at once; it stays open until all of its bytes are written (`streamer.relay.files.target`).

The pipes belong to the outlet, and a batch's pipe is its thread's until the thread has ended: `end` waits for
all threads and then closes the pipes, and the files that are not whole.

The first error of a thread is raised by the next `push`, or by `finish`.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from streamer.aio import finished, in_thread
from streamer.errors import SinkError
from streamer.linux import PIPE_SIZE, Pipe
from streamer.relay.files.target import FilePiece, PieceCutter
from streamer.units import KIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from streamer.relay.files.target import TargetFile
    from streamer.sink.outlet import Drainable

WRITERS = 8
"""Batches at once. One is enough for memory, and network disks answer many writes at once."""
SMALLEST_BATCH = 64 * KIB


def batch_size(budget: int) -> int:
    """Return the bytes of one writer's pipe. `budget`: bytes that the process may hold.

    The pipes of all writers take an eighth of it at the most, down to `SMALLEST_BATCH` each.
    """
    size = PIPE_SIZE
    while size > SMALLEST_BATCH and size * WRITERS * 8 > budget:
        size //= 2
    return size


@dataclass(slots=True)
class Written:
    """Counts of what has been written."""

    files: int = 0
    """Number of whole files."""
    bytes: int = 0


class FilesOutlet:
    """An `Outlet` that writes `files`, one after the other, with the bytes that are pushed."""

    reader_gone = False
    holding = False

    def __init__(self, files: Iterator[TargetFile], *, batch: int = PIPE_SIZE) -> None:
        """`files`: the files of the stream's objects, in order. `batch`: bytes of a writer's pipe.

        Raises SinkError if the kernel refuses the pipes.
        """
        self.written = Written()
        self._cutter = PieceCutter(files)
        self._open: set[TargetFile] = set()
        """Files that may be open: of batches that are being written, or not whole after the last one."""
        self._loop = asyncio.get_running_loop()
        self._pipes: list[Pipe] = []
        try:
            for _ in range(WRITERS):
                self._pipes.append(Pipe(batch, least=SMALLEST_BATCH))
        except OSError as error:
            self._close_pipes()
            raise SinkError(
                f"cannot make the pipes of a download: {error.strerror or error}; raise `ulimit -n`"
            ) from error
        self._free = list(self._pipes)
        self._filling: Pipe | None = None
        self._writing: set[asyncio.Future[Written]] = set()
        """What threads of the loop's executor do or will do. They run already: one more might be refused."""
        self._waiter: asyncio.Future[None] | None = None
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        return f"<FilesOutlet {self.written}, {len(self._free)} pipes free>"

    def push(self, source: Drainable) -> int:
        """See `Outlet.push`. Raises SinkError if a file cannot be written."""
        while True:
            self._raise_error()
            pipe = self._filling
            if pipe is None:
                if not self._free:
                    raise BlockingIOError
                pipe = self._filling = self._free.pop()
            try:
                count = source.drain_into(pipe.write_fd)
            except BlockingIOError:
                if not pipe.count:
                    raise RuntimeError("an empty pipe takes no byte") from None
                self._write(pipe)
                continue
            pipe.count += count
            if pipe.count >= pipe.size:
                self._write(pipe)
            return count

    async def writable(self) -> None:
        """Wait until a pipe is free, or a file cannot be written."""
        while not self._free and self._error is None:
            await self._news()

    async def finish(self) -> None:
        """Write all bytes that were pushed, and the empty files after them. Raises SinkError."""
        self._raise_error()
        if self._filling is not None:
            self._write(self._filling)
        while self._writing and self._error is None:
            await self._news()
        self._raise_error()
        if rest := self._cutter.rest():
            self._count(await in_thread(_write_pieces, -1, rest))

    def close(self) -> None:
        """Do nothing: threads may still use the pipes, which `end` closes."""

    async def end(self) -> None:
        """Wait for all threads, even if cancelled, and close the pipes and the files that are not whole."""
        try:
            if self._writing:
                await finished(asyncio.gather(*self._writing, return_exceptions=True))
        finally:
            self._close_pipes()
            for file in self._open:
                with contextlib.suppress(OSError):  # such a file is fetched again
                    file.close()

    def _close_pipes(self) -> None:
        while self._pipes:
            self._pipes.pop().close()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    async def _news(self) -> None:
        """Wait until a thread has ended."""
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _write(self, pipe: Pipe) -> None:
        """Let a thread empty the pipe into its files."""
        self._filling = None
        pieces = self._cutter.cut(pipe.count)
        self._open.update(piece.file for piece in pieces)
        writing = self._loop.run_in_executor(None, _write_pieces, pipe.read_fd, pieces)
        self._writing.add(writing)
        writing.add_done_callback(partial(self._ended, pipe, pieces))

    def _ended(self, pipe: Pipe, pieces: list[FilePiece], writing: asyncio.Future[Written]) -> None:
        """Count what a thread has written, or keep its error if it is the first; wake `_news`."""
        self._writing.discard(writing)
        if not writing.cancelled():
            error = writing.exception()
            if error is None:
                pipe.count = 0
                self._free.append(pipe)
                self._count(writing.result())
                self._open.difference_update(piece.file for piece in pieces if piece.file.whole)
            elif self._error is None:
                self._error = error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _count(self, written: Written) -> None:
        self.written.files += written.files
        self.written.bytes += written.bytes


def _write_pieces(pipe: int, pieces: list[FilePiece]) -> Written:
    """Move the bytes of the pieces from the pipe into their files. Raises SinkError."""
    written = Written()
    for file, start, end in pieces:
        written.files += file.write(pipe, start, end)
        written.bytes += end - start
    return written
