"""Objects that a listing says are empty: a HEAD each proves it, since no GET ever would."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from streamer.errors import Denied, SourceError
from streamer.formats.recordio import encode
from streamer.plan import Arrangement, Plan, S3Uri
from streamer.plan.selection import Limit, Selection
from streamer.retry import RetryPolicy
from streamer.s3.manifests.object_finder import ObjectClients
from streamer.s3.pages.object_info import open_inspector
from streamer.s3.pages.open_plan import OpenPlan
from streamer.s3.pages.pages import open_pages
from streamer.s3.pages.sources import Sources
from tests.kit.harness import PagesFrom, clients_of, running_channel
from tests.kit.pipes import off_loop, read_all
from tests.kit.planning import list_prefix, plan_manifest, plan_prefix
from tests.kit.stub import S3Stub, fails

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking", "credentials")

URI = S3Uri("b", "d/")
CONTENT = {"a": b"first", "b": b"stale", "c": b"", "dir/": b"", "e": b"last"}


@pytest.fixture
def stale(stub: S3Stub) -> S3Stub:
    """A server whose listings say that `b` is empty too."""
    stub.objects |= {f"b/d/{name}": data for name, data in CONTENT.items()}
    stub.listed_sizes["b/d/b"] = 0
    return stub


def sizes(plan: Plan) -> dict[str, int]:
    return {ref.key.removeprefix("d/"): ref.size for ref in plan.refs(0)}


RIGHT = {"a": 5, "b": 5, "c": 0, "e": 4}


async def test_each_costs_one_head_and_the_head_decides(stale: S3Stub, pages_from: PagesFrom) -> None:
    """Objects with bytes and folder markers cost none."""
    async with pages_from(stale) as pages:
        assert sizes(await plan_prefix(pages, URI)) == RIGHT
    assert stale.head_count == 2


async def test_what_no_glob_selects_costs_none(stale: S3Stub, pages_from: PagesFrom) -> None:
    async with pages_from(stale) as pages:
        plan = await plan_prefix(pages, URI, selection=Selection(exclude=("c",)))
    assert sizes(plan) == {"a": 5, "b": 5, "e": 4}
    assert stale.head_count == 1


async def test_a_limit_counts_the_right_size(stale: S3Stub, pages_from: PagesFrom) -> None:
    async with pages_from(stale) as pages:
        assert sizes(await plan_prefix(pages, URI, selection=Selection(limit=Limit(bytes=9)))) == {"a": 5}


async def test_out_of_order_too(stale: S3Stub, pages_from: PagesFrom) -> None:
    stale.unsorted_pages = True
    async with pages_from(stale) as pages:
        entries = await list_prefix(pages, URI)
    assert [entries.sizes[index] for index in range(len(entries))] == [*RIGHT.values()]


async def test_an_open_plan_waits_for_storage(stale: S3Stub) -> None:
    """Longer than the client repeats one HEAD."""
    stale.head_faults["b/d/b"].extend([fails(500, "InternalError")] * 12)
    waits: list[SourceError] = []
    async with clients_of(stale, stall_timeout=0.2) as clients:
        with open_pages(clients) as pages:
            open_plan = OpenPlan(Arrangement(), Sources(pages, [URI]))
            policy = RetryPolicy(give_up_after=60, first_wait=0.01, longest_wait=0.01)
            await open_plan.list(policy, on_wait=waits.append)
    assert open_plan.growth.error is None
    assert sizes(open_plan.plan) == RIGHT
    assert waits


async def test_what_is_deleted_meanwhile_stays_empty(stale: S3Stub, pages_from: PagesFrom) -> None:
    stale.head_faults["b/d/b"].extend([fails(404, "NoSuchKey")] * 2)
    async with pages_from(stale) as pages:
        assert sizes(await plan_prefix(pages, URI)) == RIGHT | {"b": 0}


async def test_what_cannot_be_proven_is_an_error_by_name(stale: S3Stub, pages_from: PagesFrom) -> None:
    stale.head_faults["b/d/c"].append(fails(403, "AccessDenied"))
    async with pages_from(stale) as pages:
        with pytest.raises(Denied, match=r"access denied.*: s3://b/d/c"):
            await plan_prefix(pages, URI)


async def test_a_manifest_whose_objects_are_listed(stale: S3Stub) -> None:
    stale.objects |= {f"b/d/x{number}": b"12" for number in range(50)}
    names = [*RIGHT, *(f"x{number}" for number in range(50))]
    stale.objects["b/manifest"] = json.dumps([{"prefix": "s3://b/d/"}, *names]).encode()
    async with clients_of(stale) as clients:
        with open_inspector(clients, give_up_after=30) as inspector, open_pages(clients) as pages:
            found = ObjectClients(inspector, pages)
            plan = await plan_manifest(clients, S3Uri("b", "manifest"), object_clients=found)
    assert {name: size for name, size in sizes(plan).items() if name in RIGHT} == RIGHT
    assert stale.head_count == 3, "two that are listed as empty, and one that is compared"


@pytest.mark.parametrize("wrap", [False, True])
async def test_the_stream_has_every_byte(stale: S3Stub, tmp_path: Path, *, wrap: bool) -> None:
    """A wrapped object that is empty is an empty record, and one that is not has its bytes."""
    run = functools.partial(running_channel, stale, tmp_path, prefix="b/d/", transport="splice")
    async with run(arrangement=Arrangement(wrap=wrap)) as running:
        got = await off_loop(read_all, running.fifo(0))
    whole = [data for name, data in CONTENT.items() if name != "dir/"]
    assert got == b"".join(encode(data) if wrap else data for data in whole)
