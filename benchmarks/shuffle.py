"""Measures how well orders of records are shuffled: `python -m benchmarks.shuffle`.

    data     the demo's vectors and classes (examples/demo/dataset.py), sorted by class, in objects
    orders   as stored, objects or blocks shuffled, with and without a buffer, and all records shuffled
    figures  of each order: serial correlation, classes in a batch, loss of a model after an epoch

Blocks are those of the sidecar (`streamer.plan.record_order`). The buffer is that of `tf.data` and of the
readers: it is filled, and then each record takes the place of one drawn at random. The model is a linear
classifier, trained by stochastic gradient descent over one epoch; its loss is that on held-out records.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.report import insert_into
from benchmarks.stats import Spread, spread
from examples.demo.dataset import CLASSES, DIMENSIONS, RECORD_BYTES, class_means
from streamer.plan.record_order import RecordOrder
from streamer.plan.shuffle import Permutation
from streamer.units import KIB, MIB, decimal_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Records = NDArray[np.int64]
    """Numbers of records, in the order of their training."""

BEGIN = "<!-- shuffle: begin; written by python -m benchmarks.shuffle -->"
END = "<!-- shuffle: end -->"
OBJECT = 8_000_000
"""Approximate bytes of an object; each is fetched by one request if its records stay together."""
BATCH = 32
RATE = 0.2
"""Learning rate."""


@dataclass(frozen=True, slots=True)
class Data:
    """Records that are sorted by class, and held-out ones."""

    labels: NDArray[np.int64]
    vectors: NDArray[np.float32]
    held_out_labels: NDArray[np.int64]
    held_out: NDArray[np.float32]

    @classmethod
    def made(cls, records: int, seed: int) -> Data:
        """Return so many records, and a tenth of them as held-out ones."""
        random = np.random.default_rng([seed, 1])
        means = class_means(seed, CLASSES)

        def drawn(count: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
            labels = np.arange(count) * CLASSES // count
            vectors = random.standard_normal((count, DIMENSIONS), dtype=np.float32)
            for label in range(CLASSES):
                vectors[labels == label] += means[label].astype(np.float32)
            return labels, vectors

        return cls(*drawn(records), *drawn(records // 10))


@dataclass(frozen=True, slots=True)
class Contestant:
    """A way to order the records."""

    name: str
    order: Callable[[int, int], tuple[Records, int]]
    """Takes the number of records and a seed; returns their order, and the requests of an epoch."""
    buffer: int = 0
    """Records of the buffer after it."""

    def shuffled(self, records: int, seed: int) -> tuple[Records, int]:
        """Return the order after the buffer, and the requests of an epoch."""
        order, requests = self.order(records, seed)
        return (buffered(order, self.buffer, seed) if self.buffer else order), requests


def stored(records: int, _: int) -> tuple[Records, int]:
    return np.arange(records), _objects(records)


def by_object(records: int, seed: int) -> tuple[Records, int]:
    count = _objects(records)
    parts = np.array_split(np.arange(records), count)
    return np.concatenate(
        [parts[number] for number in Permutation(count, seed=seed, epoch=0).over(range(count))]
    ), count


def by_block(size: int) -> Callable[[int, int], tuple[Records, int]]:
    def order(records: int, seed: int) -> tuple[Records, int]:
        counts = [len(part) for part in np.array_split(np.arange(records), _objects(records))]
        firsts = np.cumsum([0, *counts])
        blocks = RecordOrder(counts, [count * RECORD_BYTES for count in counts], seed=seed, block=size)
        runs = [firsts[run.entry] + np.arange(run.first, run.end) for run in blocks.runs(0)]
        return np.concatenate(runs), len(runs)

    return order


def whole(records: int, seed: int) -> tuple[Records, int]:
    return np.random.default_rng([seed, 2]).permutation(records), records


def buffered(order: Records, size: int, seed: int) -> Records:
    """Return the order after a buffer of `size` records, as `tf.data.Dataset.shuffle` makes it."""
    random = np.random.default_rng([seed, 3])
    buffer, found = order[:size].copy(), order.copy()
    for at, (record, drawn) in enumerate(
        zip(order[size:], random.integers(size, size=len(order)), strict=False)
    ):
        found[at], buffer[drawn] = buffer[drawn], record
    found[max(0, len(order) - size) :] = random.permutation(buffer)
    return found


CONTESTANTS = (
    Contestant("as stored", stored),
    Contestant("objects shuffled", by_object),
    Contestant("buffer of 1,000 records alone", stored, 1_000),
    Contestant("buffer of 10,000 records alone", stored, 10_000),
    Contestant("objects shuffled, buffer of 1,000", by_object, 1_000),
    Contestant("objects shuffled, buffer of 10,000", by_object, 10_000),
    Contestant("blocks of 1 MiB shuffled", by_block(MIB)),
    Contestant("blocks of 128 KiB shuffled", by_block(128 * KIB)),
    Contestant("blocks of 1 MiB, buffer of 1,000", by_block(MIB), 1_000),
    Contestant("blocks of 1 MiB, buffer of 10,000", by_block(MIB), 10_000),
    Contestant("all records shuffled", whole),
)


def _objects(records: int) -> int:
    return max(1, records * RECORD_BYTES // OBJECT)


def correlation(labels: NDArray[np.int64]) -> float:
    """Return the serial correlation of classes: 0 for independent neighbours, 1 for equal ones."""
    shares = np.bincount(labels, minlength=CLASSES) / len(labels)
    by_chance = float((shares**2).sum())
    return (float((labels[1:] == labels[:-1]).mean()) - by_chance) / (1 - by_chance)


def classes_in_a_batch(labels: NDArray[np.int64]) -> float:
    """Return the mean number of classes in a batch."""
    whole_batches = labels[: len(labels) // BATCH * BATCH].reshape(-1, BATCH)
    return float(np.mean([len(np.unique(batch)) for batch in whole_batches]))


def loss_after_an_epoch(data: Data, order: Records) -> float:
    """Return the cross entropy of held-out records after one epoch in this order."""
    weights = np.zeros((DIMENSIONS, CLASSES), dtype=np.float32)
    for first in range(0, len(order), BATCH):
        batch = order[first : first + BATCH]
        vectors = data.vectors[batch]
        error = _probabilities(vectors @ weights)
        error[np.arange(len(batch)), data.labels[batch]] -= 1
        weights -= RATE / len(batch) * (vectors.T @ error)
    found = _probabilities(data.held_out @ weights)
    likelihood = found[np.arange(len(found)), data.held_out_labels]
    return float(-np.log(np.maximum(likelihood, 1e-30)).mean())


def _probabilities(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    grown = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(grown / grown.sum(axis=1, keepdims=True), dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one order; medians over seeds."""

    contestant: Contestant
    requests: int
    correlation: Spread
    classes: Spread
    loss: Spread


