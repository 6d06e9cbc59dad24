"""Lookups of wanted keys in listings: nothing is lost, and pages are worth their price."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.errors import BadAnswer
from streamer.s3.manifests.key_lookup import WORTH, KeyLookup
from streamer.s3.pages.page_parser import Page

names = st.text(st.sampled_from("ab/-é😀"), min_size=1, max_size=6)


@dataclass
class Bucket:
    """Lists its keys as S3 does, and counts the pages."""

    keys: list[bytes]
    page: int = 1000
    pages: int = 0
    prefixes: set[str] = field(default_factory=set)

    def list(self, prefix: str, start_after: str) -> Page:
        self.pages += 1
        self.prefixes.add(prefix)
        keys = [key for key in self.keys if key.startswith(prefix.encode()) and key > start_after.encode()]
        more = len(keys) > self.page
        keys = keys[: self.page]
        return Page(keys, list(map(len, keys)), [b"e"] * len(keys), "token" if more else None)


def look_up(bucket: Bucket, wanted: list[bytes], *, narrow: bool = False) -> tuple[list[bytes], list[bytes]]:
    """Return the keys found in listings, and those left to HEADs."""
    lookup = KeyLookup("b", wanted)
    if narrow:
        assert lookup.narrow()
        assert not lookup.narrow()
    listed: list[bytes] = []
    heads: list[bytes] = []
    while (request := lookup.request()) is not None:
        page = bucket.list(*request)
        found, left = lookup.take(page)
        for index, position in found:
            assert wanted[index] == page.keys[position]
            listed.append(wanted[index])
        heads += [wanted[index] for index in left]
    heads += [wanted[index] for index in lookup.rest()]
    return listed, heads


@given(st.sets(names), st.sets(names), st.integers(1, 40), st.booleans())
def test_every_key_is_found_or_left_to_a_head(
    stored: set[str], absent: set[str], page: int, narrow: bool
) -> None:
    """Whatever the page's size, and whatever lies between; a key that is not listed gets a HEAD."""
    stored |= {f"{folder}{number}" for folder in ("x/", "y/é/", "") for number in range(25)}
    bucket = Bucket(sorted(each.encode() for each in stored), page=page)
    wanted = sorted({*bucket.keys[::2], *(each.encode() for each in absent)})
    listed, heads = look_up(bucket, wanted, narrow=narrow)
    assert sorted([*listed, *heads]) == wanted
    assert {*listed} <= {*bucket.keys}
    assert bucket.pages <= 2 + len(wanted) // WORTH


def keys(folder: str, count: int) -> list[bytes]:
    return [f"{folder}{number:06}.jpg".encode() for number in range(count)]


def test_a_listing_that_is_all_wanted_costs_no_head() -> None:
    bucket = Bucket(keys("data/", 7950))
    assert look_up(bucket, bucket.keys) == (bucket.keys, [])
    assert bucket.pages == 8


def test_pages_cross_the_borders_of_folders() -> None:
    """Small folders next to each other are on the same page."""
    stored = [key for number in range(100) for key in keys(f"data/{number:03}/", 50)]
    bucket = Bucket(stored)
    assert look_up(bucket, stored) == (stored, [])
    assert bucket.pages == 5
    assert "data/" in bucket.prefixes


def test_smaller_prefixes_are_those_of_the_folders() -> None:
    """Credentials may allow to list some folders alone."""
    stored = [key for number in range(10) for key in keys(f"data/{number:03}/", 50)]
    bucket = Bucket(stored)
    assert look_up(bucket, stored, narrow=True) == (stored, [])
    assert bucket.prefixes == {f"data/{number:03}/" for number in range(10)}


def test_few_keys_are_left_to_heads_at_once() -> None:
    bucket = Bucket(keys("data/", 100_000))
    wanted = bucket.keys[: WORTH - 1]
    assert look_up(bucket, wanted) == ([], wanted)
    assert bucket.pages == 0


def test_poor_pages_are_few() -> None:
    """One of a hundred objects is wanted: a page that costs 12.5 HEADs has ten."""
    bucket = Bucket(keys("data/", 200_000))
    wanted = bucket.keys[::100]
    heads = look_up(bucket, wanted)[1]
    assert len(heads) >= 0.9 * len(wanted)
    assert bucket.pages <= 8
    assert bucket.pages * 12.5 + len(heads) <= 1.1 * len(wanted)


def test_a_listing_goes_on_where_keys_are_dense_again() -> None:
    """Between two folders that are wanted lies one that is not: its pages are not read."""
    stored = [*keys("a/", 3000), *keys("b/", 50_000), *keys("c/", 3000)]
    bucket = Bucket(stored)
    wanted = [*stored[:3000], stored[20_000], stored[30_000], *stored[-3000:]]
    heads = look_up(bucket, wanted)[1]
    assert bucket.pages <= 10
    assert len(heads) <= 4 * WORTH


@pytest.mark.parametrize(
    "page",
    [
        Page([b"data/b", b"data/a"], [1, 1], [b"e", b"e"]),
        Page([b"data/a", b"data/a"], [1, 1], [b"e", b"e"]),
    ],
)
def test_a_page_whose_keys_do_not_ascend_is_refused(page: Page) -> None:
    lookup = KeyLookup("b", keys("data/", 100))
    lookup.request()
    with pytest.raises(BadAnswer):
        lookup.take(page)
    assert lookup.rest() == range(100)


def test_a_server_that_ignores_start_after_is_noticed() -> None:
    bucket = Bucket(keys("data/", 5000))
    lookup = KeyLookup("b", bucket.keys)
    first = bucket.list(*(lookup.request() or ("", "")))
    lookup.take(first)
    assert lookup.request() == ("data/", "data/001000.jp")
    with pytest.raises(BadAnswer, match="ignores start-after"):
        lookup.take(first)
    assert lookup.rest() == range(1000, 5000)


def test_empty_pages_do_not_go_on_for_ever() -> None:
    """Where S3 skips many deleted objects it sends empty pages."""
    lookup, pages = KeyLookup("b", keys("data/", 8000)), 0
    while lookup.request() is not None:
        pages += 1
        assert lookup.take(Page(token="token"))[0] == []
    assert pages <= 10
