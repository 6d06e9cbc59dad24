"""What the tests of SageMaker's own extension expect of `PipeModeDataset`, one by one, of ours.

In the order of its files: test/unit/test_pipemode.py and test/functional/test_pipemode.py. What the tests of
its C++ readers and its state file expect is in tests/unit: test_formats.py and test_reader_state.py.
As there, FIFOs may be regular files, and one directory is for FIFOs, state and configuration.
What differs: TensorFlow from 2.16 on has no Estimator, so Keras trains.
Its test of a missing file, of 120 s, is test_tensorflow's `..._that_does_not_appear`.
"""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamer.formats import recordio, tfrecord
from tests.kit.frames import spoilt
from tests.kit.late import LATE

if LATE:
    import tensorflow as tf

    from streamer.readers.tensorflow import PipeModeDataset, PipeModeDatasetException

DIMENSION = 100


class Channels:
    """One directory for everything, as in the incumbent's tests."""

    def __init__(self, path: Path, names: list[Any]) -> None:
        self.path = path
        self._threads: list[threading.Thread] = []
        document = {name: {"TrainingInputMode": "Pipe"} for name in names}
        (path / "inputdataconfig.json").write_text(json.dumps(document))

    def file(self, name: str, data: bytes) -> None:
        (self.path / name).write_bytes(data)

    def fifo(self, name: str, data: Any) -> None:
        os.mkfifo(self.path / name)
        thread = threading.Thread(target=self._write, args=(self.path / name, data))
        thread.start()
        self._threads.append(thread)

    @staticmethod
    def _write(path: Path, data: Any) -> None:
        with open(path, "wb", buffering=0) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view[:65536]) :]

    def dataset(self, channel: str, **options: Any) -> PipeModeDataset:
        path = str(self.path)
        return PipeModeDataset(channel, pipe_dir=path, state_dir=path, config_dir=path, **options)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()
            assert not thread.is_alive()


@pytest.fixture
def channels(tmp_path: Path) -> Iterator[Channels]:
    made = Channels(tmp_path, ["A", "B"])
    yield made
    made.join()


def record_io(*records: bytes) -> bytes:
    return b"".join(map(recordio.encode, records))


def is_over(iterator: Any) -> None:
    with pytest.raises(tf.errors.OutOfRangeError):
        iterator.get_next()


# test/unit/test_pipemode.py


@pytest.mark.parametrize("records", [[b"bear"], [b"bunny", b"caterpillar"], [b"a" * 1_000_000]])
def test_single_record_multiple_records_large_record(channels: Channels, records: list[bytes]) -> None:
    channels.file("A_0", record_io(*records))
    iterator = iter(channels.dataset("A"))
    assert [iterator.get_next().numpy() for _ in records] == records


BAD = {
    "no RecordIO": ("RecordIO", b"adfsafasfd"),
    "a cut RecordIO header": ("RecordIO", recordio.encode(b"bear") + b"\n#\xd7"),
    "no TFRecord": ("TFRecord", b"adfsafasfdadfsafasfd"),
    "a bad TFRecord": ("TFRecord", spoilt(b"bear")),
    "a cut TFRecord": ("TFRecord", tfrecord.encode(b"bear")[:-6]),
    "a cut TFRecord length": ("TFRecord", tfrecord.encode(b"bear")[:5]),
}
"""By what is wrong: the format, and bytes of which the incumbent raises an InternalError (contract 6.3)."""


@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize("bad", list(BAD))
def test_invalid_data(channels: Channels, bad: str, batch_size: int | None) -> None:
    record_format, data = BAD[bad]
    channels.file("A_0", data)
    with pytest.raises(tf.errors.InternalError):
        list(channels.dataset("A", record_format=record_format, batch_size=batch_size))


def test_out_of_range(channels: Channels) -> None:
    channels.file("A_0", record_io(b"bear", b"bunny", b"truck"))
    iterator = iter(channels.dataset("A"))
    for _ in range(3):
        iterator.get_next()
    is_over(iterator)
    is_over(iterator)


def test_missing_channel_and_input_config_validation_failure(channels: Channels) -> None:
    with pytest.raises(PipeModeDatasetException, match="Not A Channel"):
        channels.dataset("Not A Channel")


def test_multiple_iterators(channels: Channels) -> None:
    channels.file("A_0", record_io(b"bear"))
    dataset = channels.dataset("A")
    iterator = iter(dataset)
    assert iterator.get_next() == b"bear"
    is_over(iterator)
    channels.file("A_1", record_io(b"bunny", b"piano", b"caterpillar"))
    iterator = iter(dataset)
    assert [iterator.get_next().numpy() for _ in range(3)] == [b"bunny", b"piano", b"caterpillar"]
    is_over(iterator)


