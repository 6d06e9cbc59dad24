"""Reads the epochs of a dataset, each from a stream of its own, as steps of records.

stream --> record reader --> position, (keys, skips, shuffle) --> (meter) --> steps
"""

from __future__ import annotations

import contextlib
import itertools
import time
from typing import TYPE_CHECKING, Any

from streamer.errors import ChannelError
from streamer.readers.core.read_loop import ReadLoop
from streamer.readers.core.record_keys import RecordKeys
from streamer.readers.core.skipping import SkippedRecord, without_skipped
from streamer.readers.core.start import approach_start
from streamer.readers.tensorflow.batches import batch_steps, elements, has_layouts, record_steps
from streamer.readers.tensorflow.bulk import BulkTFRecordReader
from streamer.readers.tensorflow.foreign import tensor_functions
from streamer.readers.tensorflow.in_place import InPlaceReader
from streamer.readers.tensorflow.keys import KeyColumns

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    import tensorflow as tf

    from streamer.formats.tfrecord import Skipped
    from streamer.formats.window import RecordReader
    from streamer.readers.core.position import ReaderPosition
    from streamer.readers.core.stream import PipeStream
    from streamer.readers.tensorflow.spec import DatasetSpec
    from streamer.readers.tensorflow.steps import Steps


def epochs_dataset(
    spec: DatasetSpec,
    streams: Callable[[], PipeStream],
    skipped: Skipped,
    *,
    channel: str = "",
    starts: list[ReaderPosition] | None = None,
    records: Sequence[int] = (),
) -> tf.data.Dataset:
    """Return a dataset of elements, each of whose iterators reads the stream that `streams` returns next.

    `skipped`: counts what iterators leave out without `skip`. `channel`: empty for a path. `starts`: the
    saved position at which the first epoch begins, or nothing; it is taken out there. `records`: number of
    records that every epoch must have, or nothing; it may be filled in later.
    """
    saved = [] if starts is None else starts
    return elements(
        lambda: EpochSteps(spec, skipped, channel, saved).steps(streams, records),
        spec.batch_size,
        drop_remainder=spec.drop_remainder,
        positions=spec.positions,
        key=spec.key,
    )


class EpochSteps:
    """The steps of one iterator, and its position in the epoch. Arguments are those of `epochs_dataset`."""

    def __init__(
        self, spec: DatasetSpec, skipped: Skipped, channel: str, starts: list[ReaderPosition]
    ) -> None:
        self._spec = spec
        self._skipped = skipped
        self._channel = channel
        self._starts = starts
        self._columns = KeyColumns() if spec.key else None
        """Where the steps take the keys from; None without keys."""
        self._position: ReaderPosition | None = None
        """None before the start is reached."""
        self._lefts: list[int] | None = None
        """Places left in the last list, by the number of records left: corrupt records have places too.
        None if the list has no corrupt record.
        """

    def steps(self, streams: Callable[[], PipeStream], records: Sequence[int] = ()) -> Steps:
        """Yield the steps of the next epoch; they have no records while no bytes come."""
        spec, columns = self._spec, self._columns
        with contextlib.ExitStack() as stack:
            stream = stack.enter_context(streams())
            checks = _check_records(stream, records[0]) if records else iter(())
            lists = stack.enter_context(contextlib.closing(self._lists(stream)))
            blocks: Iterator[list[bytes]] = itertools.chain(checks, lists)
            if spec.benchmark or spec.benchmark_records_interval:
                meter = Meter(benchmark=spec.benchmark, interval=spec.benchmark_records_interval)
                blocks = meter.measure(blocks)
            positions = self._positions if spec.positions else None
            if spec.batch_size is None:
                yield from record_steps(blocks, positions, columns)
            else:
                yield from batch_steps(
                    blocks,
                    spec.batch_size,
                    drop_remainder=spec.drop_remainder,
                    positions=positions,
                    columns=columns,
                )

    def _lists(self, stream: PipeStream) -> Generator[list[bytes], None, None]:
        """Yield the lists of records of `stream` from its start on; empty lists while no bytes come."""
        start = self._starts[0] if self._starts else None
        position = yield from approach_start(stream, self._channel, start)
        if start is not None and start.epoch == stream.epoch:
            self._starts.clear()
        self._position = position
        spec, columns, reader = self._spec, self._columns, self._reader(stream, position.skip)
        if columns is not None and spec.skip is None and spec.shuffle is None:  # no object for each record
            keys = RecordKeys(stream, offset=position.offset, number=position.number)
            lists = columns.batches(reader, keys, position.offset, drop=position.skip)
            yield from ReadLoop(stream, reader, spec, position, lists=lists, keys=keys).lists()
            return
        for batch in ReadLoop(stream, reader, spec, position).lists():
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

    def _positions(self, lefts: Iterable[int]) -> list[bytes]:
        """Return, for each n of `lefts`, the position before the last n records of the last list."""
        if self._position is None:
            return []
        places = self._lefts
        return self._position.texts(lefts if places is None else [places[left] for left in lefts])

    def _reader(self, stream: PipeStream, drop: int) -> RecordReader:
        """Return the reader of a stream. `drop`: number of the first records, which no step will have."""
        spec = self._spec
        if spec.record_format != "TFRecord" or spec.skip is not None:
            return spec.reader(stream)
        size = spec.batch_size or 1
        options: dict[str, Any] = {
            "max_corrupted_records_to_skip": spec.max_corrupted_records_to_skip,
            "skipped": self._skipped,
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


class Meter:
    """Counts one iterator's records, bytes and reading time, and prints them."""

    def __init__(self, *, benchmark: bool, interval: int) -> None:
        self._benchmark = benchmark
        self._interval = interval
        self._records = 0
        self._bytes = 0
        self._nanoseconds = 0
        self._reported = (0, 0)
        """Bytes and nanoseconds up to the last print."""

    def measure(self, batches: Iterator[list[bytes]]) -> Iterator[list[bytes]]:
        """Yield `batches`; print the totals when they end or the generator is closed."""
        try:
            while True:
                started = time.perf_counter_ns()
                batch = next(batches, None)
                self._count(batch or [], time.perf_counter_ns() - started)
                if batch is None:
                    return
                yield batch
        finally:
            self._total()

    def _count(self, batch: list[bytes], nanoseconds: int) -> None:
        if self._interval:
            self._report(batch, nanoseconds)
        self._records += len(batch)
        self._bytes += sum(map(len, batch))
        self._nanoseconds += nanoseconds

    def _report(self, batch: list[bytes], nanoseconds: int) -> None:
        """Print a report for every multiple of the interval that this batch reaches."""
        start = 0
        size, spent = self._bytes, self._nanoseconds
        for stop in range(self._interval - self._records % self._interval, len(batch) + 1, self._interval):
            size += sum(map(len, batch[start:stop]))
            spent = self._nanoseconds + nanoseconds * stop // len(batch)
            self._say("records", self._records + stop)
            self._say("records read_time_ns", spent - self._reported[1])
            self._say("records read_bytes", size - self._reported[0])
            self._reported = (size, spent)
            start = stop

    def _total(self) -> None:
        if not self._benchmark:
            return
        seconds = self._nanoseconds / 1e9
        self._say("total read_time_ms", self._nanoseconds // 1_000_000)
        self._say("total read_bytes", self._bytes)
        self._say("total read_GB/s", f"{self._bytes / 2**30 / seconds if seconds else 0.0:g}")

    def _say(self, what: str, value: object) -> None:
        print(f"PipeModeDatasetOp::Dataset::Iterator {what}: {value}", flush=True)  # noqa: T201 - the incumbent's output
