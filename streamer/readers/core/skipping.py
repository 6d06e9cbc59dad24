"""Corrupt records that a reader leaves out, within a budget: the policy, the counts, and replacements.

`streamer.readers.core.epoch_skips` finds them. A corrupt record keeps its place in the reader's lists, so it
counts as consumed: positions and states are the same with it and without it. The outermost reader leaves the
places out.

Ranks that share a channel by record must return equal numbers of records. There, the record before a corrupt
one takes its place. The number of records in the rest of an object is unknown, so that is an error.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from streamer.errors import ChannelError, CorruptRecord
from streamer.formats.window import CorruptPlace
from streamer.readers.core.record_names import record_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from streamer.readers.core.shuffle import NumberedRecords

REMEMBERED = 100
"""Number of skipped records that `SkipCounts.last` has."""


@dataclass(frozen=True)
class SkipPolicy:
    """How many corrupt records, and corrupt objects, a reader may skip in each epoch of a FIFO.

    `records`: corrupt records whose end is known. `objects`: objects whose rest cannot be read; the records
    before the damage are returned. `quarantine`: file to which a line is appended for each of them; several
    processes of a host may share it. Raises ValueError for what is no integer of 0 or more, or if both are 0.
    """

    records: int = 0
    objects: int = 0
    quarantine: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        numbers = self.records, self.objects
        if not all(type(number) is int and number >= 0 for number in numbers) or not any(numbers):
            raise ValueError(
                f"skip has records {self.records!r} and objects {self.objects!r}: give one or both of them, "
                "an integer of 1 or more, or leave skip out"
            )


@dataclass(frozen=True, slots=True)
class SkippedRecord(CorruptPlace):
    """A corrupt record, or the rest of a corrupt object. `offset` is that in the epoch's stream."""

    kind: Literal["record", "object"] = "record"
    key: str | None = None
    """Key of the object in S3; None without a key list."""
    number: int | None = None
    """Number of the record in its object, from 0; for the rest of an object, that of its first record."""
    bucket: str | None = None

    def __str__(self) -> str:
        if self.key is None:
            place = f"offset {self.offset}"
        else:
            place = f"{record_name(self.key, self.number, self.bucket)} at offset {self.offset}"
        return f"{'' if self.kind == 'record' else 'the rest of the object from '}{place}: {self.reason}"


class PlacedRecord(NamedTuple):
    """A record whose framing is good, with the place that a `SkippedRecord` would have."""

    record: Any
    offset: int
    key: str | None
    number: int | None
    bucket: str | None


@dataclass(slots=True)
class SkipCounts:
    """What a reader has skipped since it was made."""

    records: int = 0
    objects: int = 0
    last: deque[SkippedRecord] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """The last skipped records and objects."""


def check_skip(policy: SkipPolicy | None, record_format: str) -> None:
    """Make the file of the quarantine list, if the policy has one.

    Raises ValueError if no record of the format can be corrupt, ChannelError if the file cannot be written.
    """
    if policy is None:
        return
    if record_format == "TextLine":
        raise ValueError("skip has no meaning for TextLine, because any bytes are lines: leave it out")
    if policy.quarantine is not None:
        append_line(policy.quarantine, b"")


class Replacements:
    """Good records in the places of corrupt ones, for a rank that shares its channel by record.

    The record before a corrupt one takes its place; at the start of reading, the record after it.
    """

    def __init__(self, channel: str) -> None:
        self._channel = channel
        self._good: Any = None
        """Last record that may take the place of a corrupt one."""
        self._vacant: list[NumberedRecords] = []
        """Blocks of corrupt records only, before the first good one."""

    def filled(self, block: NumberedRecords) -> list[NumberedRecords]:
        """Return the block with good records in all places, after the blocks that waited for one.

        A block waits if there is no good record yet. Raises CorruptRecord for the rest of an object.
        """
        good, filled = self._good_of(block.records), list[Any]()
        if self._good is None and not good:
            self._vacant.append(block)
            return []
        record = good[0] if self._good is None else self._good
        ready = [each._replace(records=[record] * len(each.records)) for each in self._vacant]
        self._vacant.clear()
        for each in block.records:
            record = record if isinstance(each, SkippedRecord) else each
            filled.append(record)
        self._good = record
        return [*ready, block._replace(records=filled)]

    def pass_over(self, records: Sequence[Any]) -> None:
        """Drop records before the position of a state; a good one may take a later place."""
        if good := self._good_of(records):
            self._good = good[-1]

    def _good_of(self, records: Sequence[Any]) -> list[Any]:
        """Return the good ones of these records. Raises CorruptRecord for the rest of an object."""
        for record in records:
            if isinstance(record, SkippedRecord) and record.kind == "object":
                raise CorruptRecord(
                    f"{record}; the ranks of {self._channel} share records, and the rest of an object has an "
                    "unknown number of them, so the ranks would have unequal steps: mend the object, or "
                    "leave it out of the channel"
                )
        return without_skipped(records)

    def check_filled(self) -> None:
        """Raise CorruptRecord at the end of an epoch that had no good record for a corrupt one's place."""
        if self._vacant:
            count = sum(len(block.records) for block in self._vacant)
            raise CorruptRecord(
                f"all {count} records of {self._channel} are corrupt since reading began, so no "
                "record can take their places: mend the objects, or leave them out of the channel"
            )


def without_skipped(batch: Iterable[Any]) -> list[Any]:
    """Return a list without its corrupt records."""
    return [record for record in batch if not isinstance(record, SkippedRecord)]


def append_line(path: str | os.PathLike[str], line: bytes) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
        try:
            if line and os.write(fd, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(fd)
    except OSError as error:
        raise ChannelError(
            f"cannot write the quarantine list {os.fspath(path)}: {error.strerror}; name a file that this "
            "process may append to"
        ) from error
