"""Lists the objects of a prefix, with their current versions.

A listing is made once per channel and job, and the plan keeps its result. A prefix is a pure string
prefix without delimiter, as in SageMaker: `s3://b/train` also names `train-old/x` (contract §3.1).

S3 sends a thousand keys per page, and each page needs a token of the page before it. So if a prefix has more
than `PAGES_IN_TURN` pages, its "folders" (common prefixes up to the next `/`) are listed instead, many at a
time, and a large folder by the same rule:

    prefix ─ pages, in turn ─ still more? ─ folders ─┬─ pages, in turn ─ …      16 requests at a time
                                                     └─ pages, in turn ─ …

With more than `MOST_FOLDERS` folders, few of which fill a page, the pages are listed in turn after all. The
result is the same either way, because the list is sorted by the bytes of the keys at the end.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from functools import partial
from itertools import pairwise
from operator import itemgetter, lt
from typing import TYPE_CHECKING

from streamer.errors import BadAnswer, ErrorContext, Missing, OutOfOrder
from streamer.plan import Arrangement, Entries, ObjectRef, Plan, S3Uri, is_folder_marker
from streamer.retry import UNAVAILABLE, Attempts, RetryPolicy, retry
from streamer.s3.catalog.validation import PlanMemory, listed_object, short
from streamer.s3.client.faults import first_error

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

    from streamer.errors import SourceError
    from streamer.plan.selection import KeyFilter
    from streamer.s3.catalog.page_parser import Page
    from streamer.s3.catalog.pages import PageSource
    from streamer.s3.catalog.validation import PlanClaim

LISTS = 16
"""Listing requests in flight for one prefix."""
PAGES_IN_TURN = 4
"""Pages listed in turn before folders are listed, so that a small prefix costs no further request."""
MOST_FOLDERS = 256
"""Folders on one level that are listed one by one; with more, most requests would return few keys."""
MOST_EMPTY = 1000
"""Most successive empty pages; S3 sends empty pages where it skips deleted objects."""


class _Lister:
    """One listing of one prefix."""

    def __init__(
        self,
        pages: PageSource,
        bucket: str,
        arrangement: Arrangement,
        *,
        progress: Callable[[int], None] | None,
        policy: RetryPolicy | None = None,
        on_wait: Callable[[SourceError], None] | None = None,
        keys: KeyFilter | None = None,
    ) -> None:
        self._pages = pages
        self._bucket = bucket
        self._arrangement = arrangement
        self._turns = asyncio.Semaphore(LISTS)
        self._progress = progress
        self._policy = policy
        self._on_wait = on_wait
        self._keys = keys
        self._listed = 0
        self._empty = 0
        """Number of successive empty pages so far."""

    async def page(self, prefix: str, *, delimiter: str = "", token: str | None = None) -> Page:
        """Fetch one page; check that its names begin with the prefix. Raises SourceError."""
        request = partial(self._pages.page, self._bucket, prefix, delimiter=delimiter, token=token)
        async with self._turns:
            if self._policy is None:
                page = await request()
            else:
                attempts = Attempts(self._policy, UNAVAILABLE, what="a page of the listing")
                page = await retry(partial(attempts.bounded, request), attempts, on_wait=self._on_wait)
        for name in (*(key for key, _, _ in page.objects), *page.folders):
            if not name.startswith(prefix):
                raise BadAnswer(
                    f"the listing names {short(name)}, which does not begin with the prefix",
                    ErrorContext(self._bucket, prefix),
                )
        return page

    def _check_progress(self, prefix: str, page: Page, seen: set[str]) -> None:
        """Raise BadAnswer for a page whose first name, or whose token, an earlier page had too.

        `seen`: first names and tokens of the earlier pages, to which this page's are added. Without this
        check a server or cache that repeats pages would make a listing endless, or stream objects twice.
        """
        first = [*(key for key, _, _ in page.objects[:1]), *page.folders[:1]]
        if page.token is not None:
            first.append(f"token\0{page.token}")
        for name in first:
            if name in seen:
                raise BadAnswer(
                    f"the listing does not advance (a second page begins with {name!r})",
                    ErrorContext(self._bucket, prefix),
                )
        seen.update(first)
        self._empty = 0 if page.objects or page.folders else self._empty + 1
        if self._empty > MOST_EMPTY:
            raise BadAnswer(
                f"the listing does not advance ({MOST_EMPTY} successive pages are empty)",
                ErrorContext(self._bucket, prefix),
            )

    def refs(self, page: Page, claim: PlanClaim) -> list[ObjectRef]:
        """Return the selected objects of a page, without folder markers. Raises BadAnswer, ConfigError."""
        selected = page.objects if self._keys is None else self._keys.select(page.objects)
        objects = [listed_object(self._bucket, *each) for each in selected]
        refs = [ref for ref in objects if not is_folder_marker(ref)]
        claim.take(refs)
        return refs

    async def below(self, prefix: str, claim: PlanClaim) -> Entries:
        """List every object whose key starts with `prefix`, in the server's order.

        The objects are counted in `claim`. Raises SourceError, or a group of them; ConfigError for an object
        that cannot be wrapped.
        """
        in_turn = claim.claim()
        entries = self._arrangement.entries()
        token: str | None = None
        seen: set[str] = set()
        pages = 0
        while True:
            page = await self.page(prefix, token=token)
            self._check_progress(prefix, page, seen)
            for ref in self.refs(page, in_turn):
                entries.add(ref)
            self._listed += len(page.objects)
            if self._progress is not None and page.objects:
                self._progress(self._listed)
            if (token := page.token) is None:
                return entries
            pages += 1
            if pages == PAGES_IN_TURN:
                before, by_folders = self._listed, claim.claim()
                if (entries_by_folder := await self._by_folders(prefix, by_folders)) is not None:
                    in_turn.release()
                    return entries_by_folder
                by_folders.release()
                self._listed = before

    async def runs(self, prefix: str, claim: PlanClaim) -> AsyncGenerator[Entries, None]:
        """Yield the objects whose keys start with `prefix` page by page, in key order.

        Raises what `below` raises, and OutOfOrder.
        """
        token: str | None = None
        seen: set[str] = set()
        last = ""
        while True:
            page = await self.page(prefix, token=token)
            self._check_progress(prefix, page, seen)
            last = self._check_order(page, last)
            run = self._arrangement.entries()
            for ref in self.refs(page, claim):
                run.add(ref)
            self._listed += len(page.objects)
            if self._progress is not None and page.objects:
                self._progress(self._listed)
            if len(run):
                yield run
            if (token := page.token) is None:
                return

    def _check_order(self, page: Page, last: str) -> str:
        """Return the page's last key. Raises OutOfOrder, BadAnswer unless the keys after `last` ascend."""
        keys = [last, *(key for key, _, _ in page.objects)]  # strings and their UTF-8 sort alike
        if not all(map(lt, keys[(not last) :], keys[1 + (not last) :])):
            before, after = next(pair for pair in pairwise(keys) if pair[0] >= pair[1])
            context = ErrorContext(self._bucket, after)
            if before == after:
                raise BadAnswer("the listing names the object twice", context)
            raise OutOfOrder(f"the listing is not in key order (after {short(before)})", context)
        return keys[-1]

    async def _by_folders(self, prefix: str, claim: PlanClaim) -> Entries | None:
        """List the same objects folder by folder; return None if there are more than `MOST_FOLDERS`."""
        runs: list[Entries | asyncio.Task[Entries]] = [self._arrangement.entries()]
        async with asyncio.TaskGroup() as group:
            folders = 0
            async for item in self._level(prefix, claim):
                last_run = runs[-1]
                if isinstance(item, ObjectRef):
                    if not isinstance(last_run, Entries):
                        runs.append(last_run := self._arrangement.entries())
                    last_run.add(item)
                    continue
                folders += 1
                if folders > MOST_FOLDERS or item == prefix:
                    for run in runs:
                        if isinstance(run, asyncio.Task):
                            run.cancel()
                    return None
                runs.append(group.create_task(self.below(item, claim)))
        entries = self._arrangement.entries()
        for run in runs:
            entries.extend(run if isinstance(run, Entries) else run.result())
        return entries

    async def _level(self, prefix: str, claim: PlanClaim) -> AsyncIterator[ObjectRef | str]:
        """Yield the objects and the names of folders directly below `prefix`, each page in key order."""
        token: str | None = None
        seen: set[str] = set()
        while True:
            page = await self.page(prefix, delimiter="/", token=token)
            self._check_progress(prefix, page, seen)
            items: list[tuple[bytes, ObjectRef | str]] = [
                (ref.key.encode(), ref) for ref in self.refs(page, claim)
            ]
            items += [(folder.encode(), folder) for folder in page.folders]
            items.sort(key=itemgetter(0))
            if self._progress is not None and items:
                self._progress(self._listed)
            for _, item in items:
                yield item
            if (token := page.token) is None:
                return


