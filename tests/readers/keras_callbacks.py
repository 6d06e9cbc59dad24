"""Keras callbacks of the tests; apart, since a class of Keras needs TensorFlow at its definition."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class Batches(tf.keras.callbacks.Callback):  # type: ignore[misc]  # TensorFlow publishes no types
    """Counts the batches of each Keras epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def on_epoch_begin(self, epoch: int, logs: None = None) -> None:  # noqa: ARG002  # Keras gives both
        self.counts.append(0)

    def on_train_batch_end(self, batch: Any, logs: None = None) -> None:  # noqa: ARG002
        self.counts[-1] += 1


class Stop(tf.keras.callbacks.Callback):  # type: ignore[misc]  # TensorFlow publishes no types
    """Leaves `fit` after `batches` batches, as a signal does."""

    def __init__(self, after: int | None) -> None:
        super().__init__()
        self.left = after

    def on_train_batch_end(self, batch: Any, logs: None = None) -> None:  # noqa: ARG002
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
