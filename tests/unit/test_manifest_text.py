"""Manifests as text: every rule of contract §4, in any pieces, compressed or not."""

from __future__ import annotations

import codecs
import gzip
import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.errors import ConfigError
from streamer.s3.manifests.lines import MAX_LINE, RowScanner
from streamer.s3.manifests.text import MAX_PIECE, ArrayScanner, Gunzip


def lines(text: bytes, *attributes: str, piece: int = 1 << 20) -> list[list[bytes | str]]:
    scanner = RowScanner("s3://b/m", attributes)
    found: list[list[bytes | str]] = []
    for start in range(0, len(text) + 1, piece):
        rows = scanner.feed(text[start : start + piece], last=start + piece > len(text))
        found += rows
    return found


def array(text: bytes, *, piece: int = 1 << 20) -> list[bytes | str]:
    scanner = ArrayScanner("s3://b/m")
    found: list[bytes | str] = []
    for start in range(0, len(text) + 1, piece):
        rows = scanner.feed(text[start : start + piece], last=start + piece > len(text))
        found += [uri for run in rows for uri in run]
    return found


def test_the_list_of_attributes_gives_the_order() -> None:
    """Not the line; unlisted ones are ignored, and one may be listed twice (contract §4.2)."""
    text = b'{"label": 1, "x": "unlisted", "image-ref": "s3://b/k"}\n'
    assert lines(text, "image-ref", "label", "label") == [["s3://b/k", b"1", b"1"]]


@pytest.mark.parametrize(
    ("token", "streamed"),
    [
        (b'"text"', b"text"),
        (b'"with \\"quotes\\" and \\u00e9"', 'with "quotes" and é'.encode()),
        ('"é\\ud83d\\ude00"'.encode(), "é😀".encode()),
        (b'""', b""),
        (b'"0"', b"0"),
        (b"0", b"0"),
        (b"-1.50", b"-1.50"),
        (b"1E400", b"1E400"),
        (b"9" * 5000, b"9" * 5000),
        (b"true", b"true"),
        (b"null", b"null"),
        (b"[1,  2.0 ,[]]", b"[1,  2.0 ,[]]"),
        (b'{"b":1 , "a" : "\\u00e9"}', b'{"b":1 , "a" : "\\u00e9"}'),
    ],
)
def test_values_keep_the_form_they_are_written_in(token: bytes, streamed: bytes) -> None:
    """Spacing, digits and escapes of tokens stay; a string is its text, without quotes or escapes."""
    assert lines(b'{"a":' + token + b"}", "a") == [[streamed]]
    assert lines(b' { "z" : [] ,\t"a"  :  ' + token + b' , "y" : {} } \r\n', "a") == [[streamed]]


@given(st.lists(st.text(max_size=5), max_size=5), st.sampled_from(["\n", "\r\n"]), st.integers(1, 30))
def test_lines_may_end_either_way_and_come_in_any_pieces(texts: list[str], ending: str, piece: int) -> None:
    text = ending.join([*(json.dumps({"a": each}) for each in texts), ""]).encode()
    due = [[each.encode("utf-8", "surrogatepass")] for each in texts]
    assert lines(text, "a", piece=piece) == due
    assert lines(text.removesuffix(ending.encode()), "a", piece=piece) == due


def test_blank_lines_are_allowed_at_the_end_alone() -> None:
    assert lines(b'{"a": 1}\n\r\n \n\n', "a") == [[b"1"]]
    with pytest.raises(ConfigError, match="s3://b/m: line 2: the line is blank"):
        lines(b'{"a": 1}\n\n\n{"a": 2}\n', "a")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"b": 1}', "line 2: attribute 'a-ref' is missing"),
        (b'{"A-ref": "s3://b/k", "b": 1}', "line 2: attribute 'a-ref' is missing"),
        (b'{"a-ref": "s3://b/k"}', "line 2: attribute 'b' is missing"),
        (b'{"a-ref": 7, "b": 1}', "line 2: attribute 'a-ref' must be the URI of an object"),
        (b'{"a-ref": "http://b/k", "b": 1}', "line 2: attribute 'a-ref' is wrong: .* is not an S3 URI"),
        (b'{"a-ref": "s3://b/", "b": 1}', "line 2: attribute 'a-ref' is wrong: .* names no object"),
        (b'{"a-ref": "s3://b/k", "b": "\\ud800"}', "line 2: attribute 'b' holds half a surrogate pair"),
        (b'{"a-ref": "s3://b/k", "b": 1, "b": 2}', "line 2: attribute 'b' comes twice"),
        (b'["s3://b/k"]', "line 2: the line is not a JSON object"),
        (b"null", "line 2: the line is not a JSON object"),
        (b"true", "line 2: the line is not a JSON object"),
        (b'{"a-ref": "s3://b/k", "b": 1} {}', "line 2: not JSON: there is text after the object"),
        (b'{"a-ref": "s3://b/k", "b": NaN}', r"line 2: not JSON \(NaN is no JSON"),
        (b'{"a-ref": "s3://b/k", "b": }', "line 2: not JSON"),
        (b'{"a-ref": "s3://b/k", "b": 1,}', "line 2: not JSON"),
        (b'{"a-ref": "s3://b/k", "b" 1}', "line 2: not JSON .expected ':'"),
        (b'{"a-ref": "s3://b/k", "b": 1', "line 2: not JSON .expected '}'"),
        (b'{"a-ref": "s3://b/k", 7: 1}', "line 2: not JSON: the name of an attribute must be a string"),
        (b'{"a-ref": "s3://b/k", "b": "\xff"}', "line 2: not UTF-8"),
        (b'{"b": ' + b"[" * 200_000, "line 2: not JSON"),
    ],
)
def test_a_bad_line_is_named_with_its_attribute(line: bytes, says: str) -> None:
    """What went before it has been given."""
    scanner = RowScanner("s3://b/m", ["a-ref", "b"])
    found: list[object] = []
    with pytest.raises(ConfigError, match=says):
        found.extend(scanner.feed(b'{"a-ref": "s3://b/k", "b": 1}\n' + line + b"\n", last=True))
    assert len(found) == 1


