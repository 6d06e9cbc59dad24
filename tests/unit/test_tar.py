"""WebDataset streams: archives that the standard library writes, cut anywhere, joined, damaged."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.errors import CorruptRecord, TruncatedStream
from streamer.formats.tar import BLOCK, TarReader, sample, split_name
from tests.kit.late import LATE
from tests.kit.pieces import Pieces

if LATE:
    from webdataset.tariterators import group_by_keys, tar_file_expander

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


def archive(
    members: Iterable[tuple[str, bytes | None]],
    *,
    kind: int = tarfile.PAX_FORMAT,
    end: bool = True,
) -> bytes:
    """A tar of (name, content) pairs; content None makes a directory. Without `end`: no blocks of zeros."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=kind) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if content is None:
                info.type = tarfile.DIRTYPE
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        length = tar.offset
    return sink.getvalue() if end else sink.getvalue()[:length]


def read(data: bytes, **options: Any) -> list[Any]:
    return [sample(record) for record in TarReader(io.BytesIO(data), **options)]


@pytest.mark.parametrize("kind", FORMATS)
def test_neighbours_of_one_name_are_a_sample(kind: int) -> None:
    members = [("a/1.jpg", b"J" * 1000), ("a/1.CLS", b"7"), ("a/2.jpg", b""), ("a/2.seg.png", b"P" * 512)]
    assert read(archive(members, kind=kind)) == [
        {"__key__": "a/1", "jpg": b"J" * 1000, "cls": b"7"},
        {"__key__": "a/2", "jpg": b"", "seg.png": b"P" * 512},
    ]


@pytest.mark.parametrize("kind", FORMATS)
def test_long_names(kind: int) -> None:
    long = "directory/" * 9 + "n" * 90
    longer = "é" * 60 + "/" + "x" * 200 if kind != tarfile.USTAR_FORMAT else long + "2"
    members = [("first.txt", b"1"), (f"{long}.jpg", b"2"), (f"{long}.cls", b"3"), (f"{longer}.jpg", b"4")]
    assert read(archive(members, kind=kind)) == [
        {"__key__": "first", "txt": b"1"},
        {"__key__": long, "jpg": b"2", "cls": b"3"},
        {"__key__": longer, "jpg": b"4"},
    ]


def test_names() -> None:
    assert split_name("a.b/c.TAR.gz") == ("a.b/c", "tar.gz")
    assert split_name("./0001.jpg") == ("./0001", "jpg")
    for name in ("README", "a/README", ".hidden", "__meta__/a.jpg"):
        assert split_name(name) is None, name


def test_what_belongs_to_no_sample_is_passed_over() -> None:
    members = [
        ("dir", None),
        ("README", b"x" * 600),
        ("1.a", b"A"),
        ("dir2/", None),
        ("LICENSE", b"y"),
        ("1.b", b"B"),
    ]
    assert read(archive(members)) == [{"__key__": "1", "a": b"A", "b": b"B"}]
    assert read(archive([("README", b"nothing else")])) == []
    assert read(archive([])) == []
    assert read(b"") == []


def test_archives_follow_each_other_and_an_end_divides() -> None:
    one, two = archive([("1.a", b"A")]), archive([("1.a", b"B"), ("2.a", b"C")])
    assert read(one + two + one) == [
        {"__key__": "1", "a": b"A"},
        {"__key__": "1", "a": b"B"},
        {"__key__": "2", "a": b"C"},
        {"__key__": "1", "a": b"A"},
    ]


def test_an_archive_may_lack_its_end() -> None:
    assert len(read(archive([("1.a", b"A"), ("2.a", b"B")], end=False))) == 2


def test_a_global_header_is_no_member() -> None:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "x"}) as tar:
        info = tarfile.TarInfo("1.a")
        info.size = 1
        tar.addfile(info, io.BytesIO(b"A"))
    assert read(sink.getvalue()) == [{"__key__": "1", "a": b"A"}]


def test_sizes_beyond_octal_digits() -> None:
    """GNU's base 256, and pax."""
    for kind in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        info = tarfile.TarInfo("1.a")
        info.size = 1 << 36
        header = info.tobuf(format=kind)
        with pytest.raises(
            TruncatedStream, match=f"{(1 << 36) + BLOCK * (len(header) // BLOCK)} bytes wanted"
        ):
            read(header + b"only this")


names = st.sampled_from(["a/1", "a/2", "b", "c" * 120, "d/" * 60 + "e"])
members = st.lists(
    st.tuples(names, st.sampled_from(["jpg", "cls", "seg.png"]), st.binary(max_size=1500)), max_size=12
)


