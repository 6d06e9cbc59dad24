"""Objects that manifests name, found by listings: the same plans as by HEADs, with few requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from streamer.errors import ConfigError, Denied, Missing, SourceError
from streamer.plan import Arrangement, Plan, S3Uri, Shard
from streamer.plan.selection import Limit, Selection
from streamer.s3.client.session import Clients
from streamer.s3.manifests import row_block
from streamer.s3.manifests.manifest import Manifest
from streamer.s3.manifests.object_finder import ObjectClients
from streamer.s3.pages.object_info import open_inspector
from streamer.s3.pages.pages import open_pages
from streamer.s3.pages.validation import PlanMemory
from tests.kit import stub as kit
from tests.kit.harness import RunChannel, clients_of
from tests.kit.pipes import eventually, off_loop
from tests.kit.planning import alone, plan_augmented, plan_manifest
from tests.kit.stub import S3Stub, error

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking")

MANIFEST = S3Uri("b", "manifest")
BOTH = pytest.mark.parametrize("by_aiobotocore", [True, False], ids=["aiobotocore", "own"])
OTHER_KEYS = (
    "<ListBucketResult><IsTruncated>false</IsTruncated>"
    "<Contents><Key>x</Key><Size>1</Size><ETag>e</ETag></Contents></ListBucketResult>"
)
ListingFault = Callable[[web.Request], web.Response | None]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 40 items and pages of 30 keys, so that a little manifest has many of both."""
    monkeypatch.setattr(row_block, "ITEMS", 40)
    monkeypatch.setattr(kit, "PAGE", 30)


def fault_listings(monkeypatch: pytest.MonkeyPatch, fault: ListingFault) -> None:
    """Answer a listing request as `fault` says, and rightly where that is None."""
    answer = S3Stub.answer_listing

    async def answered(self: S3Stub, request: web.Request, bucket: str) -> web.Response:
        response = fault(request)
        if response is None:
            return await answer(self, request, bucket)
        self.listings.append(request.query.get("prefix", ""))
        return response

    monkeypatch.setattr(S3Stub, "answer_listing", answered)


class Unlisted(list[tuple[str, SourceError]]):
    """The buckets that could not be listed, and why."""

    def __call__(self, bucket: str, error: SourceError) -> None:
        self.append((bucket, error))


@contextlib.asynccontextmanager
async def opened(
    stub: S3Stub, *, by_aiobotocore: bool = False, stall_timeout: float = 30.0
) -> AsyncIterator[tuple[Clients, ObjectClients, Unlisted]]:
    unlisted = Unlisted()
    async with clients_of(stub, stall_timeout=stall_timeout) as clients:
        used = replace(clients, by_aiobotocore=by_aiobotocore)
        with open_inspector(used, give_up_after=30) as inspector, open_pages(used) as pages:
            yield clients, ObjectClients(inspector, pages, unlisted), unlisted


def store(stub: S3Stub, folders: int, each: int, *, prefix: str = "b/data/") -> list[str]:
    """Put objects into folders; return their names."""
    names = [f"{prefix}{folder:03}/{number:05}.jpg" for folder in range(folders) for number in range(each)]
    stub.objects |= {name: name.encode() for name in names}
    return names


def write(stub: S3Stub, names: list[str]) -> None:
    """Write a manifest of objects of bucket `b`."""
    suffixes = [name.removeprefix("b/") for name in names]
    stub.objects["b/manifest"] = json.dumps([{"prefix": "s3://b/"}, *suffixes]).encode()


async def planned(stub: S3Stub, *, by_aiobotocore: bool = False) -> Plan:
    async with opened(stub, by_aiobotocore=by_aiobotocore) as (clients, object_clients, unlisted):
        plan = await plan_manifest(clients, MANIFEST, object_clients=object_clients)
    assert unlisted == []
    return plan


def refs(plan: Plan) -> list[tuple[str, int]]:
    return [(f"{ref.bucket}/{ref.key}", ref.size) for ref in plan.refs(0)]


