"""Groups records into samples, for channels of an augmented manifest (contract §3.3).

Every line of the manifest is streamed as one record for each of `AttributeNames`, in their order, wrapped in
RecordIO. The stream does not mark where a line begins, so these functions count: n records are a sample. An
epoch that ends inside a sample is an error: either n is not the manifest's number of attributes, or the
channel is not wrapped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from streamer.errors import TruncatedStream
from streamer.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

T = TypeVar("T")


def grouped(records: Iterable[T], attributes: int) -> Iterator[tuple[T, ...]]:
    """Yield tuples of `attributes` records each, from a `PipeReader` or any iterable of records.

    Raises ValueError for less than one attribute, TruncatedStream if the records end inside a sample.
    """
    check_attributes(attributes)
    return _grouped(iter(records), attributes)


def _grouped(records: Iterator[T], attributes: int) -> Iterator[tuple[T, ...]]:
    sample: list[T] = []
    for record in records:
        sample.append(record)
        if len(sample) == attributes:
            yield tuple(sample)
            sample = []
    if sample:
        raise cut_sample(len(sample), attributes)


def grouped_dataset(dataset: Any, attributes: int) -> Any:
    """Return a `tf.data.Dataset` of tuples of `attributes` records, from a dataset of single records.

    Iterating raises `tf.errors.InvalidArgumentError` if the records end inside a sample.
    """
    import tensorflow as tf

    check_attributes(attributes)

    def split(records: Any) -> tuple[Any, ...]:
        whole = tf.debugging.assert_equal(
            tf.shape(records)[0], attributes, message="the epoch ends inside a sample: " + _REMEDY
        )
        with tf.control_dependencies([whole]):
            return tuple(tf.unstack(tf.ensure_shape(tf.identity(records), [attributes])))

    return dataset.batch(attributes).map(split)


def check_attributes(attributes: int) -> None:
    """Raise ValueError for less than one attribute a sample."""
    if attributes < 1:
        raise ValueError(f"attributes is {attributes}; a sample has 1 or more")


def cut_sample(records: int, attributes: int) -> TruncatedStream:
    """Return the error of an epoch whose last sample has only `records` records."""
    return TruncatedStream(
        f"the epoch ends inside a sample, after {records} of {counted(attributes, 'record')}: {_REMEDY}"
    )


_REMEDY = "check that this is the number of AttributeNames, and that RecordWrapperType is RecordIO"