async def first_page(
    pages: PageSource, uri: S3Uri, keys: KeyFilter | None = None
) -> tuple[list[ObjectRef], bool]:
    """Return the objects on a prefix's first page, and whether more pages follow. Raises SourceError."""
    lister = _Lister(pages, uri.bucket, Arrangement(), progress=None, keys=keys)
    page = await lister.page(uri.key)
    return lister.refs(page, PlanMemory().claim()), page.token is not None


async def listed_runs(
    pages: PageSource,
    uri: S3Uri,
    arrangement: Arrangement | None = None,
    *,
    progress: Callable[[int], None] | None = None,
    memory: PlanMemory | PlanClaim | None = None,
    policy: RetryPolicy | None = None,
    on_wait: Callable[[SourceError], None] | None = None,
    keys: KeyFilter | None = None,
) -> AsyncGenerator[Entries, None]:
    """Yield the objects whose keys start with `uri.key` in runs, while the listing goes on.

    Every run has objects in the byte order of keys, without folder markers; its keys are greater than those
    of all earlier runs. While storage is unavailable the page that failed is requested again, as `policy`
    allows, and `on_wait` is called with each error; without `policy` the first such error ends the listing.
    `progress`, `memory`, `keys`: as for `list_prefix`. The caller closes the generator (`aclosing`).

    Raises what `list_prefix` raises, and OutOfOrder if the server does not list in key order. A caller that
    has used no run yet may then call `list_prefix`, which sorts.
    """
    arrangement = arrangement or Arrangement()
    lister = _Lister(
        pages, uri.bucket, arrangement, progress=progress, policy=policy, on_wait=on_wait, keys=keys
    )
    with (memory or PlanMemory()).claim() as claim:
        async with aclosing(lister.runs(uri.key, claim)) as runs:
            async for run in runs:
                yield run


