"""Plans the objects below one or several prefixes, as far as they are selected.

    S3Uri ─ listing ─ globs ─┐
    AlsoFrom ─ listing ─ …  ─┴─ limit ─ entries: the prefixes in the order given, each in key order

Globs decide while a page is read (`KeyFilter`), so objects that are left out take no memory. A limit of the
first objects ends the listing: no further page is requested, and no further prefix listed. A limit needs the
order of keys while the listing goes on. If a server has another order, everything is listed once more and
sorted.

Without a limit a prefix is listed as a whole (`list_prefix`), many requests at a time; an open plan
(`streamer.s3.pages.open_plan`) gets its runs while the listing goes on.
"""

from __future__ import annotations

from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING

from streamer.errors import ErrorContext, Missing, OutOfOrder
from streamer.plan import Arrangement, Entries, ObjectRef, Plan, S3Uri
from streamer.plan.selection import KeyFilter, Selection, Selector
from streamer.retry import RetryPolicy, retry_while_unavailable
from streamer.s3.pages.listing import list_prefix, listed_runs, nothing_below
from streamer.s3.pages.validation import PlanMemory

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from streamer.errors import SourceError
    from streamer.plan.strays import Strays
    from streamer.s3.pages.pages import PageSource
    from streamer.s3.pages.validation import PlanClaim


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

        `progress`, `memory`: as for `list_prefix`.
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

        Raises what `list_prefix` raises; Missing for a prefix without an object, or if no object is selected;
        ConfigError for a limit of bytes below the size of the first object.
        """
        try:
            return await self._plan(sort=False)
        except OutOfOrder:
            return await self._plan(sort=True)

    async def _plan(self, *, sort: bool) -> Plan:
        """Plan what is selected. Raises OutOfOrder unless `sort`."""
        early = self._selection.limit is not None and not sort
        list_below = partial(self._early_runs, None, None) if early else self._whole_runs
        selected = self._arrangement.entries()
        async with aclosing(self._selected(list_below)) as runs:
            async for run in runs:
                selected = _joined(selected, run)
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
            async with aclosing(self._selected(partial(self._early_runs, policy, on_wait))) as runs:
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
            return (await self._plan(sort=True)).entries

        yield await retry_while_unavailable(whole, policy, on_wait=on_wait)

    async def _selected(
        self, list_below: Callable[[S3Uri, KeyFilter, PlanClaim], AsyncGenerator[Entries, None]]
    ) -> AsyncGenerator[Entries, None]:
        """Yield the entries that are selected below all prefixes, in runs that are not empty.

        `list_below`: the runs of a prefix.
        """
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
                async with aclosing(self._below(list_below(uri, keys, claim), uri, keys, selector)) as runs:
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

    def _early_runs(
        self,
        policy: RetryPolicy | None,
        on_wait: Callable[[SourceError], None] | None,
        uri: S3Uri,
        keys: KeyFilter,
        claim: PlanClaim,
    ) -> AsyncGenerator[Entries, None]:
        """Return the runs of one prefix while its listing goes on."""
        return listed_runs(
            self._pages,
            uri,
            self._arrangement,
            in_turn=self._ends_early,
            progress=self._report(),
            memory=None if self._selection.limit is not None else claim,
            policy=policy,
            on_wait=on_wait,
            keys=keys,
        )

    async def _whole_runs(
        self, uri: S3Uri, keys: KeyFilter, claim: PlanClaim
    ) -> AsyncGenerator[Entries, None]:
        """Yield the objects below one prefix that `keys` selects, sorted, as one run.

        Without a limit, `claim` counts them; with a limit it counts what is selected, at the end.
        """
        whole = claim.claim()
        entries = await list_prefix(
            self._pages, uri, self._arrangement, progress=self._report(), memory=whole, keys=keys
        )
        if self._selection.limit is not None:
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
    return Missing(keys.nothing_left, ErrorContext(*uri))
