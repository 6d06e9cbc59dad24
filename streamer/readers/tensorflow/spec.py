"""What the elements of a `PipeModeDataset` are."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from streamer.readers.core.config import PipeModeDatasetException
from streamer.readers.core.record_spec import RecordSpec, check_format


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