async def list_prefix(
    pages: PageSource,
    uri: S3Uri,
    arrangement: Arrangement | None = None,
    *,
    progress: Callable[[int], None] | None = None,
    memory: PlanMemory | PlanClaim | None = None,
    keys: KeyFilter | None = None,
) -> Entries:
    """List every object whose key starts with `uri.key`, in the byte order of keys, without folder markers.

    Raises SourceError: Missing for an absent bucket, Denied, Transient once the client's own attempts
    are used up, BadAnswer for a listing that does not advance. Raises ConfigError if an object cannot be
    wrapped, or if the plans need more than `memory`. `progress` is called with the number of objects listed,
    which counts some twice. `keys` selects the objects that are returned.
    """
    arrangement = arrangement or Arrangement()
    try:
        with (memory or PlanMemory()).claim() as claim:
            lister = _Lister(pages, uri.bucket, arrangement, progress=progress, keys=keys)
            entries = await lister.below(uri.key, claim)
    except BaseExceptionGroup as errors:
        raise first_error(errors) from errors
    ordered, duplicate = await asyncio.to_thread(_in_order, entries)  # takes 1 to 2 s for a million
    if duplicate is not None:
        raise BadAnswer("the listing names the object twice", ErrorContext(uri.bucket, duplicate))
    return ordered


def _in_order(entries: Entries) -> tuple[Entries, str | None]:
    ordered = entries.in_key_order()
    return ordered, ordered.key_twice()


async def plan_prefix(
    pages: PageSource,
    uri: S3Uri,
    arrangement: Arrangement | None = None,
    *,
    progress: Callable[[int], None] | None = None,
    memory: PlanMemory | None = None,
) -> Plan:
    """Plan an `S3Prefix` channel. Raises what `list_prefix` raises, and Missing if no object matches."""
    arrangement = arrangement or Arrangement()
    entries = await list_prefix(pages, uri, arrangement, progress=progress, memory=memory)
    if not len(entries):
        raise Missing(
            "no object matches this prefix; check S3Uri (a prefix is case-sensitive)", ErrorContext(*uri)
        )
    plan = Plan.arranged(entries, arrangement)
    plan.base = uri
    return plan
