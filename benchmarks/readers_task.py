"""One reader's process of `benchmarks.readers`: does a run for each line of JSON and prints the result."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from itertools import chain
from typing import Any

Order = dict[str, Any]


def tensorflow(order: Order) -> int:
    """Return the bytes of all records, added up in C++."""
    import tensorflow as tf

    def add(total: tf.Tensor, batch: tf.Tensor) -> tf.Tensor:
        return total + tf.reduce_sum(tf.cast(tf.strings.length(batch), tf.int64))

    return int(_batches(order).reduce(tf.constant(0, tf.int64), add))


def keras(order: Order) -> int:
    """Train a small model for one epoch; return the bytes of all records."""
    import tensorflow as tf

    size, total = order["size"], tf.Variable(0, dtype=tf.int64)

    def pair(batch: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        values = tf.ensure_shape(tf.io.decode_raw(batch, tf.uint8), (None, size))
        with tf.control_dependencies([total.assign_add(tf.size(values, tf.int64))]):
            return tf.cast(values, tf.float32) / 255, tf.cast(values[:, 0] % 10, tf.int32)

    if (model := _models.get(size)) is None:
        layers = [tf.keras.layers.Dense(64, "relu"), tf.keras.layers.Dense(10)]
        model = _models[size] = tf.keras.Sequential([tf.keras.Input((size,)), *layers])
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, jit_compile=False)
    model.fit(_batches(order).map(pair).prefetch(2), verbose=0)
    return int(total.numpy())


_models: dict[int, Any] = {}
"""By size of record, the model, which is compiled in the round that does not count."""


def _batches(order: Order) -> Any:
    """Return batches of records, by the reader that the order names."""
    import tensorflow as tf

    if "TFRecordDataset" in order["reader"]:
        return tf.data.TFRecordDataset([order["path"]] * order["passes"]).batch(order["batch"])
    # Imported late, because the import sets the allocator of the whole process.
    from streamer.readers.tensorflow import PipeModeDataset

    path = os.path.join(order["directory"], f"{order['names'][0]}_0")
    if order["reader"] == "PipeModeDataset":
        return PipeModeDataset.from_path(path, order["record_format"]).batch(order["batch"])
    return PipeModeDataset.from_path(path, order["record_format"], batch_size=order["batch"])


def torch(order: Order) -> int:
    from torch.utils.data import IterableDataset

    if "IterableDataset" in order["reader"].split():

        class Records(IterableDataset):  # type: ignore[misc] # torch is not followed by the checker
            def __iter__(self) -> Iterator[bytes]:
                return map(bytes, _of_package(order))

        return sum(map(len, Records()))
    from streamer.readers.torch import PipeIterableDataset

    batch = order["batch"] if order["reader"].endswith("batch_size") else None
    dataset = PipeIterableDataset(
        order["names"], order["record_format"], batch_size=batch, share=(0, 1), **_directories(order)
    )
    return sum(map(len, dataset)) if batch is None else sum(sum(map(len, each)) for each in dataset)


def plain(order: Order) -> int:
    from streamer.readers import PipeReader

    names, kind = order["names"], order["record_format"]
    options: dict[str, Any] = {"epoch": 0, **_directories(order)}
    records: Iterable[Any]
    match order["reader"]:
        case "PipeReader":
            records = PipeReader(names[0], kind, **options)
        case "PipeReader.batches":
            return _lists(PipeReader(names[0], kind, **options).batches())
        case _:
            records = map(bytes, _of_package(order))
    return sum(map(len, records))


def _lists(lists: Iterable[list[Any]]) -> int:
    return sum(sum(map(len, each)) for each in lists)


def _of_package(order: Order) -> Iterator[Any]:
    reader = importlib.import_module("tfrecord.reader")
    return chain.from_iterable(reader.tfrecord_iterator(order["path"]) for _ in range(order["passes"]))


def _directories(order: Order) -> dict[str, Any]:
    return {"pipe_dir": order["directory"], "state_dir": order["state"], "config_dir": order["state"]}


FAMILIES: dict[str, tuple[Callable[[Order], int], str, str]] = {
    "tensorflow": (tensorflow, "tensorflow", ""),
    "keras": (keras, "tensorflow", ""),
    "torch": (torch, "torch", "tfrecord"),
    "plain": (plain, "", "tfrecord"),
}
"""By family, what does a run, and which distribution is imported: in every process, and for a file."""


def versions(family: str, *, on_file: bool) -> str:
    """Import the libraries of a process; return their versions, or nothing if one is not installed."""
    _, library, package = FAMILIES[family]
    wanted = [name for name in (library, package if on_file else "") if name]
    try:
        for name in wanted:
            importlib.import_module(name)
        return ", ".join(f"{name} {metadata.version(name)}" for name in wanted) or "Python"
    except (ImportError, metadata.PackageNotFoundError):
        return ""


def main(family: str, *, on_file: bool) -> None:
    print(versions(family, on_file=on_file), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        run = FAMILIES[family][0]
        started, cpu = time.monotonic(), time.process_time()
        payload = run(order)
        answer = {
            "payload": payload,
            "seconds": time.monotonic() - started,
            "cpu_seconds": time.process_time() - cpu,
        }
        print(json.dumps(answer), flush=True)
