"""Decides which pages of a listing give size and ETag of wanted keys, and which keys need a HEAD.

    sorted keys ─ request() ─▶ prefix, start-after ─ a page ─▶ take() ─▶ keys found, keys for HEADs
         ▲                                                     │
         └─────────────────────────────────────────────────────┘

A LIST costs as much as 12.5 HEADs and names up to a thousand objects, wanted or not. How many of them are
wanted is known only when the page is there. So after a page with fewer than `WORTH` wanted keys the next keys
are left to HEADs: `WORTH` keys at first, and twice as many after each further such page. Every page begins
just before the next wanted key, so that it skips objects that nobody wants.

A listing only ever saves HEADs: each key that no page names gets one, and its answer decides. So no rule here
can lose an object or invent one.

Pure and synchronous. Keys are UTF-8, whose order is S3's.
Source of the prices: https://aws.amazon.com/s3/pricing/ (LIST $0.005, HEAD $0.0004 per 1,000).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import pairwise
from operator import lt
from typing import TYPE_CHECKING, NamedTuple

from streamer.errors import BadAnswer, ErrorContext
from streamer.s3.pages.validation import short

if TYPE_CHECKING:
    from collections.abc import Sequence

    from streamer.s3.pages.page_parser import Page

WORTH = 20
"""Wanted keys that make a page worth its price: those of 12.5 HEADs, and some more for the wait."""
PAGE_KEYS = 1000
"""Most keys of a page."""


class PageRequest(NamedTuple):
    """The page to fetch next."""

    prefix: str
    """Common folder of the next wanted keys: credentials may be restricted to it."""
    start_after: str
    """The page has greater keys than this; empty: it begins with the prefix's first key."""


class KeyLookup:
    """The search for the objects of one bucket that have the given keys."""

    def __init__(self, bucket: str, keys: Sequence[bytes]) -> None:
        """`keys`: in ascending order, each once."""
        self._bucket = bucket
        self._keys = keys
        self._next = 0
        """Index of the first key that is neither found nor left to a HEAD."""
        self._reach = PAGE_KEYS
        """Number of the next keys that have the prefix in common."""
        self._heads = WORTH
        """HEADs after the next page with few wanted keys."""
        self._listed = ""
        """Last key of the last page."""
        self._request = PageRequest("", "")

    def request(self) -> PageRequest | None:
        """Return the page to fetch next; None if the rest of the keys is left to HEADs."""
        keys, first = self._keys, self._next
        if len(keys) - first < WORTH:
            return None
        prefix = _common_folder(keys[first], keys[min(first + self._reach, len(keys)) - 1]).decode()
        before = max(self._listed, keys[first].decode()[:-1])
        self._request = PageRequest(prefix, before if before > prefix else "")
        return self._request

    def take(self, page: Page) -> tuple[list[tuple[int, int]], list[int]]:
        """Take the requested page.

        Return the keys that it names, each as its index and its position on the page, and the keys for HEADs.
        Raises BadAnswer for an invalid page, or one that is not in key order or not of this request, as of a
        server that ignores `start-after`.
        """
        self._check(page)
        keys, first = self._keys, self._next
        if page.token is None:
            prefix = self._request.prefix.encode()
            end = bisect_left(keys, 1, first, key=lambda key: not key.startswith(prefix))
        else:
            end = bisect_right(keys, self._listed.encode(), first)
        position = dict(zip(page.keys, range(len(page)), strict=True)).get
        positions = list(map(position, keys[first:end]))
        found = [(index, at) for index, at in enumerate(positions, first) if at is not None]
        heads = [index for index, at in enumerate(positions, first) if at is None]
        self._next = end
        if len(found) < WORTH:
            self._next = min(end + self._heads, len(keys))
            self._heads *= 2
            heads.extend(range(end, self._next))
        else:
            self._heads = WORTH
        return found, heads

    def _check(self, page: Page) -> None:
        """Note the page's last key. Raises BadAnswer unless valid keys ascend within the request."""
        prefix, start_after = self._request
        context = ErrorContext(self._bucket, prefix)
        keys = page.keys
        if start_after:
            keys = [start_after.encode(), *keys]
        if not all(map(lt, keys, keys[1:])):
            before, after = next(pair for pair in pairwise(keys) if pair[0] >= pair[1])
            raise BadAnswer(
                f"the listing names {short(after.decode())} after {short(before.decode())}, so it is not in "
                "key order, or the server ignores start-after",
                context,
            )
        if page.keys:
            self._listed = page.keys[-1].decode()

    def narrow(self) -> bool:
        """Request smaller prefixes, after one was denied; return False if they are the smallest already."""
        narrower, self._reach = self._reach > WORTH, WORTH
        return narrower

    def skip(self) -> int:
        """Leave the next key to a HEAD; return its index."""
        self._next += 1
        return self._next - 1

    def rest(self) -> range:
        """Leave all remaining keys to HEADs; return them."""
        first, self._next = self._next, len(self._keys)
        return range(first, self._next)


def _common_folder(one: bytes, other: bytes) -> bytes:
    """Return the longest common prefix that is empty or ends in a slash."""
    length = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
    return one[: one.rfind(b"/", 0, length) + 1]
