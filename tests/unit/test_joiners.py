"""Joined archives and Arrow streams, cut anywhere or damaged, against their own readers."""

from __future__ import annotations

import contextlib
import io
import struct
import subprocess
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamer.formats.arrow_joiner import ArrowJoiner
from streamer.formats.join import NotJoinable
from streamer.formats.line_joiner import LineJoiner
from streamer.formats.tar_joiner import END_MARK, TarJoiner
from tests.unit.test_tar import FORMATS, archive

HEADER_LIKE = archive([("inside.txt", b"not a member")])
CONTENTS = st.sampled_from([b"", b"x", bytes(512), bytes(3000), HEADER_LIKE, b"e" * 511, b"f" * 513])
NAMES = st.sampled_from(["a.txt", "d/" + "n" * 90 + ".jpg", "é" * 70 + ".cls"])
MEMBERS = st.lists(st.tuples(NAMES, CONTENTS), max_size=4)


def joiners() -> dict[Any, Any]:
    """A new one of each kind."""
    return {"tar": TarJoiner(), "arrow": ArrowJoiner(resumed=False), "lines": LineJoiner()}


def joined(joiner: Any, objects: Any, cuts: list[int]) -> bytes:
    """What leaves, of objects fed in pieces of these sizes, over and over."""
    found, sizes = bytearray(), cuts or [1 << 20]
    for content in objects:
        joiner.begin()
        at = turn = 0
        while at < len(content):
            size = sizes[turn % len(sizes)]
            for piece in joiner.feed(content[at : at + size]):
                found += piece
            at, turn = at + size, turn + 1
        found += joiner.end()
    return bytes(found + joiner.finish())


