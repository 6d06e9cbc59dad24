"""Plans the objects below one or several prefixes, as far as they are selected.

    S3Uri ─ listing ─ globs ─┐
    AlsoFrom ─ listing ─ …  ─┴─ limit ─ entries: the prefixes in the order given, each in key order

Globs decide while a page is read (`KeyFilter`), so objects that are left out take no memory. A limit of the
first objects ends the listing: no further page is requested, and no further prefix listed. A limit needs the
order of keys while the listing goes on. If a server has another order, everything is listed once more and
sorted.

Without a limit a prefix is listed as a whole (`list_prefix`), many requests at a time.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING

from streamer.errors import ErrorContext, Missing, OutOfOrder
from streamer.plan import Arrangement, Entries, ObjectRef, Plan, S3Uri
from streamer.plan.selection import KeyFilter, Selection, Selector
from streamer.s3.catalog.listing import list_prefix, listed_runs
from streamer.s3.catalog.validation import PlanMemory

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from streamer.s3.catalog.pages import PageSource
    from streamer.s3.catalog.validation import PlanClaim


async def plan_sources(
    pages: PageSource,
    uris: Sequence[S3Uri],
    arrangement: Arrangement | None = None,
    selection: Selection | None = None,
    *,
    exact: bool = False,
    progress: Callable[[int], None] | None = None,
    memory: PlanMemory | None = None,
) -> Plan:
    """Plan what is selected of the objects below these prefixes, in this order.

    `exact`: a URI that is an object's key names that object alone, as in `penstock cat`. `progress`,
    `memory`: as for `list_prefix`. Raises what `list_prefix` raises; Missing for a prefix without an object,
    or if no object is selected; ConfigError for a limit of bytes below the size of the first object.
    """
    sources = _Sources(
        pages,
        uris,
        arrangement or Arrangement(),
        selection or Selection(),
        exact=exact,
        progress=progress,
        memory=memory or PlanMemory(),
    )
    try:
        return await sources.plan()
    except OutOfOrder:
        return await sources.plan(sort=True)


class _Sources:
    """The prefixes of one channel."""

    def __init__(
        self,
        pages: PageSource,
        uris: Sequence[S3Uri],
        arrangement: Arrangement,
        selection: Selection,
        *,
        exact: bool,
        progress: Callable[[int], None] | None,
        memory: PlanMemory,
    ) -> None:
        self._pages = pages
        self._uris = uris
        self._arrangement = arrangement
        self._selection = selection
        self._exact = exact
        self._progress = progress
        self._memory = memory
        self._listed = 0
        """Objects of the prefixes before the present one."""

    async def plan(self, *, sort: bool = False) -> Plan:
        """List the prefixes and plan what is selected. Raises OutOfOrder unless `sort`."""
        limit = self._selection.limit
        self._listed = 0
        selector = Selector(limit, self._arrangement.entries)
        selected, filters = self._arrangement.entries(), []
        strays = self._selection.strays(records=self._arrangement.wrap)
        with self._memory.claim() as claim:
            for uri in self._uris:
                keys = self._selection.keys(uri.key, strays)
                filters.append(keys)
                selected = await self._add(selected, uri, keys, selector, claim, sort=sort)
                if selector.full:
                    break
            selected = _joined(selected, selector.finish())
            if limit is not None:
                claim.take(item for items in selected for item in items if isinstance(item, ObjectRef))
        if not len(selected):
            raise _nothing_selected(self._uris, filters)
        plan = Plan.arranged(selected, self._arrangement)
        plan.base = self._uris[0] if len(self._uris) == 1 else None
        plan.strays = strays
        return plan

    async def _add(
        self,
        selected: Entries,
        uri: S3Uri,
        keys: KeyFilter,
        selector: Selector,
        claim: PlanClaim,
        *,
        sort: bool,
    ) -> Entries:
        """Return `selected` with what is selected below one prefix. Raises Missing if it has no object."""
        listed = False
        async with aclosing(self._runs(uri, keys, claim, sort=sort)) as runs:
            async for run in runs:
                listed = True
                alone = self._exact and keys.exact
                selected = _joined(selected, selector.take(_only(run, uri) if alone else run))
                if alone or selector.full:
                    break
        if not listed and not keys.left_out:
            raise Missing(
                "no object matches this prefix; check S3Uri (a prefix is case-sensitive)", ErrorContext(*uri)
            )
        return selected

    async def _runs(
        self, uri: S3Uri, keys: KeyFilter, claim: PlanClaim, *, sort: bool
    ) -> AsyncGenerator[Entries, None]:
        """Yield the objects below one prefix that `keys` selects, in key order.

        Without a limit, `claim` counts them; with a limit it counts what is selected, at the end.
        """
        before, report = self._listed, self._progress

        def progress(listed: int) -> None:
            self._listed = before + listed
            if report is not None:
                report(self._listed)

        limited = self._selection.limit is not None
        if limited and not sort:
            listing = listed_runs(self._pages, uri, self._arrangement, progress=progress, keys=keys)
            async with aclosing(listing) as runs:
                async for run in runs:
                    yield run
            return
        whole = claim.claim()
        entries = await list_prefix(
            self._pages, uri, self._arrangement, progress=progress, memory=whole, keys=keys
        )
        if limited:
            whole.release()
        if len(entries):
            yield entries


def _joined(before: Entries, run: Entries) -> Entries:
    """Return the entries of both; may be one of the two, extended."""
    if not len(before):
        return run
    before.extend(run)
    return before


def _only(run: Entries, uri: S3Uri) -> Entries:
    """Return the entry of the object that the URI names; no entry if it was left out."""
    only = Entries(wrap=run.wrap, inflate=run.inflate, objects_each=run.objects_each)
    for items in run:
        if isinstance(items[0], ObjectRef) and items[0].key == uri.key:
            only.add(*items)
    return only


def _nothing_selected(uris: Sequence[S3Uri], filters: list[KeyFilter]) -> Missing:
    uri, keys = next(pair for pair in zip(uris, filters, strict=False) if pair[1].left_out)
    return Missing(
        "Include and Exclude leave out every object; globs are compared with texts such as "
        f"{keys.example!r}, or without a slash with the part after its last slash",
        ErrorContext(*uri),
    )
