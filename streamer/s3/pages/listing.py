"""Lists the objects of a prefix, with their current versions.

A listing is made once per channel and job, and the plan keeps its result. A prefix is a pure string
prefix without delimiter, as in SageMaker: `s3://b/train` also names `train-old/x` (contract §3.1).

`listed_runs` yields the objects while they are listed (`range_lister`). If the server does not list in key
order, as S3's directory buckets and some compatible servers, `sorted_prefix` lists page after page and sorts.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

from streamer.errors import ErrorContext, Missing
from streamer.plan import Arrangement, Entries, ObjectRef, Plan, S3Uri
from streamer.s3.pages.prefix_pages import Cursor, PrefixPages
from streamer.s3.pages.range_lister import RangeLister
from streamer.s3.pages.validation import PlanMemory, named_twice

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from streamer.plan.selection import KeyFilter
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


async def listed_runs(
    pages: PrefixPages, memory: PlanMemory | PlanClaim, *, in_turn: bool = False
) -> AsyncGenerator[Entries, None]:
    """Yield the objects below the prefix in runs, while the listing goes on.

    Every run has objects in the byte order of keys, without folder markers; its keys are greater than those
    of all earlier runs. Each object that is listed as empty costs a HEAD. `in_turn`: list page after page,
    for a caller that probably ends before the listing. The caller closes the generator (`aclosing`).

    Raises SourceError: Missing for an absent bucket, Denied, Transient once the client's own attempts are
    used up, BadAnswer for a listing that does not advance, OutOfOrder if the server does not list in key
    order. A caller that has used no run yet may then call `sorted_prefix`. Raises ConfigError if an object
    cannot be wrapped, or if the plans need more than `memory`.
    """
    with memory.claim() as claim:
        lister = RangeLister(pages, claim)
        async with aclosing(lister.runs_in_turn() if in_turn else lister.runs()) as runs:
            async for run in runs:
                yield await pages.sized(run)


async def sorted_prefix(pages: PrefixPages, memory: PlanMemory | PlanClaim) -> Entries:
    """List the pages in turn, and return the objects in key order. Raises what `listed_runs` raises."""
    entries, cursor = pages.arrangement.entries(), Cursor()
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