def listed(data: bytes) -> list[tuple[str, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        found: list[tuple[str, bytes]] = []
        for each in tar.getmembers():
            content = tar.extractfile(each) if each.isreg() else None
            found.append((each.name, each.type if content is None else content.read()))
        return found


def without_mark(data: bytes) -> bytes:
    """An archive's bytes before its end mark, as its own reader finds them."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        tar.getmembers()
        return data[: tar.offset]


@settings(deadline=None)
@given(
    st.lists(st.tuples(MEMBERS, st.sampled_from(FORMATS), st.integers(0, 30)), max_size=4),
    st.lists(st.integers(1, 3000), max_size=3),
)
def test_archives_are_their_members_and_one_end_mark(
    archives: list[tuple[list[tuple[str, bytes]], int, int]], cuts: list[int]
) -> None:
    """Byte for byte: whatever data look like, however many zeros follow, however the bytes are cut."""
    objects = [
        archive([(n, c) for n, c in members if kind != tarfile.USTAR_FORMAT or n.isascii()], kind=kind)
        + bytes(zeros * 200)
        for members, kind, zeros in archives
    ]
    due = b"".join(map(without_mark, objects)) + END_MARK
    assert joined(TarJoiner(), objects, cuts) == due
    assert listed(due) == [each for one in objects for each in listed(one)]


@given(
    st.lists(st.lists(st.sampled_from([b"", b"a", b"bc\r", b"d" * 30]))),
    st.lists(st.integers(1, 40), max_size=3),
)
def test_texts_are_the_lines_of_each(texts: list[list[bytes]], cuts: list[int]) -> None:
    """As `"\\n".join` writes them, with a line feed at the end or without."""
    objects = [b"\n".join(lines) for lines in texts]
    lines = [line for data in objects for line in data.removesuffix(b"\n").split(b"\n") if data]
    assert joined(LineJoiner(), objects, cuts) == b"".join(line + b"\n" for line in lines)


@pytest.mark.parametrize("step", [101, 512, 1 << 20])
def test_what_gnu_tar_writes(tmp_path: Path, step: int) -> None:
    """Sparse members of every kind (with maps of more than one block), links, long names, v7."""
    sparse = tmp_path / "sparse"
    with open(sparse, "wb") as file:
        for hole in range(60):
            file.seek(hole * 100_000)
            file.write(b"\0data of a sparse member" * 10)
    (tmp_path / "plain").write_bytes(HEADER_LIKE)
    (tmp_path / ("long" * 40)).write_bytes(b"long")
    (tmp_path / "link").symlink_to("plain")
    (tmp_path / "hard").hardlink_to(tmp_path / "plain")
    kinds = [["gnu", "--sparse"], ["oldgnu", "--sparse"], ["ustar"], ["v7"]]
    kinds += [["posix", "--sparse", f"--sparse-version={version}"] for version in ("0.0", "0.1", "1.0")]
    names = ["sparse", "plain", "link", "hard"]
    objects = []
    for kind, *options in kinds:
        more = [] if kind in ("ustar", "v7") else ["long" * 40]
        command = ["tar", "-c", f"--format={kind}", *options, "-C", str(tmp_path), *names, *more]
        objects.append(subprocess.run(command, check=True, capture_output=True).stdout)
    data = joined(TarJoiner(), objects, [step])
    assert len(data) < sum(map(len, objects))
    reported = [
        subprocess.run(["tar", "tv"], input=each, check=True, capture_output=True) for each in objects
    ]
    whole = subprocess.run(["tar", "tv"], input=data, check=True, capture_output=True)
    assert whole.stdout == b"".join(each.stdout for each in reported)
    assert whole.stderr == b""
    out = subprocess.run(["tar", "xO", "sparse"], input=data, check=True, capture_output=True).stdout
    assert out == sparse.read_bytes() * len(kinds)


def block(
    name: bytes = b"big", *, kind: bytes = b"0", size: bytes = b"", chksum: bytes | None = None
) -> bytes:
    """One header."""
    raw = bytearray(512)
    raw[: len(name)], raw[124 : 124 + len(size)], raw[156:157] = name, size, kind
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw) if chksum is None else chksum
    return bytes(raw)


@pytest.mark.parametrize("size", [1 << 33, (1 << 33) + 1, 1 << 62])
def test_sizes_of_more_than_eight_gigabytes(size: int) -> None:
    """In base 256, and in a pax header: the data pass without being looked at."""
    record = b"size=%d\n" % size
    record = b"%d %s" % (len(record) + 3, record)
    pax = block(b"pax", kind=b"x", size=b"%011o" % len(record)) + record.ljust(512, b"\0")
    for head in (block(size=b"\x80" + size.to_bytes(11)), pax + block(size=b"%011o" % 7)):
        joiner = TarJoiner()
        joiner.begin()
        assert b"".join(joiner.feed(head + b"data")) == head + b"data"
        zeros = bytes(1 << 20)
        assert b"".join(joiner.feed(zeros)) == zeros  # data, and no end mark
        with pytest.raises(NotJoinable, match=f"a member, {-(-size // 512) * 512 - 4 - len(zeros)} bytes"):
            joiner.end()


WHOLE = archive([("a.txt", b"a" * 700), ("b.txt", b"b")], kind=tarfile.GNU_FORMAT)
MEMBERS_OF_WHOLE = len(without_mark(WHOLE))


@given(st.integers(1, MEMBERS_OF_WHOLE + 511), st.integers(1, 700))
def test_a_cut_archive_is_an_error(size: int, step: int) -> None:
    with pytest.raises(NotJoinable):
        joined(TarJoiner(), [WHOLE[:size]], [step])


@pytest.mark.parametrize(
    ("data", "offset", "match"),
    [
        (b"PAR1" * 200, 0, "no tar header"),
        (WHOLE + b"x" * 512, len(WHOLE), "no tar header"),
        (WHOLE + b"x", len(WHOLE), "in the middle of a header"),
        (WHOLE[:MEMBERS_OF_WHOLE], MEMBERS_OF_WHOLE, "no end mark"),
        (WHOLE[:1000], 512, "in the middle of a member"),
        (block(kind=b"L", size=b"%011o" % 3) + b"abc".ljust(512, b"\0") + bytes(1024), 1024, "next member"),
        (block(kind=b"L", size=b"%011o" % 3) + b"abc".ljust(512, b"\0"), 1024, "next member"),
        (block(size=b"-0000000777"), 0, "no octal number"),
        (block(kind=b"x", size=b"%011o" % 4) + b"9999".ljust(512, b"\0"), 0, "pax header without a length"),
        (block(kind=b"x", size=b"7" * 11), 0, "no more than 8388608 are read"),
    ],
)
def test_what_is_no_whole_archive_is_told_with_its_offset(data: bytes, offset: int, match: str) -> None:
    with pytest.raises(NotJoinable, match=match) as caught:
        joined(TarJoiner(), [WHOLE, data], [100])
    assert caught.value.offset // 512 * 512 == offset


def test_a_global_header_would_hold_for_other_archives() -> None:
    """A comment, as `git archive` writes it, changes nothing; all else is refused."""

    def with_global(**headers: str) -> bytes:
        sink = io.BytesIO()
        with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT, pax_headers=headers) as tar:
            tar.addfile(tarfile.TarInfo("member"))
        return sink.getvalue()

    data = joined(TarJoiner(), [with_global(comment="0123"), WHOLE], [700])
    assert [name for name, _ in listed(data)] == ["member", "a.txt", "b.txt"]
    with pytest.raises(NotJoinable, match="a global pax header sets 'mtime'"):
        joined(TarJoiner(), [with_global(mtime="1")], [700])


def arrow(*tables: Any, **options: Any) -> bytes:
    """A stream of batches of at most three rows."""
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, tables[0].schema, **options) as writer:
        for table in tables:
            writer.write_table(table, max_chunksize=3)
    return sink.getvalue()


def table(start: int, rows: int, *, metadata: dict[Any, Any] | None = None) -> Any:
    """Columns of many types, with words of its own in its dictionary."""
    numbers = list(range(start, start + rows))
    words = [f"word {n % 5}" if n % 7 else None for n in numbers]
    columns = {
        "number": pa.array(numbers, pa.int64()),
        "text": pa.array(words, pa.large_string()),
        "word": pa.array(words, pa.string()).dictionary_encode(),
        "list": pa.array([[n] * (n % 3) for n in numbers], pa.list_(pa.float32())),
        "struct": pa.array([{"a": n, "t": None} for n in numbers],
                           pa.struct([("a", pa.int32()), ("t", pa.timestamp("us", "UTC"))])),
        "fixed": pa.array([bytes([n % 256]) * 4 for n in numbers], pa.binary(4)),
        "price": pa.array(numbers, pa.decimal128(20)),
    }  # fmt: skip
    return pa.table(columns).replace_schema_metadata(metadata)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=3), min_size=1, max_size=4),
    st.lists(st.integers(1, 3000), max_size=3),
    st.sampled_from([None, "lz4", "zstd"]),
)
def test_streams_are_their_rows_and_one_end_mark(
    streams: list[list[int]], cuts: list[int], compression: str | None
) -> None:
    """Each object with a dictionary of its own; metadata of the whole schema may differ, as pandas' do."""
    options = pa.ipc.IpcWriteOptions(compression=compression)
    start, objects, due = 0, [], []
    for number, sizes in enumerate(streams):
        tables = []
        for rows in sizes:
            tables.append(table(start, rows, metadata={"rows": str(number)}))
            start += rows
        objects.append(arrow(*tables, options=options))
        due += tables
    data = joined(ArrowJoiner(resumed=False), objects, cuts)
    with pa.ipc.open_stream(data) as reader:
        found = reader.read_all()
    assert found.to_pylist() == [row for each in due for row in each.to_pylist()]
    assert found.num_rows == start
    assert data.endswith(b"\xff\xff\xff\xff\0\0\0\0")
    source = io.BytesIO(data)
    pa.ipc.open_stream(source).read_all()
    assert source.read() == b""  # the only mark is the last


def test_dictionaries_that_grow() -> None:
    """Deltas add to the dictionary of their own stream; the next stream replaces it."""
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
    words = [["a", "b"], ["a", "b", "c"], ["x"], ["x", "y", "z"]]
    columns = [
        pa.table({"w": pa.DictionaryArray.from_arrays(pa.array(range(len(each)), pa.int32()), each)})
        for each in words
    ]
    objects = [arrow(*columns[:2], options=options), arrow(*columns[2:], options=options)]
    data = joined(ArrowJoiner(resumed=False), objects, [5])
    with pa.ipc.open_stream(data) as reader:
        assert reader.read_all()["w"].to_pylist() == [word for each in words for word in each]
        assert reader.stats.num_dictionary_deltas == 2
        assert reader.stats.num_replaced_dictionaries == 1


def messages(data: bytes) -> list[bytes]:
    """The messages of a stream, as bytes."""
    found: list[bytes] = []
    at = 0
    source = pa.BufferReader(data)
    while True:
        try:
            pa.ipc.read_message(source)
        except EOFError:
            return found
        found.append(data[at : source.tell()])
        at = source.tell()


def test_a_delta_for_another_object_s_dictionary_is_refused() -> None:
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
    columns = [
        pa.table({"w": pa.DictionaryArray.from_arrays(pa.array([0], pa.int32()), words)})
        for words in (["a"], ["a", "b"])
    ]
    schema, _, _, delta, more = messages(arrow(*columns, options=options))
    whole = arrow(columns[0])
    lost = schema + delta + more + b"\xff\xff\xff\xff\0\0\0\0"
    with pytest.raises(NotJoinable, match="a delta for dictionary 0, which the stream has not") as caught:
        joined(ArrowJoiner(resumed=False), [whole, lost], [9])
    assert caught.value.offset == len(schema)


FIRST = arrow(table(0, 5))
OTHERS = [
    (pa.table({"number": pa.array([1], pa.int32())}), "the type of field 'number'"),
    (table(0, 5).rename_columns(["n", *table(0, 0).column_names[1:]]), "field 'n' where 'number' is due"),
    (table(0, 5).drop(["price"]), "6 fields, and 7 are due"),
    (table(0, 5).cast(table(0, 0).schema.set(0, pa.field("number", pa.int64(), nullable=False))), "nullable"),
    (
        table(0, 5).cast(table(0, 0).schema.set(0, pa.field("number", pa.int64(), metadata={"k": "v"}))),
        "the metadata of field 'number'",
    ),
]


@pytest.mark.parametrize(("other", "match"), OTHERS)
def test_another_schema_is_refused_by_name(other: Any, match: str) -> None:
    with pytest.raises(NotJoinable, match=f"another schema than .*{match}"):
        joined(ArrowJoiner(resumed=False), [FIRST, arrow(other)], [100])


@given(st.integers(1, len(FIRST) - 1), st.integers(1, 700))
def test_a_cut_stream_is_an_error(size: int, step: int) -> None:
    with pytest.raises(NotJoinable):
        joined(ArrowJoiner(resumed=False), [FIRST[:size]], [step])


def legacy() -> bytes:
    return arrow(table(0, 1), options=pa.ipc.IpcWriteOptions(use_legacy_format=True))


def as_file() -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table(0, 1).schema) as writer:
        writer.write_table(table(0, 1))
    return sink.getvalue()


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (as_file(), "an Arrow IPC file"),
        (legacy(), "before 0.15"),
        (b"not arrow at all", "Join: arrow takes whole Arrow IPC streams"),
        (FIRST + b"trailing", "no Arrow IPC message"),
        (FIRST + FIRST[:-8], "no end mark"),
        (b"".join(messages(FIRST)[1:]) + FIRST[-8:], "before the schema"),
        (messages(FIRST)[0] + FIRST, "a schema message where none may be"),
        (b"\xff\xff\xff\xff\0\0\0\0", "an end mark where a schema is due"),
        (b"\xff\xff\xff\xff\xff\xff\xff\x7f", "bytes of metadata"),
    ],
)
def test_what_is_no_whole_stream_is_told(data: bytes, match: str) -> None:
    with pytest.raises(NotJoinable, match=match):
        joined(ArrowJoiner(resumed=False), [FIRST, data], [1000])


