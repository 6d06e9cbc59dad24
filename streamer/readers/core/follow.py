"""Follows the records of a stream: returns them, in the FIFO's order or shuffled, and moves the position.

lists of a record reader ─▶ without those before the position ─▶ (windows) ─▶ lists; the position is after
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from streamer.errors import ChannelError
from streamer.readers.core.keys_and_skips import placed_lists
from streamer.readers.core.rank_steps import RankSteps, step_records
from streamer.readers.core.record_count import RecordCount
from streamer.readers.core.record_keys import NO_BATCH
from streamer.readers.core.shuffle import NumberedRecords, Windows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from streamer.formats.window import RecordReader
    from streamer.readers.core.epoch_skips import EpochSkips
    from streamer.readers.core.position import ReaderPosition
    from streamer.readers.core.record_keys import RecordKeys
    from streamer.readers.core.shuffle import Shuffle
    from streamer.readers.core.stream import PipeStream


def follow(
    position: ReaderPosition,
    reader: RecordReader,
    stream: PipeStream,
    keys: RecordKeys | None = None,
    skips: EpochSkips | None = None,
    *,
    batches: Iterator[tuple[list[Any], int | None]] | None = None,
    shuffle: Shuffle | None = None,
) -> Iterator[list[Any]]:
    """Yield the lists of `reader`, which reads `stream` from the position's byte, from its record on.

    While the caller has a list, the position is after it; `before` gives positions inside it. Digest and
    length of the epoch are those of the trailer as last read, because a plan may grow. With `keys` the
    records are `KeyedRecord`s, unless `skips` has its own word. With `skips` a corrupt record is in its place
    as a `SkippedRecord`, unless ranks share the channel by record. `batches`: the lists of `reader` in a form
    of the caller's, each with the number before it, instead of those with keys or skips. `shuffle`: permute
    records in windows; a corrupt record keeps a place in these. If the stream has a patience, lists are empty
    while a window is read.

    Raises CorruptRecord for a record that is over the budget, after the records before it, and StreamError as
    `RecordCount.checked`.
    """
    if batches is None:
        batches = placed_lists(reader, stream, keys, skips, position.offset)
    batches = RecordCount(stream, position.records - position.skip).checked(batches, reader)
    if shuffle is None:
        yield from _in_order(position, reader, stream, skips, batches)
        return
    position.shuffle = shuffle
    returned = 0 if position.window is None else position.records - position.window
    inner = replace(position, skip=position.skip - returned, records=position.records - returned, window=None)
    windows = Windows(shuffle, position.epoch, returned=returned)
    for batch in _in_order(inner, reader, stream, skips, batches):
        position.rank = inner.rank
        count = len(batch)
        first, skip = inner.records - count, inner.skip - count
        block = NumberedRecords(batch, first, inner.offset, skip, inner.number)
        none = True
        for piece in windows.add(block, step_records(inner.rank)):
            position.skipped, position.digest = inner.skipped, inner.digest
            position.reach(piece, last=inner.last and piece.end == inner.records)
            yield piece.records
            none = False
        if none and (not batch or stream.patience is not None):
            yield [] if batch else batch
    rest = list(windows.finish())
    position.digest = inner.digest
    while rest:
        piece = rest.pop(0)
        position.reach(piece, last=not rest)
        yield piece.records
    position.end_epoch(stream.digest)


def _in_order(
    position: ReaderPosition,
    reader: RecordReader,
    stream: PipeStream,
    skips: EpochSkips | None,
    batches: Iterator[tuple[list[Any], int | None]],
) -> Iterator[list[Any]]:
    """Do as `follow`, without a shuffle."""
    base, dropped, skipped_before = position.offset, position.skip, reader.skipped_records
    trailer = stream.trailer
    position.rank = RankSteps.of(trailer)
    while True:
        offset = base + reader.offset
        batch, number = next(batches, NO_BATCH)
        if batch is None:
            break
        count, position.skipped = len(batch), reader.skipped_records - skipped_before
        if dropped and position.skipped and position.rank is not None:
            raise ChannelError(
                f"{stream.name} has corrupt records before or near the step of the state, so the reader "
                "cannot count to that step; start the sidecar with --resume and this state"
            )
        first = min(dropped, count)
        dropped -= first
        if first and skips is not None and position.rank is not None:
            skips.replacements.pass_over(batch[:first])
        if count and first == count:
            continue
        stop = count if skips is None or not skips.bad else skips.admit(batch, first)
        if stream.trailer is not trailer:  # the weights of a mix may have changed
            trailer = stream.trailer
            position.rank = RankSteps.of(trailer)
        if count:  # an empty batch: no bytes for now
            position.offset, position.skip, position.number = offset, stop, number
            rest = batch[first:stop] if stop - first < count else batch
            if skips is not None and position.rank is not None:
                rest = skips.replacements.filled(rest)
            position.records += len(rest)
            position.last = stop == count and base + reader.offset == stream.bytes_total
            position.digest = stream.digest
            yield rest
        else:
            yield batch
        if stop < count and skips is not None:
            skips.check_refused()
    if skips is not None:
        skips.replacements.check_filled()
    position.end_epoch(stream.digest)
