"""Pages of listings are read in any shape that S3 may send; what S3 never sends is refused."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote_plus
from xml.sax.saxutils import escape

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.errors import BadAnswer, ErrorContext
from streamer.s3.pages.page_parser import Page, parse_by_expression, parse_by_tree, parse_page

CONTEXT = ErrorContext("b", "data/")
NAMESPACES = ["", ' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"']
OPTIONAL = [
    "<LastModified>2026-01-01T00:00:00.000Z</LastModified>",
    "<ChecksumAlgorithm>CRC32</ChecksumAlgorithm><ChecksumAlgorithm>SHA256</ChecksumAlgorithm>",
    "<Owner><ID>Key</ID><DisplayName>n</DisplayName></Owner>",
    "<RestoreStatus><IsRestoreInProgress>false</IsRestoreInProgress></RestoreStatus>",
]
NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=12)
ROWS = st.lists(
    st.tuples(NAMES, st.integers(0, 1 << 60), st.text("0123456789abcdef-", min_size=1, max_size=8)),
    max_size=6,
)


IN_S3_S_FORM = [OPTIONAL[0], OPTIONAL[1], OPTIONAL[2], "<StorageClass>STANDARD</StorageClass>"]


def page_of(rows: list[tuple[str, int, str]], token: str | None = None) -> Page:
    """The page of these objects: key, size and bare ETag."""
    return Page(
        [key.encode() for key, _, _ in rows],
        [size for _, size, _ in rows],
        [etag.encode() for _, _, etag in rows],
        token,
    )


def document(inside: str, *, token: str = "", namespace: str = "", truncated: str | None = None) -> bytes:
    ends = truncated or str(bool(token)).lower()
    more = f"<NextContinuationToken>{escape(token)}</NextContinuationToken>" if token else ""
    head = f'<?xml version="1.0" encoding="UTF-8"?>\n<ListBucketResult{namespace}><Name>b</Name>'
    return f"{head}<IsTruncated>{ends}</IsTruncated>{more}{inside}</ListBucketResult>".encode()


def contents(key: str, size: object = 1, etag: str = "e", extra: str = "", gap: str = "") -> str:
    fields = [f"<Key>{key}</Key>", f"<ETag>&quot;{etag}&quot;</ETag>", f"<Size>{size}</Size>", extra]
    return f"<Contents>{gap.join(fields)}</Contents>"


@given(
    ROWS,
    st.sampled_from(NAMESPACES),
    st.lists(st.sampled_from(["", *OPTIONAL]), min_size=1, max_size=3),
    st.sampled_from(["", "\n    "]),
)
def test_what_is_written_is_read(rows: Any, namespace: Any, extras: Any, gap: Any) -> None:
    """All objects of one shape, or of several; with white space between the elements, or none."""
    inside = "<EncodingType>url</EncodingType>" + "".join(
        gap + contents(quote_plus(key, safe="/"), size, etag, extras[i % len(extras)], gap)
        for i, (key, size, etag) in enumerate(rows)
    )
    page = parse_page(document(inside, token="t&1", namespace=namespace), CONTEXT)
    assert page == page_of(rows, "t&1")


def test_names_stay_as_they_are_without_an_encoding() -> None:
    page = parse_page(document(contents("a%20b+c &amp; d")), CONTEXT)
    assert page == page_of([("a%20b+c & d", 1, "e")])


@given(
    ROWS,
    st.sampled_from(NAMESPACES),
    st.lists(st.sampled_from(["", *IN_S3_S_FORM]), min_size=3, max_size=3),
    st.sampled_from(["&quot;", "&#34;", '"', ""]),
)
def test_a_page_in_s3_s_form_needs_no_tree(rows: Any, namespace: str, others: list[str], quote: str) -> None:
    """Fields that some objects have, and keys that are encoded, are part of the form."""
    inside = "<EncodingType>url</EncodingType>" + "".join(
        f"<Contents><Key>{quote_plus(key, safe='/')}</Key>{others[i % 3]}<ETag>{quote}{etag}{quote}</ETag>"
        f"{others[(i + 1) % 3]}<Size>{size}</Size>{others[(i + 2) % 3]}</Contents>"
        for i, (key, size, etag) in enumerate(rows)
    )
    found = document(inside, token="t&1", namespace=namespace)
    assert parse_by_expression(found, CONTEXT) == (page_of(rows, "t&1") if rows else None)
    assert parse_by_tree(found, CONTEXT) == page_of(rows, "t&1")


PLAIN = "<Contents><Key>a</Key><ETag>&quot;e&quot;</ETag><Size>1</Size></Contents>"


@pytest.mark.parametrize(
    "inside",
    [
        f"<!-- {PLAIN} -->",
        f"<![CDATA[{PLAIN}]]>",
        f"<Owner>{PLAIN}</Owner>",
        f"<?pi {PLAIN}?>",
        f"{PLAIN}<!-- {PLAIN} -->",
        f"{PLAIN} {PLAIN}",
        f"{PLAIN}<Contents/>",
        f"{PLAIN}<X>{PLAIN}</X>",
        PLAIN.replace("<Key>a", "<Key>a&amp;b"),
        PLAIN.replace("<Key>a", "<Key>]]>"),
        PLAIN.replace("<Key>a", "<Key>\x7f"),
        PLAIN.replace("<Key>a", "<Key>\r\n"),
        PLAIN.replace("<Key>a", "<Key>\u00e9"),
        PLAIN.replace("&quot;e", "W/&quot;e"),
        PLAIN.replace("&quot;e&quot;", "W/e"),
        PLAIN.replace("<Size>1</Size>", "<Size>1</Size><Size>2</Size>"),
        PLAIN.replace("<Size>1", "<Size>-1"),
        PLAIN.replace("</Key>", "</Key><Owner><ID>x</ID></Owner><Owner><Key>x</Key></Owner>"),
    ],
)
def test_any_other_page_is_read_as_a_tree(inside: str) -> None:
    found = document(inside)
    assert parse_by_expression(found, CONTEXT) is None
    try:
        by_tree = parse_by_tree(found, CONTEXT)
    except BadAnswer as error:
        with pytest.raises(BadAnswer, match=re.escape(str(error))):
            parse_page(found, CONTEXT)
    else:
        assert parse_page(found, CONTEXT) == by_tree


def test_a_long_page_takes_linear_time() -> None:
    """Texts that nearly match, for the longest document that a parser gets."""
    for piece in ("<Contents><Key>", "<Contents><Key>a</Key><Owner>", "<Contents><Key>a</Key><ETag>&quot;e"):
        found = document(piece * (6_000_000 // len(piece)) + "</Contents>")
        assert parse_by_expression(found, CONTEXT) is None


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (b"", "the listing is invalid"),
        (b"<ListBucketResult>", "the listing is invalid"),
        (b"<Error><Code>Busy</Code></Error>", "its root is <Error>"),
        (b"<ListBucketResult/>", "no valid IsTruncated"),
        (document("", truncated="maybe"), "no valid IsTruncated"),
        (document("", truncated="true"), "does not advance"),
        (document("<IsTruncated>false</IsTruncated>"), "<IsTruncated> comes 2 times"),
        (document("<Contents><Key>a</Key><Size>1</Size></Contents>"), "an entry without ETag"),
        (
            document("<Contents><Key>a</Key><Size>1</Size><LastModified>today</LastModified></Contents>"),
            "an entry without ETag, and its LastModified 'today' is invalid",
        ),
        (document(contents("a") + "<Contents><Key>b</Key></Contents>"), "an entry without ETag, Size"),
        (document(contents("a", extra="<Key>b</Key>")), "<Key> comes 2 times"),
        (document(contents("a") + contents("b", extra="<Size>2</Size>")), "<Size> comes 2 times"),
        (document("<CommonPrefixes><Prefix>d/</Prefix></CommonPrefixes>"), "it has folders"),
        (document(contents("a", "many")), "the size 'many'"),
        (document(contents("a", "")), "the size ''"),
        (document(contents("a", "\u0663")), "the size '\u0663'"),
        (document(contents("a", "9" * 30)), "object size: over 2"),
        (document(contents("a", "1" * 5000)), "object size: over 2"),
    ],
)
def test_what_no_server_of_s3_sends_is_refused(found: bytes, words: str) -> None:
    with pytest.raises(BadAnswer, match=words):
        parse_page(found, CONTEXT)


@pytest.mark.parametrize("count", ["0", "2", "", "\u0663", "many"])
def test_a_key_count_that_is_not_above_the_entries_is_no_error(count: str) -> None:
    found = document(f"<KeyCount>{count}</KeyCount>{PLAIN}{PLAIN.replace('<Key>a', '<Key>b')}")
    assert len(parse_page(found, CONTEXT)) == 2


@pytest.mark.parametrize(
    ("found", "token"),
    [
        (document(PLAIN, token="t", truncated="false"), None),
        (document(PLAIN, token="t", truncated=" True "), "t"),
        (document(PLAIN).replace(b"<IsTruncated>false</IsTruncated>", b""), None),
        (document(PLAIN, token="t").replace(b"<IsTruncated>true</IsTruncated>", b""), "t"),
        (document(f"<CommonPrefixes/>{PLAIN}"), None),
        (document(f"<CommonPrefixes><Prefix/></CommonPrefixes>{PLAIN}"), None),
    ],
)
def test_what_harms_no_client_is_passed_over(found: bytes, token: str | None) -> None:
    page = parse_page(found, CONTEXT)
    assert (len(page), page.token) == (1, token)