def test_an_object_may_hold_several_and_a_resumed_epoch_has_its_schema() -> None:
    data = joined(ArrowJoiner(resumed=False), [FIRST + FIRST, FIRST], [77])
    with pa.ipc.open_stream(data) as reader:
        assert reader.read_all().num_rows == 15
    assert joined(ArrowJoiner(resumed=True), [FIRST], [77]) == b"".join(messages(FIRST)[1:]) + FIRST[-8:]
    assert joined(ArrowJoiner(resumed=False), [], []) == b""


@settings(deadline=None)
@given(st.data())
def test_any_damage_ends_in_a_stream_or_an_error(data: st.DataObject) -> None:
    """Foreign bytes never end in another exception, nor in a loop."""
    which = data.draw(st.sampled_from(["tar", "arrow"]))
    content = bytearray(WHOLE if which == "tar" else FIRST)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    joiner = TarJoiner() if which == "tar" else ArrowJoiner(resumed=False)
    with contextlib.suppress(NotJoinable):
        joined(joiner, [bytes(content)], [data.draw(st.integers(1, 2000))])


def table_of(fields: Sequence[Any], at: int) -> tuple[int, bytes]:
    """A FlatBuffers table at `at`: its vtable, then 4 bytes for each field that is not None."""
    head = struct.pack("<HH", 4 + 2 * len(fields), 4 + 4 * len(fields))
    head += b"".join(struct.pack("<H", 0 if f is None else 4 + 4 * i) for i, f in enumerate(fields))
    head += bytes(-len(head) % 4)
    start = at + len(head)
    body = struct.pack("<i", len(head))
    for i, field in enumerate(fields):
        value = field(start + 4 + 4 * i) if callable(field) else field or 0
        body += struct.pack("<I", value)
    return start, head + body