def measure(data: Data, contestants: Sequence[Contestant], rounds: int) -> list[Row]:
    """Return the figures of each order, over as many seeds."""
    rows = []
    for contestant in contestants:
        figures, requests = [], 0
        for seed in range(rounds):
            order, requests = contestant.shuffled(len(data.labels), seed)
            labels = data.labels[order]
            figures.append(
                (correlation(labels), classes_in_a_batch(labels), loss_after_an_epoch(data, order))
            )
        rows.append(Row(contestant, requests, *(spread(list(each)) for each in zip(*figures, strict=True))))
    return rows


def markdown(rows: Sequence[Row], records: int, rounds: int) -> str:
    """Return the table, with its conditions."""
    size = decimal_bytes(records * RECORD_BYTES)
    conditions = (
        f"{records:,} records of {RECORD_BYTES:,} bytes ({size}) in {_objects(records)} objects, sorted by "
        f"their {CLASSES} classes, in batches of {BATCH}. Medians over {rounds} seeds."
    )
    lines = [
        conditions,
        "",
        "| Order | Serial correlation | Classes in a batch | Loss after an epoch | Requests | Buffer |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        buffer = decimal_bytes(row.contestant.buffer * RECORD_BYTES) if row.contestant.buffer else "-"
        lines.append(
            f"| {row.contestant.name} | {row.correlation.median:.3f} | {row.classes.median:.1f} "
            f"| {row.loss.median:.4f} | {row.requests:,} | {buffer} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.shuffle", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--records", type=int, default=40_000, help="records of the epoch (40,000)")
    parser.add_argument("--rounds", type=int, default=5, help="seeds (5)")
    parser.add_argument("--into", metavar="FILE", help="put the table into this Markdown file")
    chosen = parser.parse_args(arguments)
    rows = measure(Data.made(chosen.records, seed=0), CONTESTANTS, chosen.rounds)
    table = markdown(rows, chosen.records, chosen.rounds)
    print(table)
    if chosen.into is not None:
        insert_into(chosen.into, table, begin=BEGIN, end=END)
    return 0


if __name__ == "__main__":
    sys.exit(main())
