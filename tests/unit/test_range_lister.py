"""Ranges of keys: whatever the keys and the server's habits, the runs are the listing, once and in order."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from bisect import bisect_right
from collections.abc import Callable, Coroutine, Iterable
from contextlib import aclosing
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamer.errors import BadAnswer, Denied, Missing, OutOfOrder, Transient
from streamer.plan import Arrangement, ObjectRef, S3Uri
from streamer.plan.entries import Entries
from streamer.retry import RetryPolicy
from streamer.s3.pages import range_lister
from streamer.s3.pages.page_parser import Page
from streamer.s3.pages.pages import PageSource
from streamer.s3.pages.validation import PlanMemory
from tests.kit.planning import list_prefix, runs_below

ETAG = b"0" * 32


class Server(PageSource):
    """The reference: pages of sorted keys, each after a turn of the event loop that `dice` draws."""

    def __init__(
        self, keys: Iterable[str], *, page: int = 10, seed: int = 0, order: Callable[[str], Any] | None = None
    ) -> None:
        """`order`: the server's own order of keys; byte order unless given."""
        self.ends_are_certain = True
        self.order = order or str.encode
        self.keys = sorted(keys, key=self.order)
        self.page_size = page
        self.dice = random.Random(seed)
        self.requests = self.requests_in_flight = self.most_in_flight = self.splits = 0

    async def page(
        self, bucket: str, prefix: str, *, token: str | None = None, start_after: str = ""
    ) -> Page:
        assert bucket == "b"
        self.requests += 1
        self.splits += bool(start_after)
        self.requests_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.requests_in_flight)
        try:
            for _ in range(self.dice.randrange(1, 8)):
                await asyncio.sleep(0)
            return self.answer(prefix, token, start_after)
        finally:
            self.requests_in_flight -= 1

    async def stat(self, bucket: str, key: str) -> ObjectRef:
        raise AssertionError(f"{bucket}/{key} is not listed as empty")

    def answer(self, prefix: str, token: str | None, start_after: str) -> Page:
        keys = [key for key in self.keys if key.startswith(prefix)] if prefix not in ("", "d/") else self.keys
        after = start_after if token is None else token[1:]
        begin = bisect_right(keys, self.order(after), key=self.order) if after else 0
        found = keys[begin : begin + self.page_size]
        more = begin + len(found) < len(keys)
        return page_of(found, f"t{found[-1]}" if more else None)


def page_of(keys: list[str], token: str | None) -> Page:
    return Page([key.encode() for key in keys], [1] * len(keys), [ETAG] * len(keys), token)


def run(listing: Coroutine[Any, Any, Entries]) -> list[str]:
    """The keys of a listing."""
    entries = asyncio.run(listing)
    return [item.key for (item,) in entries if isinstance(item, ObjectRef)]


async def runs_of(server: Any, prefix: str, **options: Any) -> Entries:
    """All runs; each is in order and after those before it."""
    entries = Entries()
    async with aclosing(runs_below(server, S3Uri("b", prefix), **options)) as runs:
        async for each in runs:
            entries.extend(each)
    return entries


FOLDERS = st.sampled_from(["a", "ab", "b", "0", "9", "Z", "train", "é", "\U0001f600", "\uffff", "~", " "])
KEYS = st.one_of(
    st.lists(FOLDERS, min_size=1, max_size=4).map("/".join),
    st.integers(0, 400).map("img-{:07d}.jpg".format),
    st.integers(0, 400).map("part/img-{}.jpg".format),
    st.integers(0, 1 << 32).map("{:08x}".format),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
)


@given(
    st.sets(KEYS, max_size=300), st.integers(1, 7), st.integers(0, 1 << 32), st.sampled_from(["", "p", "p/"])
)
@settings(deadline=None)
def test_every_key_is_listed_once_and_in_order(keys: set[str], page: int, seed: int, prefix: str) -> None:
    """Ranges of one page and more, from keys of any form; one key may be the prefix."""
    names = {f"{prefix}{key}" for key in keys if prefix or key} | {"o", "q"}
    server = Server(names, page=page, seed=seed)
    server.ends_are_certain = seed % 2 == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(range_lister, "FEWEST_PAGES", 1)
        patch.setattr(range_lister, "SPARE", 1000)
        patch.setattr(range_lister, "PAGES_IN_TURN", 2)
        found = run(runs_of(server, prefix))
    due = sorted((name for name in names if name.startswith(prefix)), key=str.encode)
    assert found == due


