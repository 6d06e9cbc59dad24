"""Skips corrupt records, and the rest of corrupt objects, within a budget.

    RecordReader ─▶ lists of records, a corrupt one as `BadRecord` ─▶ budget, quarantine ─▶ lists
         ▲ a border of the key list, after bytes that are no record

A corrupt record keeps its place in the reader's lists, so it counts as consumed: positions and states are the
same with it and without it. The outermost reader leaves the places out.

The end of a TFRecord whose data is damaged is known. After a damaged length, or a RecordIO header, nothing in
the bytes shows where the next record begins; only the key list (`streamer.readers.core.record_keys`) does.
The rest of that object is one `BadRecord`, and reading goes on at the next object. A record that goes on
after the end of its object is treated in the same way: the object is cut off, and the bytes after its end are
good.

Ranks that share a channel by record must return equal numbers of records. There, the record before a corrupt
one takes its place. The number of records in the rest of an object is unknown, so that is an error.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from streamer.errors import ChannelError, CorruptRecord, CutRecord
from streamer.escaping import escape_control
from streamer.formats.window import BadRecord
from streamer.readers.core.record_keys import keyed_records

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence

    from streamer.formats.window import RecordReader
    from streamer.readers.core.record_keys import RecordKeys

logger = logging.getLogger("penstock")

Place = TypeVar("Place")

REMEMBERED = 100
"""Number of skipped records that `SkipCounts.last` has."""
_NAMED = 3
"""Number of skipped records in an error."""
_BEYOND = "it goes on after the end of its object, which is cut off or damaged"


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
class SkippedRecord(BadRecord):
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
            record = "a record" if self.number is None else f"record {self.number}"
            place = f"{record} of s3://{self.bucket}/{escape_control(self.key)} at offset {self.offset}"
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
        _append(policy.quarantine, b"")


class EpochSkips:
    """The corrupt records of one epoch of a FIFO."""

    def __init__(
        self,
        policy: SkipPolicy,
        channel: str,
        epoch: int,
        total: SkipCounts,
        *,
        keyed: bool = False,
        placed: bool = False,
    ) -> None:
        """`total`: counts of the reader. `keyed`: whether good records are returned as `KeyedRecord`s.
        `placed`: as `PlacedRecord`s, for a caller that decodes them and skips some itself.
        """
        self._policy = policy
        self._channel = channel
        self._epoch = epoch
        self._total = total
        self.counts = SkipCounts(last=deque(maxlen=_NAMED))
        """Counts of this epoch."""
        self.bad = False
        """Whether the last list has a corrupt record."""
        self._keyed = keyed
        self._places = placed
        self._refused: SkippedRecord | None = None
        self.replacements = Replacements(channel)

    def lists(
        self, reader: RecordReader, keys: RecordKeys | None, base: int, *, proven: bool
    ) -> Iterator[tuple[list[Any], int | None]]:
        """Yield the lists of `reader`, and the number of `with_keys` before each list.

        A corrupt record is a `SkippedRecord`. `keys`: None without a key list. `base`: offset in the epoch's
        stream of the reader's first byte. `proven`: whether the end of the stream is proven. Raises
        CorruptRecord if no border is known after bytes that are no record, CutRecord if the stream ends
        inside a record and neither a proof nor a key list shows that no more bytes belong to it.
        """
        reader.keeps_places, reader.starts = True, []
        batches = reader.batches()
        while True:
            number, self.bad = (keys.number if keys else None), False
            try:
                batch = next(batches, None)
            except (CorruptRecord, CutRecord) as error:
                if keys is None and not isinstance(error, CutRecord):
                    raise CorruptRecord(
                        f"{error}; nothing in the stream shows where the next record begins: set RecordKeys: "
                        "true in the Penstock section of the channel, so that a reader can skip the rest of "
                        "the object"
                    ) from error
                if keys is None and not proven:
                    raise CutRecord(
                        f"{error}; nothing proves that the stream ends here, so the reader does not skip "
                        "this record: see why its writer has ended"
                    ) from error
                rest = self._rest(reader, keys, base, str(error))
                yield [rest], number
                if keys is None or not (yield from self._to_next_object(reader, keys, base, rest)):
                    return
                batches = reader.batches()
                continue
            if batch is None:
                return
            starts = [base + start for start in reader.starts] if batch else []
            beyond = None
            if keys is not None and reader.contiguous and starts:
                beyond = keys.first_beyond(starts, base + reader.offset)
            count = len(batch) if beyond is None else beyond[0]
            placed = self._placed(batch[:count], starts[:count], reader.bad_places, keys)
            if keys is None or not reader.contiguous:
                yield placed, number
                continue
            begin = base + reader.offset if beyond is None else starts[count]
            if beyond is None and reader.expected > reader.offset:
                beyond = keys.first_beyond([begin], base + min(reader.expected, reader.arrived))
            if beyond is None:
                yield placed, number
                continue
            reader.move_to(beyond[1] - base)
            placed.append(self._rest(reader, keys, base, f"{reader.what}: {_BEYOND}", begin))
            yield placed, number
            if not (yield from self._to_next_object(reader, keys, base, placed[-1])):
                return
            batches = reader.batches()

    def _placed(
        self, batch: Sequence[Any], starts: Sequence[int], bad: Sequence[int], keys: RecordKeys | None
    ) -> list[Any]:
        """Return a list with the keys of its records, the corrupt ones at `bad` as `SkippedRecord`s."""
        bad = [index for index in bad if index < len(batch)]
        self.bad = bool(bad)
        placed: list[Any] = []
        done = 0
        for index in (*bad, len(batch)):
            if self._places:
                for start, record in zip(starts[done:index], batch[done:index], strict=True):
                    place = (None, None, None) if keys is None else keys.take_line(start)
                    placed.append(PlacedRecord(record, start, *place))
            elif keys is not None and self._keyed:
                placed += keyed_records(batch[done:index], keys.take(starts[done:index]))
            else:
                if keys is not None:
                    keys.pass_over(starts[done:index])
                placed += batch[done:index]
            if index < len(batch):
                where = (None, None, None) if keys is None else keys.take_line(starts[index])
                placed.append(SkippedRecord(starts[index], batch[index].reason, "record", *where))
            done = index + 1
        return placed

    def _rest(
        self, reader: RecordReader, keys: RecordKeys | None, base: int, reason: str, begin: int | None = None
    ) -> SkippedRecord:
        """Return the rest of the object from the reader's next record on."""
        begin = base + reader.offset if begin is None else begin
        place = (None, None, None) if keys is None else keys.take_line(begin)
        self.bad = True
        return SkippedRecord(begin, reason, "object", *place)

    @staticmethod
    def _to_next_object(
        reader: RecordReader, keys: RecordKeys, base: int, rest: SkippedRecord
    ) -> Generator[tuple[list[Any], None], None, bool]:
        """Move the reader to the object after `rest`, with empty lists; return whether there is one."""
        while True:
            border = keys.object_end(rest.offset, base + reader.arrived)
            if border is not None and border - base <= reader.arrived:
                reader.move_to(border - base)
                break
            if reader.drop_arrived() == 0:
                return False
            yield [], None
        yield [], None
        return True

    def admit(self, batch: Sequence[Any], first: int = 0) -> int:
        """Count, log and list the corrupt records of a list from index `first` on.

        Returns the number of the list's entries before the first one over the budget. Raises ChannelError if
        the quarantine list cannot be written.
        """
        for index in range(first, len(batch)):
            if isinstance(record := batch[index], SkippedRecord) and not self._admits(record):
                self._refused = record
                return index
        return len(batch)

    def _admits(self, record: SkippedRecord) -> bool:
        counts, policy = self.counts, self._policy
        is_object = record.kind == "object"
        if (counts.objects >= policy.objects) if is_object else (counts.records >= policy.records):
            return False
        for each in (counts, self._total):
            each.objects += is_object
            each.records += not is_object
            each.last.append(record)
        logger.warning("skipped: %s", record)
        if policy.quarantine is not None:
            line = {
                "channel": self._channel,
                "epoch": self._epoch,
                "skipped": record.kind,
                "bucket": record.bucket,
                "key": record.key,
                "record": record.number,
                "offset": record.offset,
                "reason": record.reason,
            }
            _append(policy.quarantine, json.dumps(line).encode() + b"\n")
        return True

    def check_refused(self) -> None:
        """Raise CorruptRecord if `admit` has refused a record."""
        if self._refused is not None:
            raise self.refusal()

    def refusal(self) -> CorruptRecord:
        """Return the error of the record that `admit` has refused."""
        record, counts, policy = self._refused, self.counts, self._policy
        before = "; ".join(map(str, counts.last)) or "none"
        what = "objects" if record is not None and record.kind == "object" else "records"
        return CorruptRecord(
            f"{record}; epoch {self._epoch} of {self._channel} has more corrupt {what} than skip allows: "
            f"{counts.records} of {policy.records} records and {counts.objects} of {policy.objects} objects "
            f"were skipped before, the last ones: {before}"
        )