@pytest.mark.parametrize(
    ("order", "by_aiobotocore"),
    [("sorted", False), ("folders", False), ("shuffled", False), ("shuffled", True)],
    ids=["sorted", "folders", "shuffled", "aiobotocore"],
)
async def test_listings_replace_heads(stub: S3Stub, order: str, *, by_aiobotocore: bool) -> None:
    """Requests are at most 1.1 times those of a listing of the folders; the order is the manifest's."""
    names = store(stub, 40, 500)
    dice = random.Random(1)
    if order == "shuffled":
        dice.shuffle(names)
    elif order == "folders":
        names.sort(key=lambda name: random.Random(name.rsplit("/", 1)[0]).random())
    write(stub, names)
    plan = await planned(stub, by_aiobotocore=by_aiobotocore)
    assert refs(plan) == [(name, len(name)) for name in names]
    assert stub.head_count == 1  # compared with the listing
    assert len(stub.listings) + stub.head_count <= 1.1 * 40
    assert {prefix[:5] for prefix in stub.listings} == {"data/"}


@pytest.mark.parametrize(("wanted", "most"), [(5, 0), (200, 5)])
async def test_few_of_many_objects_are_found_by_heads(stub: S3Stub, wanted: int, most: int) -> None:
    """A page of the listing would have ten of them, and costs 12.5 HEADs."""
    names = store(stub, 1, 20_000)[:: 20_000 // wanted]
    random.Random(1).shuffle(names)
    write(stub, names)
    assert refs(await planned(stub)) == [(name, len(name)) for name in names]
    assert stub.head_count >= 0.8 * wanted
    assert len(stub.listings) <= most


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("seed", range(6))
async def test_plans_are_those_of_heads_alone(stub: S3Stub, seed: int) -> None:
    """To the digest: several refs a row, buckets, old versions, odd keys, rows that come twice."""
    dice = random.Random(seed)
    names = [
        *store(stub, 4, 60),
        *store(stub, 3, 50, prefix="other/é ü/+%2F/"),
        *store(stub, 1, 30, prefix="b/"),
    ]
    odd = ["b/data/", "b/data//x", "b/data/a b+c", "b/😀", "b/\uffff", "b/data/001", "other/a=b&c?d"]
    stub.objects |= {name: dice.randbytes(dice.randrange(9)) for name in odd}
    names += odd
    if seed % 2:
        names.sort()
    else:
        dice.shuffle(names)
    names += dice.choices(names, k=100)
    stub.versions |= {f"{name}?v{seed}": name.encode() * 2 for name in names[:20]}
    versions = [f"?versionId=v{seed}" if number % 2 else "" for number in range(len(names))]
    rows = [
        {
            "a-ref": f"s3://{name}{version if name in names[:20] else ''}",
            "n": number,
            "b-ref": f"s3://{names[seed - number]}",
        }
        for number, (name, version) in enumerate(zip(names, versions, strict=True))
    ]
    stub.objects["b/manifest"] = "\n".join(map(json.dumps, rows)).encode()
    plans = []
    async with opened(stub) as (clients, object_clients, unlisted):
        for each in (ObjectClients(object_clients.inspector), object_clients):
            stub.head_count = 0
            counts: list[int] = []
            arrangement = Arrangement(wrap=seed < 3)
            plan = await plan_augmented(
                alone(clients), MANIFEST, ["a-ref", "n", "b-ref"], arrangement,
                object_clients=each, progress=counts.append,
            )  # fmt: skip
            assert counts == sorted(counts)
            assert counts[-1] == len(rows)
            plans.append((plan.digest, [*plan.refs(0)], stub.head_count))
    assert unlisted == []
    assert plans[0][:2] == plans[1][:2]
    assert plans[0][2] == 2 * len(rows)
    assert plans[1][2] < len(rows)


@BOTH
async def test_without_permission_to_list_heads_find_all(
    stub: S3Stub, monkeypatch: pytest.MonkeyPatch, *, by_aiobotocore: bool
) -> None:
    """Credentials may allow to read objects alone: that is no error, and is reported once."""
    names = store(stub, 3, 100)
    write(stub, names)
    fault_listings(monkeypatch, lambda _: error(403, "AccessDenied"))
    async with opened(stub, by_aiobotocore=by_aiobotocore) as (clients, object_clients, unlisted):
        plan = await plan_manifest(clients, MANIFEST, object_clients=object_clients)
    assert refs(plan) == [(name, len(name)) for name in names]
    assert stub.head_count == len(names)
    assert [(bucket, type(each)) for bucket, each in unlisted] == [("b", Denied)]
    assert len(set(stub.listings)) == 2  # of the folders' common prefix, and of one folder
    assert len(stub.listings) <= 4  # a refusal on a used connection is asked for again


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("listed", [True, False])
async def test_rows_that_name_an_object_again_cost_nothing(
    stub: S3Stub, monkeypatch: pytest.MonkeyPatch, *, listed: bool
) -> None:
    """A manifest may repeat the examples of rare classes."""
    names = store(stub, 1, 30)
    rows = names * 40
    random.Random(1).shuffle(rows)
    write(stub, rows)
    if not listed:
        fault_listings(monkeypatch, lambda _: error(403, "AccessDenied"))
    counts: list[int] = []
    async with opened(stub) as (clients, object_clients, _):
        plan = await plan_manifest(clients, MANIFEST, object_clients=object_clients, progress=counts.append)
    assert refs(plan) == [(name, len(name)) for name in rows]
    assert counts[-1] == len(rows)
    assert stub.head_count == (1 if listed else len(names))
    assert len(set(stub.listings)) == 1
    assert len(stub.listings) <= 3  # a refusal on a used connection is asked for again


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "selection",
    [
        None,
        Selection(exclude=("*7.jpg",)),
        Selection(limit=Limit(objects=50)),
        Selection(limit=Limit(objects=50, seed=3)),
    ],
)
async def test_a_host_looks_for_the_objects_of_its_own_rows_alone(
    stub: S3Stub, selection: Selection | None
) -> None:
    names = store(stub, 1, 6000)[::59]
    write(stub, names)
    async with opened(stub) as (clients, object_clients, _):

        async def planned_rows(rows: Shard) -> list[tuple[str, int]]:
            stub.head_count = 0
            arrangement = Arrangement(rows=rows)
            options: dict[str, Any] = {"selection": selection, "object_clients": object_clients}
            return refs(await plan_manifest(clients, MANIFEST, arrangement, **options))

        whole = await planned_rows(Shard())
        for index in range(3):
            assert await planned_rows(Shard(index, 3)) == whole[index::3]
            assert stub.head_count <= len(whole[index::3]) + 1
        assert await planned_rows(Shard(199, 200)) == []
        if selection is None:
            write(stub, [*names[:10], "b/absent.jpg", *names[10:]])
            assert len(await planned_rows(Shard(0, 3))) == len(names) // 3 + 1
            with pytest.raises(Missing, match=r"entry 12: .*s3://b/absent\.jpg"):
                await planned_rows(Shard(1, 3))