FLAT = [f"d/img-{number:07d}.jpg" for number in range(12_000)]
TREE = [f"d/{folder:03d}/{number:04d}.jpg" for folder in range(100) for number in range(120)]
HASHES = [f"d/{random.Random(number).randrange(1 << 64):016x}" for number in range(12_000)]
LONG = [f"d/{'long/' * 20}img-{number:07d}" for number in range(12_000)]
NUMBERS = [f"d/{number}.jpg" for number in range(12_000)]
UNEVEN = [f"d/big/{number:05d}" for number in range(9_000)] + [
    f"d/x{n}/{i}" for n in range(1000) for i in "abc"
]


@pytest.mark.parametrize(
    "keys",
    [FLAT, TREE, HASHES, LONG, NUMBERS, UNEVEN],
    ids=["flat", "tree", "hashes", "long", "numbers", "uneven"],
)
def test_ranges_are_listed_at_the_same_time_with_few_more_requests(keys: list[str]) -> None:
    server = Server(keys, page=10)
    assert run(list_prefix(server, S3Uri("b", "d/"))) == sorted(keys)
    assert server.most_in_flight > 16
    assert server.requests < 1.2 * len(keys) / 10 + 20


HOURS = [
    f"d/month={month:02}/day={day:02}/hour={hour:02}/data.parquet"
    for month in range(1, 13) for day in range(1, 29) for hour in range(24)
][:2690]  # fmt: skip


@pytest.mark.parametrize(("keys", "rounds"), [(FLAT[:10_000], 58), (HOURS, 66)], ids=["flat", "hours"])
def test_a_listing_takes_few_rounds_of_requests(keys: list[str], rounds: int) -> None:
    """Every request takes equally many turns of the event loop."""
    turns_each = 64

    class Slow(Server):
        async def page(self, *names: str, token: str | None = None, start_after: str = "") -> Page:
            self.requests += 1
            for _ in range(turns_each):
                await asyncio.sleep(0)
            return self.answer(names[1], token, start_after)

    async def turns() -> int:
        count = 0
        listing = asyncio.create_task(list_prefix(server, S3Uri("b", "d/")))
        while not listing.done():
            await asyncio.sleep(0)
            count += 1
        assert len(await listing) == len(keys)
        return count

    server = Slow(keys, page=10)
    assert asyncio.run(turns()) < rounds * turns_each
    assert server.requests < 1.25 * len(keys) / 10


def test_other_tasks_have_their_turn_between_runs_that_have_waited() -> None:
    """The first range ends last, so all others wait for it, and come one after the other."""

    class SlowStart(Server):
        async def page(self, *names: str, token: str | None = None, start_after: str = "") -> Page:
            if self.requests > 20 and not start_after and token is not None and token < f"t{FLAT[400]}":
                for _ in range(300):
                    await asyncio.sleep(0)
            return await super().page(*names, token=token, start_after=start_after)

    async def most_entries_in_a_turn() -> int:
        lengths, done = [0], False

        async def look() -> None:
            while not done:
                lengths.append(len(collected[0]) if collected else 0)
                await asyncio.sleep(0)

        looking = asyncio.create_task(look())
        await list_prefix(SlowStart(FLAT, page=10), S3Uri("b", "d/"), Collecting())
        done = True
        await looking
        return max(after - before for before, after in pairwise(lengths))

    collected: list[Entries] = []

    class Collecting(Arrangement):
        def entries(self, *, objects_each: int = 1) -> Entries:
            entries = super().entries(objects_each=objects_each)
            collected.append(entries)
            return entries

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(range_lister, "LONGEST_RUN", 50)
        assert 10 <= asyncio.run(most_entries_in_a_turn()) <= 60


def test_a_small_prefix_takes_one_request_a_page() -> None:
    server = Server(FLAT[:40], page=10)
    assert len(run(list_prefix(server, S3Uri("b", "d/")))) == 40
    assert server.requests == 4


PEAK = """
import asyncio, resource
from bisect import bisect_right
from benchmarks.listing import Keys
from tests.unit.test_range_lister import ETAG, Page, S3Uri, list_prefix

KEYS = Keys("flat", 300_000)

class Waits:
    requests = 0
    ends_are_certain = True

    async def page(self, _bucket, _prefix, *, token=None, start_after=""):
        self.requests += 1
        while token == "4000" and self.requests < 300:
            await asyncio.sleep(0)
        first = int(token) if token else bisect_right(KEYS, start_after)
        end = min(first + 1000, len(KEYS))
        await asyncio.sleep(0)
        keys = [KEYS[number].encode() for number in range(first, end)]
        return Page(keys, [1] * len(keys), [ETAG] * len(keys), str(end) if end < len(KEYS) else None)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

before = peak()
entries = asyncio.run(list_prefix(Waits(), S3Uri("b", "train/")))
print(len(entries), (peak() - before) / len(entries) - len(KEYS[0]))
"""
"""Lists 300,000 keys, of which most wait for the first range; prints bytes of memory each besides the key."""


