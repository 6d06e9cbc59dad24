"""Keras with `ModelCheckpoint`, in a directory for each checkpoint, or with `BackupAndRestore`.

A Keras epoch is `SAVE_EVERY` steps, so that `fit` saves after each.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from streamer.readers import load_state, save_state
from streamer.readers.tensorflow import PipeModeDataset
from tests.machines.frameworks.programs.task import (
    DIMENSIONS,
    EPOCHS,
    RATE,
    SAVE_EVERY,
    checkpoints,
    tell,
    tell_begin,
)

BATCH = int(os.environ["GLOBAL_BATCH"])
RECORD = 8 + 4 * (DIMENSIONS + 1)


def build() -> Any:
    model = keras.Sequential([keras.Input((DIMENSIONS,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(keras.optimizers.Adam(RATE), "mse")
    return model


def channel(start: Any = None) -> Any:
    return PipeModeDataset("train", "TFRecord", rank=0, batch_size=BATCH, start=start)


class Recorder(keras.callbacks.Callback):  # type: ignore[misc] # keras is not followed by the checker
    """Tells of each step; the numbers of the records come from the pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[int] = []

    def note(self, raw: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        self.numbers.extend(raw[:, :8].copy().view(np.int64)[:, 0].tolist())
        return raw

    def parse(self, records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        raw = tf.reshape(tf.io.decode_raw(records, tf.uint8), (BATCH, RECORD))
        raw = tf.ensure_shape(tf.numpy_function(self.note, [raw], tf.uint8), (BATCH, RECORD))
        floats = tf.reshape(
            tf.bitcast(tf.reshape(raw[:, 8:], (BATCH, DIMENSIONS + 1, 4)), tf.float32), (BATCH, -1)
        )
        return floats[:, :DIMENSIONS], floats[:, DIMENSIONS:]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        tell(records=self.numbers[:BATCH], loss=float(logs["loss"]))
        del self.numbers[:BATCH]
        if batch == SAVE_EVERY - 1:
            tell(save=int(self.model.optimizer.iterations))


class SaveState(keras.callbacks.Callback):  # type: ignore[misc] # as above
    """Saves the state after the checkpoint that another callback has saved."""

    def __init__(self, dataset: Any, begun: int, path: str) -> None:
        super().__init__()
        self.dataset, self.begun, self.path = dataset, begun, path
        dataset.step_state()  # the position to count from, before the first iterator takes it

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras calls it so
        steps = int(self.model.optimizer.iterations) - self.begun
        save_state(self.path.format(epoch=epoch + 1), self.dataset.step_state(steps))


def model_checkpoint(root: Path) -> tuple[Any, Any, list[Any]]:
    """Load the newest checkpoint that has a state; return the model, the dataset, and what saves."""
    whole = sorted(root.glob("step-*/penstock-state.json"))
    newest = whole[-1].parent if whole else None
    model = keras.models.load_model(newest / "model.keras") if newest else build()
    dataset = channel(load_state(newest) if newest else None)
    path = f"{root}/step-{{epoch:04d}}/"
    return model, dataset, [
        keras.callbacks.ModelCheckpoint(f"{path}model.keras"),
        SaveState(dataset, int(model.optimizer.iterations), path),
    ]  # fmt: skip


def backup_and_restore(root: Path) -> tuple[Any, Any, list[Any]]:
    """Load the backup, which may be newer than the state; return the model, the dataset, and what saves."""
    model = build()
    for metadata in root.glob("training_metadata.json*"):
        metadata.unlink()  # it is written after the weights, and a kill leaves an older or half a file
    backup = keras.callbacks.BackupAndRestore(root, double_checkpoint=True, delete_checkpoint=False)
    backup.set_model(model)
    backup.on_train_begin()
    begun, unread = int(model.optimizer.iterations), channel()
    at = unread.step_state()  # where the sidecar begins
    dataset = channel(unread.step_state(begun - at["epoch"] * unread.steps_per_epoch - at["step"]))
    return model, dataset, [backup, SaveState(dataset, begun, f"{root}/")]


def main() -> None:
    root = checkpoints()
    make = {"checkpoint": model_checkpoint, "backup": backup_and_restore}[sys.argv[2]]
    model, dataset, callbacks = make(root)
    begun = int(model.optimizer.iterations)
    tell_begin(begun)
    recorder = Recorder()
    steps = EPOCHS * dataset.steps_per_epoch
    model.fit(
        dataset.map(recorder.parse).repeat(), steps_per_epoch=SAVE_EVERY, initial_epoch=begun // SAVE_EVERY,
        epochs=steps // SAVE_EVERY, verbose=0, callbacks=[recorder, *callbacks],
    )  # fmt: skip


if __name__ == "__main__":
    main()
