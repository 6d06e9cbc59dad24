"""Entries in columns: what is added comes back, one by one or in bulk; the digest is that of the lines."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.errors import ConfigError
from streamer.formats.recordio import MAX_PAYLOAD
from streamer.plan import Entries, ObjectRef, Plan
from streamer.plan.entries import framed

MD5 = st.binary(min_size=16, max_size=16).map(bytes.hex)
ETAGS = st.one_of(
    MD5,
    st.builds("{}-{}".format, MD5, st.sampled_from([0, 1, 7, 9999, 10_000, 10_001, 99_999, "01", ""])),
    MD5.map(str.upper),
    st.text("0123456789abcdef-", min_size=1, max_size=40),
)
KEYS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
SIZES = st.one_of(st.integers(0, 9), st.integers(0, MAX_PAYLOAD))
LARGE = st.one_of(SIZES, st.integers(0, 1 << 60), st.integers((1 << 32) - 2, (1 << 32) + 2))
ROWS = st.lists(st.tuples(KEYS, SIZES, ETAGS), max_size=8)
ITEMS = st.one_of(
    st.binary(max_size=5),
    st.builds(ObjectRef, st.sampled_from("bc"), KEYS, SIZES, ETAGS, st.sampled_from([None, "v1"])),
)
MAKES = st.sampled_from(
    [
        {"wrap": False, "inflate": False},
        {"wrap": True, "inflate": False},
        {"wrap": True, "inflate": True},
        {"wrap": False, "inflate": True},
    ]
)


def size_in_stream(item: ObjectRef | bytes, *, wrap: bool, inflate: bool) -> int:
    size = item.size if isinstance(item, ObjectRef) else len(item)
    return framed(size) if wrap and not (inflate and isinstance(item, ObjectRef) and item.size) else size


def line(item: ObjectRef | bytes) -> Any:
    if isinstance(item, bytes):
        return item.hex()
    return [item.bucket, item.key, item.etag, 0, item.size, *([item.version] if item.version else [])]


@given(st.lists(st.one_of(ROWS, st.lists(ITEMS, min_size=1, max_size=3)), max_size=6), MAKES)
def test_what_is_added_comes_back(added: list[Any], make: dict[str, bool]) -> None:
    """Listed objects in bulk, and lines of manifests, in any order; joined from runs; digested by lines."""
    entries, expected = Entries(**make), list[list[ObjectRef | bytes]]()
    for each in added:
        run = Entries(**make)
        if each and not isinstance(each[0], tuple):
            run.add(*each)
            expected.append(list(each))
        else:
            keys, sizes, etags = ([row[i] for row in each] for i in range(3))
            run.add_objects("b", [key.encode() for key in keys], sizes, [etag.encode() for etag in etags])
            expected += [[ObjectRef("b", *row)] for row in each]
        entries.extend(run)
    assert [*entries] == expected
    sizes = [sum(size_in_stream(item, **make) for item in items) for items in expected]
    assert ([*entries.sizes], entries.total, len(entries)) == (sizes, sum(sizes), len(expected))
    arranged = {name: True for name, value in make.items() if value}
    lines = ["penstock plan 1", *([json.dumps(arranged)] if arranged else [])]
    for items in expected:
        if len(items) == 1 and isinstance(item := items[0], ObjectRef):
            lines += [json.dumps(line(item))] if item.size or arranged else []
        else:
            lines.append(json.dumps([line(item) for item in items]))
    text = "".join(f"{each}\n" for each in lines)
    assert Plan(entries).digest == hashlib.sha256(text.encode()).hexdigest()


@given(st.lists(st.lists(st.tuples(KEYS, LARGE, MD5), max_size=8), max_size=4), st.integers(0, 9))
def test_objects_of_any_size_come_back(runs: list[list[tuple[str, int, str]]], start: int) -> None:
    entries = Entries()
    for rows in runs:
        run = Entries()
        keys, etags = [row[0].encode() for row in rows], [row[2].encode() for row in rows]
        run.add_objects("b", keys, [row[1] for row in rows], etags)
        run.pack()
        entries.extend(run)
    rows = [row for run in runs for row in run]
    assert [*entries] == [[ObjectRef("b", *row)] for row in rows]
    assert [*entries.sizes] == [row[1] for row in rows]
    assert [*entries.sizes[start::2]] == [row[1] for row in rows[start::2]]
    columns = entries.columns(start, len(rows))
    expected = [tuple(column) for column in zip(*rows[start:], strict=True)]
    assert (columns is None) == (not expected)
    if columns is not None:
        assert [(*map(bytes.decode, columns.keys),), (*columns.sizes,), (*columns.etags,)] == expected


@given(st.lists(st.tuples(KEYS, st.just(1), MD5), max_size=12))
def test_key_order_and_duplicates(rows: list[tuple[str, int, str]]) -> None:
    entries = Entries()
    for row in rows:
        entries.add(ObjectRef("b", *row))
    ordered = entries.in_key_order()
    keys = [items[0].key for items in ordered if isinstance(items[0], ObjectRef)]
    assert keys == sorted((row[0] for row in rows), key=str.encode)
    assert (ordered is entries) == (keys == [row[0] for row in rows])
    assert (ordered.key_twice() is None) == (len({*keys}) == len(keys))


def test_an_object_of_a_listing_takes_at_most_30_bytes_and_its_key() -> None:
    entries = Entries(wrap=True)
    for number, etag in enumerate(["0" * 32, "f" * 32 + "-10000"]):
        entries.add(ObjectRef("b", f"key-{number}", 5, etag))
    assert entries.memory == 2 * (30 + 5)


@pytest.mark.parametrize(
    ("size", "key"), [(1 << 64, "k"), (-1, "k"), (1, "k" * 70_000)], ids=["too large", "negative", "long key"]
)
def test_an_object_that_cannot_be_is_refused_in_bulk(size: int, key: str) -> None:
    entries = Entries()
    with pytest.raises(ConfigError, match="S3 has no object with such"):
        entries.add_objects("b", [b"a", key.encode()], [1, size], [b"0" * 32, b"0" * 32])


def test_an_object_that_no_record_holds_is_refused_in_bulk() -> None:
    with pytest.raises(ConfigError, match="s3://b/long has"):
        Entries(wrap=True).add_objects("b", [b"a", b"long"], [1, MAX_PAYLOAD + 1], [b"0" * 32, b"0" * 32])
