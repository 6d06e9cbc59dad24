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

import json
from typing import TYPE_CHECKING, Any

from streamer.readers.core.position import ReaderPosition
from streamer.readers.core.read_loop import ReadLoop
from streamer.readers.core.record_keys import RecordKeys
from streamer.readers.core.skipping import SkippedRecord, without_skipped
from streamer.readers.core.start import approach_start

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from streamer.formats.window import RecordReader
    from streamer.readers.core.record_spec import RecordSpec
    from streamer.readers.core.shuffle import Shuffle
    from streamer.readers.core.stream import PipeStream
    from streamer.readers.tensorflow.keys import KeyColumns


def parse_start(
    start: object, channel: str, shuffle: Shuffle | None = None, *, anyway: bool = False
) -> ReaderPosition | None:
    """Parse a saved position: a dict, its JSON as text or bytes, or a string tensor or variable.

    `shuffle`, `anyway`: those of the dataset. Returns None for None and for an empty text, which a variable
    holds before the first step. Raises ValueError.
    """
    if hasattr(start, "numpy"):
        start = start.numpy()
    if isinstance(start, (str, bytes)):
        start = json.loads(start) if start else None
    if start is None:
        return None
    if not isinstance(start, dict):
        raise ValueError(f"start is {start!r}: give a position, as a dict or as JSON")  # noqa: TRY004 - as a bad dict is
    return ReaderPosition.of(start, channel, shuffle, anyway=anyway)


class EpochCursor:
    """The position of one iterator in its epoch.

    `starts` holds the saved position until an iterator of the dataset has opened that epoch's FIFO. `columns`
    get the keys of the records, if `spec` has keys.
    """

    def __init__(
        self,
        channel: str,
        starts: list[ReaderPosition],
        spec: RecordSpec,
        columns: KeyColumns | None = None,
    ) -> None:
        self._channel = channel
        self._starts = starts
        self._spec = spec
        self.columns = columns
        """Where the steps take the keys from; None without keys."""
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
        if start is not None and start.epoch == stream.epoch:
            self._starts.clear()
        self._position = position
        spec, columns, records = self._spec, self.columns, reader(stream, position.skip)
        if columns is not None and spec.skip is None and spec.shuffle is None:  # no object for each record
            keys = RecordKeys(stream, offset=position.offset, number=position.number)
            lists = columns.batches(records, keys, position.offset, drop=position.skip)
            yield from ReadLoop(stream, records, spec, position, lists=lists, keys=keys).lists()
            return
        for batch in ReadLoop(stream, records, spec, position).lists():
            good: list[Any] = batch if spec.skip is None else self._good(batch)
            yield columns.noted(good) if columns is not None and good else good

    def _good(self, batch: list[Any]) -> list[Any]:
        """Return the good records of a list, and note how many places each has after it."""
        good = without_skipped(batch)
        self._lefts = None
        if len(good) < len(batch):
            ends = [n for n, each in enumerate(batch) if not isinstance(each, SkippedRecord)]
            self._lefts = [0, *(len(batch) - ends[-left - 1] - 1 for left in range(1, len(good)))]
            self._lefts.append(len(batch))
        return good

    def positions(self, lefts: Iterable[int]) -> list[bytes]:
        """Return, for each of `lefts`, the position before the last so many records of the last list."""
        if self._position is None:
            return []
        places = self._lefts
        return self._position.texts(lefts if places is None else [places[left] for left in lefts])
