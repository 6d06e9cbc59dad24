"""Samples of several records, in plain Python and in TensorFlow, and protobuf records through a channel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from examples.demo.dataset import DIMENSIONS, RECORD_BYTES, channels, class_means
from streamer.errors import CorruptRecord, TruncatedStream
from streamer.formats import recordio
from streamer.readers import PipeReader
from streamer.readers.examples import ExampleDecoder, Fixed, Var
from streamer.readers.samples import grouped, grouped_dataset
from tests.kit.late import LATE
from tests.readers.example_bytes import entry, example, feature, tagged
from tests.readers.feeder import Feeder

if LATE:
    import tensorflow as tf

    from streamer.readers.tensorflow import PipeModeDataset

PAIRS = [(b"image %d" % number * number, b"%d" % number) for number in range(500)]


def feed(feeder: Feeder, epoch: int, pairs: Sequence[tuple[bytes, ...]]) -> None:
    feeder.feed(epoch, b"".join(recordio.encode(record) for pair in pairs for record in pair))


def test_plain_records_are_grouped(feeder: Feeder) -> None:
    feed(feeder, 0, PAIRS)
    assert list(grouped(PipeReader("train", "RecordIO"), 2)) == PAIRS
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
        got.extend(grouped(PipeReader("train", "RecordIO"), 2))
    assert got == PAIRS
    got = []
    with pytest.raises(tf.errors.InvalidArgumentError, match="the epoch ends inside a sample"):
        got.extend(grouped_dataset(PipeModeDataset("train"), attributes=2).as_numpy_iterator())
    assert got == PAIRS


def test_a_sample_has_at_least_one_record(feeder: Feeder) -> None:
    for group in (grouped, grouped_dataset):
        with pytest.raises(ValueError, match="attributes is 0"):
            group([], 0)


VALUES: dict[Any, st.SearchStrategy[Any]] = {
    "bytes": st.binary(max_size=4),
    "float32": st.floats(width=32),
    "int64": st.integers(-(2**63), 2**63 - 1),
}
KINDS = st.sampled_from(sorted(VALUES))
LENGTHS = st.sampled_from([0, 1, 2, 4, 70])


@st.composite
def encoded_features(draw: st.DrawFn) -> tuple[bytes, int]:
    """A Feature that TensorFlow's parser and protobuf understand in the same way; its number of floats."""
    kind, count = draw(KINDS), draw(LENGTHS)
    values = draw(st.lists(VALUES[kind], min_size=count, max_size=count))
    return feature(kind, values, packed=draw(st.booleans())), count if kind == "float32" else 0


@st.composite
def wanted_features(draw: st.DrawFn) -> tuple[Fixed | Var, Any]:
    """What a decoder wants, and the same for TensorFlow."""
    kind = draw(KINDS)
    dtype = tf.string if kind == "bytes" else tf.dtypes.as_dtype(kind)
    form = draw(st.sampled_from(["variable", "fixed"]))
    if form == "variable":
        return Var(kind), tf.io.VarLenFeature(dtype)
    shape = draw(st.sampled_from([(), (1,), (2,), (2, 2)]))
    default = None
    if draw(st.booleans()):
        size = int(np.prod(shape))
        default = draw(st.lists(VALUES[kind], min_size=size, max_size=size))
        default = np.array(default, object).reshape(shape).tolist()
    return Fixed(kind, shape, default), tf.io.FixedLenFeature(shape, dtype, default)


def values_of(parsed: dict[str, Any]) -> dict[str, Any]:
    dense = {key: each.values if isinstance(each, tf.SparseTensor) else each for key, each in parsed.items()}
    return {key: each.numpy() for key, each in dense.items()}


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.sampled_from("abcd"), encoded_features()), max_size=5),
    st.dictionaries(st.sampled_from("abcd"), wanted_features(), min_size=1),
    st.booleans(),
)
def test_an_example_is_what_tensorflow_makes_of_it(
    features: list[tuple[str, tuple[bytes, int]]], wanted: dict[str, tuple[Fixed | Var, Any]], unknown: bool
) -> None:
    """In any order, with names twice and unknown fields; an error of one is an error of the other."""
    for key, (_, floats) in features:
        # TensorFlow 2.21 writes floats beyond the end of a fixed feature, and its process crashes.
        theirs = wanted.get(key, (None, None))[1]
        assume(not isinstance(theirs, tf.io.FixedLenFeature) or floats <= np.prod(theirs.shape))
    payload = example(*(entry(key.encode(), value) for key, (value, _) in features))
    payload += tagged(9, b"unknown") if unknown else b""
    try:
        parsed = tf.io.parse_single_example(payload, {key: theirs for key, (_, theirs) in wanted.items()})
    except tf.errors.InvalidArgumentError:
        parsed = None
    decoder = ExampleDecoder({key: ours for key, (ours, _) in wanted.items()})
    if parsed is None:
        with pytest.raises(CorruptRecord):
            decoder.decode(payload)
        return
    due, found = values_of(parsed), decoder.decode(payload)
    assert found.keys() == due.keys()
    for key, value in due.items():
        np.testing.assert_array_equal(found[key], value, strict=not isinstance(value, bytes))


def test_tensorflow_reads_the_sample_data_of_the_demo(tmp_path: Path) -> None:
    """The hand-made protobuf and frames of the demo's sample data are what TensorFlow's own parsers take."""
    train, held_out = channels(megabytes=1.2, objects=2, seed=3)
    assert len(train.shard(0)) + len(train.shard(1)) == train.total_bytes == train.records * RECORD_BYTES
    shard = tmp_path / held_out.key(0).replace("/", "-")
    shard.write_bytes(held_out.shard(0))
    found = []
    for record in tf.data.TFRecordDataset(str(shard)).as_numpy_iterator():
        parsed = tf.train.Example.FromString(record)
        assert sorted(parsed.features.feature) == ["data", "label"]
        (label,) = parsed.features.feature["label"].int64_list.value
        (data,) = parsed.features.feature["data"].bytes_list.value
        found.append((label, data))
    assert len(found) == held_out.records
    labels = np.array([label for label, _ in found])
    vectors = np.array([np.frombuffer(data, "<f8") for _, data in found])
    assert vectors.shape == (held_out.records, DIMENSIONS)
    nearest = ((vectors[:, None] - class_means(3, 10)) ** 2).sum(axis=2).argmin(axis=1)
    assert (nearest == labels).mean() > 0.95
