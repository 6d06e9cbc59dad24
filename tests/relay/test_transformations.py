"""Stores, CDNs and proxies that compress or inflate on the way: no wrong byte, and the error names them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from aiohttp import web

from streamer.errors import BadAnswer
from streamer.plan import S3Uri
from tests.kit.harness import PagesFrom, RunChannel, clients_of, failure, fill
from tests.kit.pipes import off_loop, read_all
from tests.kit.planning import plan_manifest, plan_prefix
from tests.kit.raw import answer, raw_server
from tests.kit.stub import Answer, Fault, S3Stub, with_headers

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking")

SIGNS = "may have been compressed or inflated on its way"


def compressed(status: int, *, chunked: bool, etag: str = "{}") -> Fault:
    """The range, compressed by a proxy. `etag`: what it makes of the ETag."""

    async def fault(answer: Answer) -> web.StreamResponse:
        headers = {**answer.headers, "Content-Encoding": "gzip", "ETag": etag.format(answer.headers["ETag"])}
        if status == 200:
            del headers["Content-Range"]
        body = gzip.compress(answer.body)
        if not chunked:
            return web.Response(status=status, body=body, headers=headers)
        response = web.StreamResponse(status=status, headers=headers)
        response.enable_chunked_encoding()
        await response.prepare(answer.request)
        await response.write(body)
        return response

    return fault


@pytest.mark.parametrize(
    ("fault", "sign"),
    [
        (compressed(206, chunked=False), "its Content-Encoding is 'gzip'"),
        (compressed(200, chunked=True), "it has no Content-Length"),
        (compressed(206, chunked=True, etag="W/{}"), "its ETag is weak"),
    ],
)
async def test_the_error_names_what_happens_on_the_way(
    run: RunChannel, stub: S3Stub, tmp_path: Path, fault: Fault, sign: str
) -> None:
    fill(stub, [300_000])
    stub.script(*[fault] * 100)
    async with run(stub, tmp_path) as running:
        error = str(await failure(running))
    assert SIGNS in error
    assert sign in error
    assert "Penstock.Endpoint.Url" in error


async def test_the_etag_of_a_compressed_form_is_no_other_version(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    """Apache's mod_deflate appends -gzip."""
    fill(stub, [1000])

    async def fault(answer: Answer) -> web.StreamResponse:
        etag = answer.headers["ETag"].strip('"')
        return await with_headers(ETag=f'"{etag}-gzip"')(answer)

    stub.script(*[fault] * 100)
    async with run(stub, tmp_path) as running:
        error = await failure(running)
    assert isinstance(error, BadAnswer)
    assert "turn compression off" in str(error)


@pytest.mark.parametrize("encoding", ["gzip", "aws-chunked"])
async def test_objects_that_are_stored_with_an_encoding_are_streamed(
    run: RunChannel, stub: S3Stub, tmp_path: Path, encoding: str
) -> None:
    truth = fill(stub, [300_000])
    stub.script(*[with_headers(Content_Encoding=encoding)] * 20)
    async with run(stub, tmp_path) as running:
        assert await off_loop(read_all, running.fifo(0)) == truth


async def test_no_request_asks_for_compression(run: RunChannel, stub: S3Stub, tmp_path: Path) -> None:
    """The field is not signed, because proxies change it."""
    truth, found = fill(stub, [300_000]), []

    async def note(answer: Answer) -> web.StreamResponse:
        found.append(answer.request.headers.getall("Accept-Encoding"))
        assert "accept-encoding" not in answer.request.headers["Authorization"]
        return web.Response(status=206, body=answer.body, headers=answer.headers)

    stub.script(*[note] * 20)
    async with run(stub, tmp_path) as running:
        assert await off_loop(read_all, running.fifo(0)) == truth
    assert found
    assert all(each == ["identity"] for each in found)


@pytest.mark.usefixtures("credentials")
async def test_a_compressed_listing_is_named(pages_from: PagesFrom) -> None:
    with raw_server(lambda _: answer(200, gzip.compress(b"<ListBucketResult/>"))) as server:
        async with pages_from(server) as pages:
            with pytest.raises(BadAnswer, match="the listing is compressed"):
                await plan_prefix(pages, S3Uri("b", "data/"))


@pytest.mark.parametrize("by_aiobotocore", [True, False])
async def test_a_head_without_its_length_names_the_cause(stub: S3Stub, *, by_aiobotocore: bool) -> None:
    fill(stub, [10])
    stub.objects["b/manifest"] = json.dumps([{"prefix": "s3://b/data/"}, "0000"]).encode()

    async def head(answer: Answer) -> web.StreamResponse:
        headers = {"ETag": f"W/{answer.headers['ETag']}", "Transfer-Encoding": "chunked"}
        return web.Response(headers=headers)

    stub.script_head(*[head] * 9, key="b/data/0000")
    async with clients_of(stub, by_aiobotocore=by_aiobotocore) as clients:
        with pytest.raises(BadAnswer, match=f"no Content-Length.*{SIGNS}"):
            await plan_manifest(clients, S3Uri("b", "manifest"))


@pytest.mark.parametrize("by_aiobotocore", [True, False])
async def test_a_manifest_that_is_not_gzip_is_refused_by_its_encoding(
    stub: S3Stub, *, by_aiobotocore: bool
) -> None:
    stub.objects["b/manifest"] = b"\x8b\x00\x80"
    stub.script(*[with_headers(200, Content_Encoding="br")] * 9, key="b/manifest")
    async with clients_of(stub, by_aiobotocore=by_aiobotocore) as clients:
        with pytest.raises(BadAnswer, match="its Content-Encoding is 'br'"):
            await plan_manifest(clients, S3Uri("b", "manifest"))
