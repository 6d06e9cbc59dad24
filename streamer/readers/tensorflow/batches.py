"""Divides the records of an epoch into the steps of a dataset, with `batch_size` into batches.

    blocks of records -> rows of a matrix -> prefetch, unbatch -> elements                        (one row)
                    |                                    '--> batch, reshape -> elements      (several rows)
                    '--> a batch -> prefetch, filter -> elements                                     (whole)
    batches in place (`streamer.readers.tensorflow.in_place`) ---^

A batch of less than `WHOLE_BYTES`, or of at most `FEW` records, is one row, so that many batches share the
cost of a step. A larger batch is a step of its own. TensorFlow takes it as it is, and `filter` drops the
steps without records, by a flag of each step.

Such a batch is in memory up to four times: as bytes objects and as strings while it is made, waiting, and at
the consumer. If it is larger than the processor's cache, each copy also reads and writes memory. So a batch
of more than `LARGE_BYTES` is several rows with equal numbers of records, each of about `ROW_BYTES`, and
TensorFlow's `batch` moves their strings into one batch.

The mean size of a block's records decides, at the first block and then between two batches. Each decision
begins a layout (`streamer.readers.tensorflow.steps`). At the end of an epoch, empty strings complete the last
batch, and the number of records in each row restores its length. So TensorFlow receives only complete
batches, and drops an incomplete one when the end of the epoch is not proven.

At most `AHEAD` steps of rows, or one whole batch, wait for the consumer. A step of rows has one block and
less than one row more.
"""

from __future__ import annotations

import functools
import math
import time
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import tensorflow as tf

from streamer.formats.window import BLOCK_BYTES, FailedRecord
from streamer.readers.tensorflow.failures import Interrupted
from streamer.readers.tensorflow.in_place import PlacedBatch
from streamer.readers.tensorflow.interrupts import interrupted, now
from streamer.readers.tensorflow.keys import TYPES, keyed_elements
from streamer.readers.tensorflow.steps import PATIENCE_S, BatchLayout, NewLayout, stepped
from streamer.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from streamer.readers.tensorflow.keys import KeyColumns
    from streamer.readers.tensorflow.steps import Step, Steps

    Positions = Callable[[Iterable[int]], list[bytes]]
    """Returns, for each number n, the position before the last n records of the last block."""

T = TypeVar("T")

AHEAD = 2
"""Steps of rows that may wait between the reader and the consumer."""
FEW = 64
"""Records of a batch up to which it is one row: each dataset around `unbatch` costs time for every batch."""
WHOLE_BYTES = 4 * MIB
"""Least bytes of a batch that is a step of its own."""
LARGE_BYTES = 32 * MIB
"""Most bytes of a row, unless that is one record; a larger batch is several rows."""
ROW_BYTES = MIB
"""Bytes of a row, if a batch has several."""
WIDER = 4
"""Factor by which records must change before a row becomes wider, or a limit is crossed back."""
_ONE_ROW, _SEVERAL, _WHOLE = range(3)
"""Layouts of a dataset with `batch_size`: one row a batch, several rows a batch, one step a batch."""
_WHOLE_BATCHES = NewLayout(_WHOLE, 1)


def has_layouts(batch_size: int) -> bool:
    """Return whether a batch of `batch_size` records may be another thing than a row of a matrix."""
    return batch_size > FEW


def elements(
    make: Callable[[], Steps],
    batch_size: int | None,
    *,
    drop_remainder: bool,
    positions: bool,
    key: bool = False,
) -> tf.data.Dataset:
    """Return the records or batches of the steps that `make` returns.

    `make` returns `record_steps`, or `batch_steps` if there is a `batch_size`. `key`: the steps have columns
    of keys, and elements are `KeyedRecord`s.
    """
    flat = _flat_elements(make, batch_size, drop_remainder=drop_remainder, positions=positions, key=key)
    return keyed_elements(flat, positions=positions) if key else flat


