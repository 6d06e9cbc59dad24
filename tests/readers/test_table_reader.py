"""Parquet and Arrow objects of a channel as record batches."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from sidecar.job.resume import parse_saved
from streamer.errors import ChannelError, CorruptRecord, RecordTooLarge, TruncatedStream
from streamer.formats import recordio
from streamer.readers.table_decoder import TableDecoder
from streamer.readers.tables import TableReader
from tests.readers.feeder import Feeder

PAGE = Path(__file__).parent.parent.parent / "docs" / "how-to" / "arrays-and-tables.md"
NESTED = pa.struct([("x", pa.int64()), ("y", pa.struct([("z", pa.string())]))])


def table(first: int, rows: int) -> pa.Table:
    """A table whose columns are of every kind of layout."""
    numbers = list(range(first, first + rows))
    return pa.table(
        {
            "number": pa.array(numbers, pa.int64()),
            "text": pa.array([None if each % 7 == 0 else f"text {each}" for each in numbers], pa.string()),
            "list": pa.array([[each] * (each % 3) for each in numbers], pa.list_(pa.int32())),
            "struct": pa.array([{"x": each, "y": {"z": str(each)}} for each in numbers], NESTED),
            "word": pa.array([f"w{each % 5}" for each in numbers], pa.string()).dictionary_encode(),
            "struct.x": pa.array([each / 2 for each in numbers], pa.float32()),
        }
    )


def as_parquet(content: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    parquet.write_table(content, sink, row_group_size=70, write_page_checksum=True)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def as_ipc(content: pa.Table, writer: Any, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with writer(sink, content.schema, options=pa.ipc.IpcWriteOptions(**options)) as out:
        out.write_table(content, max_chunksize=70)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def as_stream(content: pa.Table) -> bytes:
    return as_ipc(content, pa.ipc.new_stream)


def as_file(content: pa.Table) -> bytes:
    return as_ipc(content, pa.ipc.new_file, compression="zstd")


FORMS = [as_parquet, as_stream, as_file]
Form = Callable[[pa.Table], bytes]


def wrapped(*objects: bytes) -> bytes:
    return b"".join(map(recordio.encode, objects))


def rows_of(batches: Any) -> list[dict[str, Any]]:
    return [row for batch in batches for row in batch.to_pylist()]


@pytest.mark.parametrize("form", FORMS)
def test_objects_are_record_batches(feeder: Feeder, form: Form) -> None:
    objects = [form(table(0, 200)), form(table(200, 0)), form(table(200, 1)), form(table(201, 150))]
    for epoch in range(2):
        feeder.feed(epoch, wrapped(*objects))
    reader = TableReader("train", batch_rows=60)
    batches = list(reader)
    assert all(0 < batch.num_rows <= 60 for batch in batches)
    assert pa.Table.from_batches(batches).to_pylist() == table(0, 351).to_pylist()
    assert reader.schema == table(0, 1).schema
    columns = ["struct", "word", "number"]
    projected = list(TableReader("train", columns=columns))
    assert [batch.schema.names for batch in projected] == [columns] * len(projected)
    assert pa.Table.from_batches(projected).to_pylist() == table(0, 351).select(columns).to_pylist()


@pytest.mark.parametrize("form", FORMS)
def test_a_state_after_any_batch_goes_on_with_the_next_row(feeder: Feeder, form: Form) -> None:
    data = wrapped(form(table(0, 100)), form(table(100, 30)), form(table(130, 0)), form(table(130, 90)))
    expected = rows_of(table(0, 220).to_batches())
    feeder.feed(0, data)
    reader = TableReader("train", batch_rows=40, epoch=0)
    states, returned = [(reader.state_dict(), 0)], 0
    for batch in reader:
        returned += batch.num_rows
        states.append((reader.state_dict(), returned))
    assert len(states) > 6
    for state, rows in states:
        # The sidecar takes the state too.
        assert set(parse_saved(json.dumps(state))) == {"train"}
        epoch = int(rows == 220)
        feeder.feed(epoch, data)
        other = TableReader("train", batch_rows=33, epoch=0)
        other.load_state_dict(json.loads(json.dumps(state)))
        assert other.state_dict() == state
        assert rows_of(other) == (expected if epoch else expected[rows:])


def test_a_state_of_another_object_or_reader_is_refused(feeder: Feeder) -> None:
    feeder.feed(0, wrapped(as_parquet(table(0, 100)), as_parquet(table(0, 100))))
    reader = TableReader("train", batch_rows=40, epoch=0)
    next(batches := iter(reader))
    state = reader.state_dict()
    batches.close()  # type: ignore[attr-defined]
    feeder.feed(0, wrapped(as_parquet(table(0, 30))))
    reader = TableReader("train", epoch=0)
    reader.load_state_dict(state)
    with pytest.raises(ChannelError, match="the state is 10 rows after the end of object 0 of epoch 0"):
        list(reader)
    for wrong in (state["channels"][0], state | {"rows": -1}, state | {"channels": []}):
        with pytest.raises(ValueError, match="the state is not what TableReader"):
            reader.load_state_dict(wrong)


@pytest.mark.parametrize("form", FORMS)
def test_an_object_that_was_cut_anywhere_is_an_error(form: Form) -> None:
    whole = form(table(0, 150))
    borders = {*range(16), *range(len(whole) - 300, len(whole)), *range(16, len(whole), 97)}
    for size in borders:
        with pytest.raises(CorruptRecord, match=rf"^the object \({size} bytes?\) (is no|cannot be decoded)"):
            list(TableDecoder().batches(whole[:size]))
    if form is as_stream:
        with pytest.raises(CorruptRecord, match="where the end mark of 8 bytes is due"):
            list(TableDecoder().batches(whole + whole))


@pytest.mark.parametrize("form", FORMS)
def test_damage_is_an_error_and_never_a_crash(form: Form) -> None:
    """Values may differ where the format has no checksum, but they can always be read."""
    whole, draw = form(table(0, 150)), random.Random(7)
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(draw.choice((1, 1, 8))):
            damaged[draw.randrange(len(damaged))] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
        try:
            for batch in TableDecoder(batch_rows=50).batches(bytes(damaged)):
                batch.to_pylist()
        except (CorruptRecord, UnicodeDecodeError):
            continue  # the latter for names and strings that are no UTF-8


def test_a_damaged_page_of_parquet_is_found_by_its_checksum(feeder: Feeder) -> None:
    content = pa.table({"number": pa.array(range(1000), pa.int64())})
    sink = pa.BufferOutputStream()
    parquet.write_table(
        content, sink, compression="none", use_dictionary=False, write_page_checksum=True, row_group_size=500
    )
    damaged = bytearray(sink.getvalue().to_pybytes())
    damaged[damaged.index((900).to_bytes(8, "little"))] ^= 1
    feeder.feed(0, wrapped(as_parquet(content), bytes(damaged)))
    got: list[Any] = []
    with pytest.raises(
        CorruptRecord,
        match=rf"^object 1 of epoch 0 of channel train \({len(damaged)} bytes\) cannot be decoded as Parquet",
    ):
        for batch in TableReader("train", batch_rows=250):
            got += batch["number"].to_pylist()
    assert got == [*range(1000), *range(500)]


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (pa.table({"a": pa.array([1], pa.int32())}), "a column 'a' of int32 where 'a' of int64 is due"),
        (pa.table({"a": [1], "b": [1]}), "2 columns where 1 are due"),
        (pa.table({"b": [1]}), "a column 'b' of int64 where 'a' of int64 is due"),
    ],
)
def test_another_schema_is_an_error_with_the_difference(
    feeder: Feeder, other: pa.Table, difference: str
) -> None:
    first = pa.table({"a": [1]})
    feeder.feed(
        0, wrapped(as_parquet(first.replace_schema_metadata({"k": "v"})), as_stream(first), as_file(other))
    )
    got: list[Any] = []
    with pytest.raises(
        CorruptRecord, match=f"object 2 .*has another schema than the first object: {difference}"
    ):
        got.extend(TableReader("train"))
    assert rows_of(got) == [{"a": 1}] * 2


def test_what_is_no_table_is_an_error(feeder: Feeder) -> None:
    feeder.feed(0, wrapped(as_parquet(table(0, 3)), b"a,b\n1,2\n"))
    with pytest.raises(CorruptRecord, match=r"object 1 .*is no table: .*begins with b'a,b\\n1,2\\n'"):
        list(TableReader("train"))
    with pytest.raises(CorruptRecord, match="begins with b''"):
        list(TableDecoder().batches(b""))


@pytest.mark.parametrize("form", FORMS)
def test_a_column_that_is_absent_or_there_twice_is_an_error(form: Form) -> None:
    whole = form(pa.Table.from_arrays([pa.array([1])] * 3, names=["a", "b", "b"]))
    assert rows_of(TableDecoder(columns=["a"]).batches(whole)) == [{"a": 1}]
    for name, count in (("b", 2), ("c", 0)):
        with pytest.raises(CorruptRecord, match=f"has {count} columns '{name}', and columns= needs one"):
            list(TableDecoder(columns=["a", name]).batches(whole))


def test_an_object_above_the_limit_is_refused_at_its_header(feeder: Feeder) -> None:
    small, large = as_parquet(table(0, 3)), as_parquet(table(0, 3000))
    # The rest of the large object never comes: the header is enough.
    data = wrapped(small) + recordio.header(len(large))
    feed = feeder.feed(0, data, total=len(data) + len(large), state="open", hold=True)
    got: list[Any] = []
    text = f"record at offset {len(wrapped(small))} of the stream: {len(large)} bytes, and the reader takes"
    with pytest.raises(RecordTooLarge, match=text):
        got.extend(TableReader("train", max_object_bytes=len(large) - 1))
    assert rows_of(got) == table(0, 3).to_pylist()
    feed.release.set()
    # Parts of one record count together.
    part = recordio.HEADER.pack(recordio.MAGIC, 1 << 29 | 600) + bytes(600)
    feeder.feed(1, part + recordio.HEADER.pack(recordio.MAGIC, 3 << 29 | 600) + bytes(600))
    with pytest.raises(RecordTooLarge, match="1200 bytes, and the reader takes 1000 at most"):
        list(TableReader("train", max_object_bytes=1000))


def test_an_epoch_that_was_cut_is_an_error(feeder: Feeder) -> None:
    data = wrapped(as_parquet(table(0, 3)), as_parquet(table(3, 3)))
    cut = len(wrapped(as_parquet(table(0, 3))))
    feeder.feed(0, data[:cut], state="open", total=len(data))
    with pytest.raises(TruncatedStream):
        list(TableReader("train"))


def test_wrong_arguments_are_refused(feeder: Feeder) -> None:
    for wrong, text in (
        ({"columns": []}, "columns is"),
        ({"columns": "text"}, "columns is 'text'"),
        ({"columns": ["a", "a"]}, "name each column once"),
        ({"batch_rows": 0}, "batch_rows is 0"),
        ({"max_object_bytes": 0}, "max_object_bytes is 0"),
    ):
        with pytest.raises(ValueError, match=text):
            TableReader("train", **wrong)


def test_without_pyarrow_the_error_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from streamer.readers.tables import TableReader\n"
        "TableReader('train')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "install penstock-readers with the extra `tables`" in done.stderr


def test_the_example_of_the_page(feeder: Feeder) -> None:
    (shown,) = (
        body
        for body in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
        if "import TableReader" in body and "batch_rows" in body
    )
    content = pa.table({"label": range(25_000), "text": map(str, range(25_000)), "unused": [b""] * 25_000})
    feeder.feed(0, wrapped(as_parquet(content.slice(0, 5)), as_stream(content)))
    seen: dict[str, Any] = {}
    exec(shown, seen)
    assert seen["labels"].tolist() == list(range(25_000))[-len(seen["texts"]) :]
    assert seen["reader"].schema.names == ["text", "label"]
