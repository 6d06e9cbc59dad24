"""An outlet whose bytes become files: delivery fills pipes, threads empty them into the files.

    delivery ─splice or writev→ pipe ─splice, in a thread→ file       up to `WRITERS` pipes at once

A write to a disk may block for seconds (dirty pages, a slow disk), and the event loop must not. So delivery,
on the loop, moves bytes into an empty pipe, which never blocks. A full pipe is one batch: a thread opens its
files, splices the bytes to their offsets, and closes the files. Delivery goes on with the next free pipe, or
waits for one in `writable`. A batch of small objects is many files, and a large file is many batches, which
several threads write at once.

The pipes belong to the outlet, and a batch's pipe is its thread's until the thread has ended: `end` waits for
all threads and then closes the pipes. A file descriptor belongs to the thread that opened it.

The first error of a thread is raised by the next `push`, or by `finish`. The journal's text is written by the
threads too: before a batch, or alone if no batch is being written, since the next one may come late. It never
names bytes that are not written.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from functools import partial
from typing import TYPE_CHECKING, Protocol

from streamer.aio import finished, in_thread
from streamer.errors import SinkError
from streamer.linux import PIPE_SIZE, SPLICE_FLAGS, Pipe, write_remedy
from streamer.relay.files.pieces import Batch, Piece, PieceCutter, TargetFile, WrittenFiles
from streamer.units import KIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


class Journal(Protocol):
    """Notes how far each file is written, so that a later process can continue."""

    def note(self, file: TargetFile, end: int) -> None:
        """Note that the first `end` bytes of the file are written. Called on the event loop."""

    def take(self) -> bytes:
        """Return the text of the notes since the last call. Called on the event loop."""

    def append(self, text: bytes) -> None:
        """Write the text. Called in a thread. Raises SinkError."""


class FilesOutlet:
    """An `Outlet` that writes `files`, one after the other, with the bytes that are pushed."""

    reader_gone = False
    holding = False

    def __init__(self, files: Iterator[TargetFile], *, journal: Journal, batch: int = PIPE_SIZE) -> None:
        """`files`: the files of the stream's objects, in order. `batch`: bytes of a writer's pipe.

        Raises SinkError if the kernel refuses the pipes.
        """
        self.written = WrittenFiles()
        self._cutter = PieceCutter(files)
        self._journal = journal
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
        self._writing: set[asyncio.Future[None]] = set()
        """What threads of the loop's executor do or will do. They run already: one more might be refused."""
        self._ending = False
        """Whether `end` has begun, which writes the journal's last text."""
        self._waiter: asyncio.Future[None] | None = None
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        return f"<FilesOutlet {self.written}, {len(self._free)} pipes free>"

    def push(self, source: Drainable) -> int:
        """As `Outlet.push`. Raises SinkError if a file cannot be written."""
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
        while len(self.written) and self._error is None:
            await self._news()
        self._raise_error()
        if rest := self._cutter.rest():
            await in_thread(_write_pieces, -1, rest)
            for piece in self.written.ended(self.written.begin(rest)):
                self._journal.note(piece.file, piece.end)
        await in_thread(self._journal.append, self._journal.take())

    def close(self) -> None:
        """Do nothing: threads may still use the pipes, which `end` closes."""

    async def end(self) -> None:
        """Wait for all threads, even if cancelled, and close the pipes; write the journal's last text."""
        self._ending = True
        try:
            if self._writing:
                await finished(asyncio.gather(*self._writing, return_exceptions=True))
        finally:
            self._close_pipes()
        with contextlib.suppress(SinkError):  # without it the next start fetches more, which is all
            await in_thread(self._journal.append, self._journal.take())

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
        batch = self.written.begin(self._cutter.cut(pipe.count))
        self._start(
            partial(self._ended, pipe, batch),
            *(_write_batch, pipe.read_fd, batch.pieces, self._journal, self._journal.take()),
        )

    def _start(
        self, ended: Callable[[asyncio.Future[None]], None], call: Callable[..., None], *arguments: object
    ) -> None:
        """Let a thread run `call`, and call `ended` then."""
        running = self._loop.run_in_executor(None, call, *arguments)
        self._writing.add(running)
        running.add_done_callback(self._writing.discard)
        running.add_done_callback(ended)

    def _ended(self, pipe: Pipe, batch: Batch, writing: asyncio.Future[None]) -> None:
        if not writing.cancelled() and writing.exception() is None:
            pipe.count = 0
            self._free.append(pipe)
            for piece in self.written.ended(batch):
                self._journal.note(piece.file, piece.end)
            if not (self._writing or self._ending) and (text := self._journal.take()):
                self._start(self._report, self._journal.append, text)
        self._report(writing)

    def _report(self, ended: asyncio.Future[None]) -> None:
        """Keep the error of a thread's task, if it is the first, and wake `_news`."""
        if ended.cancelled():
            return
        error = ended.exception()
        if error is not None and self._error is None:
            self._error = error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _write_batch(pipe: int, pieces: list[Piece], journal: Journal, text: bytes) -> None:
    if text:
        journal.append(text)
    _write_pieces(pipe, pieces)


def _write_pieces(pipe: int, pieces: list[Piece]) -> None:
    """Move the bytes of the pieces from the pipe into their files. Raises SinkError."""
    for file, start, end in pieces:
        try:
            fd = _opened(file.path)
            try:
                at = start
                while at < end:
                    at += os.splice(pipe, fd, end - at, offset_dst=at, flags=SPLICE_FLAGS)
            finally:
                os.close(fd)
        except OSError as error:
            raise cannot_write(file.path, error) from error


def _opened(path: str) -> int:
    """Open the file for writing; make it, and the directories above it, if they are missing."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags, 0o644)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return os.open(path, flags, 0o644)


def cannot_write(path: str, error: OSError) -> SinkError:
    """Return the error of a file that this machine refuses to write."""
    remedy = write_remedy(error, "see to the disk, or set Penstock.BaseDirectory")
    return SinkError(
        f"cannot write {path}: {error.strerror}; {remedy}; the next start continues the download"
    )
