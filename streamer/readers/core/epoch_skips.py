"""`EpochSkips`: the records of one epoch with the corrupt ones found, counted and listed.

    RecordReader ─▶ lists of records, a corrupt one as `CorruptPlace` ─▶ budget, quarantine ─▶ lists
         ▲ a border of the key list, after bytes that are no record

The end of a TFRecord whose data is corrupt is known. After a corrupt length, or a RecordIO header, nothing in
the bytes shows where the next record begins; only the key list (`streamer.readers.core.record_keys`) does.
The rest of that object is one `CorruptPlace`, and reading goes on at the next object. A record that goes on
after the end of its object is treated in the same way: the object is cut off, and the bytes after its end are
good.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from typing import TYPE_CHECKING, Any

from streamer.errors import CorruptRecord, CutRecord, RecordTooLarge, StreamError
from streamer.readers.core.record_names import keyed_records, named, record_name
from streamer.readers.core.skipping import PlacedRecord, SkipCounts, SkippedRecord, append_line
from streamer.units import counted

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from streamer.formats.window import RecordReader
    from streamer.readers.core.record_keys import RecordKeys
    from streamer.readers.core.skipping import SkipPolicy

logger = logging.getLogger("penstock")

_NAMED = 3
"""Number of skipped records in an error."""
_BEYOND = "it goes on after the end of its object, which is cut off or corrupt"


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
            except (CorruptRecord, CutRecord, RecordTooLarge) as error:
                self._check_end(error, reader, keys, base, proven=proven)
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

    @staticmethod
    def _check_end(
        error: StreamError, reader: RecordReader, keys: RecordKeys | None, base: int, *, proven: bool
    ) -> None:
        """Raise an error of the reader after which nothing shows where to go on, or that is no damage."""
        if isinstance(error, RecordTooLarge):
            if keys is None:
                raise error
            raise named(error, record_name(*keys.take_line(base + reader.offset))) from error
        if keys is None and not isinstance(error, CutRecord):
            raise CorruptRecord(
                f"{error}; nothing in the stream shows where the next record begins: set RecordKeys: true in "
                "the Penstock section of the channel, so that a reader can skip the rest of the object"
            ) from error
        if keys is None and not proven:
            raise CutRecord(
                f"{error}; nothing proves that the stream ends here, so the reader does not skip this "
                "record: see why its writer has ended"
            ) from error

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
                    placed.append(PlacedRecord(record, start, *self._place(start, keys)))
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

    def _place(self, start: int, keys: RecordKeys | None) -> tuple[str | None, int | None, str | None]:
        """Take one record; return key, number and bucket. Raises ChannelError as `RecordKeys.take`."""
        if keys is None:
            return None, None, None
        if not self._keyed:
            return keys.take_line(start)
        (run,) = keys.take([start])
        return next(run.record_keys())

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
            append_line(policy.quarantine, json.dumps(line).encode() + b"\n")
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
            f"{record}; epoch {self._epoch} of {self._channel} has more corrupt {what} than skip allows; "
            f"skipped before: {counts.records} of {counted(policy.records, 'record')} and "
            f"{counts.objects} of {counted(policy.objects, 'object')}, the last ones: {before}"
        )
