"""Joined archives and texts, cut anywhere or damaged, against their own readers."""

from __future__ import annotations

import contextlib
import io
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamer.formats.transform import END_MARK, BadContent, JoinLines, JoinTar
from tests.unit.test_tar import FORMATS, archive

HEADER_LIKE = archive([("inside.txt", b"not a member")])
CONTENTS = st.sampled_from([b"", b"x", bytes(512), bytes(3000), HEADER_LIKE, b"e" * 511, b"f" * 513])
NAMES = st.sampled_from(["a.txt", "d/" + "n" * 90 + ".jpg", "é" * 70 + ".cls"])
MEMBERS = st.lists(st.tuples(NAMES, CONTENTS), max_size=4)


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
        found += b"".join(joiner.end())
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
    assert joined(JoinTar(), objects, cuts) == due
    assert listed(due) == [each for one in objects for each in listed(one)]


@given(
    st.lists(st.lists(st.sampled_from([b"", b"a", b"bc\r", b"d" * 30]))),
    st.lists(st.integers(1, 40), max_size=3),
)
def test_texts_are_the_lines_of_each(texts: list[list[bytes]], cuts: list[int]) -> None:
    """Whether an object ends with a line feed or not."""
    objects = [b"\n".join(lines) for lines in texts]
    lines = [line for data in objects for line in data.removesuffix(b"\n").split(b"\n") if data]
    assert joined(JoinLines(), objects, cuts) == b"".join(line + b"\n" for line in lines)


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
    data = joined(JoinTar(), objects, [step])
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
        joiner = JoinTar()
        joiner.begin()
        assert b"".join(joiner.feed(head + b"data")) == head + b"data"
        zeros = bytes(1 << 20)
        assert b"".join(joiner.feed(zeros)) == zeros  # data, and no end mark
        with pytest.raises(BadContent, match=f"a member, {-(-size // 512) * 512 - 4 - len(zeros)} bytes"):
            joiner.end()


WHOLE = archive([("a.txt", b"a" * 700), ("b.txt", b"b")], kind=tarfile.GNU_FORMAT)
MEMBERS_OF_WHOLE = len(without_mark(WHOLE))


@given(st.integers(1, MEMBERS_OF_WHOLE + 511), st.integers(1, 700))
def test_a_cut_archive_is_an_error(size: int, step: int) -> None:
    with pytest.raises(BadContent):
        joined(JoinTar(), [WHOLE[:size]], [step])


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
    with pytest.raises(BadContent, match=match) as caught:
        joined(JoinTar(), [WHOLE, data], [100])
    assert caught.value.offset is not None
    assert caught.value.offset // 512 * 512 == offset


def test_a_global_header_would_hold_for_other_archives() -> None:
    """A comment, as `git archive` writes it, changes nothing; all else is refused."""

    def with_global(**headers: str) -> bytes:
        sink = io.BytesIO()
        with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT, pax_headers=headers) as tar:
            tar.addfile(tarfile.TarInfo("member"))
        return sink.getvalue()

    data = joined(JoinTar(), [with_global(comment="0123"), WHOLE], [700])
    assert [name for name, _ in listed(data)] == ["member", "a.txt", "b.txt"]
    with pytest.raises(BadContent, match="a global pax header sets 'mtime'"):
        joined(JoinTar(), [with_global(mtime="1")], [700])


@settings(deadline=None)
@given(st.data())
def test_any_damage_ends_in_a_stream_or_an_error(data: st.DataObject) -> None:
    """Foreign bytes never end in another exception, nor in a loop."""
    content = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(BadContent):
        joined(JoinTar(), [bytes(content)], [data.draw(st.integers(1, 2000))])
