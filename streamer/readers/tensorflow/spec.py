"""What the elements of a `PipeModeDataset` are, and at which position its first epoch begins.

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
from dataclasses import dataclass
from typing import TYPE_CHECKING

import tensorflow as tf

from streamer.readers.core.config import PipeModeDatasetException
from streamer.readers.core.position import ReaderPosition
from streamer.readers.core.record_spec import RecordSpec, check_format

if TYPE_CHECKING:
    from streamer.readers.core.shuffle import Shuffle


@dataclass(frozen=True)
class DatasetSpec(RecordSpec):
    """Options of a dataset, which never change; they are those of `PipeModeDataset`.

    Raises PipeModeDatasetException, and `tf.errors.InvalidArgumentError` for an unknown format.
    """

    benchmark: bool = False
    benchmark_records_interval: int = 0
    max_corrupted_records_to_skip: int = 0
    batch_size: int | None = None
    drop_remainder: bool = False
    positions: bool = False

    def __post_init__(self) -> None:
        try:
            check_format(self.record_format, self.max_corrupted_records_to_skip)
        except ValueError as error:
            raise tf.errors.InvalidArgumentError(None, None, str(error)) from error
        if self.benchmark_records_interval < 0:
            raise PipeModeDatasetException(
                f"benchmark_records_interval is {self.benchmark_records_interval}; it cannot be negative"
            )
        if self.batch_size is not None and self.batch_size < 1:
            raise PipeModeDatasetException(f"batch_size is {self.batch_size}; it must be 1 or more")
        if self.drop_remainder and self.batch_size is None:
            raise PipeModeDatasetException("drop_remainder has no meaning without batch_size")
        if self.skip is not None and self.max_corrupted_records_to_skip:
            raise PipeModeDatasetException("skip and max_corrupted_records_to_skip exclude each other")
        super().__post_init__()

    def elements(self, records: int) -> int:
        """Return the number of elements of an epoch with `records` records."""
        whole, rest = divmod(records, self.batch_size or 1)
        return whole + (rest > 0 and not self.drop_remainder)


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
