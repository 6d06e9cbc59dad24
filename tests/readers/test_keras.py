"""Keras `fit` on a channel: batches of each Keras epoch, and epochs of the channel that are opened."""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from streamer.errors import ChannelError
from streamer.readers import PipeReader, load_state, save_state
from streamer.readers.core.state import EpochState
from streamer.step_state import StepState
from tests.kit.late import LATE
from tests.readers.feeder import Feeder
from tests.readers.test_tensorflow import encoded

if LATE:
    import tensorflow as tf

    from streamer.readers.tensorflow import PipeModeDataset
    from streamer.readers.tensorflow.backup import StepBackup
    from tests.readers.keras_callbacks import Batches, Stop

BATCHES, SIZE = 10, 10


def parse(records: Any) -> Any:
    numbers = tf.reshape(tf.strings.to_number(records), [-1, 1])
    return numbers, numbers


@pytest.mark.parametrize(
    ("repeat", "steps", "batches", "opened"),
    [
        (1, None, [10, 10, 10], 3),
        (1, 10, [10, 0, 10], 2),
        (1, 6, [6, 4, 6], 2),
        (None, 10, [10, 10, 10], 4),
        (3, 10, [10, 10, 10], 3),
        (3, None, [30, 30, 30], 9),
    ],
)
def test_batches_of_each_keras_epoch(
    feeder: Feeder, repeat: int | None, steps: int | None, batches: list[int], opened: int
) -> None:
    """A `repeat()` that prefetches may open one epoch more than it trains on."""
    feeds = [feeder.feed(n, encoded(records=[b"%d" % i for i in range(BATCHES * SIZE)])) for n in range(10)]
    dataset = PipeModeDataset("train", "TFRecord", batch_size=SIZE).map(parse).repeat(repeat).prefetch(2)
    model = tf.keras.Sequential([tf.keras.Input([1]), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    seen = Batches()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Your input ran out of data", UserWarning)
        model.fit(dataset, epochs=3, steps_per_epoch=steps, callbacks=[seen], verbose=0, shuffle=False)
    assert seen.counts == batches
    assert sum(feed.opened.is_set() for feed in feeds) in {opened, opened - (repeat is None)}


def test_keras_knows_the_batches_of_a_channel_shared_by_record(
    feeder: Feeder, recwarn: pytest.WarningsRecorder
) -> None:
    """Keras reads no further than the last batch, and each of its epochs is one of the channel."""
    records = [b"%d" % number for number in range(BATCHES * SIZE)]
    feeds = [feeder.feed(n, encoded(records=records), records=len(records), steps=BATCHES) for n in range(4)]
    dataset = PipeModeDataset("train", "TFRecord", batch_size=SIZE, cardinality=True).map(parse).prefetch(2)
    model = tf.keras.Sequential([tf.keras.Input([1]), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    seen = Batches()
    model.fit(dataset, epochs=3, callbacks=[seen], verbose=0, shuffle=False)
    assert seen.counts == [BATCHES] * 3
    assert seen.params["steps"] == BATCHES
    assert sum(feed.opened.is_set() for feed in feeds) == 3
    assert not [warning for warning in recwarn if "ran out of data" in str(warning.message)]


def trained(
    directory: Path, epochs: int, *, stop_after: int | None = None, fits: bool = True, again: bool = False
) -> Any:
    """Train until the last epoch, or for a number of batches of this run. Return the model's variables.

    `fits`: call `fit` for each epoch. `again`: call it once more with the same objects.
    """
    dataset = PipeModeDataset("train-0", "TFRecord", batch_size=SIZE, start=load_state(directory))
    model = tf.keras.Sequential([tf.keras.Input([1]), tf.keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(tf.keras.optimizers.SGD(1e-6, momentum=0.9), "mse")
    backup = StepBackup(dataset, str(directory), save_every=2)
    stop = Stop(stop_after)
    options: Any = {"callbacks": [backup, stop], "verbose": 0, "shuffle": False}
    with contextlib.suppress(KeyboardInterrupt):
        if not fits:
            model.fit(dataset.map(parse), epochs=epochs, **options)
        for epoch in range(backup.epoch, epochs if fits else 0):
            model.fit(dataset.map(parse), initial_epoch=epoch, epochs=epoch + 1, **options)
    if again:
        model.fit(dataset.map(parse), **options)
    return [variable.numpy().tolist() for variable in (*model.variables, *model.optimizer.variables)]


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras writes weights
def test_a_backup_has_weights_and_state_of_the_same_step(feeder: Feeder, tmp_path: Path) -> None:
    """Killed after batch 7, of which 6 were saved, training ends with the weights of one that was not."""
    feeder.configure({"train-0": "Pipe"})
    records = [b"%d" % number for number in range(BATCHES * SIZE)]

    def feed(epoch: int, step: int = 0) -> None:
        before, data = (encoded(records=part) for part in (records[: step * SIZE], records[step * SIZE :]))
        counts: dict[str, Any] = {"records": len(records), "steps": BATCHES, "records_skipped": step * SIZE}
        feeder.feed(
            epoch, data, channel="train-0", total=len(before) + len(data), bytes_skipped=len(before),
            order={"digest": "d"}, **counts,
        )  # fmt: skip

    feed(0)
    feed(1)
    whole = trained(tmp_path / "whole", 2)
    assert load_state(tmp_path / "whole") == StepState("train", 2, 0, {"digest": "d"}).document()

    EpochState(feeder.state_dir, "train-0").put(0)
    directory, other = tmp_path / "killed", tmp_path / "other"
    feed(0)
    trained(directory, 1, stop_after=7)
    assert load_state(directory) == StepState("train", 0, 6, {"digest": "d"}).document()
    assert sorted(os.listdir(directory)) == ["0-6.weights.h5", "penstock-state.json"]
    shutil.copytree(directory, other)
    feed(0, 6)
    feed(1)
    assert trained(directory, 2) == whole
    assert sorted(os.listdir(directory)) == ["2-0.weights.h5", "penstock-state.json"]

    # A later fit of the same objects would count on from the batch at which the first one was left.
    EpochState(feeder.state_dir, "train-0").put(0)
    feed(0)
    with pytest.raises(ChannelError, match="would begin at epoch 1 .* reached step 7 of epoch 0"):
        trained(tmp_path / "again", 1, stop_after=7, again=True)
    (tmp_path / "bytes").mkdir()
    save_state(tmp_path / "bytes", PipeReader("train-0", "TFRecord", epoch=5).state_dict())
    with pytest.raises(ValueError, match="is no state of steps"):
        StepBackup(PipeModeDataset("train-0", "TFRecord"), str(tmp_path / "bytes"))
    EpochState(feeder.state_dir, "train-0").put(0)

    # Keras would train on four batches of every later epoch too.
    feed(0, 6)
    feed(1)
    with pytest.raises(
        ChannelError, match="ended its epoch 1 at step [45] of epoch 1 .*call fit for each epoch"
    ):
        trained(other, 2, fits=False)