@pytest.mark.parametrize("interval", [0, 1])
def test_benchmark_records_interval_enabled_and_disabled(
    channels: Channels, capfd: pytest.CaptureFixture[str], interval: int
) -> None:
    channels.file("A_0", record_io(b"bear"))
    assert iter(channels.dataset("A", benchmark_records_interval=interval)).get_next() == b"bear"
    assert ("Iterator records" in capfd.readouterr().out) == bool(interval)


# test/functional/test_pipemode.py


def examples(*, parts: bool = False) -> bytes:
    """100 labelled vectors as RecordIO, each in three parts if wanted."""
    stream = []
    for number in range(100):
        features = {
            "data": tf.train.Feature(
                bytes_list=tf.train.BytesList(value=[struct.pack("<100d", *[float(number)] * DIMENSION)])
            ),
            "labels": tf.train.Feature(int64_list=tf.train.Int64List(value=[number % 2])),
        }
        text = tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()
        pieces = [(0, text)] if not parts else [(1, text[:100]), (2, text[100:200]), (3, text[200:])]
        for flag, piece in pieces:
            stream += [struct.pack("<II", recordio.MAGIC, flag << 29 | len(piece)), piece]
            stream.append(bytes(-len(piece) % 4))
    return b"".join(stream)


def parse(record: Any) -> Any:
    features = {
        "data": tf.io.FixedLenFeature([], tf.string),
        "labels": tf.io.FixedLenFeature([], tf.int64),
    }
    parsed = tf.io.parse_single_example(record, features)
    data = tf.ensure_shape(tf.io.decode_raw(parsed["data"], tf.float64), [DIMENSION])
    return data, parsed["labels"]


@pytest.mark.parametrize(("parts", "epochs"), [(False, 2), (True, 1)])
def test_multi_epoch_pipeline_and_multipart_recordio(channels: Channels, parts: bool, epochs: int) -> None:
    """In three fetches ahead and batches of 3, as there; `fit` sees every record of every epoch."""
    for epoch in range(epochs):
        channels.fifo(f"A_{epoch}", examples(parts=parts))
    dataset = channels.dataset("A").map(parse, num_parallel_calls=12).repeat(epochs).prefetch(3).batch(3)
    model = tf.keras.Sequential([tf.keras.layers.Input([DIMENSION]), tf.keras.layers.Dense(1, "sigmoid")])
    model.compile(loss="binary_crossentropy", optimizer="sgd")
    seen: list[float] = []
    model.fit(
        dataset.map(lambda data, label: (seen_by(seen, data), label)),
        steps_per_epoch=-(-100 * epochs // 3),
        verbose=0,
        shuffle=False,
    )
    assert seen == [float(number) for number in range(100)] * epochs


def seen_by(seen: list[float], data: Any) -> Any:
    def look(values: Any) -> Any:
        seen.extend(values[:, 0].tolist())
        return values

    looked = tf.numpy_function(look, [data], tf.float64)
    looked.set_shape(data.shape)
    return looked


def test_multi_channels(channels: Channels) -> None:
    for name in ("A", "B"):
        for epoch in range(2):
            channels.fifo(f"{name}_{epoch}", examples())
    pair = [
        channels.dataset(name).map(parse, num_parallel_calls=12).repeat(count=2).prefetch(3).batch(10)
        for name in ("A", "B")
    ]
    iterator = iter(tf.data.Dataset.zip(tuple(pair)))
    for _ in range(20):
        for data, labels in iterator.get_next():
            assert data.shape == (10, DIMENSION)
            assert len(labels) == 10
    is_over(iterator)


def test_tf_record(channels: Channels) -> None:
    channels.fifo("A_0", tfrecord.encode(b"hello world") * 100)
    iterator = iter(channels.dataset("A", record_format="TFRecord"))
    assert {iterator.get_next().numpy() for _ in range(100)} == {b"hello world"}
    is_over(iterator)


def test_csv(channels: Channels) -> None:
    channels.fifo("A_0", (",".join(map(str, range(100))) + "\n").encode() * 100)
    lines = channels.dataset("A", record_format="TextLine")
    rows = list(lines.map(lambda line: tf.io.decode_csv(line, [[0]] * 100)).as_numpy_iterator())
    assert rows == [tuple(range(100))] * 100
