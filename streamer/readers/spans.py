"""Records as places in a window, not as objects: what a record costs in Python, paid once for a block.

    source.readinto -> [ ..ready records..####unread.... ] -> `Spans`: starts and sizes, as NumPy vectors

The readers of `streamer.formats` make a `bytes` of every record. TensorFlow would copy it once more, with the
interpreter's lock held, so the readers here, which find the same records and the same errors, only say where
in the window a record lies. `streamer.readers.strings` makes a string vector of that.

    borders   frames of one length are verified in one NumPy comparison; others are walked; the ends of lines
              are found in one pass. A TFRecord's length is believed only with its CRC
    data CRC  of every record, by a compiled function; compared with the stored ones as one vector
    parts     a RecordIO record of several parts is joined in place, when its last part is there

What `take` gives is valid until the next step of `arrivals`: the window may then move its bytes. Records
that are not taken stay, and so a batch may be collected from several blocks without being copied for each.
NumPy is what TensorFlow brings; plain Python readers do not import this module.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from streamer.formats.crc import MASK_DELTA
from streamer.formats.lines import LineReader
from streamer.formats.recordio import HEAD as PART
from streamer.formats.recordio import LAST, MAGIC, MAX_PAYLOAD, WHOLE, RecordIOReader, unfit
from streamer.formats.tfrecord import FRAME_BYTES, HEAD, HEAD_BYTES, TFRecordReader
from streamer.formats.window import BLOCK_BYTES, RecordReader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Places = NDArray[np.int64]
    Words = NDArray[np.uint32]

WINDOW_BYTES = 4 * BLOCK_BYTES
"""The window, at first. Its bytes move to the front once in several blocks, and it stays in the cache."""
RUN = 16
"""Frames of one length, at least, that are taken as a run."""

_LINE_END = ord("\n")
_NOWHERE: Places = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Spans:
    """Records in memory that belongs to a reader."""

    memory: bytearray
    starts: Places
    """Index of each record's first byte in `memory`."""
    sizes: Places
    """Bytes of each record."""

    def __len__(self) -> int:
        return len(self.starts)

    def records(self) -> list[bytes]:
        """Copies of them."""
        view = memoryview(self.memory)
        places = zip(self.starts.tolist(), self.sizes.tolist(), strict=True)
        return [bytes(view[start : start + size]) for start, size in places]


NO_SPANS = Spans(bytearray(1), _NOWHERE, _NOWHERE)


