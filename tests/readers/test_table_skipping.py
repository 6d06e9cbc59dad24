"""Tables that cannot be decoded are left out whole, within a budget, listed, and counted as consumed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from sidecar.job.resume import parse_saved
from streamer.errors import ChannelError, CorruptRecord, RecordTooLarge
from streamer.readers import SkipPolicy
from streamer.readers.tables import TableReader
from tests.readers.test_skipping import ORDER, lines
from tests.readers.test_table_reader import FORMS, Form, as_parquet, as_stream, wrapped

if TYPE_CHECKING:
    from pathlib import Path

    from tests.readers.feeder import Feeder


def table(first: int, rows: int = 100) -> pa.Table:
    return pa.table({"n": pa.array(range(first, first + rows), pa.int64())})


def plain(content: pa.Table) -> bytes:
    """Parquet without encodings, in row groups of 50, with checksums of pages."""
    sink = pa.BufferOutputStream()
    options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    parquet.write_table(content, sink, row_group_size=50, **options)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def damaged(content: pa.Table, row: int) -> bytes:
    """Parquet whose page with this row does not match its checksum; the index is good."""
    data = bytearray(plain(content))
    data[data.index(content["n"][row].as_py().to_bytes(8, "little"))] ^= 1
    return bytes(data)


def numbers(batches: Any) -> list[int]:
    return [each for batch in batches for each in batch["n"].to_pylist()]


def feed(feeder: Feeder, *objects: bytes, epoch: int = 0, keys: bool = True, **more: Any) -> None:
    if keys:
        listed = [(len(wrapped(each)), f"k{number}") for number, each in enumerate(objects)]
        feeder.list_keys(listed, epoch=epoch, channel=more.get("channel", "train"))
    feeder.feed(epoch, wrapped(*objects), **more)


BAD = damaged(table(100), 90)
OBJECTS = [plain(table(0)), BAD, plain(table(200)), b"a,b\n1,2\n", plain(table(300)), b""]
GOOD = [*range(100), *range(200, 400)]


@pytest.mark.parametrize("keys", [False, True])
def test_a_damaged_object_gives_no_row_and_is_listed(feeder: Feeder, tmp_path: Path, *, keys: bool) -> None:
    """Its first row group is good, and is left out too."""
    feed(feeder, *OBJECTS, keys=keys)
    quarantine = tmp_path / "bad"
    reader = TableReader("train", batch_rows=30, skip=SkipPolicy(objects=3, quarantine=quarantine))
    assert numbers(reader) == GOOD
    assert (reader.skipped.records, reader.skipped.objects) == (0, 3)
    found = lines(quarantine)
    for line, number in zip(found, (1, 3, 5), strict=True):
        assert line["skipped"] == "object"
        assert line["offset"] == len(wrapped(*OBJECTS[:number]))
        place = ("b", f"k{number}", 0) if keys else (None, None, None)
        assert (line["bucket"], line["key"], line["record"]) == place
        assert line["reason"].startswith(f"object {number} of epoch 0 of channel train ")
    assert "cannot be decoded as Parquet" in found[0]["reason"]
    assert "is no table" in found[1]["reason"]


def test_over_the_budget_the_error_names_the_objects(
    feeder: Feeder, caplog: pytest.LogCaptureFixture
) -> None:
    feed(feeder, *OBJECTS)
    got: list[Any] = []
    reader = TableReader("train", batch_rows=30, skip=SkipPolicy(objects=1))
    with pytest.raises(
        CorruptRecord,
        match=r"^object 3 of .* is no table: .*; it is record 0 of s3://b/k3; epoch 0 of train has more "
        r"corrupt objects than skip allows; skipped before: .* 1 of 1 object, .*: object 1 of .* of s3://b/k1$",
    ):
        got.extend(reader)
    assert numbers(got) == [*range(100), *range(200, 300)]
    assert "skipped: object 1 of epoch 0 of channel train" in caplog.text
    # The state is before the object that was refused.
    state = reader.state_dict()
    feed(feeder, *OBJECTS)
    again = TableReader("train", epoch=0, skip=SkipPolicy(objects=2))
    again.load_state_dict(state)
    assert numbers(again) == list(range(300, 400))


def test_the_budget_is_of_each_epoch(feeder: Feeder) -> None:
    reader = TableReader("train", skip=SkipPolicy(objects=3))
    for epoch in range(2):
        feed(feeder, *OBJECTS, epoch=epoch)
        assert numbers(reader) == GOOD
    assert reader.skipped.objects == 6


@pytest.mark.parametrize("keys", [False, True])
def test_a_state_after_any_batch_goes_on_with_the_next_row(feeder: Feeder, *, keys: bool) -> None:
    skip = SkipPolicy(objects=3)
    feed(feeder, *OBJECTS, keys=keys)
    reader, returned = TableReader("train", batch_rows=40, epoch=0, skip=skip), 0
    states = [(reader.state_dict(), 0)]
    for batch in reader:
        returned += batch.num_rows
        states.append((reader.state_dict(), returned))
    assert reader.state_dict()["channels"][0]["epoch"] == 1
    assert len(states) > 7
    for state, rows in states:
        assert set(parse_saved(json.dumps(state))) == {"train"}
        feed(feeder, *OBJECTS, keys=keys)
        again = TableReader("train", batch_rows=33, epoch=0, skip=skip)
        again.load_state_dict(json.loads(json.dumps(state)))
        assert numbers(again) == GOOD[rows:]
        assert again.skipped.objects == (3 if rows <= 100 else 2 if rows <= 200 else 1)


def test_a_state_inside_a_damaged_object_goes_on_after_it(feeder: Feeder) -> None:
    """It was saved by a reader without skip, which returned the rows before the damage."""
    feed(feeder, *OBJECTS[:3])
    reader, got = TableReader("train", epoch=0, batch_rows=20), list[Any]()
    with pytest.raises(CorruptRecord):
        got.extend(reader)
    assert numbers(got)[-1] >= 139
    state = reader.state_dict()
    assert state["rows"] >= 40
    feed(feeder, *OBJECTS[:3])
    again = TableReader("train", epoch=0, skip=SkipPolicy(objects=1))
    again.load_state_dict(state)
    assert numbers(again) == list(range(200, 300))


@pytest.mark.parametrize("form", FORMS)
def test_an_object_of_another_schema_is_left_out(feeder: Feeder, form: Form) -> None:
    """The schema is that of the first good object: a damaged one does not set it."""
    other = pa.table({"n": pa.array(range(100), pa.int64()), "m": pa.array(range(100), pa.int64())})
    feed(feeder, damaged(other, 90), form(table(0)), form(other), form(table(100)))
    reader = TableReader("train", skip=SkipPolicy(objects=2))
    assert numbers(reader) == list(range(200))
    assert reader.schema == table(0).schema
    assert "another schema than the first object" in reader.skipped.last[1].reason


def test_all_objects_may_be_damaged(feeder: Feeder) -> None:
    feed(feeder, *[BAD] * 3)
    assert list(TableReader("train", skip=SkipPolicy(objects=3))) == []
    feed(feeder, epoch=1)
    assert list(TableReader("train", skip=SkipPolicy(objects=1))) == []


def test_an_object_of_several_blocks_is_left_out(feeder: Feeder) -> None:
    large = as_parquet(table(0, 1_000_000))
    assert len(large) > 3 << 20
    feed(feeder, large[:-1], plain(table(0)), large)
    reader = TableReader("train", skip=SkipPolicy(objects=1))
    assert numbers(reader) == [*range(100), *range(1_000_000)]


def test_damage_of_the_frames_is_skipped_to_the_next_object(feeder: Feeder) -> None:
    """Objects that are RecordIO files themselves: damaged tables in them, and a frame that is cut off."""
    files = [
        wrapped(plain(table(0)), BAD, plain(table(100))),
        wrapped(plain(table(200)), plain(table(300)))[:-9],
        wrapped(plain(table(400))),
    ]
    feeder.list_keys([(len(each), f"k{number}") for number, each in enumerate(files)])
    feeder.feed(0, b"".join(files))
    reader = TableReader("train", skip=SkipPolicy(objects=2))
    assert numbers(reader) == [*range(300), *range(400, 500)]
    # The frames of a block are compared before its tables are decoded.
    assert sorted((bad.key, bad.number) for bad in reader.skipped.last) == [("k0", 1), ("k1", 1)]


def test_damage_of_the_frames_needs_a_key_list(feeder: Feeder) -> None:
    feeder.feed(0, wrapped(plain(table(0))) + bytes(90))
    got: list[Any] = []
    with pytest.raises(CorruptRecord, match="set RecordKeys: true in the Penstock section"):
        got.extend(TableReader("train", skip=SkipPolicy(objects=9)))
    assert numbers(got) == list(range(100))


def test_a_rank_counts_a_damaged_object_as_a_record(feeder: Feeder) -> None:
    feeder.configure({"train-0": "Pipe"})
    objects = [plain(table(each)) for each in range(0, 800, 100)]
    objects[1] = objects[3] = BAD
    order = ORDER | {"order": ORDER["order"] | {"format": "RecordIO"}}
    feed(feeder, *objects, channel="train-0", **order)
    reader = TableReader("train-0", epoch=0, skip=SkipPolicy(objects=2))
    batches = iter(reader)
    got = numbers(next(batches) for _ in range(2))
    assert got == [*range(100), *range(200, 300)]
    assert reader.state_dict()["step"] == 0
    assert numbers([next(batches)]) == list(range(400, 500))
    state = reader.state_dict()
    assert (state["epoch"], state["step"]) == (0, 1)
    assert numbers(batches) == list(range(500, 800))
    feed(feeder, *objects, channel="train-0", **order)
    again = TableReader("train-0", epoch=0, skip=SkipPolicy(objects=1))
    again.load_state_dict(state)
    assert numbers(again) == list(range(400, 800))


def test_an_object_above_the_limit_is_no_damage(feeder: Feeder) -> None:
    feed(feeder, as_stream(table(0)), as_stream(table(0, 9000)))
    with pytest.raises(RecordTooLarge):
        list(TableReader("train", max_object_bytes=5000, skip=SkipPolicy(objects=9)))


def test_argument_errors(feeder: Feeder, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="skip has records 2, and a reader of tables leaves out whole objects"
    ):
        TableReader("train", skip=SkipPolicy(records=2, objects=1))
    with pytest.raises(ChannelError, match="cannot write the quarantine list"):
        TableReader("train", skip=SkipPolicy(objects=1, quarantine=tmp_path / "no" / "file"))