def test_tables_that_share_children_take_bounded_time() -> None:
    """Each of thirty fields has the next one as its child twice: 2^30 fields for whoever believes it."""
    data, ahead = bytearray(4), []

    def put(*fields: Any) -> int:
        start, raw = table_of(fields, len(data))
        data.extend(raw)
        return start

    def forward(name: str) -> Callable[[Any], int]:
        def offset(at: Any) -> int:
            ahead.append((at, name))
            return 0

        return offset

    places = {}
    places["message"] = put(4, 1, forward("schema"))
    places["schema"] = put(None, forward("fields"))
    places["fields"] = len(data)
    data += struct.pack("<II", 1, 0)
    ahead.append((len(data) - 4, "f0"))
    for level in range(30):
        places[f"f{level}"] = put(None, None, 12, forward("type"), None, forward(f"c{level}"))
        places[f"c{level}"] = len(data)
        data += struct.pack("<III", 2, 0, 0)
        ahead += [(len(data) - 8, f"f{level + 1}"), (len(data) - 4, f"f{level + 1}")]
    places["f30"] = put(None, None, 1, forward("type"))
    places["type"] = put()
    for at, name in [(0, "message"), *ahead]:
        data[at : at + 4] = struct.pack("<I", places[name] - at)
    head = b"\xff\xff\xff\xff" + struct.pack("<i", len(data))
    with pytest.raises(NotJoinable, match="metadata of more than 65536 tables"):
        joined(ArrowJoiner(resumed=False), [head + data], [])
