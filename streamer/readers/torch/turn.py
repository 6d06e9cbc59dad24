"""The records of one worker's turn in a FIFO that several workers read (`workers`).

cursor: rest of the last block, records of an incomplete unit ─▶ turn ─▶ blocks of whole units, next cursor
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamer.readers.core.record_count import RecordCount
from streamer.readers.core.record_keys import NO_BATCH, RecordKeys, with_keys
from streamer.readers.core.record_names import KeyedRecord
from streamer.readers.core.shuffle import NumberedRecords
from streamer.readers.torch.shared_cursor import ENDED

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamer.formats.window import RecordReader, Source
    from streamer.readers.core.stream import PipeStream
    from streamer.readers.torch.record_ranges import RemainingRecords
    from streamer.readers.torch.shared_cursor import SharedCursorFile


class TurnReader:
    """Reads one worker's turns. `unit`, `key`: as for `WorkerGroupReader`.

    `remaining`: the records to return. `check`: called while no bytes come; it may raise to give up.
    """

    def __init__(
        self,
        stream: PipeStream,
        make_reader: Callable[[Source], RecordReader],
        remaining: RemainingRecords,
        *,
        unit: int,
        key: bool,
        check: Callable[[], None],
    ) -> None:
        self._stream = stream
        self._end = _End(stream)
        self._reader = make_reader(self._end)
        self._keys = RecordKeys(stream, offset=0) if key else None
        self._count = RecordCount(stream)
        self._batches = self._count.checked(with_keys(self._reader, self._keys, 0), self._reader)
        self._remaining = remaining
        self._unit = unit
        self._check = check

    def close(self) -> None:
        """Close the key list."""
        if self._keys is not None:
            self._keys.close()

    def turn(self, cursor: SharedCursorFile) -> list[NumberedRecords]:
        """Go on at `cursor`, and move it, until a unit is complete or the epoch has ended."""
        self._stream.received = cursor.received
        self._count.number = cursor.number
        self._reader.go_on(cursor.rest, cursor.offset)
        waiting: list[Any] = cursor.waiting
        if self._keys is not None:
            self._keys.go_on(cursor.offset, cursor.in_object)
            waiting = [
                KeyedRecord(record, *key)
                for record, key in zip(cursor.waiting, cursor.waiting_keys, strict=True)
            ]
        blocks = [NumberedRecords._make([waiting, *cursor.waiting_from, None])] if cursor.waiting else []
        count = len(cursor.waiting)
        while count < self._unit:
            offset = self._reader.offset
            batch, in_object = next(self._batches, NO_BATCH)
            if batch is None:
                cursor.state = ENDED
                break
            for block in self._remaining.select(batch, cursor.number, offset, in_object):
                blocks.append(block)
                count += len(block.records)
            cursor.number = self._count.number
            if not batch:
                self._check()
        if self._end.reached and self._count.fits:  # else the next turn raises
            cursor.state = ENDED
        cursor.waiting, cursor.waiting_from, cursor.waiting_keys = [], [], []
        if left := 0 if cursor.state == ENDED else count % self._unit:
            # The records left over are all of the last block, because no unit was complete before it.
            block = blocks.pop()
            whole = len(block.records) - left
            waiting, *cursor.waiting_from, _ = block.part(whole, len(block.records))
            cursor.waiting = waiting if self._keys is None else [each.record for each in waiting]
            cursor.waiting_keys = [] if self._keys is None else [each[1:] for each in waiting]
            if whole:
                blocks.append(block.part(0, whole))
        cursor.rest, cursor.offset = self._reader.hand_over()
        cursor.in_object = None if self._keys is None else self._keys.number
        cursor.received = self._stream.received
        return blocks


class _End:
    """A source that notes whether its end was reached."""

    def __init__(self, source: PipeStream) -> None:
        self._source = source
        self.reached = False

    def readinto(self, buffer: memoryview, /) -> int | None:
        return self.readv([buffer])

    def readv(self, views: list[memoryview]) -> int | None:
        count = self._source.readv(views)
        self.reached = count == 0
        return count
