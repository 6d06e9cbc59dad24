"""`key=True` of `PipeModeDataset`: each record with its object, in every form of element."""

from __future__ import annotations

import gc
import json
import os
import re
from collections.abc import Sequence
from typing import Any

import pytest

from streamer.formats import recordio, tfrecord
from streamer.readers import KeyedRecord
from streamer.units import MIB
from tests.kit.frames import spoilt
from tests.kit.late import LATE
from tests.readers.feeder import Feeder

if LATE:
    import tensorflow as tf

    from streamer.readers.tensorflow import PipeModeDataset, batches
    from streamer.readers.tensorflow.keys import KeyColumns

ENCODE = {
    "TFRecord": tfrecord.encode,
    "RecordIO": recordio.encode,
    "TextLine": lambda line: line + b"\n",
    "fixed:4": bytes,
}
COUNTS = [1, 0, 40, 3, 0, 1, 300, 0]
"""Records of the objects of an epoch; the second one and others have none."""
RECORDS = [b"%04d" % number for number in range(sum(COUNTS))]
LARGE = [b"%d." % number * 20_000 for number in range(130)]
SMALL = [b"%d" % number for number in range(1500)]
MIXED = SMALL + LARGE + SMALL + LARGE[:77] + [b"", b"last\0"]
OBJECT = 100
"""Records of an object of `MIXED`."""


def offer(feeder: Feeder, epoch: int, frames: Sequence[bytes], counts: Sequence[int], **options: Any) -> Any:
    """Offer an epoch of objects with these numbers of frames, named k0, k1, …, with its key list."""
    rest = iter(frames)
    sizes = [sum(len(next(rest)) for _ in range(count)) for count in counts]
    feeder.list_keys([(size, f"e{epoch}/k{index}") for index, size in enumerate(sizes)], epoch=epoch)
    return feeder.feed(epoch, b"".join(frames), **options)


def due(epoch: int, counts: Sequence[int]) -> list[tuple[bytes, int, bytes]]:
    """Key, number and bucket of the records of an epoch."""
    return [
        (f"e{epoch}/k{index}".encode(), number, b"b")
        for index, count in enumerate(counts)
        for number in range(count)
    ]