def test_a_line_without_end_is_refused_before_memory_is() -> None:
    scanner = RowScanner("s3://b/m", ["a"])
    with pytest.raises(ConfigError, match="line 1: longer than"):
        for _ in range(2 + MAX_LINE // (1 << 20)):
            list(scanner.feed(b" " * (1 << 20), last=False))


@given(st.lists(st.text(min_size=1, max_size=5), min_size=1), st.integers(1, 30), st.sampled_from([None, 2]))
def test_a_manifest_is_prefix_and_suffixes(suffixes: list[str], piece: int, indent: int | None) -> None:
    """Plain concatenation, no slash added, in order, duplicates kept (contract §4.1)."""
    text = json.dumps([{"prefix": "s3://b/some/pre"}, *suffixes], indent=indent).encode()
    assert array(text, piece=piece) == [f"s3://b/some/pre{each}" for each in suffixes]


def test_a_prefix_may_be_the_bucket_alone_and_a_suffix_may_ask_for_a_version() -> None:
    text = b' [ {"prefix" : "s3://b/"} , "{x}]," , "k?versionId=7" ] \n'
    assert array(text) == ["s3://b/{x}],", "s3://b/k?versionId=7"]


def test_a_byte_order_mark_is_no_part_of_a_manifest() -> None:
    text = codecs.BOM_UTF8 + b'[{"prefix": "s3://b/"}, "k"]'
    assert [array(text, piece=piece) for piece in (1, 99)] == [["s3://b/k"]] * 2
    rows = codecs.BOM_UTF8 + b'{"a-ref": "s3://b/k"}'
    assert [*RowScanner("s3://b/m", ["a-ref"]).feed(rows, last=True)] == [["s3://b/k"]]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "entry 1: the manifest is empty"),
        (b" \n", "entry 1: the manifest is empty"),
        (b'{"prefix": "s3://b/"}', "entry 1: a manifest is a JSON array"),
        (b"[]", "entry 1: expected an entry"),
        (b'["k"]', 'entry 1: the first entry must be {"prefix"'),
        (b'[{"prefix": ""}, "k"]', "entry 1: the first entry must be"),
        (b'[{"prefix": "s3://bucket"}, "/k"]', "entry 1: the first entry must be .* slash after BUCKET"),
        (b'[{"prefix": "s3://b/", "x": 1}, "k"]', "entry 1: the first entry must be"),
        (b'[{"prefix": "s3://b/"}]', "entry 2: the manifest names no object"),
        (
            b'[{"prefix": "s3://b/"}, "k", {"prefix": "s3://c/"}]',
            "entry 3: only the first entry may be an object",
        ),
        (b'[{"prefix": "s3://b/"}, "k", 7]', "entry 3: expected an entry in quotes"),
        (b'[{"prefix": "s3://b/"}, "k",]', "entry 3: expected an entry in quotes"),
        (b'[{"prefix": "s3://b/"}, "k" "l"]', "entry 2: expected an entry in quotes"),
        (b'[{"prefix": "s3://b/"}, "k"', "entry 2: expected an entry in quotes"),
        (b'[{"prefix": "s3://b/"}, ""]', "entry 2: .*names no object"),
        (b'[{"prefix": "s3://b/"}, "\\x"]', "entry 2: not JSON"),
        (b'[{"prefix": "s3://b/"}, "k"] []', "text after the array's closing bracket"),
        (b'[{"prefix": "s3://b/"}, "\xff"]', "not UTF-8"),
    ],
)
def test_a_bad_manifest_is_named_with_its_entry(text: bytes, says: str) -> None:
    with pytest.raises(ConfigError, match=f"s3://b/m: .*{says}"):
        array(text)


@given(st.binary(max_size=200), st.binary(max_size=200), st.integers(1, 50))
def test_gzip_is_known_by_its_magic(one: bytes, two: bytes, piece: int) -> None:
    """Members one after the other are one text (RFC 1952 §2.2); anything else passes as it is."""
    for packed, due in ((gzip.compress(one) + gzip.compress(two), one + two), (b"{" + one, b"{" + one)):
        inflate = Gunzip("s3://b/m")
        found = [
            each
            for start in range(0, len(packed), piece)
            for each in inflate.feed(packed[start : start + piece])
        ]
        assert b"".join([*found, inflate.finish()]) == due


def test_a_little_gzip_may_be_much_text() -> None:
    """Ten megabytes of one letter come in pieces, all of them."""
    inflate = Gunzip("s3://b/m")
    pieces = list(inflate.feed(gzip.compress(b"x" * 10_000_001) + gzip.compress(b"y")))
    assert max(map(len, pieces)) <= MAX_PIECE
    assert b"".join([*pieces, inflate.finish()]) == b"x" * 10_000_001 + b"y"


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda packed: packed[:-3], "ends in the middle of member 1: it was cut off"),
        (lambda packed: packed[:-6] + b"\0\0" + packed[-4:], "is corrupt in member 1"),
        (lambda packed: packed + b"junk", "has bytes after member 1"),
    ],
)
def test_damaged_gzip_is_an_error(spoil: Callable[[bytes], bytes], says: str) -> None:
    inflate = Gunzip("s3://b/m")

    def inflated() -> None:
        list(inflate.feed(spoil(gzip.compress(b"text" * 100))))
        inflate.finish()

    with pytest.raises(ConfigError, match=f"s3://b/m .*{says}"):
        inflated()
