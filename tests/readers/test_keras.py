"""Keras `fit` on a channel: batches of each Keras epoch, and epochs of the channel that are opened."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import tensorflow as tf

from streamer.readers.tensorflow import PipeModeDataset
from tests.readers.feeder import Feeder
from tests.readers.test_tensorflow import encoded

BATCHES, SIZE = 10, 10


class Batches(tf.keras.callbacks.Callback):  # type: ignore[misc]  # TensorFlow publishes no types
    """Counts the batches of each Keras epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def on_epoch_begin(self, epoch: int, logs: None = None) -> None:  # noqa: ARG002  # Keras gives both
        self.counts.append(0)

    def on_train_batch_end(self, batch: Any, logs: None = None) -> None:  # noqa: ARG002
        self.counts[-1] += 1


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
