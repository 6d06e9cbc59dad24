"""Samples of several records, in plain Python and in TensorFlow, and protobuf records through a channel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import tensorflow as tf

from streamer.errors import TruncatedStream
from streamer.formats import recordio
from streamer.readers import PipeReader
from streamer.readers.protobuf import decode
from streamer.readers.samples import grouped, grouped_dataset
from streamer.readers.tensorflow import PipeModeDataset
from tests.readers.feeder import Feeder

PAIRS = [(b"image %d" % number * number, b"%d" % number) for number in range(500)]


def feed(feeder: Feeder, epoch: int, pairs: Sequence[tuple[bytes, ...]]) -> None:
    feeder.feed(epoch, b"".join(recordio.encode(record) for pair in pairs for record in pair))


def test_plain_records_are_grouped(feeder: Feeder) -> None:
    feed(feeder, 0, PAIRS)
    assert list(grouped(PipeReader("train"), 2)) == PAIRS
    assert list(grouped([], 3)) == []
    assert list(grouped("ab", 1)) == [("a",), ("b",)]


def test_datasets_are_grouped(feeder: Feeder) -> None:
    feed(feeder, 0, PAIRS)
    dataset = grouped_dataset(PipeModeDataset("train"), attributes=2)
    assert [spec.shape.rank for spec in dataset.element_spec] == [0, 0]
    assert list(dataset.as_numpy_iterator()) == PAIRS


def test_an_epoch_that_ends_inside_a_sample_is_an_error(feeder: Feeder) -> None:
    for epoch in range(2):
        feed(feeder, epoch, [*PAIRS, (b"image without label",)])
    got: list[tuple[bytes, ...]] = []
    with pytest.raises(TruncatedStream, match="the epoch ends inside a sample, after 1 of 2 records"):
        got.extend(grouped(PipeReader("train"), 2))
    assert got == PAIRS
    got = []
    with pytest.raises(tf.errors.InvalidArgumentError, match="the epoch ends inside a sample"):
        got.extend(grouped_dataset(PipeModeDataset("train"), attributes=2).as_numpy_iterator())
    assert got == PAIRS


def test_a_sample_has_at_least_one_record(feeder: Feeder) -> None:
    for group in (grouped, grouped_dataset):
        with pytest.raises(ValueError, match="attributes is 0"):
            group([], 0)


def test_protobuf_records_of_a_channel(feeder: Feeder) -> None:
    payload = bytes.fromhex("0a160a0676616c756573120c120a0a080000803f000000401a0161")
    feeder.feed(0, recordio.encode(payload) * 2)
    records = [decode(payload) for payload in PipeReader("train", "RecordIO")]
    values = [record.features["values"] for record in records]
    assert [each.tolist() for each in values if isinstance(each, np.ndarray)] == [[1.0, 2.0]] * 2
    assert records[0].uid == "a"
