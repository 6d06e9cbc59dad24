"""Lists the objects of a prefix, with their current versions.

A listing is made once per channel and job, and the plan keeps its result. A prefix is a pure string
prefix without delimiter, as in SageMaker: `s3://b/train` also names `train-old/x` (contract §3.1).

`listed_runs` yields the objects while they are listed (`range_lister`). `list_prefix` collects them; if the
server does not list in key order, as S3's directory buckets and some compatible servers, it lists the prefix
page after page and sorts.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

from streamer.errors import ErrorContext, Missing, OutOfOrder
from streamer.plan import Arrangement, Entries, ObjectRef, Plan, S3Uri
from streamer.s3.pages.prefix_pages import Cursor, PrefixPages
from streamer.s3.pages.range_lister import RangeLister
from streamer.s3.pages.validation import PlanMemory, named_twice

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from streamer.errors import SourceError
    from streamer.plan.selection import KeyFilter
    from streamer.retry import RetryPolicy
    from streamer.s3.pages.pages import PageSource
    from streamer.s3.pages.validation import PlanClaim


async def first_page(
    pages: PageSource, uri: S3Uri, keys: KeyFilter | None = None
) -> tuple[list[ObjectRef], bool]:
    """Return the objects on a prefix's first page, and whether more pages follow. Raises SourceError."""
    of_prefix = PrefixPages(pages, uri, Arrangement(), keys=keys)
    page = await of_prefix.page(Cursor())
    run = of_prefix.run(page, PlanMemory().claim())
    return [*Plan(run).refs(0)], page.token is not None


async def listed_runs(  # noqa: PLR0913 - what every listing has, and who wants its runs
    pages: PageSource,
    uri: S3Uri,
    arrangement: Arrangement | None = None,
    *,
    in_turn: bool = False,
    progress: Callable[[int], None] | None = None,
    memory: PlanMemory | PlanClaim | None = None,
    policy: RetryPolicy | None = None,
    on_wait: Callable[[SourceError], None] | None = None,
    keys: KeyFilter | None = None,
) -> AsyncGenerator[Entries, None]:
    """Yield the objects whose keys start with `uri.key` in runs, while the listing goes on.

    Every run has objects in the byte order of keys, without folder markers; its keys are greater than those
    of all earlier runs. `in_turn`: list page after page, for a caller that probably ends before the listing.
    While storage is unavailable a page that failed is requested again, as `policy` allows, and `on_wait` is
    called with each error; without `policy` the first such error ends the listing. `progress`, `memory`,
    `keys`: as for `list_prefix`. The caller closes the generator (`aclosing`).

    Raises what `list_prefix` raises, and OutOfOrder if the server does not list in key order. A caller that
    has used no run yet may then call `list_prefix`, which sorts.
    """
    of_prefix = PrefixPages(
        pages,
        uri,
        arrangement or Arrangement(),
        policy=policy,
        on_wait=on_wait,
        progress=progress,
        keys=keys,
    )
    with (memory or PlanMemory()).claim() as claim:
        lister = RangeLister(of_prefix, claim)
        async with aclosing(lister.runs_in_turn() if in_turn else lister.runs()) as runs:
            async for run in runs:
                yield await of_prefix.sized(run)


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

    Each object that is listed as empty costs a HEAD.

    Raises SourceError: Missing for an absent bucket, Denied, Transient once the client's own attempts
    are used up, BadAnswer for a listing that does not advance. Raises ConfigError if an object cannot be
    wrapped, or if the plans need more than `memory`. `progress` is called with the number of objects listed,
    which counts some twice. `keys` selects the objects that are returned.
    """
    arrangement, memory = arrangement or Arrangement(), memory or PlanMemory()
    entries = arrangement.entries()
    runs = listed_runs(
        pages,
        uri,
        arrangement,
        progress=progress,
        memory=memory,
        keys=keys,
    )
    try:
        async with aclosing(runs):
            async for run in runs:
                entries.extend(run)
                await asyncio.sleep(0)  # the runs of a range that waited come one after the other
    except OutOfOrder:
        of_prefix = PrefixPages(pages, uri, arrangement, progress=progress, keys=keys)
        return await _sorted(of_prefix, arrangement.entries(), memory)
    return entries


async def _sorted(pages: PrefixPages, entries: Entries, memory: PlanMemory | PlanClaim) -> Entries:
    """List the pages in turn into `entries`; return them in key order. Raises what `list_prefix` raises."""
    cursor = Cursor()
    with memory.claim() as claim:
        while True:
            page = await pages.page(cursor)
            cursor.advance(page, pages.context)
            entries.extend(pages.run(page, claim))
            if cursor.token is None:
                break
    ordered, duplicate = await asyncio.to_thread(_in_order, entries)  # takes 1 to 2 s for a million
    if duplicate is not None:
        raise named_twice(pages.uri.bucket, duplicate)
    return await pages.sized(ordered)


def _in_order(entries: Entries) -> tuple[Entries, str | None]:
    ordered = entries.in_key_order()
    return ordered, ordered.key_twice()


def nothing_below(uri: S3Uri) -> Missing:
    """Return the error that no object's key begins with the prefix."""
    return Missing(
        "no object matches this prefix; check S3Uri (a prefix is case-sensitive)", ErrorContext(*uri)
    )
