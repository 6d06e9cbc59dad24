"""Responses that belong to another request: a final answer counts once a fresh connection brings it too."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
from aiohttp import web

from streamer.errors import Denied, Missing, SourceChanged
from streamer.plan import S3Uri
from streamer.s3.pages.object_info import open_inspector
from tests.kit import stub as kit
from tests.kit.harness import PagesFrom, RunChannel, clients_of, failure, fill
from tests.kit.pipes import off_loop, read_all
from tests.kit.planning import plan_manifest, plan_prefix
from tests.kit.stub import Answer, Fault, S3Stub, cut_after, error, fails, with_headers

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking")


async def other_version(answer: Answer) -> web.StreamResponse:
    """A response to the GET of another version, although the request has If-Match."""
    return await with_headers(ETag='"0123456789abcdef0123456789abcdef"')(answer)


async def other_size(answer: Answer) -> web.StreamResponse:
    content_range = answer.headers["Content-Range"].partition("/")[0] + "/999999"
    return await with_headers(Content_Range=content_range)(answer)


ANSWERS = {
    "deleted": fails(404, "NoSuchKey"),
    "denied": fails(403, "AccessDenied"),
    "replaced": fails(412, "PreconditionFailed"),
    "another version": other_version,
    "another size": other_size,
}


class Stray:
    """Answers with `wrong` on each connection that has carried a request, and rightly on a fresh one."""

    def __init__(self, wrong: Fault) -> None:
        self.wrong = wrong
        self.count = 0
        self._used: WeakSet[asyncio.Transport] = WeakSet()

    def used(self, request: web.Request) -> bool:
        transport = request.transport
        assert transport is not None
        used = transport in self._used
        self._used.add(transport)
        self.count += used
        return used

    async def __call__(self, answer: Answer) -> web.StreamResponse:
        if self.used(answer.request):
            return await self.wrong(answer)
        return web.Response(status=answer.status, body=answer.body, headers=answer.headers)


@pytest.mark.parametrize("wrong", ANSWERS)
@pytest.mark.parametrize("sizes", [[60_000] * 12, [700] * 40], ids=["few ranges", "many ranges"])
async def test_no_answer_of_a_used_connection_is_final(
    run: RunChannel, stub: S3Stub, tmp_path: Path, wrong: str, sizes: list[int]
) -> None:
    truth, stray = fill(stub, sizes), Stray(ANSWERS[wrong])
    stub.weather = lambda _name, _start, _size: stray
    async with run(stub, tmp_path, requests_in_flight=2) as running:
        assert await off_loop(read_all, running.fifo(0)) == truth
    assert stray.count


@pytest.mark.parametrize("wrong", ANSWERS)
async def test_the_same_answer_on_a_fresh_connection_is_final(
    run: RunChannel, stub: S3Stub, tmp_path: Path, wrong: str
) -> None:
    """After one more request and, for what may be wrong with the listing, a look at another object."""
    fill(stub, [60_000] * 4)
    stub.weather = lambda name, _start, _size: ANSWERS[wrong] if name.endswith("2") else None
    async with run(stub, tmp_path, requests_in_flight=1) as running:
        found = await failure(running)
    assert isinstance(found, Denied if wrong == "denied" else SourceChanged)
    assert sum(seen.key.endswith("2") for seen in stub.seen) <= 4


@pytest.mark.parametrize("by_aiobotocore", [True, False])
@pytest.mark.parametrize("status", [404, 403])
async def test_nor_is_that_of_a_head(stub: S3Stub, status: int, *, by_aiobotocore: bool) -> None:
    fill(stub, [10, 20, 30])

    async def wrong(_: Answer) -> web.StreamResponse:
        return web.Response(status=status)

    stray = Stray(wrong)
    for key in range(3):
        stub.script_head(*[stray] * 9, key=f"b/data/{key:04d}")
    async with clients_of(stub, by_aiobotocore=by_aiobotocore) as clients:
        with open_inspector(clients, give_up_after=5) as inspector:
            for key in range(3):
                assert (await inspector.stat("b", f"data/{key:04d}")).size == 10 * (key + 1)
            assert stray.count == 2  # each fresh connection is used by the next HEAD
            for key in range(3):
                stub.head_faults[f"b/data/{key:04d}"].clear()
                stub.script_head(wrong, wrong, key=f"b/data/{key:04d}")
            with pytest.raises(Missing if status == 404 else Denied):
                await inspector.stat("b", "data/0000")


@pytest.mark.parametrize("code", ["NoSuchBucket", "AccessDenied"])
async def test_nor_is_that_of_a_listing(
    stub: S3Stub, pages_from: PagesFrom, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    fill(stub, [10] * 50)
    stub.page = 10
    answer, stray = kit.S3Stub.answer_listing, Stray(fails(404, code))

    async def refuse(self: Any, request: web.Request, bucket: str) -> web.Response:
        if stray.used(request):
            return error(404 if code == "NoSuchBucket" else 403, code)
        return await answer(self, request, bucket)

    monkeypatch.setattr(kit.S3Stub, "answer_listing", refuse)
    async with pages_from(stub) as pages:
        assert (await plan_prefix(pages, S3Uri("b", "data/"))).objects(0) == 50
    assert stray.count


@pytest.mark.parametrize("by_aiobotocore", [True, False])
async def test_nor_is_that_of_the_rest_of_a_manifest(stub: S3Stub, *, by_aiobotocore: bool) -> None:
    fill(stub, [10, 20])
    stub.objects["b/manifest"] = json.dumps([{"prefix": "s3://b/data/"}, "0000", "0001"]).encode()
    stub.script(cut_after(5), other_version, key="b/manifest")
    async with clients_of(stub, by_aiobotocore=by_aiobotocore) as clients:
        assert (await plan_manifest(clients, S3Uri("b", "manifest"))).total_bytes(0) == 30
