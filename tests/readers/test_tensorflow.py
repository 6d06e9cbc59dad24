"""`PipeModeDataset` on real FIFOs: which epoch an iterator reads, when it lets go, and how errors look."""

from __future__ import annotations

import gc
import itertools
import json
import os
import re
import signal
import struct
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from streamer.errors import ChannelError
from streamer.formats import recordio, tfrecord
from streamer.readers.core.position import ReaderPosition
from tests.kit.frames import spoilt
from tests.kit.late import LATE
from tests.kit.warm_python import warm_python
from tests.readers.feeder import Feeder

if LATE:
    import tensorflow as tf

    from streamer.readers.tensorflow import PipeModeDataset, PipeModeDatasetException, failures

RECORDS = [b"%d" % number for number in range(3000)]
ENCODE = {"TFRecord": tfrecord.encode, "RecordIO": recordio.encode, "TextLine": lambda line: line + b"\n"}
LARGE = tfrecord.encode(b"x" * 10_000) * 1000  # far more than pipe and prefetch hold


def encoded(record_format: str = "TFRecord", records: list[bytes] = RECORDS) -> bytes:
    return b"".join(map(ENCODE[record_format], records))


def contents(dataset: Any) -> list[Any]:
    return list(dataset.as_numpy_iterator())


def opened(feeder: Feeder) -> list[Any]:
    """The FIFOs that this process has open, among those that no test writer of it holds."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue
    return [link for link in links if link.startswith(feeder.pipe_dir)]


# Elements and epochs


def test_is_a_dataset_of_strings(feeder: Feeder) -> None:
    dataset = PipeModeDataset("train")
    assert isinstance(dataset, tf.data.Dataset)
    assert dataset.element_spec == tf.TensorSpec([], tf.string)
    assert dataset.cardinality() == tf.data.UNKNOWN_CARDINALITY


@pytest.mark.parametrize(
    ("options", "elements"),
    [
        ({}, 3000),
        ({"batch_size": 128}, 24),
        ({"batch_size": 128, "drop_remainder": True}, 23),
        ({"batch_size": 128, "positions": True}, 24),
    ],
)
def test_the_cardinality_of_a_channel_shared_by_record(
    feeder: Feeder, options: dict[str, Any], elements: int
) -> None:
    for epoch in range(2):
        feeder.feed(epoch, encoded(), records=len(RECORDS), steps=7, padding=5)
    dataset = PipeModeDataset("train", "TFRecord", cardinality=True, **options)
    assert len(dataset) == elements
    assert len(dataset.prefetch(1)) == elements
    assert (dataset.steps_per_epoch, dataset.padding) == (7, 5)
    assert [len(contents(dataset)), len(contents(dataset))] == [elements, elements]
    assert feeder.next_epoch() == 2


def test_the_cardinality_waits_for_the_sidecar(feeder: Feeder) -> None:
    made: list[PipeModeDataset] = []
    making = threading.Thread(
        target=lambda: made.append(PipeModeDataset("train", "TFRecord", cardinality=True))
    )
    making.start()
    feeder.feed(0, encoded(), records=len(RECORDS), steps=7)
    making.join()
    assert len(made[0]) == len(RECORDS)
    assert contents(made[0]) == RECORDS


def test_a_channel_without_counts_has_no_cardinality(feeder: Feeder) -> None:
    feeder.feed(0, encoded())
    with pytest.raises(PipeModeDatasetException, match="the number of records of channel train is unknown"):
        PipeModeDataset("train", "TFRecord", cardinality=True)
    dataset = PipeModeDataset("train", "TFRecord")
    with pytest.raises(PipeModeDatasetException, match="the number of records of channel train is unknown"):
        _ = dataset.steps_per_epoch
    assert contents(dataset) == RECORDS
    with pytest.raises(PipeModeDatasetException, match="steps of a path"):
        _ = PipeModeDataset.from_path("/nowhere", "RecordIO").steps_per_epoch
    with pytest.raises(PipeModeDatasetException, match="padding of a path"):
        _ = PipeModeDataset.from_path("/nowhere", "RecordIO").padding


def test_a_cardinality_from_the_trailer_of_an_earlier_run_is_refused(feeder: Feeder) -> None:
    os.mkfifo(feeder.path("train", 0))
    feeder.publish(0, "open", records=10, steps=1)
    dataset = PipeModeDataset("train", "TFRecord", cardinality=True)
    feeder.feed(0, encoded(), records=len(RECORDS), steps=7)
    with pytest.raises(tf.errors.NotFoundError, match="has 3000 records; when .* the trailer stated 10"):
        contents(dataset)


def test_a_fifo_that_begins_in_mid_epoch_has_no_cardinality(feeder: Feeder) -> None:
    """`penstock run --resume`: the sidecar offers the rest of the epoch."""
    options: dict[str, Any] = {"records": len(RECORDS), "steps": 7, "bytes_skipped": 100}
    feeder.feed(0, encoded()[100:], total=len(encoded()), **options)
    dataset = PipeModeDataset("train", "TFRecord", cardinality=True)
    with pytest.raises(tf.errors.NotFoundError, match="begins at byte 100 of its epoch"):
        contents(dataset)


@pytest.mark.parametrize(
    "options", [{"max_corrupted_records_to_skip": 1}, {"start": ReaderPosition("train", 0).state()}]
)
def test_an_epoch_that_may_be_shorter_has_no_cardinality(feeder: Feeder, options: dict[str, Any]) -> None:
    with pytest.raises(PipeModeDatasetException, match="has no known cardinality"):
        PipeModeDataset("train", "TFRecord", cardinality=True, **options)


def test_the_steps_after_a_start_are_those_of_the_epoch_to_come(feeder: Feeder) -> None:
    dataset = PipeModeDataset("train", "TFRecord", start=ReaderPosition("train", 2).state())
    feeder.feed(2, encoded(), records=len(RECORDS), steps=7)
    assert dataset.steps_per_epoch == 7
    assert contents(dataset) == RECORDS


def test_a_rank_is_the_channel_of_its_fifo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    feeder = Feeder(tmp_path / "ranks", ("train-0", "train-1"))
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", feeder.base)
    feeder.feed(0, encoded(), channel="train-1")
    dataset = PipeModeDataset("train", "TFRecord", rank=1)
    assert dataset.channel == "train-1"
    assert contents(dataset) == RECORDS
    with pytest.raises(PipeModeDatasetException, match="train-2"):
        PipeModeDataset("train", "TFRecord", rank=2)
    feeder.close()


@pytest.mark.parametrize("record_format", list(ENCODE))
def test_record_formats(feeder: Feeder, record_format: str) -> None:
    feeder.feed(0, encoded(record_format))
    assert contents(PipeModeDataset("train", record_format)) == RECORDS


def test_the_incumbents_positional_arguments(
    feeder: Feeder, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", "/nowhere")
    feeder.feed(0, encoded())
    dataset = PipeModeDataset(
        "train", "TFRecord", feeder.state_dir, feeder.pipe_dir, feeder.config_dir, False, 0, 3
    )
    assert contents(dataset) == RECORDS
    assert feeder.next_epoch() == 1
    assert capfd.readouterr().out == ""


def test_each_iterator_reads_the_next_epoch(feeder: Feeder) -> None:
    dataset = PipeModeDataset("train", "TFRecord")
    for epoch in range(3):
        feeder.feed(epoch, encoded(records=RECORDS[epoch:]))
        assert contents(dataset) == RECORDS[epoch:]
    assert contents_of_a_new_dataset(feeder) == [b"last"]


def contents_of_a_new_dataset(feeder: Feeder) -> list[Any]:
    feeder.feed(3, encoded(records=[b"last"]))
    return contents(PipeModeDataset("train", "TFRecord"))


def test_repeat_reads_as_many_epochs_as_it_says(feeder: Feeder) -> None:
    feeds = [feeder.feed(epoch, encoded(records=RECORDS[epoch:])) for epoch in range(3)]
    assert contents(PipeModeDataset("train", "TFRecord").repeat(2)) == RECORDS + RECORDS[1:]
    assert feeder.next_epoch() == 2
    assert not feeds[2].opened.is_set()


def test_an_iterator_that_is_never_asked_takes_no_epoch(feeder: Feeder) -> None:
    feed = feeder.feed(0, encoded())
    dataset = PipeModeDataset("train", "TFRecord")
    for _ in range(3):
        iter(dataset)
    gc.collect()
    assert not feed.opened.is_set()
    assert contents(dataset) == RECORDS


def test_an_empty_epoch_ends_an_endless_repeat(feeder: Feeder) -> None:
    feeder.feed(0, encoded())
    feeder.feed(1, b"")
    assert contents(PipeModeDataset("train", "TFRecord").repeat()) == RECORDS


@pytest.mark.parametrize(
    ("size", "drop_remainder"), [(1, False), (7, True), (1000, False), (5000, False), (5000, True)]
)
def test_batches(feeder: Feeder, size: int, drop_remainder: bool) -> None:
    """Vectors over the borders of blocks; the last one is what is left of the epoch, or nothing."""
    records = RECORDS + [b"x" * 70_000] * 40
    feeder.feed(0, encoded(records=records))
    feeder.feed(1, encoded(records=records))
    dataset = PipeModeDataset("train", "TFRecord", batch_size=size, drop_remainder=drop_remainder)
    assert dataset.element_spec == tf.TensorSpec([size if drop_remainder else None], tf.string)
    due = [records[start : start + size] for start in range(0, len(records), size)]
    if drop_remainder and len(due[-1]) < size:
        due.pop()
    assert [batch.tolist() for batch in dataset.repeat(2).as_numpy_iterator()] == due * 2


def test_batches_of_a_dead_sidecar_are_no_end(feeder: Feeder) -> None:
    """Whole vectors before the cut are delivered; what is left of the last one is not."""
    data = encoded()
    feeder.feed(0, data[:-1], state="open", total=len(data))
    got, text = failure(PipeModeDataset("train", "TFRecord", batch_size=1000))
    assert "TruncatedStream" in text
    assert [record for batch in got for record in batch] == RECORDS[:2000]


def test_a_pipeline(feeder: Feeder) -> None:
    feeder.feed(0, encoded())
    dataset = (
        PipeModeDataset("train", "TFRecord")
        .map(tf.strings.to_number, num_parallel_calls=tf.data.AUTOTUNE)
        .shuffle(100)
        .batch(64)
        .prefetch(tf.data.AUTOTUNE)
    )

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow publishes no types
    def total(batches: Any) -> Any:
        result = tf.constant(0.0)
        for batch in batches:
            result += tf.reduce_sum(batch)
        return result

    assert total(dataset) == sum(range(3000))


def test_two_channels_zipped(feeder: Feeder) -> None:
    feeder.feed(0, encoded("TFRecord"))
    feeder.feed(0, encoded("TextLine"), channel="validation")
    both = tf.data.Dataset.zip(
        (PipeModeDataset("train", "TFRecord"), PipeModeDataset("validation", "TextLine"))
    )
    assert contents(both) == list(zip(RECORDS, RECORDS, strict=True))


def test_a_record_larger_than_a_block(feeder: Feeder) -> None:
    records = [b"a", os.urandom(3 << 20), b"b"]
    feeder.feed(0, encoded("RecordIO", records))
    assert contents(PipeModeDataset("train", "RecordIO")) == records


def test_a_foreign_fifo(feeder: Feeder) -> None:
    feeder.feed(0, encoded(), proof=False)
    assert contents(PipeModeDataset("train", "TFRecord")) == RECORDS


@pytest.mark.filterwarnings("ignore::UserWarning")  # Keras on datasets of unknown length
def test_keras_fit_with_validation(feeder: Feeder) -> None:
    for epoch in range(3):
        feeder.feed(epoch, encoded())
        feeder.feed(epoch, encoded("TextLine", RECORDS[:100]), channel="validation")

    def example(record: Any) -> Any:
        value = tf.reshape(tf.strings.to_number(record), [1]) / 3000
        return value, 2 * value

    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    history = model.fit(
        PipeModeDataset("train", "TFRecord").map(example).batch(32).prefetch(2),
        validation_data=PipeModeDataset("validation", "TextLine").map(example).batch(32),
        epochs=2,
        verbose=0,
    ).history
    assert history["loss"][1] < history["loss"][0]
    assert len(history["val_loss"]) == 2
    assert feeder.next_epoch() == 2
    assert feeder.next_epoch("validation") == 2


def test_distribution_does_not_divide_a_channel(feeder: Feeder) -> None:
    dataset = PipeModeDataset("train", "TFRecord")
    policy = tf.data.experimental.AutoShardPolicy.OFF
    assert dataset.batch(2).options().experimental_distribute.auto_shard_policy == policy
    feeder.feed(0, encoded())
    strategy = tf.distribute.MirroredStrategy(["cpu:0"])
    batches = strategy.experimental_distribute_dataset(dataset.batch(100))
    assert sum(int(tf.size(batch)) for batch in batches) == len(RECORDS)


# Letting go


def test_take_lets_go_of_the_fifo(feeder: Feeder) -> None:
    feed = feeder.feed(0, LARGE)
    assert len(contents(PipeModeDataset("train", "TFRecord").take(5))) == 5
    feed.join()
    assert feed.reader_gone
    assert opened(feeder) == []


def test_leaving_a_loop_lets_go_of_the_fifo(feeder: Feeder) -> None:
    feed = feeder.feed(0, LARGE)
    for _ in PipeModeDataset("train", "TFRecord").batch(4).prefetch(2):
        break
    gc.collect()
    feed.join()
    assert feed.reader_gone
    assert opened(feeder) == []


def test_the_next_epoch_after_leaving_early(feeder: Feeder) -> None:
    feeder.feed(0, LARGE)
    feeder.feed(1, encoded())
    dataset = PipeModeDataset("train", "TFRecord")
    iterator = iter(dataset)
    next(iterator)
    del iterator
    assert contents(dataset) == RECORDS


@pytest.mark.parametrize("batched", [False, True], ids=["batch", "batch_size"])
def test_an_iterator_of_a_stalled_channel_can_be_destroyed(feeder: Feeder, batched: bool) -> None:
    feed = feeder.feed(0, encoded(records=[b"1", b"2", b"3"]), hold=True)
    if batched:
        dataset = PipeModeDataset("train", "TFRecord", batch_size=2)
    else:
        dataset = PipeModeDataset("train", "TFRecord").batch(2)
    iterator = iter(dataset.prefetch(2))
    del dataset
    assert next(iterator).numpy().tolist() == [b"1", b"2"]
    del iterator
    gc.collect()
    assert len(opened(feeder)) == 1  # the writer's own
    feed.release.set()


def test_an_iterator_that_waits_for_its_fifo_can_be_destroyed(feeder: Feeder) -> None:
    feeder.feed(0, encoded(records=[b"1"]))
    dataset = PipeModeDataset("train", "TFRecord").repeat().prefetch(2)
    iterator = iter(dataset)
    assert next(iterator).numpy() == b"1"
    del iterator  # it is on epoch 1 now, or about to be, which nobody offers
    gc.collect()
    assert feeder.next_epoch() == 1
    assert opened(feeder) == []


def test_a_program_ends_with_live_iterators(feeder: Feeder) -> None:
    """One waits for a FIFO that is stalled, the other has read ahead."""
    feeder.feed(0, encoded(records=[b"1", b"2", b"3"]), hold=True)
    feeder.feed(0, LARGE, channel="validation", hold=True)
    script = (
        "from streamer.readers.tensorflow import PipeModeDataset\n"
        "channels = [PipeModeDataset(name, 'TFRecord') for name in ('train', 'validation')]\n"
        "iterators = [iter(channel.batch(2).prefetch(2)) for channel in channels]\n"
        "print(*[next(iterator).shape for iterator in iterators])\n"
    )
    done = subprocess.run([warm_python(), "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "(2,) (2,)\n"


@pytest.mark.parametrize("batched", [False, True])
def test_an_iterator_cannot_be_saved(feeder: Feeder, tmp_path: Path, batched: bool) -> None:
    """A checkpoint without the position would lose data silently; with `positions` it is an element."""
    feeder.feed(0, encoded())
    dataset = PipeModeDataset("train", "TFRecord")
    iterator = iter(dataset.batch(2) if batched else dataset)
    next(iterator)
    with pytest.raises(tf.errors.FailedPreconditionError):
        tf.train.Checkpoint(it=iterator).save(str(tmp_path / "checkpoint"))
    assert os.listdir(tmp_path) == ["ml"]


# Errors


def failure(dataset: Any, error: Any = None) -> tuple[list[Any], str]:
    """What it gave before it failed, and the error: DataLossError unless another is given."""
    got = []
    with pytest.raises(error or tf.errors.DataLossError) as caught:
        got.extend(dataset.as_numpy_iterator())
    return got, str(caught.value)


def test_a_dead_sidecar(feeder: Feeder) -> None:
    data = encoded()
    feeder.feed(0, data[:-1], state="open", total=len(data))
    got, text = failure(PipeModeDataset("train", "TFRecord"))
    assert (
        f"TruncatedStream: received {len(data) - 1} of {len(data)} bytes of train_0: the sidecar died" in text
    )
    assert got == RECORDS[:-1]


def test_an_error_comes_once_and_then_the_end(feeder: Feeder) -> None:
    """Or a pipeline that ignores errors would never end."""
    feeder.feed(0, encoded(records=RECORDS[:10]) + spoilt(b"x"))
    iterator = iter(PipeModeDataset("train", "TFRecord"))
    assert [next(iterator).numpy() for _ in range(10)] == RECORDS[:10]
    with pytest.raises(tf.errors.InternalError):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)
    feeder.feed(1, encoded(records=RECORDS[:20]) + spoilt(b"x"))
    assert contents(PipeModeDataset("train", "TFRecord").ignore_errors()) == RECORDS[:20]


def test_a_failed_sidecar_that_holds_the_fifo_open(feeder: Feeder) -> None:
    feeder.feed(0, encoded(), state="failed", error="503 for s3://b/k", hold=True)
    got, text = failure(PipeModeDataset("train", "TFRecord").prefetch(3))
    assert "train_0: the source failed: 503 for s3://b/k" in text
    assert got == RECORDS


@pytest.mark.parametrize("record_format", ["TFRecord", "RecordIO"])
def test_a_failed_epoch_whose_fifo_is_closed(feeder: Feeder, record_format: str) -> None:
    data = encoded(record_format)
    feeder.feed(0, data, total=2 * len(data), state="failed", error="403 for s3://b/k")
    got, text = failure(PipeModeDataset("train", record_format))
    assert "train_0: the source failed: 403 for s3://b/k" in text
    assert got == RECORDS


@pytest.mark.parametrize("record_format", ["TFRecord", "RecordIO"])
def test_a_cut_record(feeder: Feeder, record_format: str) -> None:
    feeder.feed(0, encoded(record_format)[:-1])
    got, text = failure(PipeModeDataset("train", record_format), tf.errors.InternalError)
    assert re.search(r"CutRecord: the stream ends inside a .* bytes wanted, \d+ arrived", text)
    assert got == RECORDS[:-1]


def test_a_corrupt_record_and_skipping_it(feeder: Feeder) -> None:
    bad = bytearray(tfrecord.encode(b"bad"))
    bad[-1] ^= 1
    data = encoded(records=[b"one"]) + bytes(bad) + encoded(records=[b"two"])
    feeder.feed(0, data)
    got, text = failure(PipeModeDataset("train", "TFRecord"), tf.errors.InternalError)
    assert "CorruptRecord: TFRecord at offset 19 of the stream: CRC check on data failed" in text
    assert got == [b"one"]
    feeder.feed(1, data)
    assert contents(PipeModeDataset("train", "TFRecord", max_corrupted_records_to_skip=1)) == [b"one", b"two"]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_error_passes_through_repeat_and_keras(feeder: Feeder) -> None:
    feeder.feed(0, encoded(), state="open", total=10**6)
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    dataset = (
        PipeModeDataset("train", "TFRecord")
        .map(lambda record: (tf.reshape(tf.strings.to_number(record), [1]), [1.0]))
        .batch(32)
        .repeat()
    )
    with pytest.raises(tf.errors.DataLossError, match="the sidecar died"):
        model.fit(dataset, steps_per_epoch=1000, verbose=0)


def test_a_fifo_that_does_not_appear(feeder: Feeder) -> None:
    _, text = failure(PipeModeDataset("train", "TFRecord", timeout=0), tf.errors.NotFoundError)
    assert "ChannelError: train_0 did not appear in" in text
    assert "the directory has no FIFO of this channel" in text
    feeder.feed(0, encoded())
    assert contents(PipeModeDataset("train", "TFRecord")) == RECORDS  # the epoch was not lost


def test_constructor_errors(feeder: Feeder) -> None:
    with pytest.raises(
        PipeModeDatasetException,
        match=r"^Channel eval not found in Training Job InputDataConfig; the Pipe chan.* train.*$",
    ):
        PipeModeDataset("eval")
    with pytest.raises(PipeModeDatasetException, match=r"^Channel plain is not a PipeMode channel; the P"):
        PipeModeDataset("plain")
    with pytest.raises(
        PipeModeDatasetException,
        match=r"^max_corrupted_records_to_skip can only be set for record_format='TFRecord'$",
    ):
        PipeModeDataset("train", "RecordIO", max_corrupted_records_to_skip=1)
    with pytest.raises(PipeModeDatasetException, match="cannot be negative"):
        PipeModeDataset("train", benchmark_records_interval=-1)
    with pytest.raises(tf.errors.InvalidArgumentError, match="Invalid record format: CSV"):
        PipeModeDataset("train", "CSV")
    with pytest.raises(PipeModeDatasetException, match=r"inputdataconfig\.json does not exist"):
        PipeModeDataset("train", config_dir=feeder.pipe_dir)
    assert issubclass(PipeModeDatasetException, ChannelError)


def test_a_state_directory_that_cannot_be_made(feeder: Feeder, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ChannelError, match="cannot make the state directory"):
        PipeModeDataset("train", state_dir=str(tmp_path / "file" / "state"))


# Benchmark output


def test_benchmark_lines(feeder: Feeder, capfd: pytest.CaptureFixture[str]) -> None:
    feeder.feed(0, encoded())
    assert contents(PipeModeDataset("train", "TFRecord", benchmark=True)) == RECORDS
    gc.collect()
    name = "PipeModeDatasetOp::Dataset::Iterator total"
    size = sum(map(len, RECORDS))
    assert re.fullmatch(
        rf"{name} read_time_ms: \d+\n{name} read_bytes: {size}\n{name} read_GB/s: [0-9.e-]+\n",
        capfd.readouterr().out,
    )


def test_benchmark_lines_every_so_many_records(feeder: Feeder, capfd: pytest.CaptureFixture[str]) -> None:
    feeder.feed(0, encoded())
    assert contents(PipeModeDataset("train", "TFRecord", benchmark_records_interval=500)) == RECORDS
    name = "PipeModeDatasetOp::Dataset::Iterator records"
    out = capfd.readouterr().out
    assert re.fullmatch(rf"(?:{name}: \d+\n{name} read_time_ns: \d+\n{name} read_bytes: \d+\n)+", out)
    counts = [int(line.rpartition(" ")[2]) for line in out.splitlines() if line.startswith(f"{name}: ")]
    sizes = [int(line.rpartition(" ")[2]) for line in out.splitlines() if "read_bytes" in line]
    assert counts == [500, 1000, 1500, 2000, 2500, 3000]
    assert sizes == [sum(map(len, RECORDS[count - 500 : count])) for count in counts]


def test_the_incumbents_attributes(feeder: Feeder) -> None:
    dataset = PipeModeDataset("train", "TFRecord")
    assert dataset.output_classes is tf.Tensor
    assert dataset.output_types == tf.string
    assert dataset.output_shapes == tf.TensorShape([])
    assert (dataset.channel, dataset.record_format, dataset.benchmark) == ("train", "TFRecord", False)


# Extensions


def test_skipped_records_are_counted_and_placed(feeder: Feeder) -> None:
    data = encoded(records=[b"one"]) + spoilt(b"bad") + encoded(records=[b"two"]) + spoilt(b"worse")
    feeder.feed(0, data)
    feeder.feed(1, data)
    dataset = PipeModeDataset("train", "TFRecord", max_corrupted_records_to_skip=1)
    assert contents(dataset.repeat(2)) == [b"one", b"two"] * 2
    assert dataset.skipped.records == 4
    assert list(dataset.skipped.positions) == [
        (feeder.path("train", epoch), offset) for epoch in (0, 1) for offset in (19, 57)
    ]


def test_a_given_epoch_leaves_the_state_file_alone(feeder: Feeder) -> None:
    for epoch in (4, 5):
        feeder.feed(epoch, encoded(records=[b"%d" % epoch]))
    dataset = PipeModeDataset("train", "TFRecord", epoch=4)
    assert contents(dataset.repeat(2)) == [b"4", b"5"]
    assert not os.path.exists(feeder.state_dir)
    with pytest.raises(PipeModeDatasetException, match="epoch is -1"):
        PipeModeDataset("train", epoch=-1)


def test_a_fifo_that_nobody_writes(feeder: Feeder) -> None:
    os.mkfifo(feeder.path("train", 0))
    _, text = failure(PipeModeDataset("train", timeout=0.1), tf.errors.NotFoundError)
    assert "train_0 for writing in 0.1 s; check that the sidecar is running" in text


def test_a_regular_file_as_often_as_asked(tmp_path: Path) -> None:
    (tmp_path / "records").write_bytes(encoded())
    dataset = PipeModeDataset.from_path(tmp_path / "records", "TFRecord", batch_size=1000)
    assert [batch.tolist() for batch in dataset.repeat(2).as_numpy_iterator()] == [
        RECORDS[start : start + 1000] for start in (0, 1000, 2000)
    ] * 2


def test_a_fifo_by_path_is_proven_too(feeder: Feeder) -> None:
    feeder.feed(0, encoded(), state="open", total=10**6)
    got, text = failure(PipeModeDataset.from_path(feeder.path("train", 0), "TFRecord"))
    assert got == RECORDS
    assert "of 1000000 bytes of train_0: the sidecar died" in text


def test_standard_input_once() -> None:
    script = (
        "import tensorflow as tf\n"
        "from streamer.readers.tensorflow import PipeModeDataset\n"
        "dataset = PipeModeDataset.from_path('/dev/stdin', 'TFRecord')\n"
        "print(sum(1 for _ in dataset))\n"
        "try:\n"
        "    next(iter(dataset))\n"
        "except tf.errors.NotFoundError as error:\n"
        "    print('can be read only once' in str(error))\n"
    )
    done = subprocess.run([warm_python(), "-c", script], input=encoded(), capture_output=True, check=False)
    assert done.stdout == b"3000\nTrue\n", done.stderr


def test_interleaved_channels(feeder: Feeder) -> None:
    feeder.feed(0, encoded(records=[b"t%d" % number for number in range(100)]))
    feeder.feed(0, encoded(records=[b"v%d" % number for number in range(100)]), channel="validation")
    both = [PipeModeDataset(name, "TFRecord") for name in ("train", "validation")]
    dataset = tf.data.Dataset.choose_from_datasets(both, tf.data.Dataset.range(2).repeat(100))
    assert contents(dataset) == [b"%c%d" % (letter, n) for n in range(100) for letter in b"tv"]
    for name in ("train", "validation"):
        feeder.feed(1, encoded(records=[name.encode()] * 50), channel=name)
    mixed = tf.data.Dataset.sample_from_datasets(
        both, stop_on_empty_dataset=False, rerandomize_each_iteration=False
    )
    assert sorted(contents(mixed)) == [b"train"] * 50 + [b"validation"] * 50


def test_interleave_of_channels(feeder: Feeder) -> None:
    """`Dataset.interleave` itself, over a dataset of datasets; each channel in a thread of its own."""
    for name in ("train", "validation"):
        feeder.feed(0, encoded(records=[b"%s%d" % (name[:1].encode(), n) for n in range(300)]), channel=name)
    train, validation = (
        tf.data.Dataset.from_tensors(PipeModeDataset(name, "TFRecord")) for name in ("train", "validation")
    )
    dataset = train.concatenate(validation).interleave(
        lambda channel: channel, cycle_length=2, block_length=3, num_parallel_calls=2, deterministic=True
    )
    got = contents(dataset)
    assert got[:9] == [b"t0", b"t1", b"t2", b"v0", b"v1", b"v2", b"t3", b"t4", b"t5"]
    assert sorted(got) == sorted(b"%c%d" % (letter, n) for letter in b"tv" for n in range(300))


def test_records_of_several_parts(feeder: Feeder) -> None:
    """RecordIO's continuation flags, which the incumbent's own tests have; joined without the magic."""
    parts = b"".join(
        struct.pack("<II", 0xCED7230A, flag << 29 | len(data)) + data + bytes(-len(data) % 4)
        for flag, data in ((1, b"first, "), (2, b"second, "), (3, b"third"), (0, b"single"))
    )
    feeder.feed(0, parts)
    assert contents(PipeModeDataset("train")) == [b"first, second, third", b"single"]


def test_replicas_of_a_strategy_share_a_channel(feeder: Feeder) -> None:
    """Two replicas of MirroredStrategy: every record goes to one of them, over two epochs."""
    for epoch in range(2):
        feeder.feed(epoch, encoded())
    script = (
        "import tensorflow as tf\n"
        "cpu = tf.config.list_physical_devices('CPU')[0]\n"
        "tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)\n"
        "from streamer.readers.tensorflow import PipeModeDataset\n"
        "strategy = tf.distribute.MirroredStrategy(['cpu:0', 'cpu:1'])\n"
        "dataset = PipeModeDataset('train', 'TFRecord').batch(100)\n"
        "shared = strategy.experimental_distribute_dataset(dataset)\n"
        "def step(records):\n"
        "    return tf.reduce_sum(tf.strings.to_number(records)), tf.size(records)\n"
        "for _ in range(2):\n"
        "    sums, sizes = [], []\n"
        "    for batch in shared:\n"
        "        total, size = strategy.run(step, [batch])\n"
        "        sums += [float(each) for each in strategy.experimental_local_results(total)]\n"
        "        sizes.append([int(each) for each in strategy.experimental_local_results(size)])\n"
        "    print(sum(sums), set(map(tuple, sizes)))\n"
    )
    done = subprocess.run([warm_python(), "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "4498500.0 {(50, 50)}\n" * 2, done.stderr


def test_iterators_side_by_side_read_different_epochs(feeder: Feeder) -> None:
    for epoch in range(2):
        feeder.feed(epoch, encoded(records=[b"%d" % epoch] * 100))
    dataset = PipeModeDataset("train", "TFRecord")
    first, second = dataset.as_numpy_iterator(), dataset.as_numpy_iterator()
    assert (next(first), next(second)) == (b"0", b"1")
    assert (list(first), list(second)) == ([b"0"] * 99, [b"1"] * 99)


def test_ctrl_c_ends_a_blocked_read(feeder: Feeder) -> None:
    """With a thread that reads ahead, and without."""
    for epoch in range(2):
        feeder.feed(epoch, encoded(records=[b"1", b"2"]), hold=True)
    script = (
        "from streamer.readers.tensorflow import PipeModeDataset\n"
        "dataset = PipeModeDataset('train', 'TFRecord')\n"
        "for each in (dataset.prefetch(2), dataset):\n"
        "    try:\n"
        "        for record in each:\n"
        "            print(record.numpy().decode(), flush=True)\n"
        "    except KeyboardInterrupt:\n"
        "        print('interrupted', flush=True)\n"
    )
    program = subprocess.Popen(
        [warm_python(), "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    for _ in range(2):
        assert [program.stdout.readline() for _ in range(2)] == ["1\n", "2\n"]
        program.send_signal(signal.SIGINT)
        assert program.stdout.readline() == "interrupted\n"
    out, errors = program.communicate()
    assert (out, program.returncode) == ("", 0), errors


STRIKE = """
import signal, sys
from tensorflow.python.eager import executor
from tensorflow.python.framework import tensor_shape
from streamer.readers.tensorflow import PipeModeDataset
for function in ((tensor_shape.__file__, "__len__"), (executor.__file__, "__del__")):
    def strike(frame, event, _):
        if event == "call" and (frame.f_code.co_filename, frame.f_code.co_name) == function:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)
    try:
        for record in PipeModeDataset("train", "TFRecord"):
            print(record.numpy().decode(), end=" ", flush=True)
            sys.setprofile(strike)
    except KeyboardInterrupt:
        print("interrupted")