def _flat_elements(
    make: Callable[[], Steps], batch_size: int | None, *, drop_remainder: bool, positions: bool, key: bool
) -> tf.data.Dataset:
    """Return elements that are a record or batch, or flat tuples of it, its columns and its position."""
    types = (tf.string, *TYPES) if key else (tf.string,)
    position, vector = tf.TensorSpec([], tf.string), tf.TensorSpec([None], tf.string)
    full = batch_size if drop_remainder else None

    def ahead(steps: tf.data.Dataset) -> tf.data.Dataset:
        return steps.prefetch(AHEAD).unbatch()

    def whole(steps: tf.data.Dataset) -> tf.data.Dataset:
        # tf.data does not run functions that only return arguments of theirs.
        batches = steps.prefetch(1).filter(lambda *arrays: arrays[-1]).map(lambda *arrays: arrays[:-1])
        spec = signature([full], after=position)  # states the length, without a copy of the batch
        return tf.data.experimental.from_variant(
            tf.data.experimental.to_variant(batches), spec if len(spec) > 1 else spec[0]
        )

    def join(*arrays: Any) -> Any:
        columns, counts, after = arrays[: len(types)], arrays[len(types)], arrays[len(types) + 1 :]
        joined = [tf.reshape(column, [-1 if full is None else full]) for column in columns]
        if full is None:
            count = tf.reduce_sum(counts)
            joined = [column[:count] for column in joined]
        joined += [positions[-1] for positions in after]
        return tuple(joined) if len(joined) > 1 else joined[0]

    def signature(
        shape: list[int | None],
        *arrays: tf.TensorSpec,
        after: tf.TensorSpec = vector,
    ) -> tuple[tf.TensorSpec, ...]:
        columns = tuple(tf.TensorSpec(shape, each) for each in types)
        return (*columns, *arrays, after) if positions else (*columns, *arrays)

    if batch_size is None:
        # Outside of the layouts, because each dataset around `unbatch` costs time for every element.
        return ahead(stepped(make, [BatchLayout(signature([None]), lambda steps, _: steps)]))
    matrix = signature([None, full])
    if not has_layouts(batch_size):
        return ahead(stepped(make, [BatchLayout(matrix, lambda steps, _: steps)]))
    return stepped(
        make,
        [
            BatchLayout(matrix, lambda steps, _: ahead(steps)),
            BatchLayout(
                signature([None, None], tf.TensorSpec([None], tf.int64)),
                lambda steps, rows: ahead(steps).batch(rows, drop_remainder=True).map(join),
            ),
            BatchLayout(
                (*signature([None], after=position), tf.TensorSpec([], tf.bool)),
                lambda steps, _: whole(steps),
            ),
        ],
    )


def record_steps(
    blocks: Iterator[list[bytes]], positions: Positions | None, columns: KeyColumns | None = None
) -> Steps:
    """Yield one step for each block: its records, their `columns`, and the position after each record.

    A step has no columns or positions if there are none.
    """
    for block in _uninterrupted(blocks):
        if isinstance(block, FailedRecord):
            yield block
            continue
        after = () if positions is None else (_vector(positions(range(len(block) - 1, -1, -1))),)
        yield _vector(block), *(() if columns is None else columns.take(len(block))), *after


def batch_steps(
    blocks: Iterator[list[bytes] | PlacedBatch],
    batch_size: int,
    *,
    drop_remainder: bool,
    positions: Positions | None,
    columns: KeyColumns | None = None,
) -> Steps:
    """Yield steps of batches or of rows; the last row of a batch has its position.

    Blocks are batches in place first, if there are any.
    """
    rows = _Rows(batch_size, positions, columns)
    kept: list[bytes] = []
    failed: list[FailedRecord] = []
    started = time.monotonic()
    for block in _uninterrupted(blocks):
        if isinstance(block, PlacedBatch):
            if rows.layout != _WHOLE_BATCHES:
                yield rows.begin(_WHOLE_BATCHES)
            yield rows.placed(block)
            continue
        kept += block
        if isinstance(block, FailedRecord):
            failed.append(block)
        layout = rows.best_layout(block)
        if (failed or layout != rows.layout) and rows.due <= len(kept):
            if rows.due:
                due = rows.due
                yield from rows.steps(kept[:due], left=len(kept) - due)
                kept = kept[due:]
            # Between two batches, because TensorFlow drops the rows of an incomplete batch at an error.
            yield from failed
            failed.clear()
            if layout != rows.layout:
                yield rows.begin(layout)
        whole = len(kept) - len(kept) % rows.width
        if block and not whole and time.monotonic() - started < PATIENCE_S:
            continue  # a row of several blocks needs one step only, if they come soon
        records, kept = kept[:whole], kept[whole:]
        yield from rows.steps(records, left=len(kept))
        started = time.monotonic()
    if not drop_remainder and (kept or rows.due):
        yield rows.last_step(kept)
    yield from failed


