"""Trains a linear classifier on two Pipe channels, without access to storage, as in a training container.

    TensorFlow    PipeModeDataset -> repeat -> batch -> parse -> prefetch -> Keras    this file
    PyTorch       PipeIterableDataset -> DataLoader -> a training loop                train_torch.py

The program gets one directory, refuses to start with credentials, and loads no storage client. It is written
as for SageMaker, except for `EpochCounter`, which counts the records of each epoch so that the demo can
compare them with those that were uploaded.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from examples.demo.dataset import DIMENSIONS, RECORD_BYTES
from examples.demo.progress import progress

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

FRAMEWORKS = ("tensorflow", "torch")
STORAGE_CLIENTS = ("aiobotocore", "boto3", "botocore", "s3fs", "s3transfer")
LEARNING_RATE = 5e-3


def credentials_in(environment: Mapping[str, str]) -> list[str]:
    """Return the variables of `environment`, and files in its home directory, that could open a bucket."""
    found = [name for name in sorted(environment) if name.startswith("AWS_")]
    home = os.path.join(environment.get("HOME", "/"), ".aws")
    return [*found, home] if os.path.exists(home) else found


def storage_clients_loaded() -> list[str]:
    """Return the storage clients that this process has imported."""
    return [name for name in STORAGE_CLIENTS if name in sys.modules]


class EpochCounter:
    """Counts the records of each pass over a dataset, from the index of each record in its pass."""

    def __init__(self) -> None:
        self.records: list[int] = []

    def note(self, indices: NDArray[Any]) -> None:
        """Count the records of a batch; an index of 0 begins an epoch, even inside a batch."""
        for index in indices.tolist():
            if index == 0:
                self.records.append(0)
            self.records[-1] += 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.demo.train", description=__doc__)
    parser.add_argument("--base-directory", required=True, help="the sidecar's; /opt/ml in SageMaker")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--framework", choices=FRAMEWORKS, default=FRAMEWORKS[0])
    parser.add_argument("--result", required=True, metavar="FILE", help="where the result goes, as JSON")
    arguments = parser.parse_args()
    if found := credentials_in(os.environ):
        print(f"train: refusing to start with storage credentials: {', '.join(found)}", file=sys.stderr)
        return 3
    run = train
    if arguments.framework == "torch":
        from examples.demo.train_torch import train as run
    result = run(arguments.base_directory, epochs=arguments.epochs, batch_size=arguments.batch_size)
    with open(arguments.result, "w", encoding="utf-8") as file:
        json.dump(result, file)
    return 0


def train(base: str, *, epochs: int, batch_size: int) -> dict[str, Any]:
    """Train on channel `train`, evaluate on channel `eval`; return the results.

    `storage` in the result lists credentials and clients in this process; it must be empty.
    """
    started = time.monotonic()
    import tensorflow as tf

    imported = time.monotonic()
    parameters = hyperparameters(base)
    tf.keras.utils.set_random_seed(1)
    model = _classifier(tf, int(parameters["classes"]))
    trained, evaluated = EpochCounter(), EpochCounter()
    due = {name: int(parameters[f"{name}-records"]) * RECORD_BYTES for name in ("train", "eval")}
    with progress("train", epochs * due["train"]) as advance:
        model.fit(
            _batches(tf, base, "train", trained, passes=epochs, size=batch_size),
            verbose=0,
            shuffle=False,
            callbacks=[_watch(tf, advance, batch_size=batch_size)],
        )
    fitted = time.monotonic()
    with progress("evaluate", due["eval"]) as advance:
        scores = model.evaluate(
            _batches(tf, base, "eval", evaluated, passes=1, size=batch_size),
            verbose=0,
            return_dict=True,
            callbacks=[_watch(tf, advance, batch_size=batch_size)],
        )
    return {
        "storage": credentials_in(os.environ) + storage_clients_loaded(),
        "accuracy": float(scores["accuracy"]),
        "records": {"train": trained.records, "eval": evaluated.records},
        "seconds": {
            "import": imported - started,
            "train": fitted - imported,
            "evaluate": time.monotonic() - fitted,
        },
        "framework": f"TensorFlow {tf.__version__}",
        "devices": [device.device_type for device in tf.config.list_physical_devices()],
    }


def hyperparameters(base: str) -> dict[str, str]:
    """The job's hyperparameters, which the sidecar has written below `base`."""
    with open(os.path.join(base, "input", "config", "hyperparameters.json"), encoding="utf-8") as file:
        found: dict[str, str] = json.load(file)
        return found


def _batches(tf: Any, base: str, channel: str, counter: EpochCounter, *, passes: int, size: int) -> Any:
    """Return a dataset of `passes` epochs of a channel, in batches of vectors and labels."""
    from streamer.readers.tensorflow import PipeModeDataset

    features = {
        "label": tf.io.FixedLenFeature([], tf.int64),
        "data": tf.io.FixedLenFeature([], tf.string),
    }

    def count(indices: Any, records: Any) -> Any:
        tf.numpy_function(counter.note, [indices], [])
        return records

    def parse(records: Any) -> tuple[Any, Any]:
        examples = tf.io.parse_example(records, features)
        vectors = tf.io.decode_raw(examples["data"], tf.float64)
        return tf.cast(tf.ensure_shape(vectors, [None, DIMENSIONS]), tf.float32), examples["label"]

    dataset = PipeModeDataset(
        channel=channel,
        record_format="TFRecord",
        pipe_dir=os.path.join(base, "input", "data"),
        config_dir=os.path.join(base, "input", "config"),
        state_dir=os.path.join(base, "pipe_state"),
    )
    return (
        dataset.enumerate()
        .repeat(passes)
        .batch(size)
        .map(count)  # in order; `parse` may run on several threads
        .map(parse, num_parallel_calls=tf.data.AUTOTUNE)
        .prefetch(tf.data.AUTOTUNE)
    )


def _classifier(tf: Any, classes: int) -> Any:
    """Return a linear model of `classes` classes, ready to fit."""
    model = tf.keras.Sequential(
        [tf.keras.Input([DIMENSIONS]), tf.keras.layers.Dense(classes, activation="softmax")]
    )
    model.compile(
        optimizer=tf.keras.optimizers.Adam(LEARNING_RATE),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


def _watch(tf: Any, advance: Callable[[int], None], *, batch_size: int) -> Any:
    """Return a Keras callback that reports every batch; all but the last batch of a run are full."""

    class Watch(tf.keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            del batch, logs
            advance(batch_size * RECORD_BYTES)

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            self.on_train_batch_end(batch, logs)

    return Watch()


if __name__ == "__main__":
    sys.exit(main())
