"""Runs of a listing: yielded as their pages come, in key order, through an outage of the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest
from aiohttp import web

from streamer.errors import BadAnswer, OutOfOrder, SourceError
from streamer.plan import ObjectRef, S3Uri
from streamer.plan.entries import Entries
from streamer.retry import RetryPolicy
from streamer.s3.pages import pages as page_requests
from streamer.s3.pages.validation import PlanMemory
from tests.kit import stub as kit
from tests.kit.harness import PagesFrom
from tests.kit.planning import list_prefix, runs_below
from tests.kit.raw import listing, raw_server
from tests.kit.stub import S3Stub, error

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking", "credentials", "small_pages")

URI = S3Uri("b", "d/")


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten keys a page instead of a thousand."""
    monkeypatch.setattr(kit, "PAGE", 10)


def keys_in(entries: Entries) -> list[str]:
    return [item.key for (item,) in entries if isinstance(item, ObjectRef)]


async def all_runs(runs: AsyncGenerator[Entries, None], found: list[str] | None = None) -> None:
    """Add the keys of all runs to `found`."""
    async with aclosing(runs):
        async for run in runs:
            if found is not None:
                found += keys_in(run)


async def test_a_run_is_yielded_before_the_next_page_comes(
    stub: S3Stub, monkeypatch: pytest.MonkeyPatch, pages_from: PagesFrom
) -> None:
    """The server answers a page only when the run of the page before has been used."""
    stub.objects |= {f"b/d/{number:02}": b"1" for number in range(30)}
    answer, used = kit.S3Stub.answer_listing, asyncio.Semaphore(1)
    here = asyncio.get_running_loop()

    async def after_use(self: Any, request: web.Request, bucket: str) -> web.Response:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(used.acquire(), here))
        return await answer(self, request, bucket)

    monkeypatch.setattr(kit.S3Stub, "answer_listing", after_use)
    found = []
    async with pages_from(stub) as pages, aclosing(runs_below(pages, URI)) as runs:
        async for run in runs:
            found.append(keys_in(run))
            used.release()
    assert found == [[f"d/{tens}{ones}" for ones in range(10)] for tens in range(3)]


async def test_a_listing_out_of_order_is_named_and_can_be_sorted(stub: S3Stub, pages_from: PagesFrom) -> None:
    """Here within each page."""
    stub.objects |= {f"b/d/{number:02}": b"1" for number in range(25)}
    stub.unsorted_pages = True
    memory = PlanMemory()
    async with pages_from(stub) as pages:
        with pytest.raises(OutOfOrder, match=r"not in key order \(after 'd/09'\): s3://b/d/08"):
            await all_runs(runs_below(pages, URI, memory=memory))
        assert memory.objects == 0
        assert keys_in(await list_prefix(pages, URI)) == [f"d/{number:02}" for number in range(25)]


async def test_pages_out_of_order_are_named_after_the_runs_before_them(pages_from: PagesFrom) -> None:
    pages_by_token = {
        "": listing(("d/0", 1, "e"), ("d/1", 1, "e"), more="1"),
        "1": listing(("d/4", 1, "e"), ("d/5", 1, "e"), more="2"),
        "2": listing(("d/2", 1, "e"), ("d/3", 1, "e")),
    }
    found: list[str] = []
    with raw_server(lambda request: pages_by_token[request.query.get("continuation-token", "")]) as server:
        async with pages_from(server) as pages:
            with pytest.raises(OutOfOrder, match=r"not in key order \(after 'd/5'\): s3://b/d/2"):
                await all_runs(runs_below(pages, URI), found)
            assert found == ["d/0", "d/1", "d/4", "d/5"]
            assert keys_in(await list_prefix(pages, URI)) == [f"d/{number}" for number in range(6)]


async def test_an_outage_repeats_one_page_and_not_the_listing(
    stub: S3Stub, monkeypatch: pytest.MonkeyPatch, pages_from: PagesFrom
) -> None:
    stub.objects |= {f"b/d/{number:03}": b"1" for number in range(40)}
    answer, tokens, down = kit.S3Stub.answer_listing, list[str](), [6]  # botocore tries 5 times

    async def failing(self: Any, request: web.Request, bucket: str) -> web.Response:
        token = request.query.get("continuation-token", "")
        tokens.append(token)
        if token == "d/019" and down[0]:
            down[0] -= 1
            return error(503, "SlowDown")
        return await answer(self, request, bucket)

    monkeypatch.setattr(kit.S3Stub, "answer_listing", failing)
    monkeypatch.setattr(page_requests, "PAGE_PATIENCE", 0.01)
    waits: list[SourceError] = []
    found: list[str] = []
    async with pages_from(stub) as pages:
        policy = RetryPolicy(give_up_after=60, first_wait=0.01)
        await all_runs(runs_below(pages, URI, policy=policy, on_wait=waits.append), found)
    assert waits
    assert found == [f"d/{number:03}" for number in range(40)]
    first = tokens.index("d/019")
    assert tokens[: first + 8] == ["", "d/009", *["d/019"] * 7, "d/029"][: first + 8]


async def test_a_run_that_repeats_an_object_is_an_error(stub: S3Stub, pages_from: PagesFrom) -> None:
    stub.objects |= {f"b/d/{number:02}": b"1" for number in range(25)}
    stub.tokens["d/09"] = "d/08"
    async with pages_from(stub) as pages:
        with pytest.raises(BadAnswer, match=r"names the object twice: s3://b/d/09"):
            await all_runs(runs_below(pages, URI))
