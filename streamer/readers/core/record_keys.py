"""Names the object of each record of a stream, by the epoch's key list (`streamer.key_list`).

    offsets of records ─▶ RecordKeys ─▶ key, number in the object, bucket

The sidecar lists an object before its first byte enters the FIFO. So after a byte has arrived, the lines up
to its offset are in the file, and no line comes between them any more. `RecordKeys` reads the file only when
the lines that it has end before the last record of a list.

A record is of the object in which its first byte is. Its number is that of the object's first record plus
the records since, with those that were left out as corrupt. A reader that begins inside an object must be
given the number of the record there (`ReaderPosition.number`). Records of one size without a frame need none:
their numbers are those of the offsets.
"""

from __future__ import annotations

import logging
import os
import stat
from bisect import bisect_left
from collections import deque
from itertools import chain
from typing import TYPE_CHECKING, Any

from streamer.errors import ChannelError, CorruptRecord, CutRecord, RecordTooLarge, StreamError
from streamer.escaping import escape_control
from streamer.formats.lines import LineReader
from streamer.formats.window import FailedRecord
from streamer.key_list import KeyListLine, parse_first_line, parsed
from streamer.readers.core.record_names import KeyRun, keyed_records, named

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from streamer.formats.window import RecordReader
    from streamer.readers.core.stream import PipeStream

logger = logging.getLogger("penstock")

_BLOCK = 1 << 20


