"""`batch_size` of `PipeModeDataset`: batches of one row and of several, and changes between them."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from streamer.formats import tfrecord
from streamer.readers.core.position import ReaderPosition
from streamer.units import MIB
from tests.kit.frames import spoilt
from tests.kit.late import LATE
from tests.readers.feeder import Feeder

if LATE:
    import tensorflow as tf

    from streamer.readers.tensorflow import PipeModeDataset, batches, in_place
    from streamer.readers.tensorflow.batches import (
        LARGE_BYTES,
        ROW_BYTES,
        WHOLE_BYTES,
        batch_steps,
        elements,
    )
    from streamer.readers.tensorflow.steps import NewLayout

LARGE = [b"%d." % number * 20_000 for number in range(130)]
SMALL = [b"%d" % number for number in range(1500)]
MIXED = SMALL + LARGE + SMALL + LARGE[:77] + [b"", b"last\0"]
"""Batches of 48 and more are large among the large records, and one row each among the small ones."""


@pytest.fixture(params=["several rows", "whole", "in place"])
def small_rows(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Batches of 1 MiB have several rows, or are steps of their own, so that a test needs little data."""
    monkeypatch.setattr(batches, "FEW", 2)
    monkeypatch.setattr(in_place, "LEAST_BYTES", MIB if request.param == "in place" else 1 << 62)
    if request.param == "whole":
        monkeypatch.setattr(batches, "WHOLE_BYTES", MIB)
    else:
        monkeypatch.setattr(batches, "LARGE_BYTES", MIB)


def encoded(records: list[bytes]) -> bytes:
    return b"".join(map(tfrecord.encode, records))


def batches_of(records: list[bytes], size: int) -> list[list[bytes]]:
    return [records[start : start + size] for start in range(0, len(records), size)]


def until_error(dataset: Any, error: Any) -> tuple[list[list[bytes]], str]:
    got: list[list[bytes]] = []
    with pytest.raises(error) as raised:
        got.extend(batch.tolist() for batch in dataset.as_numpy_iterator())
    text = str(raised.value)
    # The error's frames have the iterator, and one of them the error: it would keep the FIFO open.
    del raised
    return got, text


def taken_steps(blocks: list[list[bytes]], size: int) -> Iterator[tuple[NewLayout, Any]]:
    """The steps for `blocks`, each with its layout."""
    layout = NewLayout(0, 1)
    for step in batch_steps(iter(blocks), size, drop_remainder=False, positions=None):
        if isinstance(step, NewLayout):
            layout = step
        else:
            yield layout, step


@pytest.mark.usefixtures("small_rows")
@pytest.mark.parametrize(("size", "drop_remainder"), [(1, False), (48, True), (211, False), (1000, True)])
def test_records_of_mixed_sizes(feeder: Feeder, size: int, drop_remainder: bool) -> None:
    """211 is a prime, so a row of a large batch is one record."""
    for epoch in range(2):
        feeder.feed(epoch, encoded(MIXED))
    dataset = PipeModeDataset("train", "TFRecord", batch_size=size, drop_remainder=drop_remainder)
    assert dataset.element_spec == tf.TensorSpec([size if drop_remainder else None], tf.string)
    due = batches_of(MIXED, size)
    if drop_remainder and len(due[-1]) < size:
        due.pop()
    assert [batch.tolist() for batch in dataset.repeat(2).as_numpy_iterator()] == due * 2


@pytest.mark.usefixtures("small_rows")
@pytest.mark.parametrize("count", [len(LARGE), 96, 95])
def test_the_last_batch_of_several_rows(feeder: Feeder, count: int) -> None:
    """Full, one record short, or with records in its first row only."""
    feeder.feed(0, encoded(LARGE[:count]))
    dataset = PipeModeDataset("train", "TFRecord", batch_size=96)
    assert [batch.tolist() for batch in dataset.as_numpy_iterator()] == batches_of(LARGE[:count], 96)


@pytest.mark.usefixtures("small_rows")
@pytest.mark.parametrize("size", [48, 211])
def test_positions_of_several_rows(feeder: Feeder, size: int) -> None:
    """Each batch has the position after its last record; an epoch resumed there has the rest."""
    data = encoded(MIXED)
    left = feeder.feed(0, data)
    dataset = PipeModeDataset("train", "TFRecord", batch_size=size, positions=True)
    got = [(batch.tolist(), json.loads(position)) for batch, position in dataset.as_numpy_iterator()]
    left.join()
    assert [batch for batch, _ in got] == batches_of(MIXED, size)
    assert [state["records"] for _, state in got[:-1]] == [size * (n + 1) for n in range(len(got) - 1)]
    assert got[-1][1] == ReaderPosition("train", 1).state()
    middle = len(SMALL) // size + 1  # the first batch that ends among the large records
    state = got[middle][1]
    feeder.feed(0, data[state["offset"] :], total=len(data), bytes_skipped=state["offset"])
    rest = PipeModeDataset("train", "TFRecord", batch_size=size, start=state)
    assert [batch.tolist() for batch in rest.as_numpy_iterator()] == batches_of(
        MIXED[size * (middle + 1) :], size
    )


@pytest.mark.usefixtures("small_rows")
def test_rows_of_a_dead_sidecar_are_no_end(feeder: Feeder) -> None:
    """Whole batches before the cut are delivered; what is left of the last one is not."""
    data = encoded(LARGE)
    feeder.feed(0, data[:-1], state="open", total=len(data))
    dataset = PipeModeDataset("train", "TFRecord", batch_size=48)
    got, text = until_error(dataset, tf.errors.DataLossError)
    assert "TruncatedStream" in text
    assert got == batches_of(LARGE[:96], 48)


