"""One epoch read by several processes of one training job, each record by exactly one of them.

A FIFO has one reader (contract §1.3), yet PyTorch's DataLoader wants several workers. Here the workers are
one reader together: every one opens the FIFO, and whoever holds a lock reads the next block, cuts it into
records, and leaves the head of the record that the block cut, and the count of bytes, to the next one:

    worker 0   lock  read 1 MiB  cut  unlock   decode ........................   lock ...
    worker 1                          lock  read 1 MiB  cut  unlock   decode .............
                              book: bytes so far, rest of the last block

Reading and cutting are one at a time, so this is as fast as one reader; decoding is side by side. Nobody
waits for a turn of somebody else: a worker that is not asked for data does not stop the others. Which
worker gets which records therefore depends on their speed. A turn hands out whole units (samples, batches),
so units never straddle two workers, and only the last of an epoch may be short.

The book is a file in the state directory, one per pass of a loader, whose name the workers can all work out:
the base seed, which DataLoader draws anew for every set of workers, and how often the worker has begun.
The lock is `flock` on it, which the kernel takes from a process that dies.

Endings. Who meets the end of file proves it, with the bytes of all turns; who meets an error writes it
down, and all others raise it too. Who finds that a turn was begun and its worker died raises
TruncatedStream. A worker that comes when the epoch is over, or its FIFO gone, has nothing to read, and that
is no error: what is left is with the others. One that comes when the others have failed and are gone fails
like them: it must not take the next epoch. A worker whose parent has died stops reading.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamer.errors import (
    ChannelError,
    CorruptRecord,
    CutRecord,
    PenstockError,
    StreamError,
    TruncatedStream,
)
from streamer.readers.core.plain import next_stream
from streamer.readers.core.stream import PipeStream
from streamer.readers.torch.progress import Block, Start, start_of
from streamer.readers.torch.shared_cursor import ENDED, FAILED, OPEN, READING, SharedCursorFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from streamer.formats.window import RecordReader, Source
    from streamer.readers.core.config import Directories

PATIENCE_S = 1.0
"""Seconds after which a worker that waits for bytes sees whether its parent is still alive."""
_ERRORS = {
    kind.__name__: kind for kind in (ChannelError, CorruptRecord, CutRecord, StreamError, TruncatedStream)
}


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """The workers that read one epoch together, as each of them knows it."""

    name: str
    """Names this pass over the channel, the same in all workers and in no other pass."""
    member: int
    """Index of this worker in the team."""
    size: int


class WorkerGroupReader:
    """One worker's part of the next epoch of a channel, a turn's blocks at a time; each is one pass.

    `make_reader` gives the record reader of the format; `unit` is how many records stay together. `start`:
    where the epoch begins for this team, the same for all of its members.
    Iterating raises ChannelError, TruncatedStream and CorruptRecord, as reading alone does.
    """

    def __init__(
        self,
        channel: str,
        where: Directories,
        team: WorkerGroup,
        make_reader: Callable[[Source], RecordReader],
        *,
        unit: int = 1,
        timeout: float,
        start: Start | None = None,
    ) -> None:
        self._channel = channel
        self._where = where
        self._team = team
        self._make_reader = make_reader
        self._unit = unit
        self._timeout = timeout
        self._told = start
        self._parent = os.getppid()
        self._prefix = os.path.join(where.state, f".{channel}-pipe_mode-pass-")
        self._path = self._prefix + team.name

    def __iter__(self) -> Iterator[tuple[PipeStream, list[Block]]]:
        with contextlib.ExitStack() as stack:
            try:
                os.makedirs(self._where.state, exist_ok=True)
                fd = self._enter(stack)
            except OSError as error:
                raise ChannelError(f"cannot use {self._path}: {error}") from error
            try:
                stream = self._join(fd)
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)
            if stream is None:
                return
            stack.enter_context(stream)
            try:
                for blocks in self._turns(fd, stream):
                    yield stream, blocks
            except OSError as error:
                raise ChannelError(f"cannot use {self._path}: {error}") from error

    def _enter(self, stack: contextlib.ExitStack) -> int:
        """Open the book of this pass and lock it."""
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with contextlib.ExitStack() as undo:
                undo.callback(os.close, fd)
                fcntl.flock(fd, fcntl.LOCK_EX)
                if os.fstat(fd).st_nlink:
                    book = SharedCursorFile.read(fd)
                    again = book is not None and str(self._team.member) in book.members
                    left = book is not None and book.state != ENDED and book.past()
                    if not (again or left):
                        stack.push(undo.pop_all())
                        return fd
                    # A book of the same name, of a pass that is past: the loader's seed was set by hand.
                    os.unlink(self._path)

    def _join(self, fd: int) -> PipeStream | None:
        """Come into the team; the FIFO, or None if there is nothing left to read."""
        book = SharedCursorFile.read(fd)
        if book is None:
            self._sweep()
            stream = next_stream(self._channel, self._where, timeout=self._timeout, patience=PATIENCE_S)
            try:
                start = self._entered(stream)
            except BaseException as error:
                stream.close()
                if isinstance(error, PenstockError):
                    SharedCursorFile(FAILED, members=self._myself(), failure=_described(error)).write(fd)
                else:
                    os.unlink(self._path)
                raise
            if start is None:
                stream.close()
                os.unlink(self._path)
                return None
            place = start.place
            book = SharedCursorFile(
                path=stream.name,
                received=stream.received,
                offset=place.offset,
                number=place.records - place.skip,
            )
        else:
            stream = PipeStream(book.path, timeout=max(self._timeout, PATIENCE_S), patience=PATIENCE_S)
        book.members |= self._myself()
        book.write(fd)
        self._raise_if_broken(fd, book)
        if book.state == ENDED or not stream.open(0):
            stream.close()
            self._tidy(book)
            return None
        return stream

    def _entered(self, stream: PipeStream) -> Start | None:
        """Open a stream and bring it to where it is to be read from; None if this worker's parent is gone."""
        while not stream.begin(PATIENCE_S):
            if self._orphaned():
                return None
        start = start_of(stream, self._channel, self._told)
        for _ in start.place.entering(stream, anyway=start.anyway):
            if self._orphaned():
                return None
        return start

    def _myself(self) -> dict[str, int]:
        return {str(self._team.member): os.getpid()}

    def _turns(self, fd: int, stream: PipeStream) -> Iterator[list[Block]]:
        end = _End(stream)
        start = start_of(stream, self._channel, self._told)
        reader = self._make_reader(end)
        batches = reader.batches()
        while True:
            fcntl.flock(fd, fcntl.LOCK_EX)
            try:
                book = SharedCursorFile.read(fd)
                assert book is not None  # noqa: S101 - nobody empties it
                self._raise_if_broken(fd, book)
                if book.state == ENDED:
                    self._tidy(book)
                    return
                os.pwrite(fd, READING, 0)
                try:
                    blocks = self._turn(book, stream, end, reader, batches, start)
                except PenstockError as error:
                    book.state, book.failure = FAILED, _described(error)
                    book.write(fd)
                    raise
                if blocks is None:
                    os.pwrite(fd, OPEN, 0)
                    return
                book.write(fd)
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)
            if blocks:
                yield blocks

    def _turn(  # noqa: PLR0917 - what a turn is made of
        self,
        book: SharedCursorFile,
        stream: PipeStream,
        end: _End,
        reader: RecordReader,
        batches: Iterator[list[bytes]],
        start: Start,
    ) -> list[Block] | None:
        """Read until a unit is whole or the epoch over; None if this worker's parent is gone."""
        stream.received = book.received
        reader.go_on(book.rest, book.offset)
        blocks = [Block(book.waiting, *book.begin)] if book.waiting else []
        count = len(book.waiting)
        while count < self._unit:
            begin = reader.offset
            batch = next(batches, None)
            if batch is None:
                book.state = ENDED
                break
            for block in start.blocks(batch, book.number, begin):
                blocks.append(block)
                count += len(block.records)
            book.number += len(batch)
            if not batch and self._orphaned():
                return None
        if end.reached:
            book.state = ENDED
        book.waiting, book.begin = [], []
        if left := 0 if book.state == ENDED else count % self._unit:
            # They are all of the last block: before it no unit was whole.
            block = blocks.pop()
            whole = len(block.records) - left
            book.waiting, *book.begin = block.part(whole, len(block.records))
            if whole:
                blocks.append(block.part(0, whole))
        book.rest, book.offset = reader.hand_over()
        book.received = stream.received
        return blocks

    def _raise_if_broken(self, fd: int, book: SharedCursorFile) -> None:
        if book.state == READING:
            lost = TruncatedStream(
                f"a worker died while it read {self._channel}, behind byte {book.received} of the epoch: "
                "what it read is lost"
            )
            book.state, book.failure = FAILED, _described(lost)
            book.write(fd)
        if book.state == FAILED:
            kind, text = book.failure
            raise _ERRORS.get(kind, StreamError)(text)

    def _orphaned(self) -> bool:
        return os.getppid() != self._parent

    def _tidy(self, book: SharedCursorFile) -> None:
        """The last one to hear of the end removes the book."""
        if len(book.members) == self._team.size:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)

    def _sweep(self) -> None:
        """Remove the books of passes that were left early and whose workers are gone."""
        for path in glob.glob(glob.escape(self._prefix) + "*"):
            if path == self._path:
                continue
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    book = SharedCursorFile.read(fd)
                    if book is not None and book.abandoned():
                        os.unlink(path)
                finally:
                    os.close(fd)


class _End:
    """A source that remembers whether its end was reached."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.reached = False

    def readinto(self, buffer: memoryview, /) -> int | None:
        count = self._source.readinto(buffer)
        self.reached = count == 0
        return count


def _described(error: PenstockError) -> list[str]:
    return [type(error).__name__, str(error)]
