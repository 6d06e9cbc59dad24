"""Pages of listings are read in any shape that S3 may send; what S3 never sends is refused."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote_plus
from xml.sax.saxutils import escape

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.errors import BadAnswer, ErrorContext
from streamer.s3.catalog.page_parser import Page, parse_page

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
    st.lists(NAMES, max_size=3),
    st.sampled_from(NAMESPACES),
    st.lists(st.sampled_from(["", *OPTIONAL]), min_size=1, max_size=3),
    st.sampled_from(["", "\n    "]),
)
def test_what_is_written_is_read(rows: Any, folders: Any, namespace: Any, extras: Any, gap: Any) -> None:
    """All objects of one shape, or of several; with white space between the elements, or none."""
    inside = "<EncodingType>url</EncodingType>" + "".join(
        gap + contents(quote_plus(key, safe="/"), size, etag, extras[i % len(extras)], gap)
        for i, (key, size, etag) in enumerate(rows)
    )
    inside += "".join(
        f"<CommonPrefixes><Prefix>{quote_plus(name)}</Prefix></CommonPrefixes>" for name in folders
    )
    page = parse_page(document(inside, token="t&1", namespace=namespace), CONTEXT)
    assert page == Page([(key, size, f'"{etag}"') for key, size, etag in rows], folders, "t&1")


def test_names_stay_as_they_are_without_an_encoding() -> None:
    page = parse_page(document(contents("a%20b+c &amp; d")), CONTEXT)
    assert page.objects == [("a%20b+c & d", 1, '"e"')]
    assert page.token is None


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (b"", "the listing is invalid"),
        (b"<ListBucketResult>", "the listing is invalid"),
        (b"<Error><Code>Busy</Code></Error>", "its root is <Error>"),
        (b"<ListBucketResult/>", "no valid IsTruncated"),
        (document("", truncated="maybe"), "no valid IsTruncated"),
        (document("", truncated="true"), "does not advance"),
        (document("", token="t", truncated="false"), "last page has a continuation token"),
        (document("<IsTruncated>false</IsTruncated>"), "<IsTruncated> comes 2 times"),
        (document("<Contents><Key>a</Key><Size>1</Size></Contents>"), "an entry without ETag"),
        (document(contents("a") + "<Contents><Key>b</Key></Contents>"), "an entry without ETag, Size"),
        (document(contents("a", extra="<Key>b</Key>")), "<Key> comes 2 times"),
        (document(contents("a") + contents("b", extra="<Size>2</Size>")), "<Size> comes 2 times"),
        (document("<CommonPrefixes/>"), "an entry without Prefix"),
        (document(contents("a", "many")), "the size 'many'"),
        (document(contents("a", "")), "the size ''"),
        (document(contents("a", "9" * 30)), "object size: over 2"),
        (document(contents("a", "1" * 5000)), "object size: over 2"),
    ],
)
def test_what_no_server_of_s3_sends_is_refused(found: bytes, words: str) -> None:
    with pytest.raises(BadAnswer, match=words):
        parse_page(found, CONTEXT)