class _Rows:
    """The rows of the current layout; in the layout `_WHOLE` a row is a step."""

    def __init__(self, batch_size: int, positions: Positions | None, columns: KeyColumns | None) -> None:
        self._batch_size = batch_size
        self._positions = positions
        self._columns = columns
        self.layout = NewLayout(_ONE_ROW, 1)
        self.due = 0
        """Records until the end of the batch that has begun; 0 between two batches."""

    @property
    def width(self) -> int:
        """Records of a row."""
        return self._batch_size // self.layout.rows

    def best_layout(self, block: list[bytes]) -> NewLayout:
        """Return the layout for records such as those of `block`; the current one if no other is better."""
        size, now = self._batch_size, self.layout
        small = now.layout == _ONE_ROW and size * BLOCK_BYTES < len(block) * WHOLE_BYTES
        if not block or size <= FEW or small:
            return now  # found without the sum, which takes long for small records
        mean = sum(map(len, block)) / len(block)
        most = LARGE_BYTES / WIDER if now.layout == _SEVERAL else LARGE_BYTES
        if size * mean > most:
            widths = [width for width in _divisors(size) if width == 1 or width * mean <= LARGE_BYTES]
            width = min(widths, key=lambda width: abs(math.log(width * mean / ROW_BYTES)))
            better = width < self.width or width >= WIDER * self.width
            return NewLayout(_SEVERAL, size // width) if better else now
        least = WHOLE_BYTES / WIDER if now.layout == _WHOLE else WHOLE_BYTES
        return _WHOLE_BATCHES if size * mean >= least else NewLayout(_ONE_ROW, 1)

    def begin(self, layout: NewLayout) -> NewLayout:
        """Begin the rows of `layout`, between two batches."""
        self.layout = layout
        return layout

    def steps(self, records: list[bytes], *, left: int) -> Iterator[Step]:
        """Yield whole rows: each as a step, with which they leave the list, or all as one.

        `left`: number of further records in the last block.
        """
        size, total = self._batch_size, left + len(records)
        if self.layout.layout == _WHOLE:
            if not records:
                yield self._whole_list([], None)
            while records:
                # Nothing here keeps the records of a step, so they are freed when TensorFlow has copied them.
                yield self._whole_list(_taken(records, size), left + len(records))
            return
        ends = range((self.due or size), len(records) + 1, size)
        self.due = (self.due - len(records)) % size
        last = [end // self.width - 1 for end in ends]
        counts = [self.width] * (len(records) // self.width)
        yield self._matrix(records, self.width, counts, last, [total - end for end in ends])

    def last_step(self, records: list[bytes]) -> Step:
        """Return the step that completes the epoch's last batch with `records` and empty strings."""
        if self.layout.layout == _WHOLE:
            return self._whole_list(records, 0)
        if self.layout.layout == _ONE_ROW:
            return self._matrix(records, len(records), [], [0], [0])
        due = self.due or self._batch_size
        rows = due // self.width
        counts = [len(records)] + [0] * (rows - 1)
        return self._matrix(records, self.width, counts, [rows - 1], [0], size=due)

    def placed(self, batch: PlacedBatch) -> Step:
        """Return the step of a batch in place."""
        return self._whole(len(batch), batch.take(), 0)

    def _whole_list(self, batch: list[bytes], left: int | None) -> Step:
        return self._whole(len(batch), _vector(batch), left)

    def _whole(self, count: int, batch: Any, left: int | None) -> Step:
        """`left`: number of records of the block after the batch of `count`; None without a batch."""
        arrays: Step = (batch, *self._keys(count))
        if self._positions is not None:
            after = [b""] if left is None else self._positions([left])
            arrays += (np.array(after[0], dtype=object),)
        return *arrays, np.bool_(left is not None)

    def _matrix(  # noqa: PLR0917 - the parts of a step
        self,
        records: list[bytes],
        width: int,
        counts: list[int],
        ends: list[int],
        lefts: list[int],
        size: int | None = None,
    ) -> Step:
        """`ends`: last rows of batches. `lefts`: number of records of the block after each of them.

        `size`: number of strings, if more than the records; the last ones are empty.
        """
        columns = self._keys(len(records), size)
        if size is not None:
            records = records + [b""] * (size - len(records))
        columns = (_vector(records), *columns)
        arrays: Step = tuple(column.reshape(-1, width) for column in columns)
        matrix = arrays[0]
        if self.layout.layout == _SEVERAL:
            arrays += (np.array(counts, np.int64),)
        if self._positions is not None:
            after = np.full(len(matrix), b"", dtype=object)
            for end, position in zip(ends, self._positions(lefts), strict=True):
                after[end] = position
            arrays += (after,)
        return arrays

    def _keys(self, count: int, size: int | None = None) -> Step:
        """Return the columns of the next records; none without keys."""
        return () if self._columns is None else self._columns.take(count, size)


def _taken(records: list[bytes], count: int) -> list[bytes]:
    """Remove the first `count` records from the list and return them."""
    first = records[:count]
    del records[:count]
    return first


@functools.lru_cache(maxsize=16)
def _divisors(number: int) -> list[int]:
    low = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*low, *(number // divisor for divisor in low)})


def _uninterrupted(blocks: Iterator[T]) -> Iterator[T]:
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
