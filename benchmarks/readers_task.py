"""One reader's process of `benchmarks.readers`: does a run for each line of JSON and prints the result."""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any

import tensorflow as tf


def dataset(order: dict[str, Any]) -> tf.data.Dataset:
    """Return batches of records, by the reader that the order names."""
    if order["reader"] == "TFRecordDataset":
        return tf.data.TFRecordDataset([order["path"]] * order["passes"]).batch(order["batch"])
    # Imported late, because the import sets the allocator of the whole process.
    from streamer.readers.tensorflow import PipeModeDataset

    if order["reader"] == "PipeModeDataset":
        return PipeModeDataset.from_path(order["path"], order["record_format"]).batch(order["batch"])
    return PipeModeDataset.from_path(order["path"], order["record_format"], batch_size=order["batch"])


def payload(batches: tf.data.Dataset) -> int:
    """Return the bytes of all records, added up in C++."""

    def add(total: tf.Tensor, batch: tf.Tensor) -> tf.Tensor:
        return total + tf.reduce_sum(tf.cast(tf.strings.length(batch), tf.int64))

    return int(batches.reduce(tf.constant(0, tf.int64), add))


def main() -> None:
    print(tf.__version__, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        batches = dataset(order)
        started, cpu = time.monotonic(), time.process_time()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        found = payload(batches)
        answer = {
            "payload": found,
            "seconds": time.monotonic() - started,
            "cpu_seconds": time.process_time() - cpu,
            "faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults,
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
