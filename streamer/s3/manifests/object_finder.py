"""Finds size and ETag of the objects that a manifest's rows name, by listings where HEADs cost more.

    blocks of rows ─┬─ key ranges ─ KeyLookup ─ LISTs, 16 at a time ─┬─▶ known ─▶ runs of entries
                    └─ objects with a version ──────────────┐        │
                               keys that no page names ─────┴─ HEADs, 128 at a time

Blocks whose keys hardly mix are listed while the manifest is still being read: its rows are sorted, or
clustered by folder. From the first block on that mixes with its successor, blocks wait for the end of the
manifest, because each page would be needed by many of them. Then all their keys are divided into ranges.
Ranges are listed, and HEADs sent, in the order in which the rows need them.

A listing is never needed: if it is denied, its pages are wrong, or a HEAD describes one of its objects in
another way, HEADs find all objects of the bucket, and `on_unlisted` is called. If storage is unavailable, a
HEAD waits for it; then the page is requested again.

Reading pauses while `MOST_BLOCKS` blocks wait for answers. Blocks that wait for the end of the manifest are
limited by `PlanMemory` alone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamer.aio import TaskGroup
from streamer.errors import BadAnswer, ConfigError, Denied, ErrorContext, SourceError, Throttled
from streamer.plan.validators import described
from streamer.s3.client.faults import first_error
from streamer.s3.manifests.head_queue import HeadQueue
from streamer.s3.manifests.key_lookup import KeyLookup
from streamer.s3.manifests.wanted_ranges import SortedBlock, WantedRange, cut, grouped, is_mixed, pivots
from streamer.s3.pages.object_info import HEADS
from streamer.s3.pages.validation import short

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Sequence

    from streamer.plan import Entries
    from streamer.s3.manifests.row_block import RowBlock
    from streamer.s3.manifests.wanted_ranges import NumberedItem
    from streamer.s3.pages.object_info import ObjectInspector
    from streamer.s3.pages.page_parser import Page
    from streamer.s3.pages.pages import PageSource
    from streamer.s3.pages.validation import PlanClaim

LISTS = 16
"""LISTs in flight for one manifest."""
MOST_BLOCKS = 16
"""Blocks whose objects are being looked for."""
RUN = 500
"""Most rows of a run of entries: some milliseconds of the event loop."""
FAILED_PAGES = 2
"""Successive failures of a listing, after each of which a HEAD succeeds, that count as its last."""
THROTTLED_PAGES = 12
"""Such failures while the server wants fewer requests: HEADs would be a thousand times as many."""


@dataclass(frozen=True, slots=True)
class ObjectClients:
    """What finds objects."""

    inspector: ObjectInspector
    pages: PageSource | None = None
    """None: HEADs find all objects."""
    on_unlisted: Callable[[str, SourceError], None] = lambda _bucket, _error: None
    """Called with a bucket whose listing failed, so that HEADs find the rest of its objects."""


class ObjectFinder:
    """Looks for the objects of one manifest."""

    def __init__(
        self,
        object_clients: ObjectClients,
        row_name: Callable[[int], str],
        *,
        claim: PlanClaim,
        on_progress: Callable[[int], None],
    ) -> None:
        """`row_name`: names manifest and row in errors. `claim`: the memory that the rows take.

        `on_progress` is called for each page and each HEAD, with the number of objects that it has found.
        """
        self._pages = object_clients.pages
        self._on_unlisted = object_clients.on_unlisted
        self._row_name = row_name
        self._claim = claim
        self._on_progress = on_progress
        self._compared: set[str] = set()
        """Buckets whose listings agree with HEADs."""
        self._comparing = asyncio.Lock()
        self._unlisted: set[str] = set()
        """Buckets whose listing is of no use."""
        self._blocks: deque[RowBlock] = deque()
        """Blocks with rows that are not in a run yet."""
        self._held: list[SortedBlock] = []
        """Blocks not looked for yet: the latest, or those that wait for the end of the manifest."""
        self._early = False
        """Whether rows come before all objects are found: there are too many for one turn of HEADs."""
        self._mixed = False
        self._ranges: deque[WantedRange] = deque()
        self._lookups = 0
        self._sorting = asyncio.Lock()
        """One range is sorted at a time, and then other tasks have their turn."""
        self._group = TaskGroup()
        self._heads = HeadQueue(
            object_clients.inspector, self._blocks, row_name, tasks=self._group, on_found=self._note_head
        )
        self._changed = asyncio.Event()
        """Set when further rows of the oldest block may be known, or the search has ended."""
        self._room = asyncio.Event()

    async def runs(
        self, blocks: AsyncGenerator[RowBlock, None], entries: Callable[[], Entries]
    ) -> AsyncGenerator[Entries, None]:
        """Yield the rows of `blocks` as runs of entries, in order. `entries` makes an empty run.

        Rows come as their objects are known. At most `HEADS` objects are looked for all at once. Their rows
        come when all are known, so a mistake in a short manifest precedes its first row.

        Raises SourceError for a failed HEAD, ConfigError for an entry that cannot be, both with the row's
        name; and what `blocks` raises. The caller closes the generator.
        """
        finding = asyncio.create_task(self._find(blocks))
        finding.add_done_callback(lambda _: self._changed.set())
        try:
            while not finding.done():
                self._changed.clear()
                while self._early and len(run := self._next_run(entries())):
                    yield run
                    await asyncio.sleep(0)  # other tasks' turn
                if not finding.done():
                    await self._changed.wait()
            await finding
            while len(run := self._next_run(entries())):
                yield run
                await asyncio.sleep(0)
        finally:
            finding.cancel()
            await asyncio.wait([finding])
            if not finding.cancelled():
                finding.exception()  # retrieved, so that asyncio does not log it

    def _next_run(self, run: Entries) -> Entries:
        """Move the next rows into `run`, as far as their objects are known. Raises ConfigError."""
        if not self._blocks:
            return run
        block = self._blocks[0]
        try:
            block.take(run, block.ready(RUN))
        except ConfigError as error:
            raise ConfigError(f"{self._row_name(block.first_row + block.taken)}: {error}") from error
        self._claim.count(len(run) * run.objects_each, run.memory)
        if block.taken == block.rows:
            self._blocks.popleft()
            self._claim.count(-block.objects, -block.memory)
            self._room.set()
        return run

    async def _find(self, blocks: AsyncGenerator[RowBlock, None]) -> None:
        try:
            async with self._group:
                async with aclosing(blocks):
                    async for block in blocks:
                        await self._take(block)
                if self._pages is not None:
                    await self._look_for_held(self._pages)
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors

    async def _take(self, block: RowBlock) -> None:
        """Look for the block's objects as soon as that is useful; wait while too many blocks wait."""
        self._claim.count(block.objects, block.memory)
        items = block.close()
        await asyncio.sleep(0)  # other tasks' turn
        self._early = self._early or block.first_row > 0 or block.objects > HEADS
        self._blocks.append(block)
        self._changed.set()  # its rows may have literals alone
        if self._pages is None:
            block.leave_to_head(items)
        else:
            self._hold(SortedBlock(block, items), self._pages)
        self._heads.start()
        while len(self._blocks) > MOST_BLOCKS and not self._mixed:
            self._room.clear()
            await self._room.wait()

    def _hold(self, block: SortedBlock, pages: PageSource) -> None:
        """Keep the block; look for the objects of the block before it, if the two hardly mix."""
        self._mixed = self._mixed or (bool(self._held) and is_mixed(self._held[-1], block))
        if not self._mixed and self._held:
            self._look_for(WantedRange([self._held.pop()]), pages)
        self._held.append(block)

    async def _look_for_held(self, pages: PageSource) -> None:
        """Look for the objects of all blocks that are kept."""
        at = pivots(self._held)
        parts: list[list[SortedBlock]] = [[] for _ in range(len(at) + 1)]
        for block in self._held:
            for part, piece in zip(parts, cut(block, at), strict=True):
                if piece.items:
                    part.append(piece)
            await asyncio.sleep(0)  # other tasks' turn
        self._held.clear()
        for wanted_range in sorted(
            (WantedRange(part) for part in parts if part), key=lambda each: each.first_row
        ):
            self._look_for(wanted_range, pages)

    def _look_for(self, wanted_range: WantedRange, pages: PageSource) -> None:
        self._ranges.append(wanted_range)
        if self._lookups < LISTS:
            self._lookups += 1
            self._group.create_task(self._look_up_ranges(pages))

    async def _look_up_ranges(self, pages: PageSource) -> None:
        try:
            while self._ranges:
                wanted_range = self._ranges.popleft()
                async with self._sorting:
                    items = wanted_range.sorted_items()
                    await asyncio.sleep(0)  # other tasks' turn
                    by_bucket = grouped(items)
                    await asyncio.sleep(0)
                for bucket, by_key in by_bucket.items():
                    await self._look_up(bucket, by_key, pages)
        finally:
            self._lookups -= 1

    async def _look_up(self, bucket: str, by_key: dict[bytes, list[NumberedItem]], pages: PageSource) -> None:
        """Find objects of one bucket by listing as far as it is worth its price; leave the rest to HEADs."""
        groups = list(by_key.values())
        lookup = KeyLookup(bucket, list(by_key))
        failures = 0
        while bucket not in self._unlisted and (request := lookup.request()) is not None:
            prefix, start_after = request
            try:
                page = await pages.page(bucket, prefix, start_after=start_after)
                found, heads = lookup.take(page)
            except SourceError as error:
                if error.retryable:
                    failures += 1
                    await self._heads.send(groups[lookup.skip()])
                    if failures < (THROTTLED_PAGES if isinstance(error, Throttled) else FAILED_PAGES):
                        continue  # storage answers again
                elif isinstance(error, Denied) and lookup.narrow():
                    continue
                self._leave_unlisted(bucket, error)
                continue
            failures = 0
            # Nothing would notice the bytes of an object that is listed as empty by mistake.
            heads += [index for index, position in found if not page.sizes[position]]
            found = [(index, position) for index, position in found if page.sizes[position]]
            if found and not await self._agrees(
                bucket, [(groups[i][0], position) for i, position in found], page
            ):
                heads = [index for index, _ in found] + heads
                found = []
            for index, position in found:
                for block, item in groups[index]:
                    block.answer(item, page.sizes[position], page.etags[position])
            self._changed.set()
            self._on_progress(sum(len(groups[index]) for index, _ in found))
            self._leave_to_heads(groups[index] for index in heads)
        self._leave_to_heads(groups[index] for index in lookup.rest())

    async def _agrees(self, bucket: str, found: list[tuple[NumberedItem, int]], page: Page) -> bool:
        """Return whether HEADs describe the bucket's objects as its listings do, by one object or two.

        They do not for access points that change objects (S3 Object Lambda), or on some compatible servers
        for objects that were uploaded in parts. Such an object is compared if the page has one. A second
        object is compared if the first differs, for that may have been replaced.
        """
        async with self._comparing:
            if bucket in self._compared or bucket in self._unlisted:
                return bucket in self._compared
            found.sort(key=lambda each: not _of_parts(page.etags[each[1]]))
            for (block, item), position in found[:2]:
                ref = await self._heads.stat(block, item)
                if (ref.size, ref.etag.encode()) == (page.sizes[position], page.etags[position]):
                    self._compared.add(bucket)
                    return True
            error = BadAnswer(
                f"a HEAD says {ref.size} bytes and {short(described(ref.etag))}, the listing "
                f"{page.sizes[position]} bytes and {short(described(page.etags[position].decode()))}",
                ErrorContext(bucket, ref.key),
            )
            self._leave_unlisted(bucket, error)
            return False

    def _leave_unlisted(self, bucket: str, error: SourceError) -> None:
        """Find the other objects of the bucket by HEADs."""
        if bucket not in self._unlisted:
            self._unlisted.add(bucket)
            self._on_unlisted(bucket, error)

    def _leave_to_heads(self, groups: Iterable[Sequence[NumberedItem]]) -> None:
        for same in groups:
            self._heads.leave(same)
        self._heads.start()

    def _note_head(self, items: int) -> None:
        self._changed.set()
        self._on_progress(items)


def _of_parts(validator: bytes) -> bool:
    """Return whether it is an ETag of an object that was uploaded in parts; times have a space."""
    return b"-" in validator and b" " not in validator
