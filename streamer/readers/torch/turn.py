"""The records of one worker's turn in a FIFO that several workers read (`workers`).

cursor: rest of the last block, records of an incomplete unit ─▶ turn ─▶ blocks of whole units, next cursor
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamer.readers.core.record_names import KeyedRecord
from streamer.readers.core.shuffle import NumberedRecords
from streamer.readers.torch.shared_cursor import ENDED

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamer.readers.core.read_loop import ReadLoop
    from streamer.readers.torch.shared_cursor import SharedCursorFile


def read_turn(
    loop: ReadLoop, cursor: SharedCursorFile, unit: int, check: Callable[[], None]
) -> list[NumberedRecords]:
    """Go on at `cursor`, and move it, until a unit of records is complete or the epoch has ended.

    `check`: called while no bytes come; it may raise to give up. Raises as `ReadLoop.read`.
    """
    stream, key = loop.stream, loop.spec.key
    stream.received = cursor.received
    loop.go_on(cursor.rest, cursor.offset, number=cursor.number, in_object=cursor.in_object)
    waiting: list[Any] = cursor.waiting
    if key:
        names = zip(cursor.waiting, cursor.waiting_keys, strict=True)
        waiting = [KeyedRecord(record, *name) for record, name in names]
    blocks = [NumberedRecords._make([waiting, *cursor.waiting_from, None, False])] if waiting else []
    count = len(waiting)
    while count < unit:
        if (found := loop.read()) is None:
            cursor.state = ENDED
            break
        cursor.number = loop.number
        blocks += (block for block in found if block.records)
        count += sum(len(block.records) for block in found)
        if found and not found[0].records:
            check()
    if stream.ended and loop.fits:  # else the next turn raises
        cursor.state = ENDED
    cursor.waiting, cursor.waiting_from, cursor.waiting_keys = [], [], []
    if left := 0 if cursor.state == ENDED else count % unit:
        # The records left over are all of the last block, because no unit was complete before it.
        block = blocks.pop()
        whole = len(block.records) - left
        waiting, *cursor.waiting_from = block.part(whole, len(block.records))[:5]
        cursor.waiting = [each.record for each in waiting] if key else waiting
        cursor.waiting_keys = [each[1:] for each in waiting] if key else []
        if whole:
            blocks.append(block.part(0, whole))
    cursor.rest, cursor.offset, cursor.in_object = loop.hand_over()
    cursor.received = stream.received
    return blocks
