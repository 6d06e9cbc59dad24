"""The record index: its file, rows and lookups."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.formats.record_format import RecordFormat
from streamer.formats.record_index import (
    HEADER_BYTES,
    Damaged,
    IndexedObject,
    RecordIndex,
    block,
    header,
    memory_of,
    object_name,
    object_version,
)
from streamer.formats.stored_offsets import PAGE
from tests.kit.index import IndexBytes, with_stride

TFRECORD = RecordFormat.parse("TFRecord")
numbers = st.integers(0, 2**64 - 1)


@st.composite
def rows(draw: st.DrawFn) -> IndexedObject:
    size = draw(st.integers(0, 2**63))
    offsets = draw(st.lists(numbers, max_size=6))
    name = draw(st.integers(0, 10))
    return IndexedObject(name, draw(numbers), size, len(offsets), size, array("Q", offsets))


def file_of(blocks: list[list[IndexedObject]]) -> bytes:
    return header(TFRECORD) + b"".join(map(block, blocks))


@given(st.lists(st.lists(rows(), max_size=6), max_size=5))
def test_a_file_is_read_as_it_was_written(blocks: list[list[IndexedObject]]) -> None:
    data = file_of(blocks)
    read = RecordIndex(IndexBytes(data))
    assert read.end == len(data)
    assert read.format == TFRECORD
    latest = {row.name: row for rows in blocks for row in rows}
    assert list(read) == list(latest.values())
    assert read.names() == list(latest)
    assert read.replaced == sum(map(len, blocks)) - len(latest)
    assert (read.records, read.bytes) == (
        sum(row.records for row in latest.values()),
        sum(row.size for row in latest.values()),
    )
    assert all(read.has(row.name, row.version) for row in latest.values())
    assert not read.has(11, 0)
    assert read.get(11) is None


@given(st.lists(st.lists(rows(), min_size=1, max_size=3), max_size=3), st.integers(0), st.integers(1, 255))
def test_a_damaged_file_is_read_up_to_its_last_whole_block(
    blocks: list[list[IndexedObject]], at: int, change: int
) -> None:
    """Cut off, or one byte changed: every row that is read was written."""
    data = file_of(blocks)
    borders = [len(file_of(blocks[:count])) for count in range(len(blocks) + 1)]
    at %= len(data)
    whole = max((each for each in borders if each <= at), default=0)
    changed = bytearray(data)
    changed[at] ^= change
    for damaged in (data[:at], bytes(changed)):
        if not whole:
            with pytest.raises(Damaged):
                RecordIndex(IndexBytes(damaged))
            continue
        read = RecordIndex(IndexBytes(damaged))
        assert read.end == whole
        assert len(read) == len({row.name for rows in blocks[: borders.index(whole)] for row in rows})


def test_a_header_of_another_version_is_refused_by_name() -> None:
    begin = header(TFRECORD)
    assert begin[:8] == b"PENSTIDX"
    assert len(begin) == HEADER_BYTES
    with pytest.raises(Damaged, match="it has version 2, and this Penstock reads version 1"):
        RecordIndex(IndexBytes(begin[:8] + b"\2" + begin[9:]))
    with pytest.raises(Damaged, match="it has 1 record of 256, and this Penstock needs every one"):
        RecordIndex(IndexBytes(with_stride(begin, 256)))
    with pytest.raises(Damaged, match="it is of fixed:8, whose records need no index"):
        RecordIndex(IndexBytes(header(RecordFormat.parse("fixed:8"))))
    with pytest.raises(Damaged, match="its header is damaged"):
        RecordIndex(IndexBytes(begin[:12] + b"\2" + begin[13:]))
    with pytest.raises(Damaged, match="does not begin as a record index does"):
        RecordIndex(IndexBytes(b"x" * 100))


def test_a_row_is_of_one_version_of_one_object() -> None:
    names = {object_name(*each) for each in [("b", "k"), ("c", "k"), ("b", "l"), ("b", "k\n")]}
    assert len(names) == 4
    versions = {
        object_version("b", "k", size=size, etag=etag, version=version)
        for size, etag, version in [(1, "e", None), (2, "e", None), (1, "f", None), (1, "e", "v")]
    }
    assert len(versions) == 4
    assert object_name("b", "\udcff") != object_name("b", "\udcfe"), "keys that are no UTF-8"
    assert object_name("bucket", "key") == 0x27D4694DF94697FF, "part of the file's format"


@given(st.lists(st.lists(rows(), max_size=6), max_size=5), st.data())
def test_offsets_are_those_of_whole_blocks(blocks: list[list[IndexedObject]], data: st.DataObject) -> None:
    """Whole files, torn ones, and ones with a wrong byte."""
    file = file_of(blocks)
    cut = data.draw(st.integers(HEADER_BYTES, len(file)))
    damaged, wrong = bytearray(file[:cut]), cut
    if cut > HEADER_BYTES and data.draw(st.booleans()):
        wrong = data.draw(st.integers(HEADER_BYTES, cut - 1))
        damaged[wrong] ^= 1
    count = max(count for count in range(len(blocks) + 1) if len(file_of(blocks[:count])) <= wrong)
    read = RecordIndex(IndexBytes(bytes(damaged)))
    assert read.end == len(file_of(blocks[:count]))
    whole = [row for rows in blocks[:count] for row in rows]
    assert list(read.offsets) == [each for row in whole for each in row.offsets]
    assert list(read) == list({row.name: row for row in whole}.values())


def test_stored_offsets_of_many_pages() -> None:
    """Blocks that end within a page, looked up in any order and in slices."""
    counts = [3 * PAGE, 1, PAGE - 1, 70 * PAGE + 5, 0]
    expected, blocks = array("Q"), []
    for name, count in enumerate(counts):
        offsets = array("Q", (name * 10**9 + each * 31 for each in range(count)))
        row = IndexedObject(name, 0, 10**12, count, 10**12, offsets)
        expected.extend(offsets)
        blocks.append([row])
    file = IndexBytes(file_of(blocks))
    assert 0 < memory_of(file) < 10_000
    stored = RecordIndex(file)
    assert stored.end == file.size
    assert len(stored.offsets) == sum(counts)
    drawn = random.Random(5)
    numbers = range(sum(counts))
    for number in [*drawn.sample(numbers, 2000), *numbers[-3:]]:
        assert stored.offsets[number] == expected[number]
    for _ in range(50):
        start, stop = sorted(drawn.sample(numbers, 2))
        assert stored.offsets[start:stop] == expected[start:stop]
    with pytest.raises(IndexError):
        stored.offsets[sum(counts)]


def test_stored_offsets_that_change_are_noticed() -> None:
    row = IndexedObject(1, 0, 10**9, 2 * PAGE, 10**9, array("Q", range(2 * PAGE)))
    data = file_of([[row]])
    file = IndexBytes(data)
    stored = RecordIndex(file)
    assert stored.offsets[0] == 0
    file.data = data[:-5] + b"\1" + data[-4:]  # the last offset
    assert stored.offsets[1] == 1
    for bad in (2 * PAGE - 1, slice(PAGE - 1, PAGE + 1)):
        with pytest.raises(RuntimeError, match="changed"):
            stored.offsets[bad]