class RecordKeys:
    """The keys of one stream's records, from a position on. Its owner closes it once."""

    def __init__(self, stream: PipeStream, *, offset: int, number: int | None = None, size: int = 0) -> None:
        """`offset`: in the stream, of the first record. `number`: its number in its object; None if it is
        unknown. `size`: bytes of each record, if all have one size and no frame; else 0. The list is opened
        at the first record.
        """
        self._size = size
        self._stream = stream
        self._path = stream.name
        self._given: tuple[int, int | None] | None = (offset, number)
        """Arguments for the next record; None once it was taken."""
        self._number = number
        """Number in the present object of the next record; None if it is unknown."""
        self._lines: deque[KeyListLine] = deque()
        """Lines that have been read, from that of the present object on."""
        self._rest = b""
        """Bytes of the file after its last whole line."""
        self._headed = False
        self._fd = -1

    def go_on(self, offset: int, number: int | None) -> None:
        """Continue at a later record of the stream; the arguments are as in the constructor."""
        self._given, self._number = (offset, number), number

    def _open(self) -> None:
        """Open the file, once a record has come: a sidecar makes it before the FIFO's first byte."""
        path = self._stream.key_list_path
        fd = -1
        try:
            if path is not None:
                self._path = path
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise ChannelError(f"cannot read the key list {path}: {error.strerror}") from error
        if fd < 0:
            raise ChannelError(
                f"{self._stream.name} has no key list, so its records have no keys: set RecordKeys: true in "
                "the Penstock section of the channel, or read without keys"
            )
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise ChannelError(f"the key list {path} is not a regular file")
        self._fd = fd

    def close(self) -> None:
        """Close the file. Safe to call again."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    @property
    def number(self) -> int | None:
        """Number of the next record, if it is of the same object as the last one; None if unknown."""
        return self._number

    def take(self, starts: Sequence[int]) -> list[KeyRun]:
        """Return the keys of the next records, which begin at these offsets of the epoch's stream.

        Every record must be taken once, in order. Successive records of one object are one run, so the cost
        is that of objects, and not of records. Raises ChannelError if the FIFO has no key list or a number
        is unknown, StreamError if the list cannot be read.
        """
        runs = []
        for line, number, count in self._runs(starts):
            if number is None:
                raise ChannelError(
                    f"the number of a record of s3://{line.bucket}/{escape_control(line.key)} is unknown, "
                    "because reading begins inside the object: save states with key=True, "
                    "or begin without the state"
                )
            runs.append(KeyRun(count, line.key, number, line.bucket))
        return runs

    def pass_over(self, starts: Sequence[int]) -> None:
        """Take the next records, as `take`, without their keys; a number may be unknown."""
        for _ in self._runs(starts):
            pass

    def take_line(self, start: int) -> tuple[str, int | None, str]:
        """Take one record; return key, number and bucket. The number may be unknown."""
        ((line, number, _),) = self._runs([start])
        return line.key, number, line.bucket

    def object_end(self, start: int, arrived: int) -> int | None:
        """Return where the object of the record at `start` ends; None if no byte before `arrived` shows it.

        All records before `start` must have been taken. `arrived`: offset after the last byte that has come.
        """
        self._read_past(start, arrived - 1)
        self._reach(start)
        return self._lines[1].offset if len(self._lines) > 1 else None

    def borders(self, first: int, end: int) -> list[int]:
        """Return where objects begin after offset `first`, before `end`; each place once.

        All records before `first` must have been taken.
        """
        self._read_past(first, end - 1)
        return list(dict.fromkeys(line.offset for line in self._lines if first < line.offset < end))

    def first_beyond(self, starts: Sequence[int], end: int) -> tuple[int, int] | None:
        """Return the index of the first record that goes on after its object, and where the object ends.

        `starts`: offsets of the next records, which are contiguous. `end`: that of the end of the last one.
        Takes no record. Returns None if no record does.
        """
        self._read_past(starts[0], end - 1)
        for line in self._lines:
            if line.offset >= end:
                return None
            if line.offset > starts[0]:
                index = bisect_left(starts, line.offset)
                if index == len(starts) or starts[index] != line.offset:
                    return index - 1, line.offset
        return None

    def _runs(self, starts: Sequence[int]) -> Iterator[tuple[KeyListLine, int | None, int]]:
        """Take the next records; yield the line, the first number and the count of each run of an object."""
        if not starts:
            return
        self._read_past(starts[0], starts[-1])
        lines, index = self._lines, 0
        while index < len(starts):
            start = starts[index]
            self._reach(start)
            line = lines[0] if lines else None
            if line is None or line.offset > start:
                raise StreamError(f"the key list {self._path} has no line for byte {start} of the stream")
            if self._given is not None:
                (begin, number), self._given = self._given, None
                self._number = number if line.offset < begin else line.number
            if self._size:
                self._number = line.number + (start - line.offset) // self._size
            end = bisect_left(starts, lines[1].offset, index) if len(lines) > 1 else len(starts)
            first = self._number
            if first is not None:
                self._number = first + end - index
            yield line, first, end - index
            index = end

    def _reach(self, start: int) -> None:
        """Drop the lines before that of the record at `start`."""
        lines = self._lines
        while len(lines) > 1 and lines[1].offset <= start:
            lines.popleft()
            self._number = lines[0].number

    def _read_past(self, first: int, last: int) -> None:
        """Read up to a line after offset `last`, or to the end. `first`: offset of the next record."""
        if self._fd < 0:
            self._open()
        lines = self._lines
        while not lines or lines[-1].offset <= last:
            try:
                block = os.read(self._fd, _BLOCK)
            except OSError as error:
                raise StreamError(f"cannot read the key list {self._path}: {error.strerror}") from error
            if not block:
                return
            *whole, self._rest = (self._rest + block).split(b"\n")
            try:
                if whole and not self._headed:
                    self._check_run(parse_first_line(whole.pop(0)))
                lines.extend(map(parsed, whole))
            except ValueError as error:
                raise StreamError(f"the key list {self._path} cannot be used: {error}") from error
            self._reach(first)

    def _check_run(self, run: str) -> None:
        self._headed = True
        trailer = self._stream.trailer
        if run != (trailer.run if trailer else ""):
            raise StreamError(
                f"the key list {self._path} is of another run of the sidecar; start the trainer again"
            )


def keyed_runs(
    reader: RecordReader, keys: RecordKeys, base: int
) -> Iterator[tuple[list[Any], list[KeyRun], int | None]]:
    """Yield the lists of `reader`, the keys of each list's records, and the number before each list.

    `base`: offset in the epoch's stream of the reader's first byte. The number is that of a record at the
    reader's offset before the list (`RecordKeys.number`). A corrupt record that the reader leaves out counts,
    and is logged with its key. An error of a record names it.
    """
    reader.starts = []
    batches = reader.batches()
    while True:
        number = keys.number
        try:
            batch = next(batches, None)
        except (CorruptRecord, CutRecord, RecordTooLarge) as error:
            (run,) = keys.take([base + reader.offset])
            raise named(error, next(run.record_keys())) from error
        if batch is None:
            return
        if isinstance(reader, LineReader) and batch:
            _cut_at_objects(batch, reader.starts, keys, base, base + reader.offset)
        runs = keys.take([base + start for start in reader.starts] if base else reader.starts)
        if isinstance(batch, FailedRecord):
            batch.error, runs = named(batch.error, next(runs[0].record_keys())), []
        if reader.left_out:
            bad = dict(reader.left_out)
            kept = []
            for start, key in zip(
                reader.starts, chain.from_iterable(map(KeyRun.record_keys, runs)), strict=True
            ):
                if (text := bad.get(start)) is None:
                    kept.append(KeyRun(1, *key))
                else:
                    logger.warning("skipped: %s; it is %s", text, key)
            runs = kept
        yield batch, runs, number


def _cut_at_objects(lines: list[bytes], starts: list[int], keys: RecordKeys, base: int, end: int) -> None:
    """Cut each line that goes on in the next object, because an object may end without a line feed.

    `starts`: offsets of the lines, from `base` on. `end`: offset after the last line.
    """
    whole, index = list(zip(starts, lines, strict=True)), len(lines)
    for border in reversed(keys.borders(base + starts[0], end)):
        index = bisect_left(starts, border - base, hi=index)
        if index == len(starts) or starts[index] != border - base:
            start, line = whole[index - 1]
            cut = border - base - start
            whole[index - 1 : index] = [(start, line[:cut]), (border - base, line[cut:])]
    starts[:], lines[:] = zip(*whole, strict=True)


def with_keys(
    reader: RecordReader, keys: RecordKeys | None, base: int
) -> Iterator[tuple[list[Any], int | None]]:
    """Yield the lists of `reader` and the number before each list; with `keys`, of `KeyedRecord`s.

    Other arguments, and errors, are those of `keyed_runs`. Without keys the numbers are None.
    """
    if keys is None:
        return ((batch, None) for batch in reader.batches())
    return (
        (batch and keyed_records(batch, runs), number)
        for batch, runs, number in keyed_runs(reader, keys, base)
    )
