"""The file in which workers that share a channel (`workers`) leave what the next turn needs.

    state, 1 byte | length of the head, u32 | head, JSON | records that wait | rest of the last block

The state is written last, so a book that is half written says that a turn is under way; if nobody holds the
lock then, the worker whose turn it was is dead. The lock is not this module's affair.
"""

from __future__ import annotations

import errno
import json
import os
import struct
import time
from dataclasses import dataclass, field

OPEN = b"O"
"""Between two turns."""
READING = b"R"
"""A turn has begun and not ended."""
ENDED = b"E"
"""The end is reached and proven."""
FAILED = b"F"
"""An error has ended the epoch for all."""

_HEAD = struct.Struct("<cI")


@dataclass(slots=True)
class SharedCursorFile:
    """What one turn leaves to the next."""

    state: bytes = OPEN
    path: str = ""
    """The FIFO."""
    received: int = 0
    """Bytes read from it, by all."""
    offset: int = 0
    """Offset in the epoch's stream of `rest`."""
    number: int = 0
    """Number in the epoch of the first record in `rest`."""
    begin: list[int] = field(default_factory=list)
    """Of the first record that waits: number, and where it is (`streamer.readers.torch.progress.Block`)."""
    members: dict[str, int] = field(default_factory=dict)
    """Process ids of those who have come, by index."""
    failure: list[str] = field(default_factory=list)
    """Class and text of the error that ended the epoch for all."""
    waiting: list[bytes] = field(default_factory=list)
    """Records of a unit that is not whole yet."""
    rest: bytes = b""
    written: float = 0.0
    """When, in seconds of CLOCK_BOOTTIME; 0 if that is not known."""

    def write(self, fd: int) -> None:
        """Replace what the file holds. Raises OSError."""
        head = {
            "path": self.path,
            "received": self.received,
            "offset": self.offset,
            "number": self.number,
            "begin": self.begin,
            "members": self.members,
            "failure": self.failure,
            "waiting": [len(record) for record in self.waiting],
            "written": time.clock_gettime(time.CLOCK_BOOTTIME),
        }
        text = json.dumps(head).encode()
        data = b"".join((_HEAD.pack(READING, len(text)), text, *self.waiting, self.rest))
        if os.pwrite(fd, data, 0) != len(data):  # as a full disk makes it, without an error
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(fd, len(data))
        os.pwrite(fd, self.state, 0)  # last, so that a book that is half written is one of a dead worker

    @classmethod
    def read(cls, fd: int) -> SharedCursorFile | None:
        """The book, or None if nobody has written it yet. Raises OSError."""
        if not (size := os.fstat(fd).st_size):
            return None
        data = os.pread(fd, size, 0)
        try:
            state, length = _HEAD.unpack_from(data)
            at = _HEAD.size + length
            head = json.loads(data[_HEAD.size : at])
        except (ValueError, struct.error):
            return cls(READING)
        waiting = []
        for record in head.pop("waiting"):
            waiting.append(data[at : at + record])
            at += record
        return cls(state=state, waiting=waiting, rest=data[at:], **head)

    def abandoned(self) -> bool:
        """Whether nobody is left who began this pass."""
        return not any(map(_lives, self.members.values()))

    def past(self) -> bool:
        """Whether it is of a pass before this process: abandoned, and written before that began."""
        return self.abandoned() and self.written < _born()


def _born() -> float:
    """When this process began, in seconds of CLOCK_BOOTTIME (`starttime` of proc_pid_stat(5))."""
    with open("/proc/self/stat", "rb") as file:
        ticks = file.read().rpartition(b")")[2].split()[19]
    return int(ticks) / os.sysconf("SC_CLK_TCK")


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