def model(found: list[tuple[str, str, bytes]]) -> list[dict[str, object]]:
    """Samples by the definition: neighbours of one key; no field of it may come again."""
    samples: list[dict[str, object]] = []
    for key, field, content in found:
        if not samples or samples[-1]["__key__"] != key:
            samples.append({"__key__": key})
        samples[-1][field] = content
    return samples


@given(
    members,
    st.lists(st.integers(0, 900), max_size=60),
    st.sampled_from([1, 512, 700, 1 << 20]),
    st.sampled_from(FORMATS[1:]),
)
def test_any_pieces_and_any_buffer_give_the_same_samples(
    found: list[tuple[str, str, bytes]], pieces: list[int], block: int, kind: int
) -> None:
    unique: list[tuple[str, str, bytes]] = []
    for member in found:
        if not any(member[:2] == other[:2] for other in unique):
            unique.append(member)
    data = archive([(f"{key}.{field}", content) for key, field, content in unique], kind=kind)
    got = [sample(record) for record in TarReader(Pieces(data, pieces), block_bytes=block)]
    assert got == model(unique)


def test_samples_are_those_of_webdataset() -> None:
    """Its own reader on the same two shards."""
    shards: list[list[tuple[str, bytes | None]]] = [
        [
            ("__meta__/x.txt", b"m"),
            ("a/1.JPG", b"A"),
            ("a/1.cls", b"1"),
            ("README", b"r"),
            ("a/2.jpg", b"B" * 600),
        ],
        [("a/2.jpg", b"C"), ("b.c/3.seg.png", b"D"), ("dir", None), ("b.c/3.cls", b""), (".hidden", b"h")],
    ]
    streams = [{"stream": io.BytesIO(archive(shard)), "url": "url"} for shard in shards]
    theirs = [
        {name: value for name, value in each.items() if name != "__url__"}
        for each in group_by_keys(tar_file_expander(streams))
    ]
    assert len(theirs) == 4
    assert read(b"".join(map(archive, shards))) == theirs


def test_cut_anywhere_is_an_error_or_a_border() -> None:
    data = archive([("1.a", b"A" * 700), ("1.b", b"B"), ("2.a", b"C" * 512)], end=False)
    borders = {0: 0, 1536: 1, 2560: 1, len(data): 2}
    for cut in range(0, len(data) + 1, 4):
        if cut in borders:
            assert len(read(data[:cut])) == borders[cut]
            continue
        with pytest.raises(TruncatedStream, match="the stream ends inside a tar member at offset"):
            read(data[:cut])


def test_samples_before_a_bad_header_are_handed_over() -> None:
    got: list[bytes] = []
    data = archive([("1.a", b"A"), ("2.a", b"B")], end=False) + b"no header" * 100
    with pytest.raises(CorruptRecord, match="tar member at offset 2048 of the stream: its checksum does not"):
        got.extend(TarReader(io.BytesIO(data)))
    assert [sample(record)["__key__"] for record in got] == ["1"]


def test_what_cannot_be_read_is_refused() -> None:
    with pytest.raises(CorruptRecord, match="the field 'a' comes twice"):
        read(archive([("1.a", b"A"), ("1.A", b"B")]))
    sparse = tarfile.TarInfo("1.a")
    sparse.type = tarfile.GNUTYPE_SPARSE
    with pytest.raises(CorruptRecord, match="sparse"):
        read(sparse.tobuf(format=tarfile.GNU_FORMAT))
    for pax in ({"GNU.sparse.major": "1"}, {"size": "ten"}, {"size": "-512"}):
        info = tarfile.TarInfo("1.a")
        info.pax_headers = pax
        with pytest.raises(CorruptRecord):
            read(info.tobuf(format=tarfile.PAX_FORMAT))


WEBDATASET = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)
"""The rule of the webdataset package; it takes quadratic time for some paths."""
HIDDEN = re.compile(r"__[^/]*__($|/)")


@given(st.text("a./_\n", max_size=12))
def test_names_are_split_as_webdataset_splits_them(name: str) -> None:
    match = None if HIDDEN.match(name) else WEBDATASET.fullmatch(name)
    assert split_name(name) == (match and (match[1], match[2].lower()))


def test_a_path_of_millions_of_folders_is_split_at_once() -> None:
    """A quadratic split takes hours, so the test's time limit ends it."""
    assert split_name("a/" * (4 << 20)) is None
    assert split_name("a/" * (4 << 20) + ".x") == ("a/" * (4 << 20), "x")
    assert split_name("." * (8 << 20) + "/.x") is None