def rows(elements: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The records of elements that are batches, each with its key."""
    return [row for each in elements for row in zip(*(column.tolist() for column in each), strict=True)]


def keyed(record: bytes, key: tuple[bytes, int, bytes]) -> tuple[Any, ...]:
    return (record, *key)


@pytest.fixture(params=["several rows", "whole"])
def small_rows(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Batches of 1 MiB have several rows, or are steps of their own, so that a test needs little data."""
    monkeypatch.setattr(batches, "FEW", 2)
    if request.param == "whole":
        monkeypatch.setattr(batches, "WHOLE_BYTES", MIB)
    else:
        monkeypatch.setattr(batches, "LARGE_BYTES", MIB)


@pytest.mark.parametrize("record_format", list(ENCODE))
def test_every_record_of_every_format_has_its_object(feeder: Feeder, record_format: str) -> None:
    for epoch in range(2):
        offer(feeder, epoch, list(map(ENCODE[record_format], RECORDS)), COUNTS)
    dataset = PipeModeDataset("train", record_format, key=True)
    scalar = tf.TensorSpec([], tf.string)
    assert dataset.element_spec == KeyedRecord(scalar, scalar, tf.TensorSpec([], tf.int64), scalar)
    found = list(dataset.repeat(2).as_numpy_iterator())
    assert all(type(each) is KeyedRecord for each in found)
    assert [tuple(each) for each in found] == [
        keyed(*row) for epoch in range(2) for row in zip(RECORDS, due(epoch, COUNTS), strict=True)
    ]


@pytest.mark.parametrize(("size", "drop_remainder"), [(1, False), (7, False), (7, True), (100, False)])
def test_batches_have_columns(feeder: Feeder, size: int, drop_remainder: bool) -> None:
    offer(feeder, 0, list(map(tfrecord.encode, RECORDS)), COUNTS)
    dataset = PipeModeDataset("train", "TFRecord", batch_size=size, drop_remainder=drop_remainder, key=True)
    vector = tf.TensorSpec([size if drop_remainder else None], tf.string)
    numbers = tf.TensorSpec(vector.shape, tf.int64)
    assert dataset.element_spec == KeyedRecord(vector, vector, numbers, vector)
    found = list(dataset.as_numpy_iterator())
    whole, rest = divmod(len(RECORDS), size)
    last = [rest] if rest and not drop_remainder else []
    assert [len(each.record) for each in found] == [size] * whole + last
    assert rows(found) == list(map(keyed, RECORDS, due(0, COUNTS)))[: whole * size + sum(last)]


@pytest.mark.usefixtures("small_rows")
@pytest.mark.parametrize("size", [48, 211])
def test_positions_and_keys_of_large_batches(feeder: Feeder, size: int) -> None:
    """In every layout; an epoch that resumes inside an object goes on with its numbers."""
    counts = [OBJECT] * (len(MIXED) // OBJECT) + [len(MIXED) % OBJECT]
    frames = list(map(tfrecord.encode, MIXED))
    expected = list(map(keyed, MIXED, due(0, counts)))
    left = offer(feeder, 0, frames, counts)
    dataset = PipeModeDataset("train", "TFRecord", batch_size=size, positions=True, key=True)
    found = list(dataset.as_numpy_iterator())
    left.join()
    assert rows([record for record, _ in found]) == expected
    states = [json.loads(position) for _, position in found]
    for state in (states[0], states[len(SMALL) // size + 1]):
        data = b"".join(frames)
        feeder.feed(0, data[state["offset"] :], total=len(data), bytes_skipped=state["offset"])
        rest = PipeModeDataset("train", "TFRecord", batch_size=size, start=state, key=True)
        assert rows(list(rest.as_numpy_iterator())) == expected[state["records"] :]


def test_a_number_is_never_guessed(feeder: Feeder) -> None:
    """A position that was saved without keys, inside an object."""
    frames = list(map(tfrecord.encode, RECORDS))
    left = offer(feeder, 0, frames, COUNTS)
    dataset = PipeModeDataset("train", "TFRecord", batch_size=20, positions=True)
    (_, state), *_ = dataset.as_numpy_iterator()
    left.join()
    state = json.loads(state)
    assert "number" not in state
    assert (state["offset"], state["skip"]) == (0, 20)  # the list of these records begins an object
    left = offer(feeder, 0, frames, COUNTS)
    rest = PipeModeDataset("train", "TFRecord", batch_size=20, start=state, key=True)
    assert rows(list(rest.as_numpy_iterator())) == list(map(keyed, RECORDS, due(0, COUNTS)))[20:]
    left.join()
    inside = state | {"offset": sum(map(len, frames[:25])), "skip": 0, "records": 25}
    offer(feeder, 0, frames, COUNTS)
    with pytest.raises(tf.errors.NotFoundError, match="save states with key=True"):
        list(PipeModeDataset("train", "TFRecord", start=inside, key=True))


@pytest.mark.parametrize("payload", [b"%04d" * 100, b"%d"], ids=["one length", "many lengths"])
def test_records_that_are_left_out_count_and_are_named(
    feeder: Feeder, caplog: pytest.LogCaptureFixture, payload: bytes
) -> None:
    """In bulk too; one object is bad as a whole."""
    records = [payload.replace(b"%04d", b"%04d" % n).replace(b"%d", b"%d" % 10**n) for n in range(100)]
    bad = {0, 5, *range(40, 60)}
    frames = [spoilt(each) if n in bad else tfrecord.encode(each) for n, each in enumerate(records)]
    counts = [40, 20, 40]
    offer(feeder, 0, frames, counts)
    dataset = PipeModeDataset("train", "TFRecord", batch_size=9, max_corrupted_records_to_skip=50, key=True)
    expected = list(map(keyed, records, due(0, counts)))
    found = rows(list(dataset.as_numpy_iterator()))
    assert found == [each for n, each in enumerate(expected) if n not in bad]
    names = re.findall(r"it is record (\d+) of s3://b/e0/(k\d)", caplog.text)
    assert names == [("0", "k0"), ("5", "k0")] + [(str(number), "k1") for number in range(20)]


@pytest.mark.parametrize("batch_size", [None, 4])
def test_an_error_names_the_record_after_the_records_before_it(
    feeder: Feeder, batch_size: int | None
) -> None:
    frames = list(map(tfrecord.encode, RECORDS))
    frames[52] = spoilt(RECORDS[52])
    offer(feeder, 0, frames, COUNTS)
    found = []
    with pytest.raises(tf.errors.InternalError, match="it is record 7 of s3://b/e0/k6"):
        found.extend(
            PipeModeDataset("train", "TFRecord", batch_size=batch_size, key=True).as_numpy_iterator()
        )
    assert (rows(found) if batch_size else list(map(tuple, found))) == list(
        map(keyed, RECORDS, due(0, COUNTS))
    )[:52]


@pytest.mark.parametrize("batch_size", [None, 4])
def test_a_channel_without_a_key_list_is_refused(feeder: Feeder, batch_size: int | None) -> None:
    feeder.feed(0, b"".join(map(tfrecord.encode, RECORDS)))
    with pytest.raises(
        tf.errors.NotFoundError, match=r"ChannelError: .*train_0 has no key list.*RecordKeys: true"
    ):
        list(PipeModeDataset("train", "TFRecord", batch_size=batch_size, key=True))


def test_an_empty_epoch_has_no_record(feeder: Feeder) -> None:
    for epoch in range(2):
        offer(feeder, epoch, [], [0, 0])
    for batch_size in (None, 4):
        assert list(PipeModeDataset("train", "TFRecord", batch_size=batch_size, key=True)) == []


def test_leaving_an_epoch_closes_its_key_list(feeder: Feeder) -> None:
    frames = [tfrecord.encode(b"x" * 10_000)] * 1000
    for epoch in range(2):
        left = offer(feeder, epoch, frames, [1000])
        iterator = iter(PipeModeDataset("train", "TFRecord", batch_size=4, key=True))
        next(iterator)
        paths = (os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
        assert any(path.endswith(".penstock.keys") for path in paths)
        del iterator
        gc.collect()
        left.join()
        paths = (os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
        assert not any(path.endswith(".penstock.keys") for path in paths)


def test_keys_pass_through_a_pipeline(feeder: Feeder) -> None:
    """The record by its name, in a function of one argument; with positions, of two."""
    for epoch in range(2):
        offer(feeder, epoch, list(map(tfrecord.encode, RECORDS)), COUNTS)
    dataset = PipeModeDataset("train", "TFRecord", batch_size=32, key=True)
    lengths = dataset.map(lambda each: (tf.strings.length(each.record), each.key, each.number))
    found = [key for _, keys, _ in lengths.prefetch(2).as_numpy_iterator() for key in keys.tolist()]
    assert found == [key for key, _, _ in due(0, COUNTS)]
    placed = PipeModeDataset("train", "TFRecord", positions=True, key=True)
    pairs = placed.map(lambda each, position: (each.number, position)).batch(10)
    assert [n for numbers, _ in pairs for n in numbers.numpy()] == [number for _, number, _ in due(1, COUNTS)]


def test_an_epoch_that_is_counted(feeder: Feeder) -> None:
    offer(feeder, 0, list(map(tfrecord.encode, RECORDS)), COUNTS, records=len(RECORDS), steps=23)
    dataset = PipeModeDataset("train", "TFRecord", batch_size=100, key=True, cardinality=True)
    assert len(dataset) == 4
    assert rows(list(dataset.as_numpy_iterator())) == list(map(keyed, RECORDS, due(0, COUNTS)))


def test_columns_are_not_longer_than_their_records() -> None:
    """Rows that complete a batch have no key."""
    columns = KeyColumns()
    assert [column.tolist() for column in columns.take(0, 2)] == [[b"", b""], [0, 0], [b"", b""]]