"""


def test_ctrl_c_is_not_lost_where_tensorflow_calls_python(feeder: Feeder) -> None:
    """Compiled code would take the KeyboardInterrupt for a shape without length; a `__del__` ignores it."""
    for epoch in range(2):
        feeder.feed(epoch, encoded(records=[b"1", b"2"]), hold=True)
    done = subprocess.run([warm_python(), "-c", STRIKE], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    assert {*lines} <= {"1 interrupted", "1 2 interrupted"}, done.stderr
    assert "Exception ignored" not in done.stderr


def test_without_the_c_api_errors_are_what_python_steps_can_raise(
    feeder: Feeder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(failures, "_LIBRARY", "no-such-library.so")
    failures.raiser.cache_clear()
    try:
        feeder.feed(0, encoded(), state="open", total=10**6)
        got, text = failure(PipeModeDataset("train", "TFRecord"), tf.errors.UnknownError)
    finally:
        failures.raiser.cache_clear()
        monkeypatch.undo()
    assert got == RECORDS
    assert "TruncatedStream: received" in text
    assert "errors of a stream will be UnknownError" in caplog.text


# Positions


def taken(dataset: Any, count: int) -> tuple[list[Any], Any]:
    """The first elements, and the position that came with the last one, as a checkpoint has it."""
    got, positions = zip(*itertools.islice(dataset.as_numpy_iterator(), count), strict=True)
    return list(got), positions[-1]


@pytest.mark.parametrize(
    ("record_format", "count"), [("TFRecord", 1), ("RecordIO", 1777), ("TextLine", len(RECORDS) - 1)]
)
def test_a_position_is_that_of_the_element_and_not_of_the_reading(
    feeder: Feeder, record_format: str, count: int
) -> None:
    """The prefetch is far ahead when the position is taken; the rest is exactly what was not seen."""
    left = feeder.feed(0, encoded(record_format), digest="d")
    dataset = PipeModeDataset("train", record_format, positions=True)
    assert dataset.element_spec == (tf.TensorSpec([], tf.string),) * 2
    assert dataset.output_types == (tf.string, tf.string)
    got, position = taken(dataset.prefetch(100), count)
    assert got == RECORDS[:count]
    left.join()
    assert json.loads(position)["records"] == count
    for epoch in range(2):
        feeder.feed(epoch, encoded(record_format), digest="d")
    again = PipeModeDataset("train", record_format, start=position)
    assert contents(again.repeat(2)) == RECORDS[count:] + RECORDS
    assert feeder.next_epoch() == 2


@pytest.mark.parametrize("rows", [1, 4])
def test_positions_of_batches(feeder: Feeder, rows: int) -> None:
    """Over the borders of blocks; and for the position after a batch that the pipeline made of records."""
    records = RECORDS + [b"x" * 70_000] * 40
    data = encoded(records=records)
    left = feeder.feed(0, data)
    batches = PipeModeDataset("train", "TFRecord", batch_size=7, positions=True)
    got, position = taken(batches.batch(rows).prefetch(2), 107)
    left.join()
    seen = 7 * rows * 107
    assert b"".join(record for batch in got for record in batch.ravel()) == b"".join(records[:seen])
    state = json.loads(position[-1])
    assert state["records"] == seen
    left = feeder.feed(0, data[state["offset"] :], total=len(data), bytes_skipped=state["offset"])
    rest = PipeModeDataset("train", "TFRecord", batch_size=7, start=state, positions=True)
    resumed = list(rest.as_numpy_iterator())
    assert [record for batch, _ in resumed for record in batch] == records[seen:]
    assert json.loads(resumed[-1][1]) == ReaderPosition("train", 1).state()


def test_the_position_after_the_last_record_is_the_next_epoch(feeder: Feeder) -> None:
    """By the bytes that are due, before the end of file; an endless repeat must not begin with nothing."""
    left = feeder.feed(0, encoded(), hold=True)
    iterator = PipeModeDataset("train", "TFRecord", batch_size=1500, positions=True).as_numpy_iterator()
    assert [json.loads(position)["epoch"] for _, position in (next(iterator), next(iterator))] == [0, 1]
    left.release.set()
    assert list(iterator) == []


def test_a_checkpoint_holds_what_the_steps_have_seen(feeder: Feeder, tmp_path: Path) -> None:
    """The whole way: variable, checkpoint, a new program's variable, and the rest of the epoch."""
    left = feeder.feed(0, encoded())
    position = tf.Variable("", dtype=tf.string)
    total = tf.Variable(0.0)

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow publishes no types
    def step(records: Any, positions: Any) -> None:
        total.assign_add(tf.reduce_sum(tf.strings.to_number(records)))
        position.assign(positions)

    def dataset(start: Any) -> PipeModeDataset:
        return PipeModeDataset("train", "TFRecord", batch_size=100, positions=True, start=start)

    for records, after in dataset(position).prefetch(5).take(13):
        step(records, after)
    left.join()
    saved = tf.train.Checkpoint(position=position, total=total).save(str(tmp_path / "checkpoint"))
    position.assign("")
    total.assign(0.0)
    tf.train.Checkpoint(position=position, total=total).restore(saved).assert_consumed()
    feeder.feed(0, encoded())
    for records, after in dataset(position):
        step(records, after)
    assert total.numpy() == sum(range(3000))


