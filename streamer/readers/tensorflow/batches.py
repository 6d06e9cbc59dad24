"""Divides the records of an epoch into the steps of a dataset, with `batch_size` into batches.

    blocks of records -> rows of a matrix -> prefetch, unbatch -> elements                  (one row a batch)
                                                            '--> batch, reshape -> elements (several rows)

A batch of at most `ONE_ROW_BYTES`, or of a few records, is one row. TensorFlow has no work for single
records, but a few batches wait at a time. With larger batches that is more memory than glibc keeps
(`streamer.readers.tensorflow.memory`), and each batch costs page faults. So a larger batch is several rows
with equal numbers of records, each of about `ROW_BYTES`, and TensorFlow's `batch` makes one batch of them.

The mean size of a block's records decides, at the first block and then between two batches. Each decision
begins a layout (`streamer.readers.tensorflow.steps`). At the end of an epoch, empty strings complete the last
batch, and the number of records in each row restores its length. So TensorFlow receives only complete
batches, and drops an incomplete one when the end of the epoch is not proven.

At most `AHEAD` steps wait for the consumer. A step has one block and less than one row more.
"""

from __future__ import annotations

import functools
import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from streamer.formats.window import BLOCK_BYTES
from streamer.readers.tensorflow.failures import Interrupted
from streamer.readers.tensorflow.interrupts import interrupted, now
from streamer.readers.tensorflow.steps import PATIENCE_S, Layout, NewLayout, stepped
from streamer.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from streamer.readers.tensorflow.positions import EpochCursor
    from streamer.readers.tensorflow.steps import Step, Steps

AHEAD = 2
"""Steps that may wait between the reader and the consumer."""
ONE_ROW_BYTES = 32 * MIB
"""Most bytes of a row, unless that is one record; a batch up to this size is one row."""
ROW_BYTES = 512 * KIB
"""Bytes of a row, if a batch has several."""
WIDER = 4
"""Factor by which a wider row must be better than the current one; a narrower row is taken at once."""
_ONE_ROW, _SEVERAL = range(2)
"""Layouts of a dataset with `batch_size`: one row a batch, or several."""


def elements(
    make: Callable[[], Steps], batch_size: int | None, *, drop_remainder: bool, positions: bool
) -> tf.data.Dataset:
    """Return the records or batches of the steps that `make` returns.

    `make` returns `record_steps`, or `batch_steps` if there is a `batch_size`.
    """
    records = tf.TensorSpec([None], tf.string)
    after = (records,) if positions else ()
    full = batch_size if drop_remainder else None

    def ahead(steps: tf.data.Dataset) -> tf.data.Dataset:
        return steps.prefetch(AHEAD).unbatch()

    def join(records: Any, counts: Any, *after: Any) -> Any:
        batch = tf.reshape(records, [-1 if full is None else full])
        if full is None:
            batch = batch[: tf.reduce_sum(counts)]
        return (batch, after[0][-1]) if after else batch

    if batch_size is None:
        # Outside of the layouts, because each dataset around `unbatch` costs time for every element.
        return ahead(stepped(make, [Layout((records, *after), lambda steps, _: steps)]))
    one = tf.TensorSpec([None, full], tf.string), *after
    if _always_one_row(batch_size):
        return ahead(stepped(make, [Layout(one, lambda steps, _: steps)]))
    several = tf.TensorSpec([None, None], tf.string), tf.TensorSpec([None], tf.int64), *after
    return stepped(
        make,
        [
            Layout(one, lambda steps, _: ahead(steps)),
            Layout(several, lambda steps, rows: ahead(steps).batch(rows, drop_remainder=True).map(join)),
        ],
    )


def record_steps(blocks: Iterator[list[bytes]], cursor: EpochCursor | None) -> Steps:
    """Yield one step for each block: its records, and the position after each if `cursor` is given."""
    for block in _uninterrupted(blocks):
        after = () if cursor is None else (_vector(cursor.positions(range(len(block) - 1, -1, -1))),)
        yield _vector(block), *after