def test_keys_that_wait_are_not_in_memory_twice() -> None:
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    count, size = done.stdout.split()
    assert count == "300000"
    assert float(size) < 56


def test_in_turn_no_page_is_requested_before_the_last_one_is_used() -> None:
    server = Server(FLAT, page=10)

    async def first(count: int) -> None:
        async with aclosing(runs_below(server, S3Uri("b", "d/"), in_turn=True)) as runs:
            async for _ in runs:
                if (count := count - 1) == 0:
                    return

    asyncio.run(first(20))
    assert (server.splits, server.most_in_flight, server.requests) == (0, 1, 20)


class IgnoresStartAfter(Server):
    def answer(self, prefix: str, token: str | None, start_after: str) -> Page:  # noqa: ARG002
        return super().answer(prefix, token, "")


class RefusesStartAfter(Server):
    def answer(self, prefix: str, token: str | None, start_after: str) -> Page:
        if start_after:
            raise BadAnswer("the endpoint does not support this request")
        return super().answer(prefix, token, "")


class HasNothingLeft(Server):
    def answer(self, prefix: str, token: str | None, start_after: str) -> Page:
        if start_after:
            raise Missing("no such object")
        return super().answer(prefix, token, "")


class SkipsOneKey(Server):
    """Takes `start-after` for "from the second key after"."""

    def answer(self, prefix: str, token: str | None, start_after: str) -> Page:
        page = super().answer(prefix, token, start_after)
        return Page(page.keys[1:], page.sizes[1:], page.etags[1:], page.token) if start_after else page


class EndsEarly(Server):
    """Finds nothing after a `start-after`."""

    def answer(self, prefix: str, token: str | None, start_after: str) -> Page:
        return Page() if start_after else super().answer(prefix, token, "")


class PagesOfOne(Server):
    """Pages of any length, empty ones too."""

    def answer(self, prefix: str, token: str | None, start_after: str) -> Page:
        after = start_after if token is None else token[1:].partition("\0")[0]
        if self.dice.random() < 0.3:
            return page_of([], f"t{after}\0{self.requests}")
        self.page_size = self.dice.randrange(1, 20)
        return super().answer(prefix, f"t{after}" if after else None, start_after)


@pytest.mark.parametrize(
    "kind", [IgnoresStartAfter, RefusesStartAfter, HasNothingLeft, SkipsOneKey, EndsEarly, PagesOfOne]
)
@pytest.mark.parametrize("seed", range(3))
def test_a_server_that_does_not_know_ranges_loses_no_key(kind: type[Server], seed: int) -> None:
    server = kind(FLAT[:3000], page=10, seed=seed)
    memory = PlanMemory()
    assert run(runs_of(server, "d/", memory=memory)) == FLAT[:3000]
    assert server.splits
    assert memory.objects == 3000


class Short(Server):
    """Ends the listing before its last key, again and again."""

    ends: tuple[int, ...] = (999, 2345, 2999)

    def answer(self, prefix: str, token: str | None, start_after: str) -> Page:
        page = super().answer(prefix, token, start_after)
        if any(FLAT[end].encode() in page.keys for end in self.ends):
            page.token = None
        return page


@pytest.mark.parametrize("certain", [True, False])
def test_keys_after_the_end_of_a_listing_continue_it(*, certain: bool) -> None:
    """A sequential listing is short without a word; here `start-after` finds what it left out."""
    server = Short(FLAT, page=10)
    server.ends_are_certain = certain
    assert run(list_prefix(server, S3Uri("b", "d/"))) == FLAT


