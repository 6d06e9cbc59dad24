"""Reads the epochs of a dataset, each from a stream of its own, as steps of records.

stream --> record reader --> position, (keys, skips, shuffle) --> (meter) --> steps
"""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any

from streamer.errors import ChannelError
from streamer.formats.tfrecord import Skipped
from streamer.readers.tensorflow.batches import (
    batch_steps,
    elements,
    has_layouts,
    record_steps,
)
from streamer.readers.tensorflow.bulk import BulkTFRecordReader
from streamer.readers.tensorflow.foreign import tensor_functions
from streamer.readers.tensorflow.in_place import InPlaceReader
from streamer.readers.tensorflow.keys import KeyColumns
from streamer.readers.tensorflow.meter import Meter
from streamer.readers.tensorflow.positions import EpochCursor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import tensorflow as tf

    from streamer.formats.window import RecordReader
    from streamer.readers.core.position import ReaderPosition
    from streamer.readers.core.stream import PipeStream
    from streamer.readers.tensorflow.spec import DatasetSpec
    from streamer.readers.tensorflow.steps import Steps


class EpochSteps:
    """The epochs of one dataset.

    `streams`: returns the stream of the next epoch. `channel`: None for a path. `starts`: the saved position
    at which the first epoch begins, or nothing; it is taken out there. `records`: number of records that
    every epoch must have, or nothing; it may be filled in later.
    """

    def __init__(
        self,
        spec: DatasetSpec,
        streams: Callable[[], PipeStream],
        *,
        channel: str | None = None,
        starts: list[ReaderPosition] | None = None,
        records: Sequence[int] = (),
    ) -> None:
        self._spec = spec
        self._streams = streams
        self._channel = channel
        self._starts = [] if starts is None else starts
        self._records = records
        self.skipped: Any = Skipped() if spec.skip is None else spec.skipped
        """What all iterators have left out: `Skipped`, or `SkipCounts` with `skip`."""

    def dataset(self) -> tf.data.Dataset:
        """Return the dataset of elements; each of its iterators reads the next epoch."""
        spec = self._spec
        return elements(
            self._steps,
            spec.batch_size,
            drop_remainder=spec.drop_remainder,
            positions=spec.positions,
            key=spec.key,
        )

    def _steps(self) -> Steps:
        """Yield the steps of the next epoch; they have no records while no bytes come."""
        spec, cursor = self._spec, self._cursor()
        with contextlib.ExitStack() as stack:
            stream = stack.enter_context(self._streams())
            checks = _check_records(stream, self._records[0]) if self._records else iter(())
            lists = stack.enter_context(contextlib.closing(cursor.batches(stream, self._reader)))
            blocks: Iterator[list[bytes]] = itertools.chain(checks, lists)
            if spec.benchmark or spec.benchmark_records_interval:
                meter = Meter(benchmark=spec.benchmark, interval=spec.benchmark_records_interval)
                blocks = meter.measure(blocks)
            after, columns = cursor if spec.positions else None, cursor.columns
            if spec.batch_size is None:
                yield from record_steps(blocks, after, columns)
            else:
                yield from batch_steps(
                    blocks,
                    spec.batch_size,
                    drop_remainder=spec.drop_remainder,
                    cursor=after,
                    columns=columns,
                )

    def _cursor(self) -> EpochCursor:
        """Return the position of an iterator in its epoch."""
        columns = KeyColumns() if self._spec.key else None
        return EpochCursor(self._channel or "", self._starts, self._spec, columns)  # a path has no positions

    def _reader(self, stream: PipeStream, drop: int = 0) -> RecordReader:
        """Return the reader of a stream. `drop`: number of the first records, which no step will have."""
        spec = self._spec
        if spec.record_format != "TFRecord" or spec.skip is not None:
            return spec.reader(stream)
        size = spec.batch_size or 1
        options: dict[str, Any] = {
            "max_corrupted_records_to_skip": spec.max_corrupted_records_to_skip,
            "skipped": self.skipped,
        }
        measured = spec.benchmark or spec.benchmark_records_interval
        large = has_layouts(size) and not (measured or spec.shuffle or drop % size)
        if large and (functions := tensor_functions()):
            return InPlaceReader(stream, functions, size, drop_remainder=spec.drop_remainder, **options)
        return BulkTFRecordReader(stream, **options)


def _check_records(stream: PipeStream, records: int) -> Iterator[list[bytes]]:
    """Raise ChannelError unless the FIFO has an epoch of `records` records, from its first byte on.

    Yields empty lists while no bytes come.
    """
    while not stream.begin(stream.patience):
        yield []
    if stream.start_offset:
        raise ChannelError(
            f"{stream.name} begins at byte {stream.start_offset} of its epoch, so it has fewer records than "
            "its cardinality; leave cardinality out to resume there"
        )
    found = stream.trailer.records if stream.trailer else None
    if found != records:
        number = "an unknown number of" if found is None else found
        raise ChannelError(
            f"{stream.name} has {number} records; when this dataset was made with cardinality, the trailer "
            f"stated {records}: make the dataset after the sidecar has started"
        )
