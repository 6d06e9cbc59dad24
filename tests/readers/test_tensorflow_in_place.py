"""Batches of `PipeModeDataset` whose records stay where the FIFO was read into."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from streamer.formats import tfrecord
from streamer.units import KIB, MIB
from tests.kit.late import LATE
from tests.readers.feeder import Feeder

if LATE:
    import numpy as np
    import tensorflow as tf

    from streamer.readers.tensorflow import PipeModeDataset, in_place
    from streamer.readers.tensorflow.foreign import KEPT_SLOTS, SlotPool, tensor_functions

SIZE = 70
"""Records of a batch: more than `batches.FEW`."""


def encoded(records: list[bytes]) -> bytes:
    return b"".join(map(tfrecord.encode, records))


def batches_of(records: list[bytes]) -> list[list[bytes]]:
    return [records[start : start + SIZE] for start in range(0, len(records), SIZE)]


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> SlotPool:
    """An empty pool; batches of 128 KiB are made in place."""
    pool = SlotPool()
    monkeypatch.setattr(in_place, "POOL", pool)
    monkeypatch.setattr(in_place, "LEAST_BYTES", 128 * KIB)
    return pool


def is_empty(pool: SlotPool) -> bool:
    return " in 0 slots" in repr(pool)


def random_records(seed: int, lengths: list[int]) -> list[bytes]:
    draw = random.Random(seed)
    return [draw.randbytes(draw.choice(lengths)) for _ in range(6 * SIZE + 11)]


@pytest.mark.parametrize("drop_remainder", [False, True])
@pytest.mark.parametrize(
    "lengths",
    [
        [4000],
        [0, 1, 14, 15, 22, 23, 9000],
        [3000, 3001],
        [*[4000] * 200, 4001],
        [0, 50_000, 70_000],
        [*[5000] * 9, 900_000],
    ],
)
def test_any_lengths(feeder: Feeder, pool: SlotPool, lengths: list[int], drop_remainder: bool) -> None:
    """Batches are compared after all of them have come, when their slots could have been used again."""
    records = random_records(1, lengths)
    feeder.feed(0, encoded(records))
    dataset = PipeModeDataset("train", "TFRecord", batch_size=SIZE, drop_remainder=drop_remainder)
    due = batches_of(records)[: -1 if drop_remainder else None]
    assert [batch.numpy().tolist() for batch in list(dataset)] == due
    assert not is_empty(pool)


@pytest.mark.usefixtures("pool")
def test_strings_that_leave_a_batch_are_copies(feeder: Feeder) -> None:
    """Their batches are dropped, and other batches take the slots."""
    records = random_records(2, [4000])
    feeder.feed(0, encoded(records))
    dataset = PipeModeDataset("train", "TFRecord", batch_size=SIZE, drop_remainder=True)
    one_by_one = dataset.map(lambda batch: tf.gather(batch, [SIZE - 1, 0])).unbatch().batch(2)
    due = [[batch[-1], batch[0]] for batch in batches_of(records)[:-1]]
    assert [batch.numpy().tolist() for batch in list(one_by_one)] == due


@pytest.mark.usefixtures("pool")
@pytest.mark.parametrize("count", [8, 64])
def test_strings_that_leave_a_part_of_a_batch_are_copies(feeder: Feeder, count: int) -> None:
    """TensorFlow would move them out of a part that shares a batch's memory, and free them as its own."""
    records = random_records(9, [4000])
    feeder.feed(0, encoded(records))
    dataset = PipeModeDataset("train", "TFRecord", batch_size=SIZE, drop_remainder=True)
    due = [record for batch in batches_of(records)[:-1] for record in batch[:count]]
    parts = dataset.map(lambda batch: batch[:count])
    assert [record.numpy() for record in list(parts.unbatch())] == due
    feeder.feed(1, encoded(records))
    pairs = parts.rebatch(count // 2).batch(2, drop_remainder=True)
    assert [record for pair in pairs.as_numpy_iterator() for record in pair.ravel().tolist()] == due


@pytest.mark.parametrize("lengths", [[3000, 3001], [*[4000] * 200, 10]])
def test_positions_and_keys(feeder: Feeder, pool: SlotPool, lengths: list[int]) -> None:
    """From a position the epoch goes on in batches of the same size, which are in place again, or of another.

    Objects have 100 records, and the last ones are too small to be in place.
    """
    records = random_records(10, lengths) + random_records(11, [0, 20])
    frames = list(map(tfrecord.encode, records))
    objects = [frames[start : start + 100] for start in range(0, len(frames), 100)]
    keys = [(f"k{index}", number) for index, each in enumerate(objects) for number in range(len(each))]
    data = b"".join(frames)

    def offer(offset: int = 0) -> Any:
        feeder.list_keys([(sum(map(len, each)), f"k{index}") for index, each in enumerate(objects)])
        return feeder.feed(0, data[offset:], total=len(data), bytes_skipped=offset)

    def rows(found: list[Any]) -> list[Any]:
        columns = [(each.record.numpy(), each.key.numpy(), each.number.numpy()) for each, _ in found]
        return [
            (record, (key.decode(), number))
            for each in columns
            for record, key, number in zip(*each, strict=True)
        ]

    options: dict[str, Any] = {"positions": True, "key": True}
    offer()
    found = list(PipeModeDataset("train", "TFRecord", batch_size=SIZE, **options))
    due = list(zip(records, keys, strict=True))
    assert rows(found) == due
    slots = int(repr(pool).split(" in ")[1].split()[0])
    assert slots >= 6  # one for each batch that is still here
    for index, size in ((0, SIZE), (2, SIZE), (2, SIZE + 3), (len(found) - 2, SIZE)):
        state = json.loads(found[index][1].numpy())
        offer(state["offset"])
        rest = list(PipeModeDataset("train", "TFRecord", batch_size=size, start=state, **options))
        assert rows(rest) == due[(index + 1) * SIZE :]


@pytest.mark.parametrize("length", [10, 1000])
def test_small_batches_are_not_in_place(feeder: Feeder, pool: SlotPool, length: int) -> None:
    """The first block decides. Its slot is free again."""
    records = random_records(3, [length])
    feeder.feed(0, encoded(records))
    dataset = PipeModeDataset("train", "TFRecord", batch_size=SIZE)
    assert [batch.tolist() for batch in dataset.as_numpy_iterator()] == batches_of(records)
    assert "in 1 slots, 1 of them free" in repr(pool)


@pytest.mark.usefixtures("pool")
def test_records_that_become_small(feeder: Feeder) -> None:
    """Another reader goes on between two records, and in the middle of a batch."""
    records = random_records(4, [4000]) + random_records(5, [0, 20]) + random_records(6, [3000])
    feeder.feed(0, encoded(records))
    dataset = PipeModeDataset("train", "TFRecord", batch_size=SIZE)
    assert [batch.tolist() for batch in dataset.as_numpy_iterator()] == batches_of(records)


@pytest.mark.usefixtures("pool")
@pytest.mark.parametrize(
    ("at", "damage"),
    [
        *((at, damage) for at in (0, 2 * SIZE + 3) for damage in ("data", "length", "cut")),
        (2 * SIZE, "data"),
        (3 * SIZE - 1, "data"),
    ],
)
def test_damage(feeder: Feeder, at: int, damage: str) -> None:
    """The whole batches before it come first; its error states its place. Corrupt data can be skipped."""
    records = random_records(7, [4000])
    before, bad = encoded(records[:at]), bytearray(tfrecord.encode(bytes(4000)))
    bad[{"data": -1, "length": 3, "cut": 0}[damage]] ^= damage != "cut"
    rest = encoded(records[at:])
    data = before + (bytes(bad[:100]) if damage == "cut" else bytes(bad) + rest)
    feeder.feed(0, data)
    got: list[list[bytes]] = []
    dataset = PipeModeDataset("train", "TFRecord", batch_size=SIZE)
    with pytest.raises(tf.errors.InternalError, match=f"offset {len(before)}\\b"):
        got.extend(batch.tolist() for batch in dataset.as_numpy_iterator())
    assert got == batches_of(records[: at - at % SIZE])
    if damage == "data":
        feeder.feed(1, data)
        skipping = PipeModeDataset("train", "TFRecord", batch_size=SIZE, max_corrupted_records_to_skip=1)
        assert [batch.tolist() for batch in skipping.as_numpy_iterator()] == batches_of(records)
        assert [offset for _, offset in skipping.skipped.positions] == [len(before)]


@pytest.mark.usefixtures("pool")
def test_a_dead_sidecar_is_no_end(feeder: Feeder) -> None:
    """Even where the bytes end with a record."""
    records = random_records(8, [4000])
    feeder.feed(0, encoded(records), state="open", total=10 * MIB)
    got: list[list[bytes]] = []
    dataset = PipeModeDataset("train", "TFRecord", batch_size=SIZE)
    with pytest.raises(tf.errors.DataLossError, match="TruncatedStream"):
        got.extend(batch.tolist() for batch in dataset.as_numpy_iterator())
    assert got == batches_of(records)[:-1]


# Slots


def place(pool: SlotPool, size: int = MIB) -> tf.Tensor:
    """A tensor of one string in a slot."""
    functions = tensor_functions()
    assert functions is not None
    return pool.take(size).lend(functions, np.array([100]), np.array([size - 101]))


def test_a_slot_is_used_again_once_no_tensor_needs_it() -> None:
    pool = SlotPool()
    tensor = place(pool)
    part = tensor[0]
    del tensor
    place(pool)
    assert part.numpy() == bytes(MIB - 101)
    del part
    assert repr(pool) == "<SlotPool of 2 MiB in 2 slots, 2 of them free>"
    place(pool, 3 * MIB)
    assert repr(pool) == "<SlotPool of 4 MiB in 2 slots, 2 of them free>"


def test_few_free_slots_stay() -> None:
    pool = SlotPool()
    tensors = [place(pool, 60 * MIB) for _ in range(6)]
    assert repr(pool) == "<SlotPool of 360 MiB in 6 slots, 0 of them free>"
    tensors.clear()
    place(pool)
    assert repr(pool) == f"<SlotPool of {60 * (KEPT_SLOTS + 1)} MiB in 3 slots, 3 of them free>"
