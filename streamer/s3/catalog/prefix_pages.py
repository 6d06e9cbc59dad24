"""Fetches the pages of one prefix in turn, and makes entries of them.

`PrefixPages` requests a page until it comes, as far as its policy allows, and checks it. A `Cursor` names
the page and proves that the listing advances.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING

from streamer.errors import BadAnswer, ErrorContext
from streamer.plan import Arrangement, Entries
from streamer.retry import UNAVAILABLE, Attempts, RetryPolicy, retry
from streamer.s3.catalog.validation import check_page

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamer.errors import SourceError
    from streamer.plan import S3Uri
    from streamer.plan.selection import KeyFilter
    from streamer.s3.catalog.page_parser import Page
    from streamer.s3.catalog.pages import PageSource
    from streamer.s3.catalog.validation import PlanClaim

MOST_EMPTY = 1000
"""Most successive empty pages; S3 sends empty pages where it skips deleted objects."""


@dataclass(slots=True)
class Cursor:
    """The next page of a listing by tokens, and the proof that the listing advances."""

    start_after: str = ""
    token: str | None = None
    _seen: set[str] = field(default_factory=set)
    """First keys and tokens of the pages so far."""
    _empty: int = 0
    """Number of successive empty pages so far."""

    def advance(self, page: Page, context: ErrorContext) -> None:
        """Move to the page after this one. Raises BadAnswer if an earlier page had its first key or token.

        Without this check a server or cache that repeats pages would make a listing endless, or stream
        objects twice.
        """
        names = [key.decode() for key in page.keys[:1]]
        if page.token is not None:
            names.append(f"token\0{page.token}")
        for name in names:
            if name in self._seen:
                raise BadAnswer(f"the listing does not advance (a second page begins with {name!r})", context)
        self._seen.update(names)
        self._empty = 0 if page.keys else self._empty + 1
        if self._empty > MOST_EMPTY:
            raise BadAnswer(
                f"the listing does not advance ({MOST_EMPTY} successive pages are empty)", context
            )
        self.token = page.token


class PrefixPages:
    """Requests and checks the pages of one prefix, and makes entries of them."""

    def __init__(
        self,
        pages: PageSource,
        uri: S3Uri,
        arrangement: Arrangement,
        *,
        policy: RetryPolicy | None = None,
        on_wait: Callable[[SourceError], None] | None = None,
        progress: Callable[[int], None] | None = None,
        keys: KeyFilter | None = None,
    ) -> None:
        """`policy`, `on_wait`, `keys`: as for `streamer.s3.catalog.listing.listed_runs`."""
        self.uri = uri
        self.context = ErrorContext(*uri)
        self._pages = pages
        self._arrangement = arrangement
        self._policy = policy
        self._on_wait = on_wait
        self._progress = progress
        self._keys = keys
        self._listed = 0

    async def page(self, cursor: Cursor) -> Page:
        """Return the page at the cursor, which does not move. Raises SourceError."""
        request = partial(
            self._pages.page,
            *self.uri,
            token=cursor.token,
            start_after="" if cursor.token else cursor.start_after,
        )
        if self._policy is None:
            page = await request()
        else:
            attempts = Attempts(self._policy, UNAVAILABLE, what="a page of the listing", context=self.context)
            page = await retry(partial(attempts.bounded, request), attempts, on_wait=self._on_wait)
        check_page(page, self.context)
        return page

    def run(self, page: Page, claim: PlanClaim, *, start: int = 0, stop: int | None = None) -> Entries:
        """Return the selected objects of `start` to `stop` of the page, without folder markers.

        Raises ConfigError.
        """
        keys, sizes, etags = page.keys[start:stop], page.sizes[start:stop], page.etags[start:stop]
        self._listed += len(keys)
        if self._progress is not None and keys:
            self._progress(self._listed)
        if self._keys is not None and (selected := self._keys.select(keys, sizes)) is not None:
            keys, sizes, etags = _compressed(keys, sizes, etags, selected)
        if 0 in sizes:
            objects = [size > 0 or not key.endswith(b"/") for key, size in zip(keys, sizes, strict=True)]
            keys, sizes, etags = _compressed(keys, sizes, etags, objects)
        run = self._arrangement.entries()
        run.add_objects(self.uri.bucket, keys, sizes, etags)
        claim.count(len(run), run.memory)
        return run


def _compressed(
    keys: list[bytes], sizes: list[int], etags: list[bytes], selected: list[bool]
) -> tuple[list[bytes], list[int], list[bytes]]:
    """Return the rows of the columns that are selected."""
    return list(compress(keys, selected)), list(compress(sizes, selected)), list(compress(etags, selected))
