"""Positions of a `PipeModeDataset`, each in one tuple with its element.

tf.data reads ahead of the model, so the position of its iterator is not the position of the training. So each
element carries its position (`streamer.readers.core.position`) through the pipeline. The position of the last
element that a training step has used is the position of the training. It is JSON in a scalar string, so a
`tf.Variable` holds it and `tf.train.Checkpoint` saves it:

    record reader -> (records, positions) -> map, batch, prefetch -> step -> variable -> checkpoint

If the pipeline changes the order of elements (shuffle, a mix of datasets, a map or interleave that is not
deterministic), records before a position may not have been used.

A dataset's first epoch may begin at a saved position. The iterator that opens that epoch's FIFO uses the
position up; if an iterator is dropped before, the next one uses it.
"""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

from streamer.readers.core.follow import follow
from streamer.readers.core.position import ReaderPosition
from streamer.readers.core.record_keys import RecordKeys
from streamer.readers.core.skipping import SkippedRecord, without_skipped
from streamer.readers.core.start import approach_start

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from streamer.formats.window import RecordReader
    from streamer.readers.core.keys_and_skips import KeysAndSkips
    from streamer.readers.core.position import StartPosition
    from streamer.readers.core.shuffle import Shuffle
    from streamer.readers.core.stream import PipeStream
    from streamer.readers.tensorflow.keys import KeyColumns


def parse_start(start: object, channel: str, shuffle: Shuffle | None = None) -> ReaderPosition | None:
    """Parse a saved position: a dict, its JSON as text or bytes, or a string tensor or variable.

    `shuffle`: that of the dataset. Returns None for None and for an empty text, which a variable holds before
    the first step. Raises ValueError.
    """
    if hasattr(start, "numpy"):
        start = start.numpy()
    if isinstance(start, (str, bytes)):
        start = json.loads(start) if start else None
    if start is None:
        return None
    if not isinstance(start, dict):
        raise ValueError(f"start is {start!r}: give a position, as a dict or as JSON")  # noqa: TRY004 - as a bad dict is
    return ReaderPosition.of(start, channel, shuffle)


class EpochCursor:
    """The position of one iterator in its epoch.

    `starts` holds the saved position until an iterator of the dataset has opened that epoch's FIFO. `columns`
    get the keys of the records, if the sidecar keeps key lists. `skipping`: leaves out corrupt records.
    `shuffle`: how records are permuted in windows.
    """

    def __init__(
        self,
        channel: str,
        starts: list[StartPosition],
        columns: KeyColumns | None = None,
        *,
        skipping: KeysAndSkips | None = None,
        shuffle: Shuffle | None = None,
    ) -> None:
        self._channel = channel
        self._starts = starts
        self.columns = columns
        """Where the steps take the keys from; None without keys."""
        self._skipping = skipping
        self._shuffle = shuffle
        self._position: ReaderPosition | None = None
        self._lefts: list[int] | None = None
        """Of the last list, by the number of records that are left: the number of places, which corrupt
        records have too. None if it has none of these.
        """

    def batches(
        self, stream: PipeStream, reader: Callable[[PipeStream, int], RecordReader]
    ) -> Generator[list[bytes], None, None]:
        """Yield the lists of records of `stream` from its start on; empty lists while no bytes come.

        `reader`: is given the number of records to drop at the start.
        """
        start = self._starts[0] if self._starts else None
        position = yield from approach_start(stream, self._channel, start)
        if start is not None and start.position.epoch == stream.epoch:
            self._starts.clear()
        self._position = position
        records, columns, base = reader(stream, position.skip), self.columns, position.offset
        if self._skipping is not None:
            yield from self._good(stream, position, records, self._skipping)
            return
        if columns is None:
            yield from follow(position, records, stream, shuffle=self._shuffle)
            return
        with contextlib.closing(RecordKeys(stream, offset=base, number=position.number)) as keys:
            if self._shuffle is not None:
                for batch in follow(position, records, stream, keys, shuffle=self._shuffle):
                    yield batch and columns.noted(batch)
                return
            batches = columns.batches(records, keys, base, drop=position.skip)
            yield from follow(position, records, stream, batches=batches)

    def _good(
        self, stream: PipeStream, position: ReaderPosition, reader: RecordReader, skipping: KeysAndSkips
    ) -> Generator[list[bytes], None, None]:
        """Yield the lists of good records."""
        columns, offset = self.columns, position.offset
        opened = skipping.epoch(stream, self._channel, offset=offset, number=position.number)
        with opened as (keys, skips):
            for batch in follow(position, reader, stream, keys, skips, shuffle=self._shuffle):
                good = without_skipped(batch)
                self._lefts = None
                if len(good) < len(batch):
                    ends = [n for n, each in enumerate(batch) if not isinstance(each, SkippedRecord)]
                    self._lefts = [0, *(len(batch) - ends[-left - 1] - 1 for left in range(1, len(good)))]
                    self._lefts.append(len(batch))
                yield good if columns is None else columns.noted(good)

    def positions(self, lefts: Iterable[int]) -> list[bytes]:
        """Return, for each of `lefts`, the position before the last so many records of the last list."""
        if self._position is None:
            return []
        places = self._lefts
        return self._position.texts(lefts if places is None else [places[left] for left in lefts])
