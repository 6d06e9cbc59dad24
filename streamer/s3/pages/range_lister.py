"""Lists a prefix: its pages in turn, and after the first ones its ranges of keys at the same time.

    pages in turn ─ still more? ─ ranges ─┬─ pages of one range, in turn ─┐
                                          ├─ …   up to LISTS at a time    ├─ runs in key order
                                          └─ …                            ┘

S3 sends a thousand keys per page, and each page needs a token of the page before it. So a prefix with more
than `PAGES_IN_TURN` pages is split into ranges (`key_ranges`), each of which begins with a `start-after`. A
range that ends leaves its place to a part of the range that seems to have most keys left. The page on which a
range ends has keys of the next one too, so no range is split into parts that seem to have fewer than
`FEWEST_PAGES`, or four times as many once such pages exceed `SPARE` and `SPARE_FRACTION` of all pages. Ranges
without any key stay below the same number.

The runs of a range are yielded when all ranges before it have ended, and wait until then. A plan needs them
anyway, so they are counted in its memory and not bounded otherwise. The consumer copies each run into the
plan. The C library would keep the memory of the runs that were copied, so it is released as the plan grows.

Correctness does not depend on where ranges begin. It needs a server that lists in key order and knows
`start-after`, so both are proven before a range is yielded: every page ascends, and the first key that the
range before it found after its own end is the first key of this range. A range without this proof is listed
once more, from the last page of the range before it, by tokens alone; or by `start-after`, if the listing has
ended there.

Some servers end a listing before its last key (IsTruncated is false in mid-prefix). So a last range begins
after the last key, except at AWS's own hosts: it costs one request, and the keys that it finds continue the
listing.

The task of a range never raises: the first error ends all tasks and is raised to the consumer of the runs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from itertools import islice, pairwise
from operator import attrgetter, lt
from typing import TYPE_CHECKING

from streamer.aio import TaskGroup
from streamer.errors import BadAnswer, ErrorContext, Missing, OutOfOrder
from streamer.linux import release_free_memory
from streamer.s3.pages.key_ranges import KeyRange, KeySpace, spread
from streamer.s3.pages.prefix_pages import Cursor
from streamer.s3.pages.validation import named_twice, short

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from streamer.plan import Entries
    from streamer.s3.pages.page_parser import Page
    from streamer.s3.pages.prefix_pages import PrefixPages
    from streamer.s3.pages.validation import PlanClaim

LISTS = 32
"""Listing requests in flight for one prefix."""
PAGES_IN_TURN = 4
"""Pages listed in turn before a prefix is split, so that a small prefix costs no further request."""
SPARE = 8
"""Ranges that may turn out to have no key, besides `SPARE_FRACTION`."""
SPARE_FRACTION = 1 / 10
"""Further such ranges for each page."""
RELEASE_EVERY = 1 << 16
"""Entries that are yielded before the memory of their runs is released."""
LONGEST_RUN = 8192
"""Entries from which a run that waits is not extended; many short runs would fragment memory."""
FEWEST_PAGES = 8
"""Fewest pages that each part of a range must seem to have for the range to be split."""


@dataclass(slots=True, eq=False)
class _Listing:
    """The listing of one range."""

    keys: KeyRange
    claim: PlanClaim
    cursor: Cursor
    runs: deque[Entries] = field(default_factory=deque)
    """Runs that were not yielded yet."""
    last_page: Cursor = field(default_factory=Cursor)
    """The cursor of the last page that was listed."""
    continued: bool = False
    """Whether the first page is the last one of the range before, and begins with keys of that range."""
    refused: bool = False
    """Whether the server has refused `start-after`, or ignored it."""
    left: float = 0.0
    """Estimate of the number of keys that were not listed yet."""
    task: asyncio.Task[None] | None = None


class RangeLister:
    """One listing of one prefix."""

    def __init__(self, pages: PrefixPages, claim: PlanClaim) -> None:
        self._pages = pages
        self._claim = claim
        self._space = KeySpace(pages.uri.key)
        self._ranges = [_Listing(KeyRange(), claim.claim(), Cursor())]
        """Ranges that were not wholly yielded, in order."""
        self._running = 0
        """Ranges with a task."""
        self._unanswered = 0
        """Ranges whose first page has not come."""
        self._answers = 0
        self._fruitless = 0
        """First pages of ranges without a key of theirs."""
        self._kept = 0
        """Keys that were listed in their range."""
        self._page_size = 1
        """Most keys of a page so far."""
        self._splits = True
        self._group: TaskGroup
        self._error: Exception | None = None
        self._news = asyncio.Event()
        """Set by each page, and when a task ends."""

    async def runs(self) -> AsyncGenerator[Entries, None]:
        """Yield the runs in key order. Raises SourceError, OutOfOrder, ConfigError."""
        ended: BaseException | None = None
        used = 0
        async with TaskGroup() as self._group:
            try:
                self._start(self._ranges[0])
                before: _Listing | None = None
                while self._ranges:
                    listing = self._ranges[0]
                    if before is not None:
                        await self._prove(before, listing)
                    while listing.runs or not listing.keys.done:
                        if listing.runs:
                            run = listing.runs.popleft()
                            if (used := used + len(run)) >= RELEASE_EVERY:
                                release_free_memory()
                                used = 0
                            yield run
                            self._raise()
                        else:
                            await self._wait()
                    before = self._ranges.pop(0)
                    if not self._ranges and (after := self._after_end(before)) is not None:
                        self._ranges.append(after)
                        self._start(after)
                        before = None  # a range without a key proves the end, and no border
            except (Exception, GeneratorExit) as error:  # noqa: BLE001 - outside the group
                ended = error
            finally:
                for listing in self._ranges:
                    if listing.task is not None:
                        listing.task.cancel()
        if ended is not None:
            raise ended

    async def runs_in_turn(self) -> AsyncGenerator[Entries, None]:
        """Yield the same runs; request a page when the runs of the one before it were used."""
        while self._ranges:
            listing = self._ranges[0]
            while not listing.keys.done:
                await self._next_page(listing)
                while listing.runs:
                    yield listing.runs.popleft()
            after = self._after_end(listing)
            self._ranges = [] if after is None else [after]

    def _after_end(self, last: _Listing) -> _Listing | None:
        """Return a range after the last key; None if the end is certain, or cannot be proven."""
        if self._pages.ends_are_certain or last.refused or last.keys.last is None:
            return None
        return _Listing(KeyRange(last.keys.last), self._claim.claim(), Cursor(last.keys.last))

    async def _wait(self) -> None:
        """Wait for news. Raises the first error of a task."""
        self._raise()
        self._news.clear()
        await self._news.wait()
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    async def _prove(self, before: _Listing, listing: _Listing) -> None:
        """Wait for the proof that the range begins where the one before it ends; without it, list anew."""
        while listing.keys.first is None and not listing.keys.done:
            await self._wait()
        if not listing.refused and listing.keys.first == before.keys.next:
            return
        if listing.task is not None:
            listing.task.cancel()
            await asyncio.wait([listing.task])
        self._kept -= listing.keys.kept
        listing.runs.clear()
        listing.claim.release()
        listing.claim = self._claim.claim()
        if not listing.refused and before.keys.next is None:  # the range before has ended too early
            start = before.keys.last or before.keys.start
            listing.keys, listing.cursor = KeyRange(start, listing.keys.stop), Cursor(start)
        else:
            listing.keys = KeyRange(listing.keys.start, listing.keys.stop)
            listing.cursor = Cursor(before.last_page.start_after, before.last_page.token)
            listing.continued, listing.refused = True, False
        listing.left = 0.0
        self._start(listing)

    def _start(self, listing: _Listing) -> None:
        self._running += 1
        self._unanswered += 1
        listing.task = self._group.create_task(self._list(listing))

    async def _list(self, listing: _Listing) -> None:
        """List the range; note the first error of all tasks."""
        answered = False
        try:
            while not listing.keys.done and self._error is None:
                await self._next_page(listing)
                self._answers += 1
                if not answered:
                    self._unanswered -= 1
                    answered = True
                self._news.set()
                self._split()
        except Exception as error:  # noqa: BLE001 - raised by `runs`
            if self._error is None:
                self._error = error
        finally:
            self._running -= 1
            self._unanswered -= not answered
            self._news.set()
        if self._error is None:
            self._split()

    async def _next_page(self, listing: _Listing) -> None:
        """Request the next page of a range, and add it. Raises SourceError, ConfigError."""
        begins = listing.cursor.token is None and listing.cursor.start_after and not listing.continued
        try:
            # No variable refers to a page while the next one is awaited: 32 pages take 7 MB.
            self._take(listing, await self._pages.page(listing.cursor))
        except (BadAnswer, Missing) as error:  # some servers answer 404 where nothing is left
            if not begins or isinstance(error, OutOfOrder):
                raise
            self._refuse(listing)

    def _refuse(self, listing: _Listing) -> None:
        """Note that `start-after` does not work: the range is listed by tokens later, and is not split."""
        listing.refused = listing.keys.done = True
        self._splits = False

    def _take(self, listing: _Listing, page: Page) -> None:
        """Add a page to its range. Raises BadAnswer, ConfigError, OutOfOrder."""
        keys, cursor = listing.keys, listing.cursor
        first = 0
        if listing.continued and keys.last is None:
            start = keys.start.encode()
            first = next((i for i, key in enumerate(page.keys) if key > start), len(page.keys))
        elif page.keys and keys.first is None and page.keys[0].decode() <= keys.start and keys.start:
            self._refuse(listing)
            return
        asked = Cursor(cursor.start_after, cursor.token)
        cursor.advance(page, self._pages.context)
        self._check_order(page.keys[first:], keys.last)
        listing.last_page = asked
        count = keys.take(page.keys[first:] if first else page.keys, more=page.token is not None)
        run = self._pages.run(page, listing.claim, start=first, stop=first + count)
        if listing.runs and len(listing.runs[-1]) < LONGEST_RUN:
            listing.runs[-1].extend(run)
            if len(listing.runs[-1]) >= LONGEST_RUN:
                listing.runs[-1].pack()
        elif len(run):
            listing.runs.append(run)
        self._kept += count
        self._fruitless += not keys.kept
        self._page_size = max(self._page_size, len(page))
        self._space.learn(page.keys)
        if keys.kept == count and listing is not self._ranges[0]:
            self._space.learn_border(self._ranges[self._ranges.index(listing) - 1].keys, keys)
        listing.left = self._space.left(keys)
        if keys.stop is None and not keys.done:
            listing.left = max(listing.left, self._kept, 8 * FEWEST_PAGES * self._page_size)

    def _check_order(self, keys: list[bytes], last: str | None) -> None:
        """Raise OutOfOrder, BadAnswer unless the keys are greater than `last` and ascend."""
        if last is not None:
            keys = [last.encode(), *keys]
        if all(map(lt, keys, islice(keys, 1, None))):
            return
        before, after = next(pair for pair in pairwise(keys) if pair[0] >= pair[1])
        context = ErrorContext(self._pages.uri.bucket, after.decode())
        if before == after:
            raise named_twice(self._pages.uri.bucket, after.decode())
        raise OutOfOrder(f"the listing is not in key order (after {short(before.decode())})", context)

    def _split(self) -> None:
        """Split the ranges that have most keys left, as far as places and spare requests allow."""
        if not self._splits or self._answers < PAGES_IN_TURN:
            return
        further = self._answers * SPARE_FRACTION
        places = min(LISTS - self._running, int(SPARE + further - self._fruitless - self._unanswered))
        twice = self._answers - self._fruitless - self._kept / self._page_size
        fewest = self._page_size * (FEWEST_PAGES if twice < SPARE + further else 4 * FEWEST_PAGES)
        while places > 0:
            listing = max(self._ranges, key=attrgetter("left"))
            if listing.left < 2 * fewest:
                return
            share = places * listing.left / sum(each.left for each in self._ranges)
            most = listing.left / fewest - 1
            points = spread(self._space.points(listing.keys), max(1, round(min(share, most))))
            listing.left = listing.left / (1 + len(points)) if points else 0.0
            index = self._ranges.index(listing)
            parts = [
                _Listing(keys, self._claim.claim(), Cursor(keys.start)) for keys in listing.keys.split(points)
            ]
            self._ranges[index + 1 : index + 1] = parts
            for part in parts:
                self._start(part)
            places -= len(parts)
