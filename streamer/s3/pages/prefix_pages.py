"""Fetches the pages of one prefix in turn, and makes entries of them.

`PrefixPages` requests a page until it comes, as far as its policy allows. A `Cursor` names the page and
proves that the listing advances.

An object with bytes is proven by its GETs, which have If-Match. An empty object has no GET, so a listing that
says 0 bytes by mistake would leave bytes out without an error. So `sized` sends a HEAD for each object that
is listed as empty, and what the HEAD says is planned.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, TypeVar

from streamer.aio import TaskGroup
from streamer.errors import BadAnswer, ErrorContext, ObjectMissing
from streamer.plan import Arrangement, Entries
from streamer.retry import UNAVAILABLE, Attempts, RetryPolicy, retry
from streamer.s3.client.faults import first_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from streamer.errors import SourceError
    from streamer.plan import ObjectRef, S3Uri
    from streamer.plan.selection import KeyFilter
    from streamer.s3.pages.page_parser import Page
    from streamer.s3.pages.pages import PageSource
    from streamer.s3.pages.validation import PlanClaim

T = TypeVar("T")

HEADS_AT_ONCE = 512
"""Most tasks that wait for HEADs of one run; the inspector bounds the HEADs in flight."""
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
    """Requests the pages of one prefix, and makes entries of them."""

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
        """`policy`: how long a page that fails while storage is unavailable is requested again; None: not.

        `on_wait` is called with each such error, `progress` with the number of objects listed, which counts
        some twice. `keys` selects objects.
        """
        self.uri = uri
        self.context = ErrorContext(*uri)
        self.ends_are_certain = pages.ends_are_certain
        self._pages = pages
        self.arrangement = arrangement
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
        return await self._retry_while_unavailable(
            request, what="a page of the listing", context=self.context
        )

    async def _retry_while_unavailable(
        self, request: Callable[[], Awaitable[T]], *, what: str, context: ErrorContext
    ) -> T:
        """Send a request until it succeeds, as far as the policy allows. Raises SourceError."""
        if self._policy is None:
            return await request()
        attempts = Attempts(self._policy, UNAVAILABLE, what=what, context=context)
        attempts.on_noted = self._on_wait
        return await retry(partial(attempts.bounded, request), attempts, on_wait=self._on_wait)

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
        run = self.arrangement.entries()
        run.add_objects(self.uri.bucket, keys, sizes, etags)
        claim.count(len(run), run.memory)
        return run

    async def sized(self, run: Entries) -> Entries:
        """Return the run with the objects as HEADs describe them that were listed as empty and are not.

        An object that is missing by now stays as it was listed, without a byte. Raises SourceError.
        """
        found: dict[int, ObjectRef] = {}

        async def look(index: int, listed: ObjectRef) -> None:
            request = partial(self._pages.stat, listed.bucket, listed.key)
            context = ErrorContext(listed.bucket, listed.key)
            with contextlib.suppress(ObjectMissing):
                now = await self._retry_while_unavailable(request, what="an answer to HEAD", context=context)
                if now.size:
                    found[index] = now

        empty = list(run.empty_objects().items())
        for begin in range(0, len(empty), HEADS_AT_ONCE):
            try:
                async with TaskGroup() as heads:
                    for index, listed in empty[begin : begin + HEADS_AT_ONCE]:
                        heads.create_task(look(index, listed))
            except BaseExceptionGroup as errors:
                raise first_error(errors) from errors
            if self._progress is not None:
                self._progress(self._listed)
        if not found:
            return run
        sized = self.arrangement.entries()
        for index, items in enumerate(run):
            sized.add(found.get(index, items[0]))
        return sized


def _compressed(
    keys: list[bytes], sizes: list[int], etags: list[bytes], selected: list[bool]
) -> tuple[list[bytes], list[int], list[bytes]]:
    """Return the rows of the columns that are selected."""
    return list(compress(keys, selected)), list(compress(sizes, selected)), list(compress(etags, selected))
