"""Servers without ETags: size and Last-Modified tell an object's versions apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamer.errors import BadAnswer, SourceChanged, SourceError
from streamer.plan import S3Uri
from streamer.plan.plan import Plan
from tests.kit.harness import PagesFrom, RunChannel, clients_of, failure, fill
from tests.kit.pipes import off_loop, read_all
from tests.kit.planning import plan_manifest, plan_prefix
from tests.kit.stub import S3Stub, cut_after, with_headers

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking")

THEN, NOW = "2026-11-03T21:56:26.789Z", "2026-11-03T21:56:27.001Z"
SIZES = [120_000, 0, 30_000]


@pytest.fixture
def truth(stub: S3Stub) -> bytes:
    """What an epoch of the stub's objects is; the stub has no ETag of them."""
    data = fill(stub, SIZES)
    stub.times = dict.fromkeys(stub.objects, THEN)
    return data


async def test_objects_without_etags_are_streamed(
    run: RunChannel, stub: S3Stub, tmp_path: Path, truth: bytes
) -> None:
    stub.script(cut_after(10_000), cut_after(0))
    async with run(stub, tmp_path) as running:
        assert await off_loop(read_all, running.fifo(0)) == truth
    assert {seen.if_match for seen in stub.seen} == {None}


@pytest.mark.parametrize("time", [NOW, "2025-11-03T21:56:26Z"])
async def test_a_replaced_object_is_found_by_its_time(
    run: RunChannel, stub: S3Stub, tmp_path: Path, truth: bytes, time: str
) -> None:
    async with run(stub, tmp_path) as running:
        stub.times["b/data/0002"] = time
        error = await failure(running)
    assert isinstance(error, SourceChanged)
    assert "replaced after it was listed (Last-Modified 2026-11-03T21:56:26Z then" in str(error)
    assert "s3://b/data/0002" in str(error)
    assert "IfMatch" not in str(error)


async def test_a_second_version_of_the_same_second_is_not_noticed(
    run: RunChannel, stub: S3Stub, tmp_path: Path, truth: bytes
) -> None:
    """The limit of Last-Modified, whose unit is a second."""
    async with run(stub, tmp_path) as running:
        stub.times["b/data/0002"] = THEN.replace("789", "999")
        assert await off_loop(read_all, running.fifo(0)) == truth


@pytest.mark.parametrize(
    "sent",
    [("", "no Last-Modified"), ("Tue, 3 Nov 2026 21:56:26 UTC", "the invalid Last-Modified")],
)
async def test_a_response_without_a_valid_time_is_refused(
    run: RunChannel, stub: S3Stub, tmp_path: Path, truth: bytes, sent: tuple[str, str]
) -> None:
    """It counts as an answer that proves nothing, not as an object that was replaced."""
    time, words = sent
    stub.script(*[with_headers(Last_Modified=time)] * 9)
    async with run(stub, tmp_path) as running:
        error: BaseException | None = await failure(running)
    while not isinstance(error, BadAnswer):
        assert isinstance(error, SourceError)
        assert not isinstance(error, SourceChanged)
        error = error.__cause__
    assert words in str(error)


async def test_both_clients_list_the_same(pages_from: PagesFrom, stub: S3Stub, truth: bytes) -> None:
    stub.times.pop("b/data/0000")
    async with pages_from(stub) as pages:
        plan = await plan_prefix(pages, S3Uri("b", "data/"))
    assert [ref.etag for ref in plan.refs(0)][1:] == ["modified 2026-11-03T21:56:26Z"] * 2
    assert " " not in next(plan.refs(0)).etag


async def test_an_entry_with_neither_is_refused(pages_from: PagesFrom, stub: S3Stub, truth: bytes) -> None:
    stub.listed_times = False
    async with pages_from(stub) as pages:
        with pytest.raises(BadAnswer, match="an entry without ETag"):
            await plan_prefix(pages, S3Uri("b", "data/"))


@pytest.mark.parametrize("by_aiobotocore", [True, False])
async def test_heads_of_a_manifest(stub: S3Stub, truth: bytes, *, by_aiobotocore: bool) -> None:
    stub.objects["b/manifest"] = b'[{"prefix": "s3://b/data/"}, "0000", "0002"]'
    stub.times["b/manifest"] = THEN
    stub.script(cut_after(5), key="b/manifest")
    async with clients_of(stub, by_aiobotocore=by_aiobotocore) as clients:
        plan = await plan_manifest(clients, S3Uri("b", "manifest"))
    assert {ref.etag for ref in plan.refs(0)} == {"modified 2026-11-03T21:56:26Z"}
    assert [seen.if_match for seen in stub.seen] == [None, None]


async def test_the_digest_covers_the_time(stub: S3Stub, pages_from: PagesFrom, truth: bytes) -> None:
    async def plan() -> Plan:
        async with pages_from(stub) as pages:
            return await plan_prefix(pages, S3Uri("b", "data/"))

    before = (await plan()).digest
    assert (await plan()).digest == before
    stub.times["b/data/0002"] = NOW
    assert (await plan()).digest != before