async def test_permission_for_some_folders_is_used(stub: S3Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy with `s3:prefix` may allow the folders, and not what is above them."""
    names = store(stub, 10, 100)
    write(stub, names)
    fault_listings(
        monkeypatch,
        lambda request: error(403, "AccessDenied") if request.query["prefix"] == "data/" else None,
    )
    assert refs(await planned(stub)) == [(name, len(name)) for name in names]
    assert stub.head_count == 1
    assert len(stub.listings) == 11


@pytest.mark.parametrize(
    "fault",
    [
        lambda _: error(501, "NotImplemented"),
        lambda _: error(404, "NoSuchBucket"),
        lambda _: web.Response(text="<html>listing</html>"),
        lambda _: web.Response(text=OTHER_KEYS),
        lambda _: error(500, "InternalError"),
    ],
    ids=["not offered", "absent", "no listing", "other keys", "broken"],
)  # fmt: skip
async def test_a_listing_that_does_not_work_is_not_needed(
    stub: S3Stub, monkeypatch: pytest.MonkeyPatch, fault: ListingFault
) -> None:
    names = store(stub, 3, 100)
    write(stub, names)
    fault_listings(monkeypatch, fault)
    async with opened(stub, stall_timeout=0.5) as (clients, object_clients, unlisted):
        plan = await plan_manifest(clients, MANIFEST, object_clients=object_clients)
    assert refs(plan) == [(name, len(name)) for name in names]
    assert [bucket for bucket, _ in unlisted] == ["b"]


async def test_a_listing_that_was_throttled_goes_on(stub: S3Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """HEADs for everything would be a thousand times as many requests to a server that wants fewer."""
    names = store(stub, 3, 100)
    write(stub, names)
    refused = iter(range(12))
    fault_listings(monkeypatch, lambda _: None if next(refused, None) is None else error(503, "SlowDown"))
    async with opened(stub, stall_timeout=0.1) as (clients, object_clients, unlisted):
        plan = await plan_manifest(clients, MANIFEST, object_clients=object_clients)
    assert refs(plan) == [(name, len(name)) for name in names]
    assert unlisted == []
    assert stub.head_count < 20


async def test_an_absent_object_is_named_with_its_entry(stub: S3Stub) -> None:
    names = store(stub, 3, 100)
    write(stub, [*names[:200], "b/data/001/absent.jpg", *names[200:]])
    async with opened(stub) as (clients, object_clients, _):
        with pytest.raises(Missing, match=r"s3://b/manifest: entry 202: .*s3://b/data/001/absent\.jpg"):
            await plan_manifest(clients, MANIFEST, object_clients=object_clients)


async def test_an_object_that_is_not_listed_may_exist(stub: S3Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its HEAD decides: an index that lags behind cannot leave an object out."""
    names = store(stub, 3, 100)
    write(stub, names)
    kept = dict(stub.objects)
    answer = S3Stub.answer_listing

    async def behind(self: S3Stub, request: web.Request, bucket: str) -> web.Response:
        self.objects = {name: data for name, data in kept.items() if not name.endswith("7.jpg")}
        try:
            return await answer(self, request, bucket)
        finally:
            self.objects = kept

    monkeypatch.setattr(S3Stub, "answer_listing", behind)
    assert refs(await planned(stub)) == [(name, len(name)) for name in names]
    assert stub.head_count == 1 + 30


@pytest.mark.parametrize("differs", ["size", "etag"])
async def test_a_listing_that_heads_contradict_is_not_used(
    stub: S3Stub, monkeypatch: pytest.MonkeyPatch, differs: str
) -> None:
    """An access point may change objects: the stream would fail at the first one."""
    names = store(stub, 3, 100)
    write(stub, names)
    answer = S3Stub.answer_listing

    async def another(self: S3Stub, request: web.Request, bucket: str) -> web.Response:
        response = await answer(self, request, bucket)
        before, after = ("<Size>", "<Size>1") if differs == "size" else ("</ETag>", "-2</ETag>")
        text = (response.text or "").replace("&quot;</ETag>", "</ETag>").replace("<ETag>&quot;", "<ETag>")
        return web.Response(content_type="application/xml", text=text.replace(before, after))

    monkeypatch.setattr(S3Stub, "answer_listing", another)
    async with opened(stub) as (clients, object_clients, unlisted):
        plan = await plan_manifest(clients, MANIFEST, object_clients=object_clients)
    assert refs(plan) == [(name, len(name)) for name in names]
    assert stub.head_count == 2 + len(names)
    assert [(bucket, "a HEAD says" in str(each)) for bucket, each in unlisted] == [("b", True)]


@pytest.mark.parametrize(("content", "words"), [(None, "deleted"), (b"another", "replaced")])
async def test_a_change_after_the_listing_is_an_error(
    run: RunChannel, stub: S3Stub, tmp_path: Path, content: bytes | None, words: str
) -> None:
    """The listed ETag is the If-Match of every GET."""
    names = store(stub, 1, 50)
    write(stub, names)

    async def make(client: Any) -> Plan:
        plan = await planned(stub)
        if content is None:
            del stub.objects[names[7]]
        else:
            stub.objects[names[7]] = content
        return plan

    async with run(stub, tmp_path, make_plan=make) as running:
        reader = await off_loop(os.open, running.fifo(0), os.O_RDONLY)
        await eventually(lambda: running.channel.error)
        os.close(reader)
        running.channel.drain()
        await running.task
        assert words in str(running.channel.error)


@pytest.mark.usefixtures("small_blocks")
async def test_rows_are_entries_before_the_manifest_is_read(stub: S3Stub) -> None:
    """The first rows of a manifest in key order do not wait for the last ones."""
    names = store(stub, 4, 100)
    write(stub, names)
    first: list[str] = []
    async with opened(stub) as (clients, object_clients, _):
        manifest = Manifest(clients, MANIFEST, Arrangement(), object_clients=object_clients)
        async with contextlib.aclosing(manifest.runs()) as runs:
            async for entries in runs:
                first = [name for name, _ in refs(Plan(entries))]
                break
    assert first == names[: len(first)]
    assert len(stub.listings) < 400 / 30


@pytest.mark.parametrize("listed", [True, False])
async def test_rows_come_before_every_head_is_answered(stub: S3Stub, *, listed: bool) -> None:
    """One block, whose objects are few among those of the bucket; the HEAD of the last is never answered."""
    names = store(stub, 1, 12_000)[:: 12_000 // 200]
    write(stub, names)
    stub.together = {f"head {names[-1]}", "head never"}
    found: list[str] = []
    async with opened(stub) as (clients, object_clients, _):
        finding = object_clients if listed else ObjectClients(object_clients.inspector)
        manifest = Manifest(clients, MANIFEST, Arrangement(), object_clients=finding)
        async with contextlib.aclosing(manifest.runs()) as runs:
            async for entries in runs:
                found += [name for name, _ in refs(Plan(entries))]
                if len(found) == len(names) - 1:
                    break
    assert found == names[:-1]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kind", ["list", "head"])
async def test_a_cancelled_plan_leaves_nothing(
    stub: S3Stub, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """No task, no connection: `no_leaks` looks for both."""
    names = store(stub, 3, 100)
    write(stub, names)
    if kind == "head":
        fault_listings(monkeypatch, lambda _: error(403, "AccessDenied"))
        stub.together = {"head b/data/000/00000.jpg", "head never"}
    else:
        stub.together = {"list data/000/", "list never"}
    async with opened(stub) as (clients, object_clients, _):
        planning = asyncio.create_task(plan_manifest(clients, MANIFEST, object_clients=object_clients))
        await eventually(lambda: bool(stub.listings if kind == "list" else stub.head_requests))
        planning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await planning


@pytest.mark.usefixtures("small_blocks")
async def test_rows_that_wait_count_as_memory(stub: S3Stub) -> None:
    names = store(stub, 3, 100)
    random.Random(1).shuffle(names)
    write(stub, names)
    async with opened(stub) as (clients, object_clients, _):
        memory = PlanMemory(20_000)
        with pytest.raises(ConfigError, match=r"the plan has \d+ objects so far"):
            await plan_manifest(clients, MANIFEST, object_clients=object_clients, memory=memory)
        memory = PlanMemory(200_000)
        plan = await plan_manifest(clients, MANIFEST, object_clients=object_clients, memory=memory)
        assert memory.objects == len(plan.entries) == 300
