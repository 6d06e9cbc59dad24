"""The keys of a `PipeModeDataset`'s records, as columns beside the records.

    key list ─▶ runs of one object ─▶ columns: key, number, bucket ─┐
    FIFO ─▶ lists of records ─▶ steps ─▶ column of records ─────────┴─▶ KeyedRecord of tensors

The reader notes runs of records of one object, in the order of the stream. A step takes as many rows of the
columns as it has records, whatever lists they came in. NumPy fills the rows of a run at once, so a key is
encoded once for each run and step, and no Python object is made for a record.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from streamer.readers.core.record_keys import keyed_runs
from streamer.readers.core.record_names import KeyedRecord, KeyRun

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from streamer.formats.window import RecordReader
    from streamer.readers.core.record_keys import RecordKeys

TYPES = (tf.string, tf.int64, tf.string)
"""Types of the columns: those of the fields of `KeyedRecord` after the record."""


class KeyColumns:
    """The keys of one iterator's records that no step has taken yet."""

    def __init__(self) -> None:
        self._runs: deque[KeyRun] = deque()

    def batches(
        self, reader: RecordReader, keys: RecordKeys, base: int, *, drop: int
    ) -> Iterator[tuple[list[Any], int | None]]:
        """Yield the lists of `reader` and the number before each, and note the keys of their records.

        `drop`: number of records, the first ones, that no step will take. Other arguments, and errors, are
        those of `keyed_runs`.
        """
        for batch, runs, number in keyed_runs(reader, keys, base):
            for run in runs:
                dropped = min(drop, run.records)
                drop -= dropped
                if dropped < run.records:
                    self._runs.append(_without(run, dropped))
            yield batch, number

    def noted(self, records: Sequence[KeyedRecord]) -> list[bytes]:
        """Return the records without their keys, which the next steps take."""
        for _, key, number, bucket in records:
            last = self._runs[-1] if self._runs else None
            if last is not None and last == (last.records, key, number - last.records, bucket):
                self._runs[-1] = last._replace(records=last.records + 1)
            else:
                self._runs.append(KeyRun(1, key, number, bucket))
        return [record for record, *_ in records]

    def take(self, count: int, size: int | None = None) -> tuple[Any, Any, Any]:
        """Return the columns of the next `count` records: keys and buckets as bytes, and numbers as int64.

        `size`: number of rows, if more than `count`; the last ones are empty.
        """
        rows = count if size is None else size
        keys, buckets = np.full(rows, b"", dtype=object), np.full(rows, b"", dtype=object)
        numbers = np.zeros(rows, np.int64)
        start = 0
        while start < count:
            run = self._runs[0]
            length = min(run.records, count - start)
            end = start + length
            keys[start:end] = run.key.encode()
            numbers[start:end] = np.arange(run.number, run.number + length)
            buckets[start:end] = run.bucket.encode()
            if length == run.records:
                self._runs.popleft()
            else:
                self._runs[0] = _without(run, length)
            start = end
        return keys, numbers, buckets


def keyed_elements(dataset: tf.data.Dataset, *, positions: bool) -> tf.data.Dataset:
    """Return a dataset of flat tuples as one of `KeyedRecord`s, in pairs with their positions, if any.

    It is a statement of the elements' structure only; no element is copied.
    """
    fields = dataset.element_spec
    record = KeyedRecord._make(fields[:-1] if positions else fields)
    spec = (record, fields[-1]) if positions else record
    return tf.data.experimental.from_variant(tf.data.experimental.to_variant(dataset), spec)


def _without(run: KeyRun, first: int) -> KeyRun:
    """Return a run without its first records."""
    return run._replace(records=run.records - first, number=run.number + first)