@pytest.mark.parametrize("in_turn", [True, False])
@pytest.mark.parametrize("keys", [1, 10, 25, 30])
def test_the_end_of_a_listing_is_proven_once(keys: int, *, in_turn: bool) -> None:
    """Also where it ends early on its first page, before any range was split."""
    server = Server(FLAT[:keys], page=10)
    server.ends_are_certain = False
    assert run(runs_of(server, "d/", in_turn=in_turn)) == FLAT[:keys]
    assert server.requests == -(-keys // 10) + 1
    short = Short(FLAT[:keys], page=10)
    short.ends, short.ends_are_certain = (2, 15), False
    assert run(runs_of(short, "d/", in_turn=in_turn)) == FLAT[:keys]


@pytest.mark.parametrize("in_turn", [True, False])
@pytest.mark.parametrize("kind", [IgnoresStartAfter, RefusesStartAfter, HasNothingLeft])
def test_a_server_without_start_after_proves_no_end(kind: type[Server], *, in_turn: bool) -> None:
    server = kind(FLAT[:25], page=10)
    server.ends_are_certain = False
    assert run(runs_of(server, "d/", in_turn=in_turn)) == FLAT[:25]
    assert server.requests == 4


@pytest.mark.parametrize("order", [str.casefold, lambda key: key.encode("utf-16-be")], ids=["case", "UTF-16"])
def test_a_server_with_an_order_of_its_own_loses_no_key(order: Callable[[str], Any]) -> None:
    """Also where no page shows it: upper-case letters in one part of the names, lower-case in another."""
    odd = ["\ue000", "\uffff", "\U0001f600"]
    for letters in (["a", "b", "B", "c"], ["a", "b", "c"], odd):
        keys = [f"IMG/{letter}{number:03d}" for letter in letters for number in range(400)]
        assert run(list_prefix(Server(keys, page=10, order=order), S3Uri("b", "IMG/"))) == sorted(keys)


def test_a_key_that_comes_at_a_border_meanwhile_breaks_nothing() -> None:
    """The range is listed anew from the end of the one before it."""
    keys = FLAT[::2]

    class Growing(Server):
        def answer(self, prefix: str, token: str | None, start_after: str) -> Page:
            page = super().answer(prefix, token, start_after)
            if start_after and page.keys:
                self.keys = sorted({*self.keys, start_after + "!"})
            return page

    server = Growing(keys, page=10)
    found = run(runs_of(server, "d/"))
    assert found == sorted(set(found))
    assert set(keys) <= set(found) <= set(server.keys)


@pytest.mark.parametrize("last", [500, 5_000])
def test_disorder_after_the_first_ranges_is_named_and_can_be_sorted(last: int) -> None:
    class Late(Server):
        def answer(self, prefix: str, token: str | None, start_after: str) -> Page:
            page = super().answer(prefix, token, start_after)
            if FLAT[last].encode() in page.keys:
                page.keys.reverse()
            return page

    server = Late(FLAT, page=10)
    with pytest.raises(OutOfOrder, match="not in key order"):
        run(runs_of(server, "d/"))
    assert run(list_prefix(server, S3Uri("b", "d/"))) == FLAT


@pytest.mark.parametrize("error", [Denied("no"), Transient("503"), BadAnswer("bad")])
def test_an_error_in_one_range_ends_the_listing(error: Exception) -> None:
    class Failing(Server):
        def answer(self, prefix: str, token: str | None, start_after: str) -> Page:
            page = super().answer(prefix, token, start_after)
            if FLAT[7_777].encode() in page.keys:
                raise error
            return page

    server, memory = Failing(FLAT, page=10), PlanMemory()
    with pytest.raises(type(error), match=str(error)):
        run(list_prefix(server, S3Uri("b", "d/"), memory=memory))
    assert (server.requests_in_flight, memory.objects) == (0, 0)


def test_an_outage_of_all_ranges_is_waited_for() -> None:
    """Every range goes on at its page; no range begins anew."""

    class Storm(Server):
        fails = 40

        def answer(self, prefix: str, token: str | None, start_after: str) -> Page:
            if self.requests_in_flight > 16 and self.fails:
                self.fails -= 1
                raise Transient("503 SlowDown")
            return super().answer(prefix, token, start_after)

    server, waits = Storm(FLAT, page=10), list[Any]()
    policy = RetryPolicy(first_wait=0.001)
    assert run(runs_of(server, "d/", policy=policy, on_wait=waits.append)) == FLAT
    assert len(waits) == 40
    assert server.requests < 1.2 * 1200 + 20 + 40


@pytest.mark.parametrize("pages", [0, 3, 40])
def test_a_listing_that_is_left_ends_its_requests(pages: int) -> None:
    """By closing the runs, by cancelling the task that waits for them, or by an error of the consumer."""
    server, memory = Server(FLAT, page=10), PlanMemory()

    async def leave(how: str) -> None:
        count = 0
        async with aclosing(runs_below(server, S3Uri("b", "d/"), memory=memory)) as runs:
            async for _ in runs:
                if (count := count + 1) > pages:
                    break
            if how == "raise":
                raise KeyError
            if how == "cancel":
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                await anext(runs)

    async def main() -> None:
        for how, error in (("close", None), ("raise", KeyError), ("cancel", asyncio.CancelledError)):
            task = asyncio.create_task(leave(how))
            await asyncio.wait([task])
            assert task.cancelled() == (error is asyncio.CancelledError)
            if not task.cancelled():
                assert isinstance(task.exception(), error or type(None))
            assert asyncio.all_tasks() == {asyncio.current_task()}
            assert (server.requests_in_flight, memory.objects) == (0, 0)

    asyncio.run(main())
