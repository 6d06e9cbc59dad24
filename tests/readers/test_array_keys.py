"""`key=True` of `TokenReader`, `TableReader` and `TableIterableDataset`: arrays with their objects."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from sidecar.job.resume import parse_saved
from streamer.errors import ChannelError, CorruptRecord, CutRecord, RecordTooLarge
from streamer.readers import PipeReader, SkipPolicy
from streamer.readers.tables import TableReader
from streamer.readers.token_blocks import ARRAY_BYTES
from streamer.readers.tokens import TokenReader
from tests.kit.late import LATE
from tests.readers.test_skipping import lines
from tests.readers.test_table_reader import FORMS, Form, wrapped
from tests.readers.test_table_skipping import BAD, feed, plain, table
from tests.readers.test_tokens import tokens

if LATE:
    from torch.utils.data import DataLoader

    from streamer.readers.table_dataset import TableIterableDataset

if TYPE_CHECKING:
    from pathlib import Path

    from tests.readers.feeder import Feeder

LENGTH = 100
BLOCK = 2 * LENGTH
MANY = ARRAY_BYTES // BLOCK + 40
WRONG = 60_000
SIZES = [3 * BLOCK, 0, 50, BLOCK, MANY * BLOCK, BLOCK - 50]
"""Bytes of objects, of which three begin inside a block, and one has no block's begin."""


def due_keys(sizes: list[int], block: int, first: int = 0) -> list[tuple[str, int, str]]:
    """The keys of all blocks from byte `first` on, by the definition."""
    borders = np.cumsum([0, *sizes])
    found = []
    for number, (begin, end) in enumerate(pairwise(borders.tolist())):
        # Blocks of this grid that begin in the object, also those before `first`.
        starts = [start for start in range(first % block, end, block) if begin <= start]
        found += [(f"k{number}", n, "b") for n, start in enumerate(starts) if start >= first]
    return found


def offer(feeder: Feeder, data: Any, sizes: list[int] = SIZES) -> None:
    feeder.list_keys([(size, f"k{number}") for number, size in enumerate(sizes)])
    feeder.feed(0, data.tobytes())


def reader(**options: Any) -> TokenReader:
    return TokenReader("train", "uint16", **({"length": LENGTH, "epoch": 0, "key": True} | options))


