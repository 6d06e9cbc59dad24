"""A listed object that is not as it was listed: whether somebody changed it, or the listing is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from streamer.errors import BadAnswer, Deleted, SourceChanged
from streamer.plan import S3Uri
from streamer.plan.plan import Plan
from streamer.relay.fetch import second_look
from streamer.relay.fetch.second_look import spellings
from streamer.s3.client.session import Clients
from tests.kit.harness import RunChannel, failure
from tests.kit.planning import plan_prefix
from tests.kit.raw import answer, raw_server
from tests.kit.stub import Answer, S3Stub

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking")

MISTAKES = {
    "data/run+1": "data/run 1",  # `+` left as it is under EncodingType
    "data/a b+c d+e": "data/a b c d e",
    "data/a+b+c+d+e+f": "data/a b c d e f",
    "data/a b": "data/a+b",  # a blank as `+`, without EncodingType
    "data/c d%é": "data/c%20d%25%C3%A9",  # encoded without EncodingType, or twice
    "data/x%2By": "data/x+y",  # EncodingType, and not encoded
    "data/p&q": "data/p&amp;q",  # escaped twice
    "data/é": "data/e\u0301",  # decomposed
    "data/ö": "data/Ã¶",  # UTF-8 twice
    "data/m\rn": "data/m\nn",  # XML reads a carriage return as a line feed
}
"""Keys, and what a server may list for each."""


def listing_then(stub: S3Stub, objects: Mapping[str, bytes]) -> Callable[[Clients], Any]:
    """A `make_plan` that lists, and then replaces all objects by these."""

    async def make(clients: Clients) -> Plan:
        found = await plan_prefix(clients, S3Uri("b", "data/"))
        stub.objects = {f"b/{key}": data for key, data in objects.items()}
        return found

    return make


@pytest.mark.parametrize("key", MISTAKES)
async def test_a_key_that_the_listing_encodes_wrongly_is_named(
    run: RunChannel, stub: S3Stub, tmp_path: Path, key: str
) -> None:
    stub.objects = {f"b/{MISTAKES[key]}": b"1" * 1000}
    async with run(stub, tmp_path, make_plan=listing_then(stub, {key: b"1" * 1000})) as running:
        error = await failure(running)
    assert isinstance(error, BadAnswer)
    assert f"the listing names an object {MISTAKES[key]!r}, which S3 has as {key!r}" in str(error)
    assert "ManifestFile" in str(error)
    assert "deleted" not in str(error)


@pytest.mark.parametrize(("key", "listed"), MISTAKES.items())
def test_no_spelling_is_the_listed_one(key: str, listed: str) -> None:
    assert key in spellings(listed)
    assert listed not in spellings(listed)
    assert len(spellings(listed)) < 30


async def test_a_key_that_is_not_utf8_is_named(run: RunChannel, stub: S3Stub, tmp_path: Path) -> None:
    stub.objects = {"b/data/h\ufffd": b"1"}
    async with run(stub, tmp_path, make_plan=listing_then(stub, {"data/other": b"1"})) as running:
        error = await failure(running)
    assert isinstance(error, BadAnswer)
    assert "a key that is not UTF-8" in str(error)


async def test_one_deleted_object_is_said_to_be_deleted(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    stub.objects = {"b/data/0": b"1", "b/data/1": b"2"}
    async with run(stub, tmp_path, make_plan=listing_then(stub, {"data/1": b"2"})) as running:
        error = await failure(running)
    assert isinstance(error, Deleted)
    assert str(error).startswith("the object was deleted after it was listed: no such object")
    assert "the listing is wrong" not in str(error)


async def test_a_server_that_is_silent_does_not_delay_the_error(
    run: RunChannel, stub: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(second_look, "PATIENCE", 0.2)

    async def silent(answer: Answer) -> web.StreamResponse:
        await stub.released.wait()
        return web.Response()

    stub.objects = {"b/data/0": b"1", "b/data/1": b"2"}
    stub.script(*[silent] * 9, key="b/data/1")
    async with run(stub, tmp_path, make_plan=listing_then(stub, {"data/1": b"2"})) as running:
        error = await failure(running)
        assert not stub.released.is_set()
        stub.release()
    assert isinstance(error, Deleted)


async def test_where_nothing_is_found_the_listing_may_be_wrong(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    stub.objects = {"b/data/0": b"1", "b/data/1": b"2"}
    async with run(stub, tmp_path, make_plan=listing_then(stub, {"data/x": b"2"})) as running:
        error = await failure(running)
    assert isinstance(error, Deleted)
    assert str(error).startswith("neither this object nor s3://b/data/1 is found: somebody deletes them, or")
    assert "encode the keys of its listings" in str(error)


@pytest.mark.parametrize("if_match", ["send", "omit"])
async def test_where_every_etag_differs_the_listing_may_be_wrong(
    run: RunChannel, stub: S3Stub, tmp_path: Path, if_match: str
) -> None:
    stub.objects = {"b/data/0": b"1", "b/data/1": b"2"}
    make = listing_then(stub, {"data/0": b"x", "data/1": b"y"})
    async with run(stub, tmp_path, make_plan=make, if_match=if_match) as running:
        error = await failure(running)
    assert isinstance(error, SourceChanged)
    assert str(error).startswith("neither this object nor s3://b/data/1 is as it was listed")
    assert "its ETags or sizes may differ from those of GETs, which `penstock doctor` tells" in str(error)


async def test_one_replaced_object_is_said_to_be_replaced(
    run: RunChannel, stub: S3Stub, tmp_path: Path
) -> None:
    stub.objects = {"b/data/0": b"1", "b/data/1": b"2"}
    make = listing_then(stub, {"data/0": b"x", "data/1": b"2"})
    async with run(stub, tmp_path, make_plan=make) as running:
        error = await failure(running)
    assert str(error).startswith("the object was replaced after it was listed")
    assert "the listing is wrong" not in str(error)


@pytest.mark.usefixtures("credentials")
@pytest.mark.parametrize("key", [b"a\x07b", b"a&#7;b", b"\xe9"])
async def test_a_page_that_cannot_be_xml_names_its_key(pages_from: Any, key: bytes) -> None:
    """botocore reports such a page as an internal error of S3, for as long as it is asked."""
    entry = b'<Contents><Key>data/%b</Key><ETag>"e"</ETag><Size>1</Size></Contents>' % key
    page = b"<ListBucketResult>\n<IsTruncated>false</IsTruncated>%b</ListBucketResult>" % entry
    with raw_server(lambda _: answer(200, page)) as server:
        async with pages_from(server) as pages:
            with pytest.raises(BadAnswer, match=r"the key b'data/.* has a character that XML cannot have"):
                await plan_prefix(pages, S3Uri("b", "data/"))


@pytest.mark.usefixtures("credentials")
async def test_a_page_that_is_cut_names_no_key(pages_from: Any) -> None:
    page = b"<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>data/x"
    with raw_server(lambda _: answer(200, page)) as server:
        async with pages_from(server) as pages:
            with pytest.raises(BadAnswer, match="the listing is invalid") as caught:
                await plan_prefix(pages, S3Uri("b", "data/"))
    assert "the key b" not in str(caught.value)
