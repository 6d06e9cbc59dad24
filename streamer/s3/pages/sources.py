"""Plans the objects below one or several prefixes, as far as they are selected.

    S3Uri ─ listing ─ globs ─┐
    AlsoFrom ─ listing ─ …  ─┴─ limit ─ entries: the prefixes in the order given, each in key order

Globs decide while a page is read (`KeyFilter`), so objects that are left out take no memory. A limit of the
first objects ends the listing: no further page is requested, and no further prefix listed. A limit needs the
order of keys while the listing goes on. If a server has another order, everything is listed once more and
sorted.

An open plan (`streamer.s3.pages.open_plan`) gets the runs while the listing goes on.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

from streamer.errors import ErrorContext, Missing, OutOfOrder
from streamer.plan import Arrangement, Entries, ObjectRef, Plan, S3Uri
from streamer.plan.selection import KeyFilter, Selection, Selector
from streamer.retry import RetryPolicy, retry_while_unavailable
from streamer.s3.pages.listing import listed_runs, nothing_below, sorted_prefix
from streamer.s3.pages.prefix_pages import PrefixPages
from streamer.s3.pages.validation import PlanMemory

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from streamer.errors import SourceError
    from streamer.plan.strays import Strays
    from streamer.s3.pages.pages import PageSource
    from streamer.s3.pages.validation import PlanClaim

    _ListBelow = Callable[[PrefixPages, PlanClaim], AsyncGenerator[Entries, None]]
    """Returns the runs of one prefix."""


class Sources:
    """The prefixes of one channel, in their order."""

    def __init__(
        self,
        pages: PageSource,
        uris: Sequence[S3Uri],
        arrangement: Arrangement | None = None,
        selection: Selection | None = None,
        *,
        exact: bool = False,
        progress: Callable[[int], None] | None = None,
        memory: PlanMemory | None = None,
    ) -> None:
        """`exact`: a URI that is an object's key names that object alone, as in `penstock cat`.

        `progress` is called with the number of objects listed, which counts some twice. `memory`: of plans.
        """
        self._pages = pages
        self._uris = uris
        self._arrangement = arrangement or Arrangement()
        self._selection = selection or Selection()
        self._exact = exact
        self._progress = progress
        self._memory = memory or PlanMemory()
        self._listed = 0
        """Objects of the prefixes before the present one."""
        self._progressed: Callable[[], None] = lambda: None
        """Called for each page too."""
        self.strays: Strays | None = None
        """Selected objects that are probably no data, as far as the listing has come."""

    @property
    def objects_each(self) -> int:
        """Number of objects in each entry."""
        return 1

    @property
    def base(self) -> S3Uri | None:
        """The prefix of all objects, if there is only one."""
        return self._uris[0] if len(self._uris) == 1 else None

    @property
    def _ends_early(self) -> bool:
        """Whether a limit probably ends the listing before its last page."""
        return self._selection.limit is not None and self._selection.limit.seed is None

    async def plan(self) -> Plan:
        """List the prefixes and plan what is selected.

        Raises what `listed_runs` raises but OutOfOrder; Missing for a prefix without an object, or if no
        object is selected; ConfigError for a limit of bytes below the size of the first object.
        """
        try:
            return await self._plan(self._early_runs)
        except OutOfOrder:
            return await self._plan(self._sorted_runs)

    async def _plan(self, list_below: _ListBelow) -> Plan:
        selected = self._arrangement.entries()
        async with aclosing(self._selected(list_below)) as runs:
            async for run in runs:
                selected.extend(run)
                await asyncio.sleep(0)  # the runs of a range that waited come one after the other
        plan = Plan(selected, self._arrangement)
        plan.base, plan.strays = self.base, self.strays
        return plan

    async def runs(
        self, policy: RetryPolicy, on_wait: Callable[[SourceError], None] | None = None
    ) -> AsyncGenerator[Entries, None]:
        """Yield what is selected in runs, in plan order, while the listing goes on.

        While storage is unavailable, it is asked again, as `policy` allows; `on_wait` is called with each
        error. If the first run is out of order, everything is listed once more and sorted. Raises what
        `plan` raises, and OutOfOrder if a later run is out of order.
        """
        begun = False
        try:
            async with aclosing(self._selected(self._early_runs, policy, on_wait)) as runs:
                async for run in runs:
                    begun = True
                    yield run
        except OutOfOrder:
            if begun:
                raise
        else:
            return

        async def whole(progressed: Callable[[], None]) -> Entries:
            self._progressed = progressed
            return (await self._plan(self._sorted_runs)).entries

        yield await retry_while_unavailable(whole, policy, on_wait=on_wait)

    async def _selected(
        self,
        list_below: _ListBelow,
        policy: RetryPolicy | None = None,
        on_wait: Callable[[SourceError], None] | None = None,
    ) -> AsyncGenerator[Entries, None]:
        """Yield the entries that are selected below all prefixes, in runs that are not empty."""
        limit, count = self._selection.limit, 0
        self._listed = 0
        selector = Selector(limit, self._arrangement.entries)
        filters = []
        self.strays = self._selection.strays(records=self._arrangement.wrap)
        with self._memory.claim() as claim:
            for uri in self._uris:
                # With a limit, what is listed may be more than what is selected.
                strays = self.strays if limit is None else None
                keys = self._selection.keys(uri.key, strays, alone=self._exact, bucket=uri.bucket)
                filters.append(keys)
                pages = PrefixPages(
                    self._pages,
                    uri,
                    self._arrangement,
                    policy=policy,
                    on_wait=on_wait,
                    progress=self._report(),
                    keys=keys,
                )
                async with aclosing(self._below(list_below(pages, claim), uri, keys, selector)) as runs:
                    async for run in runs:
                        count += self._claim(run, claim)
                        yield run
                if selector.full:
                    break
            if len(rest := selector.finish()):
                count += self._claim(rest, claim)
                yield rest
        if not count:
            raise _nothing_selected(self._uris, filters)

    def _claim(self, run: Entries, claim: PlanClaim) -> int:
        """Count a run in `claim`, and look for strays in it, if its listing did not; return its entries."""
        if self._selection.limit is not None:
            refs = [item for items in run for item in items if isinstance(item, ObjectRef)]
            claim.take(refs)
            if self.strays is not None:
                for uri in self._uris:
                    below = [ref for ref in refs if ref.bucket == uri.bucket and ref.key.startswith(uri.key)]
                    keys, sizes = [ref.key.encode() for ref in below], [ref.size for ref in below]
                    self.strays.look(keys, sizes, uri.key)
        return len(run)

    async def _below(
        self, listing: AsyncGenerator[Entries, None], uri: S3Uri, keys: KeyFilter, selector: Selector
    ) -> AsyncGenerator[Entries, None]:
        """Yield what is selected of the listing of one prefix. Raises Missing if it has no object."""
        listed = False
        async with aclosing(listing) as runs:
            async for run in runs:
                listed = True
                alone = self._exact and keys.exact
                if len(selected := selector.take(_only(run, uri) if alone else run)):
                    yield selected
                if alone or selector.full:
                    break
        if not listed and not keys.left_out:
            raise nothing_below(uri)

    def _report(self) -> Callable[[int], None]:
        """Return a callback for the number of listed objects of the next prefix."""
        before, report = self._listed, self._progress

        def progress(listed: int) -> None:
            self._listed = before + listed
            self._progressed()
            if report is not None:
                report(self._listed)

        return progress

    def _early_runs(self, pages: PrefixPages, claim: PlanClaim) -> AsyncGenerator[Entries, None]:
        """Return the runs of one prefix while its listing goes on.

        Without a limit, `claim` counts the objects; with a limit it counts what is selected.
        """
        memory = claim if self._selection.limit is None else PlanMemory()
        return listed_runs(pages, memory, in_turn=self._ends_early)

    async def _sorted_runs(self, pages: PrefixPages, claim: PlanClaim) -> AsyncGenerator[Entries, None]:
        """Yield the objects below one prefix as one run, whatever the order of the listing."""
        whole = claim.claim()
        entries = await sorted_prefix(pages, whole)
        if self._selection.limit is not None:
            whole.release()
        if len(entries):
            yield entries


def _only(run: Entries, uri: S3Uri) -> Entries:
    """Return the entry of the object that the URI names; no entry if it was left out."""
    only = Entries(wrap=run.wrap, inflate=run.inflate, objects_each=run.objects_each)
    for items in run:
        if isinstance(items[0], ObjectRef) and items[0].key == uri.key:
            only.add(*items)
    return only


def _nothing_selected(uris: Sequence[S3Uri], filters: list[KeyFilter]) -> Missing:
    uri, keys = next(pair for pair in zip(uris, filters, strict=False) if pair[1].left_out)
    return Missing(keys.nothing_left, ErrorContext(*uri))
