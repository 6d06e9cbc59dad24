"""Servers that refuse If-Match: the error names the setting, and without the header the proof is the ETag."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from streamer.errors import SourceChanged
from streamer.plan import S3Uri
from tests.kit.harness import RunChannel, clients_of, failure, fill
from tests.kit.pipes import off_loop, read_all
from tests.kit.planning import plan_manifest
from tests.kit.stub import S3Stub, cut_after, with_headers

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking")


REFUSALS = [(501, "NotImplemented"), (400, "InvalidArgument"), (412, "PreconditionFailed")]


@pytest.mark.parametrize("refusal", REFUSALS)
async def test_a_server_that_refuses_the_header_is_read_without_it(
    run: RunChannel, stub: S3Stub, tmp_path: Path, refusal: tuple[int, str]
) -> None:
    stub.if_match_refused = refusal
    truth = fill(stub, [120_000, 0, 30_000])
    stub.script(cut_after(10_000), cut_after(0))
    async with run(stub, tmp_path, if_match="omit") as running:
        assert await off_loop(read_all, running.fifo(0)) == truth
    assert {seen.if_match for seen in stub.seen} == {None}


@pytest.mark.parametrize("refusal", REFUSALS)
async def test_the_error_names_the_setting(
    run: RunChannel, stub: S3Stub, tmp_path: Path, refusal: tuple[int, str]
) -> None:
    stub.if_match_refused = refusal
    fill(stub, [1000])
    async with run(stub, tmp_path) as running:
        error = str(await failure(running))
    assert error.count("set Penstock.Endpoint.IfMatch: omit") == 1
    assert refusal[1] in error


async def test_without_the_header_the_error_does_not_name_it(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    fill(stub, [1000])
    async with run(stub, tmp_path, if_match="omit") as running:
        stub.objects["b/data/0000"] = os.urandom(1000)
        error = await failure(running)
    assert isinstance(error, SourceChanged)
    assert "replaced after it was listed (ETag" in str(error)
    assert "IfMatch" not in str(error)


async def test_a_response_without_an_etag_is_refused(run: RunChannel, stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, [1000])
    stub.script(*[with_headers(ETag="")] * 9)
    async with run(stub, tmp_path, if_match="omit") as running:
        assert "ETag" in str(await failure(running))


@pytest.mark.parametrize("if_match", ["send", "omit"])
@pytest.mark.parametrize("by_aiobotocore", [True, False])
async def test_the_rest_of_a_manifest_is_requested_likewise(
    stub: S3Stub, if_match: str, *, by_aiobotocore: bool
) -> None:
    fill(stub, [10, 20])
    stub.objects["b/manifest"] = json.dumps([{"prefix": "s3://b/data/"}, "0000", "0001"]).encode()
    stub.script(cut_after(5), key="b/manifest")
    async with clients_of(stub, by_aiobotocore=by_aiobotocore, if_match=if_match) as clients:
        plan = await plan_manifest(clients, S3Uri("b", "manifest"))
    assert plan.total_bytes(0) == 30
    assert [seen.if_match is None for seen in stub.seen] == [True, if_match == "omit"]
