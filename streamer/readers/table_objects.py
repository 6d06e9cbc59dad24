"""The record batches of one object after the other, for all readers of tables.

    object ─▶ its batches, each with the rows after it ─▶ reader
          └─▶ with `skip`: all its batches, or CorruptRecord ─▶ budget, quarantine

With `skip` an object is decoded wholly before its first batch is returned, so a damaged object gives no row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamer.errors import ChannelError, CorruptRecord
from streamer.readers.core.record_names import named, record_name
from streamer.readers.core.skipping import SkippedRecord
from streamer.readers.table_decoder import KeyedBatch

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from streamer.readers.core.epoch_skips import EpochSkips
    from streamer.readers.core.skipping import PlacedRecord, SkipPolicy
    from streamer.readers.table_decoder import TableDecoder


@dataclass(frozen=True, slots=True)
class SkippedTable(SkippedRecord):
    """An object that cannot be decoded. `reason` names it; the next one begins at its end."""

    def __str__(self) -> str:
        if self.key is None:
            return f"{self.reason}; it is the table at offset {self.offset}"
        return f"{self.reason}; it is {record_name(self.key, self.number, self.bucket)}"


def check_table_skip(skip: SkipPolicy | None) -> None:
    """Raise ValueError for a budget of records, which tables have not."""
    if skip is not None and skip.records:
        raise ValueError(
            f"skip has records {skip.records}, and a reader of tables leaves out whole objects: give objects "
            "only"
        )


def table_batches(
    decoder: TableDecoder,
    entry: Any,
    name: str,
    *,
    key: bool,
    skips: EpochSkips | None = None,
    rows: int = 0,
) -> Iterator[tuple[Any, int]]:
    """Yield the batches of an object, each with the number of its rows so far; 0 with the last batch.

    `entry`: the object, as a `KeyedRecord` with `key`, and as an entry of `EpochSkips` with `skips`. `name`:
    the object's, for errors. `key`: batches are `KeyedBatch`es. `rows`: number of rows that were returned
    before. A corrupt object has no batch, within the budget of `skips`. Raises CorruptRecord, ChannelError.
    """
    if isinstance(entry, SkippedRecord):
        return
    if skips is None:
        batches = _plain(decoder, entry, name, key=key)
    elif (whole := _decoded(decoder, entry, name, skips)) is not None:
        batches = iter(whole)
    else:
        return
    batches = _without(batches, rows, name)
    batch = next(batches, None)
    while batch is not None:
        failure, following = None, None
        try:
            following = next(batches, None)
        except CorruptRecord as error:
            failure = error
        element = KeyedBatch(batch, entry.key, entry.number, entry.bucket, rows) if key else batch
        rows += batch.num_rows
        yield element, 0 if following is None and failure is None else rows
        if failure is not None:
            raise failure
        batch = following


def _plain(decoder: TableDecoder, entry: Any, name: str, *, key: bool) -> Iterator[pa.RecordBatch]:
    """Yield the batches of an object, without skips. Raises CorruptRecord, which names the object."""
    if not key:
        yield from decoder.batches(entry, name=name)
        return
    try:
        yield from decoder.batches(entry.record, name=name)
    except CorruptRecord as error:
        raise named(error, record_name(*entry[1:])) from error


def _decoded(
    decoder: TableDecoder, entry: PlacedRecord, name: str, skips: EpochSkips
) -> list[pa.RecordBatch] | None:
    """Return the batches of an object; None if it is left out. Raises CorruptRecord over the budget."""
    try:
        return decoder.whole(entry.record, name=name)
    except CorruptRecord as error:
        place = (entry.key, entry.number, entry.bucket)
        if not skips.admit([SkippedTable(entry.offset, str(error), "object", *place)]):
            raise skips.refusal() from error
    return None


def _without(batches: Iterator[pa.RecordBatch], skip: int, name: str) -> Iterator[pa.RecordBatch]:
    """Yield batches without the first `skip` rows. Raises ChannelError if there are less."""
    for batch in batches:
        if skip < batch.num_rows:
            yield batch.slice(skip) if skip else batch
            skip = 0
        else:
            skip -= batch.num_rows
    if skip:
        raise ChannelError(
            f"the state is {skip} rows after the end of {name}: restore it, or begin without the state"
        )
