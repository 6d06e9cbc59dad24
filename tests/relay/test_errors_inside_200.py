"""An error in the body of a 200: the code decides, as if the status were right."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from streamer.errors import Denied, SourceError, Throttled
from streamer.plan import S3Uri
from streamer.retry import RetryPolicy
from streamer.s3.manifests.body import read_manifest
from tests.kit.harness import PagesFrom, RunChannel, clients_of
from tests.kit.pipes import off_loop, read_all
from tests.kit.planning import plan_prefix
from tests.kit.raw import Request, answer, etag, listing, raw_server

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking", "credentials")

DATA = os.urandom(1000)
PATIENT = RetryPolicy(give_up_after=30, first_wait=0.001, longest_wait=0.01, wrong_answers=1)


def failure(code: str) -> bytes:
    text = f'<?xml version="1.0"?>\n<Error><Code>{code}</Code><Message>Reduce your rate.</Message></Error>'
    return answer(200, text.encode(), Content_Type="application/xml")


def chunked(response: bytes) -> bytes:
    body = response.partition(b"\r\n\r\n")[2]
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


async def test_a_part_waits_as_for_its_code(run: RunChannel, tmp_path: Path) -> None:
    left = [failure("SlowDown"), chunked(failure("SlowDown"))] * 3 + [failure("InternalError")] * 2

    def reply(request: Request) -> bytes:
        if "list-type" in request.query:
            found = not request.query.get("start-after")
            return listing(*[("data/a", len(DATA), etag(DATA))] * found)
        if left:
            return left.pop()
        return answer(206, DATA, ETag=f'"{etag(DATA)}"', Content_Range=f"bytes 0-999/{len(DATA)}")

    with raw_server(reply) as server:
        async with run(server, tmp_path, policy=PATIENT) as running:
            assert await off_loop(read_all, running.fifo(0)) == DATA
            errors = {each.kind: each.text for each in running.channel.statistics().errors}
    assert "Reduce your rate (S3 responded 200 SlowDown)" in errors[Throttled.kind]


async def test_a_page_waits_as_for_its_code(pages_from: PagesFrom) -> None:
    left = [failure("SlowDown")] * 4

    def reply(request: Request) -> bytes:
        if left:
            return left.pop()
        return listing(*[("data/a", 1, "e")] * (not request.query.get("start-after")))

    with raw_server(reply) as server:
        async with pages_from(server) as pages:
            assert (await plan_prefix(pages, S3Uri("b", "data/"))).objects(0) == 1


async def test_a_denial_inside_a_200_is_final(pages_from: PagesFrom) -> None:
    with raw_server(lambda _: failure("AccessDenied")) as server:
        async with pages_from(server) as pages:
            with pytest.raises(Denied, match="Reduce your rate .S3 responded"):
                await plan_prefix(pages, S3Uri("b", "data/"))


@pytest.mark.parametrize("by_aiobotocore", [False, True], ids=["own", "aiobotocore"])
async def test_a_manifest_waits_as_for_its_code(*, by_aiobotocore: bool) -> None:
    left = [failure("SlowDown"), chunked(failure("InternalError"))] * 2
    waits: list[SourceError] = []

    def reply(_: Request) -> bytes:
        return left.pop() if left else answer(200, DATA, ETag=f'"{etag(DATA)}"')

    with raw_server(reply) as server:
        async with clients_of(server, by_aiobotocore=by_aiobotocore) as clients:
            pieces = read_manifest(clients, S3Uri("b", "m.json"), PATIENT, on_wait=waits.append)
            assert b"".join([each async for each in pieces]) == DATA
    assert "Reduce your rate (S3 responded 200 SlowDown)" in str(waits[-1])


async def test_a_small_object_without_a_version_is_no_error() -> None:
    with raw_server(lambda _: answer(200, b"<Errors>")) as server:
        async with clients_of(server) as clients:
            pieces = read_manifest(clients, S3Uri("b", "m.json"), PATIENT, on_wait=None)
            assert b"".join([each async for each in pieces]) == b"<Errors>"


@pytest.mark.parametrize("by_aiobotocore", [False, True], ids=["own", "aiobotocore"])
async def test_a_denied_manifest_is_final(*, by_aiobotocore: bool) -> None:
    with raw_server(lambda _: failure("AccessDenied")) as server:
        async with clients_of(server, by_aiobotocore=by_aiobotocore) as clients:
            pieces = read_manifest(clients, S3Uri("b", "m.json"), PATIENT, on_wait=None)
            with pytest.raises(Denied, match="Reduce your rate .S3 responded 200 AccessDenied"):
                await anext(pieces)
