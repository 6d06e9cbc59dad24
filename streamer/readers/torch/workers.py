"""Reads one epoch in several workers of a DataLoader, each record in exactly one worker.

A FIFO has one reader (contract §1.3), but a DataLoader may have several workers. The workers act as one
reader: each opens the FIFO, and the worker that holds a lock reads the next block and cuts it into records.
It writes the incomplete last record and the number of bytes so far to the cursor file, for the next worker:

    worker 0   lock  read 1 MiB  cut  unlock   decode ........................   lock ...
    worker 1                          lock  read 1 MiB  cut  unlock   decode .............
                              cursor file: bytes so far, rest of the last block

One worker at a time reads and cuts, so reading is as fast as in one process; decoding runs in parallel. Turns
have no fixed order, so a worker from which no data is requested does not stop the others, and the records of
a worker depend on the workers' speed. A turn returns whole units (samples, batches), so no unit is divided
between two workers, and only the last unit of an epoch may be short.

The cursor file is in the state directory, one for each pass of a loader. Every worker computes its name from
the base seed, which DataLoader draws anew for every set of workers, and the number of the pass. The lock is
`flock` on the file; the kernel releases it when a process dies.

Endings. The worker that reaches the end of file proves it with the number of bytes of all turns. An error of
one worker is written to the cursor file, and all others raise it too. If a worker dies in its turn, the next
one raises TruncatedStream. A worker that joins after the epoch has ended, or after its FIFO is gone, has
nothing to read, which is no error, because the other workers have the rest. A worker that joins after the
others have failed and exited raises their error and takes no further epoch. A worker whose parent has exited
stops reading.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from streamer.errors import (
    ChannelError,
    CorruptRecord,
    CutRecord,
    PenstockError,
    StreamError,
    TruncatedStream,
)
from streamer.readers.core.epochs import ChannelEpochs
from streamer.readers.core.read_loop import ReadLoop
from streamer.readers.core.start import reach_start, start_in
from streamer.readers.core.stream import PipeStream
from streamer.readers.torch.progress import ChannelProgress, progress_in
from streamer.readers.torch.shared_cursor import ENDED, FAILED, OPEN, READING, SharedCursorFile, read_turn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from streamer.readers.core.config import Directories
    from streamer.readers.core.record_spec import RecordSpec
    from streamer.readers.core.shuffle import NumberedRecords

PATIENCE_S = 1.0
"""Seconds after which a worker that waits for bytes checks whether its parent is alive."""
_ERRORS = {
    kind.__name__: kind for kind in (ChannelError, CorruptRecord, CutRecord, StreamError, TruncatedStream)
}


class ParentExited(Exception):
    """The process that started this worker has exited, so the worker stops reading."""


def parent_check() -> Callable[[], None]:
    """Return a function that raises ParentExited once the current parent process has exited."""
    parent = os.getppid()

    def check() -> None:
        if os.getppid() != parent:
            raise ParentExited

    return check


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """The workers that read one epoch together, and the index of this one."""

    name: str
    """Name of this pass over the channel, the same in all workers and different in every other pass."""
    member: int
    """Index of this worker in the group."""
    size: int


class WorkerGroupReader:
    """One worker's records of the channel's next epoch; can be iterated once.

    `spec`: has neither skip nor shuffle. `unit`: number of records that stay together. `saved`: the records
    to read, if that is not the whole epoch; the same for all workers of the group.
    Iterating raises ChannelError, TruncatedStream and CorruptRecord, as a reader without a group does.
    """

    def __init__(
        self,
        channel: str,
        paths: Directories,
        group: WorkerGroup,
        spec: RecordSpec,
        *,
        unit: int = 1,
        timeout: float,
        saved: ChannelProgress | None = None,
    ) -> None:
        self._channel = channel
        self._state_dir = paths.state
        self._epochs = ChannelEpochs(channel, paths, timeout=timeout, patience=PATIENCE_S)
        self._group = group
        self._spec = spec
        self._unit = unit
        self._timeout = timeout
        self._saved = saved
        self._check_parent = parent_check()
        self._prefix = os.path.join(paths.state, f".{channel}-pipe_mode-pass-")
        self._path = self._prefix + group.name

    def __iter__(self) -> Iterator[tuple[ReadLoop, list[NumberedRecords]]]:
        with contextlib.suppress(ParentExited), contextlib.ExitStack() as stack:
            try:
                os.makedirs(self._state_dir, exist_ok=True)
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
                with contextlib.closing(self._loop(stream)) as loop:
                    for blocks in self._turns(fd, loop):
                        yield loop, blocks
            except OSError as error:
                raise ChannelError(f"cannot use {self._path}: {error}") from error

    def _enter(self, stack: contextlib.ExitStack) -> int:
        """Open the cursor file of this pass and lock it."""
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with contextlib.ExitStack() as undo:
                undo.callback(os.close, fd)
                fcntl.flock(fd, fcntl.LOCK_EX)
                if os.fstat(fd).st_nlink:
                    cursor = SharedCursorFile.read(fd)
                    again = cursor is not None and str(self._group.member) in cursor.members
                    left = cursor is not None and cursor.state != ENDED and cursor.past()
                    if not (again or left):
                        stack.push(undo.pop_all())
                        return fd
                    # The file is of an earlier pass of the same name: the loader's seed was set by hand.
                    os.unlink(self._path)

    def _join(self, fd: int) -> PipeStream | None:
        """Join the group; return the FIFO, or None if there is nothing left to read."""
        cursor = SharedCursorFile.read(fd)
        if cursor is None:
            self._sweep()
            stream = self._epochs.next_stream()
            try:
                start = None if self._saved is None else self._saved.position
                position = reach_start(stream, self._channel, start, check=self._check_parent)
            except BaseException as error:
                stream.close()
                if isinstance(error, PenstockError):
                    SharedCursorFile(FAILED, members=self._myself(), failure=_described(error)).write(fd)
                else:
                    os.unlink(self._path)
                raise
            cursor = SharedCursorFile(
                path=stream.name,
                received=stream.received,
                offset=position.offset,
                number=position.records - position.skip,
                in_object=position.number,
            )
        else:
            stream = PipeStream(cursor.path, timeout=max(self._timeout, PATIENCE_S), patience=PATIENCE_S)
        cursor.members |= self._myself()
        cursor.write(fd)
        self._raise_if_broken(fd, cursor)
        # The sidecar withdraws the name once the first worker has opened it, and removes both at the end.
        if cursor.state == ENDED or not (stream.open(0) or stream.open_withdrawn()):
            stream.close()
            self._tidy(cursor)
            return None
        return stream

    def _myself(self) -> dict[str, int]:
        return {str(self._group.member): os.getpid()}

    def _turns(self, fd: int, loop: ReadLoop) -> Iterator[list[NumberedRecords]]:
        while True:
            fcntl.flock(fd, fcntl.LOCK_EX)
            try:
                cursor = SharedCursorFile.read(fd)
                assert cursor is not None  # noqa: S101 - no process empties it
                self._raise_if_broken(fd, cursor)
                if cursor.state == ENDED:
                    self._tidy(cursor)
                    return
                os.pwrite(fd, READING, 0)
                try:
                    blocks = read_turn(loop, cursor, self._unit, self._check_parent)
                except PenstockError as error:
                    cursor.state, cursor.failure = FAILED, _described(error)
                    cursor.write(fd)
                    raise
                except ParentExited:
                    os.pwrite(fd, OPEN, 0)
                    raise
                cursor.write(fd)
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)
            if blocks:
                yield blocks

    def _loop(self, stream: PipeStream) -> ReadLoop:
        """Return the loop over the records of the group's FIFO, for this worker's turns."""
        saved = progress_in(self._saved, self._channel, stream.epoch)
        start = replace(start_in(stream, self._channel, saved.position), offset=0)
        return ReadLoop(stream, self._spec.reader(stream), self._spec, start, gaps=saved.ahead)

    def _raise_if_broken(self, fd: int, cursor: SharedCursorFile) -> None:
        if cursor.state == READING:
            lost = TruncatedStream(
                f"a worker died while it read {self._channel}, after byte {cursor.received} of the epoch: "
                "the bytes that it read are lost"
            )
            cursor.state, cursor.failure = FAILED, _described(lost)
            cursor.write(fd)
        if cursor.state == FAILED:
            kind, text = cursor.failure
            raise _ERRORS.get(kind, StreamError)(text)

    def _tidy(self, cursor: SharedCursorFile) -> None:
        """Remove the cursor file once all workers of the group have joined."""
        if len(cursor.members) == self._group.size:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)

    def _sweep(self) -> None:
        """Remove the cursor files of passes that were left early and whose workers have exited."""
        for path in glob.glob(glob.escape(self._prefix) + "*"):
            if path == self._path:
                continue
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    cursor = SharedCursorFile.read(fd)
                    if cursor is not None and cursor.abandoned():
                        os.unlink(path)
                finally:
                    os.close(fd)


def _described(error: PenstockError) -> list[str]:
    return [type(error).__name__, str(error)]