class SpanReader(RecordReader):
    """Finds the records of a stream. It is used up by one pass; it does not close its source."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **({"block_bytes": WINDOW_BYTES} | keywords))
        self._block = min(BLOCK_BYTES, len(self._buffer))
        self._found: list[tuple[Places, Places]] = []
        self.ready = 0
        """Records that are found and not taken."""

    def arrivals(self) -> Iterator[Places]:
        """Sizes of the records that were found, block by block; none when the source has nothing for now.

        Raises CorruptRecord, TruncatedStream, and what the source raises, behind what was found before.
        """
        while True:
            if len(sizes := self._find()):
                yield sizes
            if self._fault is not None:
                raise self._fault
            arrived = self._fill()
            if arrived is None:
                yield _NOWHERE
            elif arrived == 0:
                break
        for record in self._finish():
            start = np.array([self._end - len(record)])
            self._found.append((start, np.array([len(record)])))
            self.ready += 1
            yield self._found[-1][1]

    def take(self, count: int) -> Spans:
        """The first `count` of the records that are ready, until the next step of `arrivals`."""
        starts, sizes = (
            (self._found[0] if len(self._found) == 1 else map(np.concatenate, zip(*self._found, strict=True)))
            if self._found
            else (_NOWHERE, _NOWHERE)
        )
        self.ready -= count
        self._found = [(starts[count:], sizes[count:])] if self.ready else []
        return Spans(self._buffer, starts[:count], sizes[:count])

    @abstractmethod
    def _spans(self) -> tuple[Places, Places]:
        """Starts and sizes of the whole records in the window; sets `_start`, `_wanted`, and `_fault`."""

    def _find(self) -> Places:
        starts, sizes = self._spans()
        if len(starts):
            self._found.append((starts, sizes))
            self.ready += len(starts)
        return sizes

    def _fill(self) -> int | None:
        if len(self._buffer) - self._end < self._block:
            self._make_room()
        arrived = self._source.readinto(self._view[self._end : self._end + self._block])
        self._end += arrived or 0
        return arrived

    def _make_room(self) -> None:
        """Move what is needed to the front, into a larger window if it fills half of this one."""
        low = int(self._found[0][0][0]) if self._found else self._start
        kept = self._end - low
        if kept > len(self._buffer) // 2 or len(self._buffer) - kept < self._block:
            grown = bytearray(max(2 * len(self._buffer), kept + self._block))
            grown[:kept] = self._view[low : self._end]
            self._buffer, self._view = grown, memoryview(grown)
        else:
            self._view[:kept] = self._view[low : self._end]
        self._base += low
        self._start, self._end = self._start - low, kept
        self._found = [(starts - low, sizes) for starts, sizes in self._found]


class TFRecordSpans(SpanReader, TFRecordReader):
    """The records of a TFRecord stream, as `TFRecordReader` gives them."""

    def _spans(self) -> tuple[Places, Places]:
        self._wanted = HEAD_BYTES
        if self._end - self._start < HEAD_BYTES:
            return _NOWHERE, _NOWHERE
        run = self._run_of_one_length()
        if self._fault is not None:
            return run
        rest = self._any_lengths()
        if not len(run[0]):
            return rest
        return np.concatenate((run[0], rest[0])), np.concatenate((run[1], rest[1]))

    def _run_of_one_length(self) -> tuple[Places, Places]:
        """The frames at the front that are as long as the first one."""
        start = self._start
        length, stored = HEAD.unpack_from(self._view, start)
        step = length + FRAME_BYTES
        count = (self._end - start) // step
        if count < RUN or not length or not self._length_holds(length, stored):
            return _NOWHERE, _NOWHERE
        layout = np.dtype([("length", "<u8"), ("check", "<u4"), ("data", f"V{length}"), ("crc", "<u4")])
        frames = np.frombuffer(self._buffer, layout, count, start)
        same = (frames["length"] == length) & (frames["check"] == stored)
        if not same.all():
            count = int(same.argmin())
            if count < RUN:
                return _NOWHERE, _NOWHERE
        starts = np.arange(start + HEAD_BYTES, start + count * step, step)
        return self._proven(starts, np.full(count, length), frames["crc"][:count])

    def _any_lengths(self) -> tuple[Places, Places]:
        """All whole frames that are left."""
        view, start, end = self._view, self._start, self._end
        head, known = HEAD.unpack_from, self._known
        starts: list[int] = []
        self._wanted = HEAD_BYTES
        fault = None
        position = start
        while end - position >= HEAD_BYTES:
            length, stored = head(view, position)
            if known.get(length) != stored and not self._length_holds(length, stored):
                fault = self._corrupt(self._base + position, "CRC check on header failed")
                break
            if end - position < length + FRAME_BYTES:
                self._wanted = length + FRAME_BYTES
                break
            starts.append(position)
            position += length + FRAME_BYTES
        found = _NOWHERE, _NOWHERE
        if starts:
            borders = np.array([*starts, position])
            words: Words = np.ndarray((position - start - 3,), "<u4", self._buffer, start, (1,))
            stored_crcs = words[borders[1:] - (start + FRAME_BYTES - HEAD_BYTES)]
            found = self._proven(borders[:-1] + HEAD_BYTES, np.diff(borders) - FRAME_BYTES, stored_crcs)
        self._fault = self._fault or fault
        return found

    def _proven(self, starts: Places, sizes: Places, stored: Words) -> tuple[Places, Places]:
        """Of the frames whose data is there, those that are not skipped; `_start` goes behind them."""
        view, crc = self._view, self._crc32c
        pieces = map(slice, starts.tolist(), (starts + sizes).tolist())
        found: Words = np.fromiter(map(crc, map(view.__getitem__, pieces)), np.uint32, len(starts))
        masked = (found >> np.uint32(15) | found << np.uint32(17)) + np.uint32(MASK_DELTA)
        self._start = int(starts[-1] + sizes[-1]) + FRAME_BYTES - HEAD_BYTES
        bad = np.flatnonzero(masked != stored)
        if not len(bad):
            self._run = 0
            return starts, sizes
        good = np.ones(len(starts), np.bool_)
        good[bad] = False
        last_bad = -1
        for number in bad.tolist():
            if number != last_bad + 1:
                self._run = 0
            last_bad = number
            frame = int(starts[number]) - HEAD_BYTES
            if not self._may_skip(frame, int(sizes[number])):
                self._start = frame
                return starts[:number][good[:number]], sizes[:number][good[:number]]
        if good[-1]:
            self._run = 0
        return starts[good], sizes[good]


class RecordIOSpans(SpanReader, RecordIOReader):
    """The records of a RecordIO stream, as `RecordIOReader` gives them, without the magic between parts."""

    _open: tuple[int, int, int] | None = None
    """Of a record without its last part: its whole parts, their bytes, and bytes wanted for the next."""

    def _spans(self) -> tuple[Places, Places]:
        view, start, end = self._view, self._start, self._end
        head = PART.unpack_from
        starts: list[int] = []
        sizes: list[int] = []
        self._wanted = PART.size
        while end - start >= PART.size:
            magic, word = head(view, start)
            if magic != MAGIC or word >> 29:
                frame, size = self._joined(start)
            else:
                size = word & MAX_PAYLOAD
                frame = PART.size + (size + 3 & ~3)
            if self._fault is not None:
                break
            if end - start < frame:
                self._wanted = frame
                break
            starts.append(start + PART.size)
            sizes.append(size)
            start += frame
        self._start = start
        return np.array(starts, np.int64), np.array(sizes, np.int64)

    def _joined(self, start: int) -> tuple[int, int]:
        """Bytes of the record in parts at `start`, as far as is known, and of its payload if all is there."""
        view = self._view
        parts: list[slice] = []
        position = start
        flag = WHOLE
        self._open = None
        while flag != LAST:
            left = self._end - position
            wanted = PART.size
            if left >= wanted:
                magic, word = PART.unpack_from(view, position)
                flag, size = word >> 29, word & MAX_PAYLOAD
                if magic == MAGIC:
                    wanted += size + 3 & ~3
                if wanted <= left and (fault := unfit(magic, flag, len(parts))) is not None:
                    self._fault = self._corrupt(self._base + position, fault)
                    return 0, 0
            if wanted > left:
                self._open = len(parts), position - start, wanted
                return position + wanted - start, 0
            parts.append(slice(position + PART.size, position + PART.size + size))
            position += wanted
        stop = start + PART.size
        for part in parts:
            size = part.stop - part.start
            view[stop : stop + size] = view[part]
            stop += size
        return position - start, stop - start - PART.size

    def _finish(self) -> list[bytes]:
        if self._open is not None:
            parts, behind, self._wanted = self._open
            self._start += behind
            self._parts = [b""] * parts
        return super()._finish()


class LineSpans(SpanReader, LineReader):
    """The lines of a stream, as `LineReader` gives them."""

    def _spans(self) -> tuple[Places, Places]:
        first = self._start + self._searched
        unread = np.frombuffer(memoryview(self._buffer)[first : self._end], np.uint8)
        stops = np.flatnonzero(unread == _LINE_END) + first
        starts = np.empty_like(stops)
        if len(stops):
            starts[0] = self._start
            starts[1:] = stops[:-1] + 1
            self._start = int(stops[-1]) + 1
        self._searched = self._end - self._start
        return starts, stops - starts