def batch_steps(
    blocks: Iterator[list[bytes]], batch_size: int, *, drop_remainder: bool, cursor: EpochCursor | None
) -> Steps:
    """Yield steps of rows; the last row of a batch has its position."""
    rows = _Rows(batch_size, cursor)
    kept: list[bytes] = []
    started = time.monotonic()
    for block in _uninterrupted(blocks):
        records = kept + block
        width = rows.best_width(block)
        if width != rows.width and rows.due <= len(records):
            if rows.due:
                due = rows.due
                yield rows.step(records[:due], left=len(records) - due)
                records = records[due:]
            yield rows.begin(width)
        whole = len(records) - len(records) % rows.width
        kept = records[whole:]
        if block and not whole and time.monotonic() - started < PATIENCE_S:
            continue  # a row of several blocks needs one step only, if they come soon
        yield rows.step(records[:whole], left=len(kept))
        started = time.monotonic()
    if not drop_remainder and (kept or rows.due):
        yield rows.last_step(kept)


class _Rows:
    """The rows of the current layout."""

    def __init__(self, batch_size: int, cursor: EpochCursor | None) -> None:
        self._batch_size = batch_size
        self._cursor = cursor
        self.width = batch_size
        """Records of a row."""
        self.due = 0
        """Records until the end of the batch that has begun; 0 between two batches."""

    def best_width(self, block: list[bytes]) -> int:
        """Return the width for records such as those of `block`; the current one if no other is better."""
        size = self._batch_size
        whole = self.width == size
        if not block or _always_one_row(size) or (whole and size * BLOCK_BYTES <= len(block) * ONE_ROW_BYTES):
            return self.width  # found without the sum, which takes long for small records
        mean = sum(map(len, block)) / len(block)
        best = size
        if size * mean > ONE_ROW_BYTES:
            widths = [width for width in _divisors(size) if width == 1 or width * mean <= ONE_ROW_BYTES]
            best = min(widths, key=lambda width: abs(math.log(width * mean / ROW_BYTES)))
        return best if best < self.width or best >= WIDER * self.width else self.width

    def begin(self, width: int) -> NewLayout:
        """Begin rows of `width` records, between two batches."""
        self.width = width
        rows = self._batch_size // width
        return NewLayout(_ONE_ROW if rows == 1 else _SEVERAL, rows)

    def step(self, records: list[bytes], *, left: int) -> Step:
        """Return a step of whole rows. `left`: number of further records in the last block."""
        ends = range((self.due or self._batch_size), len(records) + 1, self._batch_size)
        lefts = [left + len(records) - end for end in ends]
        self.due = (self.due - len(records)) % self._batch_size
        rows = len(records) // self.width
        last = [end // self.width - 1 for end in ends]
        return self._arrays(records, self.width, [self.width] * rows, last, lefts)

    def last_step(self, records: list[bytes]) -> Step:
        """Return the step that completes the epoch's last batch with `records` and empty strings."""
        if self.width == self._batch_size:
            return self._arrays(records, len(records), [], [0], [0])
        due = self.due or self._batch_size
        rows = due // self.width
        counts = [len(records)] + [0] * (rows - 1)
        return self._arrays(records + [b""] * (due - len(records)), self.width, counts, [rows - 1], [0])

    def _arrays(
        self, records: list[bytes], width: int, counts: list[int], ends: list[int], lefts: list[int]
    ) -> Step:
        """`ends`: last rows of batches. `lefts`: number of records of the block after each of them."""
        matrix = _vector(records).reshape(-1, width)
        arrays: Step = (matrix,)
        if self.width < self._batch_size:
            arrays += (np.array(counts, np.int64),)
        if self._cursor is not None:
            after = np.full(len(matrix), b"", dtype=object)
            for end, position in zip(ends, self._cursor.positions(lefts), strict=True):
                after[end] = position
            arrays += (after,)
        return arrays


def _always_one_row(batch_size: int) -> bool:
    """Return whether a batch has so few records that only records of more than a row make it large."""
    return batch_size * ROW_BYTES <= ONE_ROW_BYTES


@functools.lru_cache(maxsize=16)
def _divisors(number: int) -> list[int]:
    low = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*low, *(number // divisor for divisor in low)})


def _uninterrupted(blocks: Iterator[list[bytes]]) -> Iterator[list[bytes]]:
    """Yield `blocks`; raise Interrupted if SIGINT came and no records come."""
    first_moment = now()
    for block in blocks:
        if not block and interrupted(first_moment):
            raise Interrupted("reading was interrupted")
        yield block


def _vector(records: list[bytes]) -> Any:
    vector = np.empty(len(records), dtype=object)
    vector[:] = records
    return vector
