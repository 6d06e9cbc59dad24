"""Inflating: any cut of the input gives the content, what is not whole and sound an error by name."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import os
import random
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from backports import zstd
from hypothesis import given
from hypothesis import strategies as st

from streamer.errors import CorruptObject
from streamer.inflate import LONGEST_HEADER, OUTPUT, Inflater
from streamer.plan import ObjectRef
from streamer.relay.deliver.lookahead import not_inflatable

REF = ObjectRef("b", "data/part.gz", 1, "e")
CONTENT = random.Random(3).randbytes(50) + b"abc" * 1000


def gzip_member(
    content: bytes,
    *,
    extra: bytes | None = None,
    name: bytes | None = None,
    comment: bytes | None = None,
    checked: bool = False,
) -> bytes:
    """A member with any of the optional header fields of RFC 1952 §2.3."""
    flags = 4 * (extra is not None) | 8 * (name is not None) | 16 * (comment is not None) | 2 * checked
    head = b"\x1f\x8b\x08" + bytes([flags]) + bytes(5) + b"\x03"
    if extra is not None:
        head += len(extra).to_bytes(2, "little") + extra
    for text in (name, comment):
        if text is not None:
            head += text + b"\0"
    if checked:
        head += (zlib.crc32(head) & 0xFFFF).to_bytes(2, "little")
    return head + gzip.compress(content, mtime=0)[10:]


def skippable(content: bytes) -> bytes:
    return b"\x53\x2a\x4d\x18" + len(content).to_bytes(4, "little") + content


def inflate(data: bytes, cuts: Any = (), *, most: int = 1 << 20) -> bytes:
    """The content of `data`, fed in pieces and taken in pieces."""
    inflater, found = Inflater(partial(not_inflatable, REF)), []
    places = [0, *sorted(cuts), len(data)]
    for start, end in itertools.pairwise(places):
        inflater.feed(data[start:end])
        while pieces := inflater.pieces(most):
            assert 0 < sum(map(len, pieces)) <= most
            assert max(map(len, pieces)) <= OUTPUT
            found += pieces
    inflater.finish()
    assert inflater.produced == sum(map(len, found))
    return b"".join(found)


members = st.one_of(
    st.builds(
        gzip_member,
        st.binary(max_size=300),
        extra=st.none() | st.binary(max_size=20),
        name=st.none() | st.just(b"a name"),
        comment=st.none() | st.just(b"why"),
        checked=st.booleans(),
    ),
    st.builds(zstd.compress, st.binary(max_size=300)),
    st.builds(skippable, st.binary(max_size=20)),
)


def known(member: bytes) -> bytes:
    """What a member holds, by the reference implementations."""
    if member.startswith(b"\x1f\x8b"):
        return zlib.decompress(member, 31)
    return zstd.decompress(member)


@given(st.lists(members, min_size=1, max_size=5), st.data())
def test_any_cut_and_any_limit_give_the_members_contents(parts: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(parts)
    cuts = data.draw(st.lists(st.integers(0, len(whole)), max_size=6))
    most = data.draw(st.sampled_from([1, 2, 7, 100, 1 << 20]))
    assert inflate(whole, cuts, most=most) == b"".join(map(known, parts))


def test_every_byte_by_itself() -> None:
    """isal itself takes some headers for corrupt when they come in two pieces."""
    member = gzip_member(CONTENT, extra=b"BC\2\0\7\0", name=b"name", comment=b"comment", checked=True)
    whole = member + zstd.compress(CONTENT) + skippable(b"x") + member
    assert inflate(whole, range(1, len(whole))) == CONTENT * 3


@pytest.mark.parametrize("compress", [gzip.compress, zstd.compress])
def test_truncated_anywhere_is_an_error(compress: Callable[..., bytes]) -> None:
    whole = compress(CONTENT)
    for end in range(1, len(whole)):
        with pytest.raises(CorruptObject, match="cut off") as caught:
            inflate(whole[:end])
        assert "s3://b/data/part.gz (offset " in str(caught.value)
        with pytest.raises(CorruptObject, match="member 2"):
            inflate(whole + whole[:end])


@pytest.mark.parametrize("place", range(-8, 0))
def test_a_wrong_checksum_or_length_is_an_error(place: int) -> None:
    damaged = bytearray(gzip.compress(CONTENT))
    damaged[place] ^= 1
    with pytest.raises(CorruptObject, match="corrupt in member 1"):
        inflate(bytes(damaged))


def test_a_damaged_frame_is_an_error() -> None:
    options: dict[int, int] = {zstd.CompressionParameter.checksum_flag: 1}
    damaged = bytearray(zstd.compress(CONTENT, options=options))
    damaged[-1] ^= 1
    with pytest.raises(CorruptObject, match="corrupt in member 1"):
        inflate(bytes(damaged))


@given(st.integers(0, 10_000), st.integers(0, 255), st.booleans())
def test_a_flipped_byte_never_gives_other_content(place: int, value: int, framed: bool) -> None:
    """Gzip's checksum, or Zstandard's if the frame has one; header fields without a meaning may differ."""
    options: dict[int, int] = {zstd.CompressionParameter.checksum_flag: 1}
    whole = bytearray(zstd.compress(CONTENT, options=options) if framed else gzip.compress(CONTENT))
    whole[place % len(whole)] = value
    with contextlib.suppress(CorruptObject):
        assert inflate(bytes(whole)) == CONTENT


@pytest.mark.parametrize("data", [b"a,b,c\n1,2,3\n", b"\x1f\x8c", b"\x28\xb5\x2f\xfe", b"PK\3\4", b"\0"])
def test_what_is_not_compressed_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(CorruptObject, match="neither gzip nor zstd"):
        inflate(data)


@pytest.mark.parametrize(
    ("behind", "text"),
    [
        (b"\0", "has zero bytes after member 1, the padding"),
        (b"\0" * 512, "has zero bytes after member 1, the padding"),
        (b"text", "has bytes after member 1 that are no further member"),
        (b"\x1f\x00", "has bytes after member 1 that are no further member"),
    ],
)
def test_what_follows_the_last_member_and_is_none_is_refused(behind: bytes, text: str) -> None:
    with pytest.raises(CorruptObject, match=text):
        inflate(gzip.compress(CONTENT) + behind)


@pytest.mark.parametrize("compress", [gzip.compress, zstd.compress])
def test_a_bomb_takes_no_more_memory_than_is_asked_for(compress: Callable[..., bytes]) -> None:
    """A few kilobytes that stand for 64 MiB come in pieces; the first costs what any piece does."""
    bomb = compress(bytes(64 << 20))
    assert len(bomb) < 100_000
    inflater, total = Inflater(partial(not_inflatable, REF)), 0
    inflater.feed(bomb)
    while pieces := inflater.pieces(1 << 20):
        size = sum(map(len, pieces))
        assert size <= 1 << 20
        assert not any(any(piece) for piece in pieces)
        total += size
    inflater.finish()
    assert total == 64 << 20


def test_a_frame_that_wants_much_memory_is_refused() -> None:
    parameters: dict[int, int] = {zstd.CompressionParameter.window_log: 28}
    compressor = zstd.ZstdCompressor(options=parameters)
    frame = compressor.compress(os.urandom(1000)) + compressor.flush()
    with pytest.raises(CorruptObject, match="memory"):
        inflate(frame)


def test_a_header_without_end_is_refused() -> None:
    head = b"\x1f\x8b\x08\x08" + bytes(6) + b"n" * (LONGEST_HEADER + 1000)
    with pytest.raises(CorruptObject, match="header without end"):
        inflate(head)


@pytest.mark.parametrize("flag", [0x20, 0x40, 0x80, 0xE0])
@pytest.mark.parametrize("member", [1, 2])
@pytest.mark.parametrize("cut", [2, 4, 12])
def test_reserved_flags_of_a_header_are_refused_by_name(flag: int, member: int, cut: int) -> None:
    """RFC 1952 §2.3.1.2: whoever sets them may add fields that this program would take for data."""
    before = gzip.compress(b"first") * (member - 1)
    damaged = bytearray(gzip_member(CONTENT, name=b"n"))
    damaged[3] |= flag
    why = f"wrong header in member {member}: reserved flags \\(0x{8 | flag:02x}\\)"
    with pytest.raises(CorruptObject, match=why):
        inflate(before + damaged, [len(before) + cut])


def test_input_is_fed_only_when_the_last_is_used_up() -> None:
    inflater = Inflater(partial(not_inflatable, REF))
    inflater.feed(gzip.compress(CONTENT))
    assert inflater.pieces(10)
    with pytest.raises(ValueError, match="take all pieces"):
        inflater.feed(b"more")