class Replacements:
    """Good records in the places of corrupt ones, for a rank that shares its channel by record."""

    def __init__(self, channel: str) -> None:
        self._channel = channel
        self._good: Any = None
        """Last record that may take the place of a corrupt one."""
        self._vacant = 0
        """Places of corrupt records before the first good one."""
        self._ready: list[Any] = []
        self._waiting: deque[tuple[int, Any]] = deque()
        """Number of records, and place, of the units that `_ready` does not complete yet."""

    def filled(self, batch: Sequence[Any]) -> list[Any]:
        """Return a list of a rank that shares the channel by record, with good records in all places.

        The record before a corrupt one takes its place; at the begin of reading, the record after it. Raises
        CorruptRecord for the rest of an object.
        """
        filled: list[Any] = []
        for record in batch:
            if not isinstance(record, SkippedRecord):
                filled += [record] * (self._vacant + 1)
                self._good, self._vacant = record, 0
            elif record.kind == "object":
                raise CorruptRecord(
                    f"{record}; the ranks of {self._channel} share records, and the rest of an object has an "
                    "unknown number of them, so the ranks would have unequal steps: mend the object, or "
                    "leave it out of the channel"
                )
            elif self._good is None:
                self._vacant += 1
            else:
                filled.append(self._good)
        return filled

    def pass_over(self, batch: Sequence[Any]) -> None:
        """Drop entries before the position of a state; a good record may take a later place."""
        good = self.filled(batch)
        self._good, self._vacant = (good[-1] if good else None), 0

    def units(self, units: Iterable[tuple[list[Any], Place]]) -> Iterator[tuple[list[Any], Place]]:
        """Yield units of records with good records in all places; one without any waits for a later one.

        Raises CorruptRecord as `filled`.
        """
        for records, place in units:
            self._waiting.append((len(records), place))
            self._ready += self.filled(records)
            while self._waiting and len(self._ready) >= self._waiting[0][0]:
                count, whose = self._waiting.popleft()
                yield self._ready[:count], whose
                del self._ready[:count]

    def check_filled(self) -> None:
        """Raise CorruptRecord at the end of an epoch that had no good record for a corrupt one's place."""
        if self._vacant:
            raise CorruptRecord(
                f"all {self._vacant} records of {self._channel} are corrupt since reading began, so no "
                "record can take their places: mend the objects, or leave them out of the channel"
            )


def without_skipped(batch: list[Any]) -> list[Any]:
    """Return a list without its corrupt records."""
    return [record for record in batch if not isinstance(record, SkippedRecord)]


def _append(path: str | os.PathLike[str], line: bytes) -> None:
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
