"""Large prefixes: listed range by range, many at a time, and the same as in turn."""

from __future__ import annotations

import random
from typing import Any

import pytest
from aiohttp import web
from botocore.utils import parse_timestamp

from streamer.errors import BadAnswer
from streamer.plan import ObjectRef, S3Uri
from streamer.plan.entries import Entries
from streamer.s3.client.botocore_session import timestamp
from streamer.s3.pages.validation import PlanMemory
from tests.kit import stub as kit
from tests.kit.harness import PagesFrom
from tests.kit.planning import list_prefix, plan_prefix
from tests.kit.stub import S3Stub

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking")


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten keys a page instead of a thousand."""
    monkeypatch.setattr(kit, "PAGE", 10)


def keys_in(entries: Entries) -> list[str]:
    return [item.key for (item,) in entries if isinstance(item, ObjectRef)]


def tree(seed: int) -> list[str]:
    """Keys of uneven folders, with what sorts beside `/` among them."""
    source = random.Random(seed)
    names = ["a", "a.b", "a0", "b", "é", "z z", "a+b", "&"]
    found = {"d/", "d/a/", "d/a/a/", "d//x", "d", "d.x", "dd/x"}
    while len(found) < 900:
        depth = source.choices([1, 2, 3], [1, 3, 6])[0]
        found.add("/".join(["d", *source.choices(names, k=depth), f"{source.randrange(1000)}"]))
    return sorted(found)


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("prefix", ["d", "d/", "d/a", "d/a/", ""])
async def test_range_by_range_is_the_same_as_in_turn(
    stub: S3Stub, prefix: str, pages_from: PagesFrom
) -> None:
    for key in tree(1):
        stub.objects[f"b/{key}"] = b"" if key.endswith("/") else key.encode()
    due = sorted((key for key in tree(1) if key.startswith(prefix) and not key.endswith("/")), key=str.encode)
    async with pages_from(stub) as pages:
        found = await list_prefix(pages, S3Uri("b", prefix))
    assert keys_in(found) == due
    sizes = [item.size for (item,) in found if isinstance(item, ObjectRef)]
    assert sizes == [len(key.encode()) for key in due]
    assert stub.split_listings or len(due) < 100


@pytest.mark.usefixtures("small_pages")
async def test_a_server_s_own_order_is_not_the_plan_s(stub: S3Stub, pages_from: PagesFrom) -> None:
    """Pages from the last name to the first."""
    stub.unsorted_pages = True
    for key in tree(2):
        stub.objects[f"b/{key}"] = b"" if key.endswith("/") else key.encode()
    due = sorted((key for key in tree(2) if not key.endswith("/")), key=str.encode)
    async with pages_from(stub) as pages:
        assert keys_in(await list_prefix(pages, S3Uri("b", "d"))) == due
        few = [key for key in due if key.startswith("d/a/a")]
        assert keys_in(await list_prefix(pages, S3Uri("b", "d/a/a"))) == few


@pytest.mark.usefixtures("small_pages")
async def test_a_small_prefix_costs_the_proof_of_its_end_alone(stub: S3Stub, pages_from: PagesFrom) -> None:
    stub.objects |= {f"b/d/{number}/x": b"1" for number in range(40)}
    async with pages_from(stub) as pages:
        assert len(await list_prefix(pages, S3Uri("b", "d/"))) == 40
    assert (stub.split_listings, len(stub.listings)) == (1, 5)


@pytest.mark.usefixtures("small_pages")
async def test_an_object_on_the_pages_of_two_ranges_is_counted_once(
    stub: S3Stub, pages_from: PagesFrom
) -> None:
    """The last page of a range has keys of the next one."""
    stub.objects |= {f"b/d/{number % 60:03}/{number}": b"1" for number in range(600)}
    memory = PlanMemory()
    async with pages_from(stub) as pages:
        assert len(await list_prefix(pages, S3Uri("b", "d/"), memory=memory)) == 600
    assert memory.objects == 600
    assert stub.split_listings


@pytest.mark.usefixtures("small_pages")
async def test_a_listing_that_fails_takes_no_memory(stub: S3Stub, pages_from: PagesFrom) -> None:
    """It is made anew, as long as `GiveUpAfter` allows."""
    stub.objects |= {f"b/d/{number:03}": b"1" for number in range(100)}
    stub.tokens["d/019"] = "d/009"  # the listing goes round
    memory = PlanMemory()
    async with pages_from(stub) as pages:
        with pytest.raises(BadAnswer):
            await list_prefix(pages, S3Uri("b", "d/"), memory=memory)
    assert memory.objects == 0


@pytest.mark.usefixtures("small_pages")
async def test_ranges_are_requested_side_by_side(stub: S3Stub, pages_from: PagesFrom) -> None:
    """Three first pages of ranges that wait for one another."""
    stub.objects |= {f"b/d/{number:04}": b"1" for number in range(1000)}
    stub.listings_together = 3
    async with pages_from(stub) as pages:
        assert len(await list_prefix(pages, S3Uri("b", "d/"))) == 1000


async def test_a_listing_that_does_not_advance_is_an_error(
    stub: S3Stub, monkeypatch: pytest.MonkeyPatch, pages_from: PagesFrom
) -> None:
    """Truncated without a token would else look like a shorter listing."""
    stub.objects["b/d/x"] = b"1"
    listed = kit.S3Stub.answer_listing

    async def stuck(self: Any, request: web.Request, bucket: str) -> web.Response:
        answer = await listed(self, request, bucket)
        assert answer.text is not None
        answer.text = answer.text.replace("false", "true")
        return answer

    monkeypatch.setattr(kit.S3Stub, "answer_listing", stuck)
    async with pages_from(stub) as pages:
        with pytest.raises(BadAnswer, match="does not advance"):
            await list_prefix(pages, S3Uri("b", "d/"))


@pytest.mark.parametrize("back_to", ["", "d/00999"], ids=["circle", "one page again"])
async def test_a_page_that_comes_again_is_an_error(stub: S3Stub, back_to: str, pages_from: PagesFrom) -> None:
    """Else a listing without end, or objects that are streamed twice."""
    stub.objects = {f"b/d/{number:05d}": b"x" for number in range(3500)}
    stub.tokens["d/01999"] = back_to
    async with pages_from(stub) as pages:
        with pytest.raises(BadAnswer, match="does not advance"):
            await list_prefix(pages, S3Uri("b", "d/"))


async def test_pages_that_overlap_are_an_error(stub: S3Stub, pages_from: PagesFrom) -> None:
    stub.objects = {f"b/d/{number:05d}": b"x" for number in range(2500)}
    stub.tokens["d/00999"] = "d/00998"
    async with pages_from(stub) as pages:
        with pytest.raises(BadAnswer, match=r"names the object twice: s3://b/d/00999"):
            await list_prefix(pages, S3Uri("b", "d/"))


@pytest.mark.parametrize(
    "text",
    [
        "2026-11-21T07:12:00.000Z",
        "2026-11-21T07:12:00+01:00",
        "Sat, 21 Nov 2026 07:12:00 GMT",
        "1795245120",
        1795245120.5,
    ],
)
def test_timestamps_are_those_of_botocore(text: str | float) -> None:
    """The faster way agrees with botocore's where it applies and gives way where it does not."""
    assert timestamp(text) == parse_timestamp(text)
    assert timestamp(text).utcoffset() == parse_timestamp(text).utcoffset()


@pytest.mark.usefixtures("small_pages")
async def test_progress_is_told_page_by_page(stub: S3Stub, pages_from: PagesFrom) -> None:
    stub.objects |= {f"b/d/{number:02}": b"1" for number in range(25)}
    counts: list[int] = []
    async with pages_from(stub) as pages:
        await plan_prefix(pages, S3Uri("b", "d/"), progress=counts.append)
    assert counts == [10, 20, 25]