@pytest.mark.usefixtures("small_rows")
def test_a_corrupt_record_after_whole_batches(feeder: Feeder) -> None:
    feeder.feed(0, encoded(LARGE[:100]) + spoilt(b"x") + encoded(LARGE))
    dataset = PipeModeDataset("train", "TFRecord", batch_size=48)
    got, text = until_error(dataset, tf.errors.InternalError)
    assert "CorruptRecord" in text
    assert got == batches_of(LARGE[:96], 48)


@pytest.mark.usefixtures("small_rows")
def test_leaving_in_the_middle_of_a_batch_lets_go_of_the_fifo(feeder: Feeder) -> None:
    feed = feeder.feed(0, encoded(LARGE * 3))
    assert len(list(PipeModeDataset("train", "TFRecord", batch_size=48).take(1))) == 1
    feed.join()
    assert feed.reader_gone


@pytest.mark.parametrize(("length", "size"), [(40_000, 4093), (40_000, 4096), (100_000, 1024)])
def test_a_large_batch_is_not_made_in_python(length: int, size: int) -> None:
    """A step has a block and at most a row more, however large the batch is. 4093 is a prime."""
    records = [bytes(length)] * (2 * size)
    blocks = batches_of(records, MIB // length)
    steps = list(taken_steps(blocks, size))
    rows = [array[0].shape[1] * length for _, array in steps]
    assert max(rows) <= 2 * ROW_BYTES
    assert max(array[0].size for _, array in steps) * length <= MIB + max(rows)
    assert sum(array[0].size for _, array in steps) == len(records)


@pytest.mark.parametrize(("length", "size"), [(200, 1024), (8192, 128), (100_000, 64), (30 * MIB, 1)])
def test_a_small_batch_is_one_row(length: int, size: int) -> None:
    blocks = batches_of([bytes(length)] * 64, max(1, MIB // length))
    assert {layout for layout, _ in taken_steps(blocks, size)} == {NewLayout(0, 1)}
    assert length * size <= LARGE_BYTES


@pytest.mark.parametrize(("length", "size"), [(8192, 1024), (100_000, 300), (30_000, 1000)])
def test_a_batch_between_is_one_step(length: int, size: int) -> None:
    blocks = batches_of([bytes(length)] * (2 * size + 1), MIB // length)
    steps = list(taken_steps(blocks, size))
    assert {layout for layout, _ in steps} == {NewLayout(2, 1)}
    assert [array[0].shape for _, array in steps if array[0].size] == [(size,), (size,), (1,)]
    assert WHOLE_BYTES <= length * size <= LARGE_BYTES


def test_a_step_of_one_batch_leaves_no_record_in_python() -> None:
    """While the consumer has the batch, Python has only the records after it."""
    blocks = ([bytes([number]) * 5000 for number in range(100)] for _ in range(21))
    steps = batch_steps(blocks, 1000, drop_remainder=False, positions=None)
    record = next(step for step in steps if not isinstance(step, NewLayout))[0][0]
    assert sys.getrefcount(record) == 2  # of the name and of the argument


@pytest.mark.usefixtures("small_rows")
def test_a_pause_in_a_batch_adds_no_element() -> None:
    """A step without records, while no bytes come, is no batch."""
    records = LARGE[:100]
    blocks = [[], *batches_of(records[:60], 7), [], [], *batches_of(records[60:], 7), []]
    dataset = elements(
        lambda: batch_steps(iter(blocks), 48, drop_remainder=False, positions=None),
        48,
        drop_remainder=False,
        positions=False,
    )
    assert [batch.tolist() for batch in dataset.as_numpy_iterator()] == batches_of(records, 48)


@pytest.mark.usefixtures("small_rows")
@pytest.mark.parametrize("size", [1, 7, 60, 128])
def test_any_blocks_and_any_size(size: int) -> None:
    """Steps in random order of sizes, joined by the real datasets."""
    draw = random.Random(size)
    blocks: list[list[bytes]] = []
    for _ in range(30):
        length = draw.choice([0, 10, 3000, 200_000])
        count = draw.choice([0, 1, 5, max(1, min(300, MIB // (length or 1)))])
        blocks.append([draw.randbytes(draw.randint(0, length)) for _ in range(count)])
    records = [record for block in blocks for record in block]
    dataset = elements(
        lambda: batch_steps(iter(blocks), size, drop_remainder=False, positions=None),
        size,
        drop_remainder=False,
        positions=False,
    )
    assert [batch.tolist() for batch in dataset.as_numpy_iterator()] == batches_of(records, size)


@pytest.mark.parametrize(("large", "ahead"), [(4 * MIB, 700), (None, 2 * 1024 + 100)])
def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch, large: int | None, ahead: int) -> None:
    """The reader is a few steps before the consumer: less than a batch in rows, or two whole batches."""
    monkeypatch.setattr(batches, "LARGE_BYTES", large or LARGE_BYTES)
    blocks = batches_of([bytes(10_000)] * 8000, 100)
    seen = 0

    def counted() -> Iterator[list[bytes]]:
        nonlocal seen
        for block in blocks:
            seen += len(block)
            yield block

    dataset = elements(
        lambda: batch_steps(counted(), 1024, drop_remainder=False, positions=None),
        1024,
        drop_remainder=False,
        positions=False,
    )
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False  # one batch more, of TensorFlow's own
    iterator = iter(dataset.with_options(options))
    for number in range(1, 4):
        assert len(next(iterator)) == 1024
        assert seen <= 1024 * number + ahead
