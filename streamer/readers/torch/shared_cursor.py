"""The file that passes the position in a shared channel from one worker's turn to the next (`workers`).

    state, 1 byte | length of the header, u32 | header, JSON | waiting records | rest of the last block

The state is written last, so a half-written file has the state of a turn under way. If no process holds the
lock then, the worker whose turn it was is dead. Callers hold the lock. `read_turn` reads one turn:

    cursor: rest of the last block, records of an incomplete unit ─▶ blocks of whole units, next cursor
"""

from __future__ import annotations

import errno
import json
import os
import struct
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from streamer.readers.core.record_names import KeyedRecord
from streamer.readers.core.shuffle import NumberedRecords

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamer.readers.core.read_loop import ReadLoop


OPEN = b"O"
"""State between two turns."""
READING = b"R"
"""State during a turn."""
ENDED = b"E"
"""State after the proven end of the epoch."""
FAILED = b"F"
"""State after an error, which ends the epoch for all workers."""

_PREFIX = struct.Struct("<cI")


@dataclass(slots=True)
class SharedCursorFile:
    """Content of the file: the position after a turn, and the bytes that the turn could not use."""

    state: bytes = OPEN
    path: str = ""
    """Path of the FIFO."""
    received: int = 0
    """Bytes that all workers together have read from the FIFO."""
    offset: int = 0
    """Offset in the epoch's stream of `rest`."""
    number: int = 0
    """Number in the epoch of the first record in `rest`."""
    in_object: int | None = None
    """Number in its object of that record, if records are read with their keys; else None."""
    waiting_from: list[int | None] = field(default_factory=list)
    """Number, offset and skip of the first waiting record, and the number in its object of the record at that
    offset, as in `NumberedRecords`."""
    waiting_keys: list[Any] = field(default_factory=list)
    """Key, number and bucket of each waiting record, if records are read with their keys."""
    members: dict[str, int] = field(default_factory=dict)
    """Process ids of the workers that have joined, by index."""
    failure: list[str] = field(default_factory=list)
    """Class and text of the error that ended the epoch for all workers."""
    waiting: list[bytes] = field(default_factory=list)
    """Records of a unit that is not complete yet."""
    rest: bytes = b""
    written: float = 0.0
    """Time of the last `write`, in seconds of CLOCK_BOOTTIME; 0 if unknown."""

    def write(self, fd: int) -> None:
        """Replace the content of the file. Raises OSError."""
        header = {
            "path": self.path,
            "received": self.received,
            "offset": self.offset,
            "number": self.number,
            "in_object": self.in_object,
            "waiting_from": self.waiting_from,
            "waiting_keys": self.waiting_keys,
            "members": self.members,
            "failure": self.failure,
            "waiting": [len(record) for record in self.waiting],
            "written": time.clock_gettime(time.CLOCK_BOOTTIME),
        }
        text = json.dumps(header).encode()
        data = b"".join((_PREFIX.pack(READING, len(text)), text, *self.waiting, self.rest))
        if os.pwrite(fd, data, 0) != len(data):  # a full disk shortens a write without an error
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(fd, len(data))
        os.pwrite(fd, self.state, 0)  # last, so that a half-written file shows that its worker died

    @classmethod
    def read(cls, fd: int) -> SharedCursorFile | None:
        """Return the content of the file; None while it is empty. Raises OSError."""
        if not (size := os.fstat(fd).st_size):
            return None
        data = os.pread(fd, size, 0)
        try:
            state, length = _PREFIX.unpack_from(data)
            at = _PREFIX.size + length
            header = json.loads(data[_PREFIX.size : at])
        except (ValueError, struct.error):
            return cls(READING)
        waiting = []
        for record in header.pop("waiting"):
            waiting.append(data[at : at + record])
            at += record
        return cls(state=state, waiting=waiting, rest=data[at:], **header)

    def abandoned(self) -> bool:
        """Return whether all workers that joined this pass have exited."""
        return not any(map(_is_alive, self.members.values()))

    def past(self) -> bool:
        """Return whether the pass is abandoned and its file was last written before this process began."""
        return self.abandoned() and self.written < _started_at()


def _started_at() -> float:
    """Return when this process began, in seconds of CLOCK_BOOTTIME (`starttime` of proc_pid_stat(5))."""
    with open("/proc/self/stat", "rb") as file:
        ticks = file.read().rpartition(b")")[2].split()[19]
    return int(ticks) / os.sysconf("SC_CLK_TCK")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


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