def keys_of(elements: Any) -> list[tuple[str, int, str]]:
    found = []
    for _, key, number, bucket in elements:
        if isinstance(key, str):
            found.append((key, number, bucket))
        else:
            found += zip(key, number.tolist(), bucket, strict=True)
    return found


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("batch_size", [None, 7])
def test_blocks_have_the_object_in_which_they_begin(
    feeder: Feeder, overlap: bool, batch_size: int | None
) -> None:
    """And from any state on; also for blocks of another length, which the state does not know."""
    sizes = [*SIZES[:-1], SIZES[-1] + 2 * overlap]
    data = tokens(sum(sizes) // 2)
    offer(feeder, data, sizes)
    first, states = reader(overlap=overlap, batch_size=batch_size), []
    elements = []
    for element in first:
        elements.append(element)
        states.append(first.state_dict())
    due = due_keys(sizes, BLOCK)[: len(data) // LENGTH]
    assert keys_of(elements) == due
    rows = [row.tolist() for element in elements for row in np.atleast_2d(element.record)]
    assert rows == [data[at : at + LENGTH + overlap].tolist() for at in range(0, len(data) - overlap, LENGTH)]
    step = batch_size or 1
    for at in {0, 2, 20 // step, MANY // step}:
        offer(feeder, data, sizes)
        again = reader(overlap=overlap, batch_size=batch_size)
        again.load_state_dict(json.loads(json.dumps(states[at])))
        assert keys_of(again) == due[(at + 1) * step :]
    offer(feeder, data, sizes)
    other = reader(length=60, drop_remainder=True)
    other.load_state_dict(states[1])
    found = keys_of(other)
    assert found == due_keys(sizes, 120, 2 * step * BLOCK)[: len(found)]
    assert len(found) == (len(data) - 2 * step * LENGTH) // 60


def test_records_of_a_fixed_size_need_no_number_in_the_state(feeder: Feeder) -> None:
    data = tokens(sum(SIZES) // 2)
    feed = feeder.feed(0, data.tobytes())
    before = PipeReader("train", f"fixed:{BLOCK}", epoch=0)
    batches = before.batches()
    taken = len(next(batches))
    state = before.state_dict()
    del batches
    feed.join()
    offer(feeder, data)
    again = PipeReader("train", f"fixed:{BLOCK}", epoch=0, key=True)
    again.load_state_dict(state)
    assert [each[1:] for each in again] == due_keys(SIZES, BLOCK)[taken:]


def test_errors_of_blocks_name_them(feeder: Feeder) -> None:
    data = tokens(sum(SIZES) // 2)
    data[6 * LENGTH + 1] = WRONG  # 4,450 / 100
    offer(feeder, data)
    got: list[Any] = []
    with pytest.raises(CorruptRecord, match=r"token 60000 at offset 1202 .*; it is record 1 of s3://b/k4$"):
        got.extend(reader(vocabulary=50_000))
    assert keys_of(got) == due_keys(SIZES, BLOCK)[:6]
    offer(feeder, tokens(sum(SIZES) // 2 + 3), [*SIZES, 6])
    with pytest.raises(CutRecord, match=r"6 bytes are left .*; it is record 0 of s3://b/k6$"):
        list(reader())
    feeder.feed(1, data.tobytes())
    with pytest.raises(ChannelError, match="set RecordKeys: true"):
        list(TokenReader("train", "uint16", length=LENGTH, epoch=1, key=True))


@pytest.mark.parametrize("batch_size", [None, 7])
def test_a_block_in_the_place_of_a_corrupt_one_has_its_own_key(
    feeder: Feeder, tmp_path: Path, batch_size: int | None
) -> None:
    data = tokens(sum(SIZES) // 2)
    second = ARRAY_BYTES // (BLOCK * (batch_size or 1)) * (batch_size or 1)
    bad = [0, 4, 5, second]
    for place in bad:
        data[place * LENGTH + 9] = WRONG
    offer(feeder, data)
    quarantine = tmp_path / "bad"
    skipping = reader(
        batch_size=batch_size, vocabulary=50_000, skip=SkipPolicy(records=4, quarantine=quarantine)
    )
    due = due_keys(SIZES, BLOCK)
    assert [(line["key"], line["record"]) for line in lines(quarantine)] == []
    found = keys_of(skipping)
    assert [(line["key"], line["record"]) for line in lines(quarantine)] == [due[at][:2] for at in bad]
    for place, source in zip(bad, (1, 3, 3, second - 1), strict=True):
        due[place] = due[source]
    assert found == due


def rows_of(batches: Any) -> list[tuple[Any, ...]]:
    """Each row with its object, and its number in the table."""
    return [
        (row, key, number, bucket, first + at)
        for batch, key, number, bucket, first in batches
        for at, row in enumerate(batch["n"].to_pylist())
    ]


TABLES = [table(0), table(100, 0), table(100, 30), table(130, 90)]
DUE = [
    (row, f"k{number}", 0, "b", at)
    for number, each in enumerate(TABLES)
    for at, row in enumerate(each["n"].to_pylist())
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("skip", [None, SkipPolicy(objects=1)])
def test_batches_have_their_object_and_first_row(feeder: Feeder, form: Form, skip: SkipPolicy | None) -> None:
    """And from any state on, with batches of another size."""
    objects = list(map(form, TABLES))
    feed(feeder, *objects)
    first, states, returned = TableReader("train", batch_rows=40, epoch=0, key=True, skip=skip), [], 0
    batches = []
    for batch in first:
        batches.append(batch)
        returned += batch.batch.num_rows
        states.append((first.state_dict(), returned))
    assert rows_of(batches) == DUE
    for state, rows in states[:-1]:
        assert set(parse_saved(json.dumps(state))) == {"train"}
        feed(feeder, *objects)
        again = TableReader("train", batch_rows=33, epoch=0, key=True, skip=skip)
        again.load_state_dict(json.loads(json.dumps(state)))
        assert rows_of(again) == DUE[rows:]


@pytest.mark.parametrize("skip", [None, SkipPolicy(objects=1)])
def test_tables_in_one_object_are_numbered(feeder: Feeder, skip: SkipPolicy | None) -> None:
    """Objects that are RecordIO files. A state without numbers is refused inside an object."""
    files = [wrapped(plain(table(0)), plain(table(100))), wrapped(plain(table(200)))]
    due = [(row, f"k{row // 200}", row // 100 % 2, "b", row % 100) for row in range(300)]

    def offer_files() -> None:
        feeder.list_keys([(len(each), f"k{number}") for number, each in enumerate(files)])
        feeder.feed(0, b"".join(files))

    offer_files()
    first = TableReader("train", epoch=0, key=True, skip=skip)
    batches = iter(first)
    got = rows_of([next(batches) for _ in range(2)])
    state = first.state_dict()
    assert got + rows_of(batches) == due
    offer_files()
    again = TableReader("train", epoch=0, key=True, skip=skip)
    again.load_state_dict(state)
    assert rows_of(again) == due[len(got) :]
    state["channels"][0]["offset"], state["channels"][0]["skip"] = len(wrapped(plain(table(0)))), 0
    state["channels"][0].pop("number", None)
    offer_files()
    again.load_state_dict(state)
    with pytest.raises(ChannelError, match="save states with key=True"):
        list(again)


def test_errors_of_tables_name_their_object(feeder: Feeder) -> None:
    feed(feeder, plain(table(0)), BAD)
    got: list[Any] = []
    with pytest.raises(
        CorruptRecord, match=r"^object 1 of epoch 0 .* as Parquet: .*; it is record 0 of s3://b/k1$"
    ):
        got.extend(TableReader("train", batch_rows=50, key=True))
    assert rows_of(got)[-1] == (149, "k1", 0, "b", 49)
    both: list[dict[str, Any]] = [{"key": True}, {"skip": SkipPolicy(objects=1)}]
    for epoch, options in zip((1, 3), both, strict=True):
        feed(feeder, plain(table(0)), plain(table(0, 9000)), epoch=epoch)
        with pytest.raises(RecordTooLarge, match=r"takes 5000 at most.*; it is record 0 of s3://b/k1$"):
            list(TableReader("train", epoch=epoch, max_object_bytes=5000, **options))
    feeder.feed(2, wrapped(plain(table(0))))
    with pytest.raises(ChannelError, match="set RecordKeys: true"):
        list(TableReader("train", key=True, epoch=2))


@pytest.mark.parametrize("workers", [0, 1])
def test_tables_in_a_data_loader_have_their_object(feeder: Feeder, workers: int) -> None:
    feed(feeder, *map(plain, TABLES))
    dataset = TableIterableDataset("train", key=True, batch_rows=40, **feeder.directories)
    loaded = list(DataLoader(dataset, batch_size=None, num_workers=workers, collate_fn=lambda batch: batch))
    assert rows_of(loaded) == DUE
    feed(feeder, plain(table(0)), BAD, epoch=1)
    with pytest.raises(CorruptRecord, match=r"; it is record 0 of s3://b/k1"):
        list(dataset)
