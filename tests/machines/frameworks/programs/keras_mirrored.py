"""Keras over TensorFlow's MirroredStrategy: one process, whose replicas divide each global batch."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from streamer.readers import rank_channels
from streamer.readers.tensorflow import PipeModeDataset
from tests.machines.frameworks.programs.task import DIMENSIONS, EPOCHS, RATE

RECORD = 8 + 4 * (DIMENSIONS + 1)


class Losses(keras.callbacks.Callback):  # type: ignore[misc] # keras is not followed by the checker
    def __init__(self) -> None:
        super().__init__()
        self.found: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras calls it so
        self.found.append(float(logs["loss"]))


def main() -> None:
    replicas, batch = int(os.environ["REPLICAS"]), int(os.environ["GLOBAL_BATCH"])
    [cpu] = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
    strategy = tf.distribute.MirroredStrategy([f"/cpu:{number}" for number in range(replicas)])
    numbers: list[int] = []

    def note(raw: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        numbers.extend(raw[:, :8].copy().view(np.int64)[:, 0].tolist())
        return raw

    def parse(records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        raw = tf.ensure_shape(
            tf.reshape(tf.io.decode_raw(records, tf.uint8), (batch, RECORD)), (batch, RECORD)
        )
        raw = tf.ensure_shape(tf.numpy_function(note, [raw], tf.uint8), (batch, RECORD))
        floats = tf.reshape(
            tf.bitcast(tf.reshape(raw[:, 8:], (batch, DIMENSIONS + 1, 4)), tf.float32), (batch, -1)
        )
        return floats[:, :DIMENSIONS], floats[:, DIMENSIONS:]

    [channel] = rank_channels("train")
    dataset = PipeModeDataset(channel, record_format="TFRecord").batch(batch, drop_remainder=True).map(parse)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((DIMENSIONS,)), keras.layers.Dense(1, kernel_initializer="zeros")]
        )
        model.compile(keras.optimizers.SGD(RATE), "mse")
    losses = Losses()
    # Under a strategy `fit` builds the model from a pass of its own, which it leaves after some batches.
    model.fit(dataset, epochs=EPOCHS, verbose=0, callbacks=[losses])
    del numbers[: -batch * len(losses.found)]
    steps = [
        {"records": numbers[number * batch : (number + 1) * batch], "loss": loss}
        for number, loss in enumerate(losses.found)
    ]
    Path(sys.argv[1], "0.json").write_text(json.dumps(steps), encoding="utf-8")


if __name__ == "__main__":
    main()