def test_a_start_under_another_plan(feeder: Feeder) -> None:
    left = feeder.feed(0, encoded(), digest="one")
    _, position = taken(PipeModeDataset("train", "TFRecord", positions=True), 10)
    left.join()
    left = feeder.feed(0, encoded(), digest="two")
    _, text = failure(PipeModeDataset("train", "TFRecord", start=position), tf.errors.NotFoundError)
    left.join()
    assert "the objects or their order have changed" in text
    assert "anyway=True" in text
    feeder.feed(0, encoded(), digest="two")
    assert contents(PipeModeDataset("train", "TFRecord", start=position, anyway=True)) == RECORDS[10:]


def test_a_start_far_into_a_slow_fifo_does_not_hold_the_program(feeder: Feeder) -> None:
    """While the bytes before the position are dropped, steps stay short: the iterator can be thrown away."""
    feed = feeder.feed(0, LARGE[: 5 << 20], total=len(LARGE), hold=True, state="open")
    state = ReaderPosition("train", 0, offset=8 << 20).state()
    iterator = iter(PipeModeDataset("train", "TFRecord", start=state).prefetch(1))
    feed.written.wait(2)  # a megabyte is in the FIFO then; the rest does not fit
    del iterator
    gc.collect()  # waits for ever, unless a step ends before the position is reached
    feed.release.set()


def test_starts_that_mean_nothing(feeder: Feeder) -> None:
    with pytest.raises(PipeModeDatasetException, match="start names the first epoch"):
        PipeModeDataset("train", start=ReaderPosition("train", 1).state(), epoch=1)
    with pytest.raises(ValueError, match="of channel eval"):
        PipeModeDataset("train", start=ReaderPosition("eval", 1).state())
    with pytest.raises(ValueError, match="give a position, as a dict or as JSON"):
        PipeModeDataset("train", start=b"7")
