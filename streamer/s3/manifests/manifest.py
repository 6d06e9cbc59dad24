"""Plans channels from manifests, which name the objects one by one (contract §4).

    S3 ─ body, resumed after a failure ─ gunzip, if it is gzip ─ scanner ─ blocks of rows ─ object finder
                                                                                                  │
                                                          entries, in the manifest's order ◀──────┘

A manifest is parsed as it arrives; only rows whose objects are not found yet stay, in compact form
(`row_block`). `object_finder` finds size and ETag of the objects by listings and HEADs, in any order; entries
are added in the manifest's order. A manifest that cannot be read to its proven end is an error, because a
truncated manifest may look like a shorter one.

`manifest_body` reads the bytes; `manifest_text` and `manifest_lines` parse them.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

from streamer.errors import ConfigError, ErrorContext, Missing
from streamer.plan import Arrangement, Plan, S3Uri, parse_s3_uri
from streamer.plan.selection import Selector
from streamer.s3.client.session import Clients
from streamer.s3.manifests.body import read_manifest
from streamer.s3.manifests.lines import RowScanner
from streamer.s3.manifests.object_finder import ObjectClients, ObjectFinder
from streamer.s3.manifests.row_block import RowBlock
from streamer.s3.manifests.row_selection import RowSelection
from streamer.s3.manifests.text import ArrayScanner, Gunzip
from streamer.s3.pages.validation import PlanMemory

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from streamer.errors import SourceError
    from streamer.plan import Entries
    from streamer.plan.selection import Selection
    from streamer.retry import RetryPolicy

    Progress = Callable[[int], None]
    """Called with the number of entries found so far, at each page, HEAD and piece of the manifest."""


class Manifest:
    """One manifest, whose rows become runs of entries. `runs` or `plan` is called once."""

    def __init__(
        self,
        clients: Clients,
        uri: S3Uri,
        arrangement: Arrangement,
        attributes: Sequence[str] | None = None,
        *,
        object_clients: ObjectClients,
        selection: Selection | None = None,
        progress: Progress | None = None,
        memory: PlanMemory | None = None,
    ) -> None:
        """`object_clients` find the objects.

        `attributes`: AttributeNames of an augmented manifest; None for a `ManifestFile`. Raises ConfigError
        for an empty list.

        An entry of an augmented manifest has the listed attributes in their order: an attribute whose name
        ends in `-ref` is the object that it names, any other is its text (contract §4.2).
        """
        self._clients = clients
        self._uri = uri
        self._arrangement = arrangement
        self._object_clients = object_clients
        self._progress = progress
        self._memory = memory or PlanMemory()
        self._scanner: ArrayScanner | RowScanner
        if attributes is None:
            self._scanner = ArrayScanner(str(uri))
            self._pattern = [True]
        elif not attributes:
            raise ConfigError("AttributeNames is empty: list the attributes to stream, in order")
        else:
            self._scanner = RowScanner(str(uri), attributes)
            self._pattern = [name.endswith("-ref") for name in attributes]
        self._augmented = attributes is not None
        self._limit = None if selection is None else selection.limit
        self._selected: RowSelection | None = None
        if selection is not None and (selection.by_key or selection.limit is not None):
            width = len(self._pattern)
            self._selected = RowSelection(selection, width=width, augmented=self._augmented)
        self._part = arrangement.rows
        self._rows = 0
        """Number of rows read and planned."""
        self._dealt = 0
        """Number of rows read and selected, of all parts."""
        self._found = 0
        """Number of objects found."""

    @property
    def objects_each(self) -> int:
        """Number of objects in each entry."""
        return sum(self._pattern)

    @property
    def strays(self) -> None:
        """None: a manifest's objects are all meant."""

    @property
    def base(self) -> S3Uri | None:
        """The prefix of all objects, once it is read; None for an augmented manifest."""
        prefix = self._scanner.prefix if isinstance(self._scanner, ArrayScanner) else None
        return None if prefix is None else parse_s3_uri(prefix)

    async def plan(self) -> Plan:
        """Return the plan of all entries. Raises what `runs` raises."""
        entries = self._new_entries()
        async with aclosing(self.runs()) as runs:
            async for run in runs:
                entries.extend(run)
        plan = Plan(entries, self._arrangement)
        plan.base = self.base
        return plan

    async def runs(
        self, policy: RetryPolicy | None = None, on_wait: Callable[[SourceError], None] | None = None
    ) -> AsyncGenerator[Entries, None]:
        """Yield the entries in runs, in the manifest's order, as their objects are found.

        If the manifest has at most `HEADS` objects, the first run comes when all are found. While storage is
        unavailable, reading the manifest goes on as `policy` allows; `on_wait` is called with each error.

        Raises ConfigError naming the row for a manifest that breaks a rule or an entry that cannot be
        wrapped, ConfigError if the plans need more than the memory, SourceError for a failed request. The
        caller closes the generator.
        """
        by_bytes = None if self._limit is None or self._limit.bytes is None else self._limit
        selector = Selector(by_bytes, self._new_entries, by_number=self._augmented)
        body = read_manifest(self._clients, self._uri, policy, on_wait=on_wait)
        with self._memory.claim() as claim:
            finder = ObjectFinder(
                self._object_clients, self._row_name, claim=claim, on_progress=self._report_progress
            )
            async with aclosing(finder.runs(self._blocks(body), self._new_entries)) as runs:
                async for found in runs:
                    if len(run := selector.take(found)):
                        yield run
                    if selector.full:
                        break
            if len(sample := selector.finish()):
                yield sample
        if not self._dealt and self._selected is not None and (keys := self._selected.keys) is not None:
            raise Missing(keys.nothing_left, ErrorContext(*self._uri))
        if not self._dealt:
            raise ConfigError(f"{self._uri} names no object; a manifest needs at least one entry")

    def _new_entries(self) -> Entries:
        return self._arrangement.entries(objects_each=self.objects_each)

    def _row_name(self, row: int) -> str:
        """Return manifest and entry of a planned row, for errors. `row`: from 0."""
        row = self._part.index + self._part.count * row
        return self._scanner.row_name(row if self._selected is None else self._selected.number(row))

    def _report_progress(self, objects: int) -> None:
        """Report the number of entries. `objects`: number of objects found since the last report."""
        self._found += objects
        if self._progress is not None:
            each = self.objects_each
            self._progress(self._found // each if each else self._rows)

    async def _blocks(self, body: AsyncGenerator[bytes, None]) -> AsyncGenerator[RowBlock, None]:
        """Yield the manifest's rows in blocks, as they are read."""
        block = RowBlock(0, self._pattern)
        async with aclosing(self._rows_to_plan(body)) as all_items:
            async for left in all_items:
                items = left
                while items:
                    self._rows -= block.rows
                    items = block.add(items)
                    self._rows += block.rows
                    if block.full:
                        yield block
                        block = RowBlock(block.first_row + block.rows, self._pattern)
        if block.rows:
            yield block

    async def _rows_to_plan(
        self, body: AsyncGenerator[bytes, None]
    ) -> AsyncGenerator[list[bytes | str], None]:
        """Yield the items of the rows to plan, of whole rows at a time; read no further than needed."""
        selected = self._selected
        async with aclosing(self._items(body)) as all_items:
            async for items in all_items:
                if selected is None:
                    yield self._own(items)
                    continue
                base = self.base
                yield self._own(selected.take(items, "" if base is None else base.key))
                if selected.full:
                    return
        if selected is not None:
            yield self._own(selected.finish())

    def _own(self, items: list[bytes | str]) -> list[bytes | str]:
        """Return the items of this part's rows, of the next rows that are selected."""
        part, width = self._part, len(self._pattern)
        rows, before = len(items) // width, self._dealt
        self._dealt += rows
        if part.count == 1:
            return items
        own = range((part.index - before) % part.count, rows, part.count)
        return [item for row in own for item in items[row * width : (row + 1) * width]]

    async def _items(self, body: AsyncGenerator[bytes, None]) -> AsyncGenerator[list[bytes | str], None]:
        """Yield the items of all rows, of one or more whole rows at a time."""
        inflate, scanner = Gunzip(str(self._uri)), self._scanner
        async with aclosing(body):
            async for data in body:
                self._report_progress(0)
                for text in inflate.feed(data):
                    for items in scanner.feed(text, last=False):
                        yield items
                    await asyncio.sleep(0)  # other tasks' turn
        for items in scanner.feed(inflate.finish(), last=True):
            yield items
