"""Listings that a right server never sends: no such listing makes a plan or goes on for ever."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sidecar.download.paths import relative_path
from sidecar.process.exits import Exit, exit_code
from streamer.errors import BadAnswer, ConfigError, Missing, ObjectMissing, PenstockError, Truncated
from streamer.plan import S3Uri, parse_s3_uri
from streamer.s3.pages import prefix_pages as subject
from streamer.s3.pages.object_info import open_inspector
from streamer.s3.pages.pages import open_pages
from tests.kit.harness import PagesFrom, clients_of
from tests.kit.planning import alone, plan_manifest, plan_prefix
from tests.kit.raw import Request, answer, listing, raw_server
from tests.kit.stub import S3Stub

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking", "credentials")

PREFIX = "data/tr"
FIRST = [(f"data/train/{i}", 1, "e") for i in range(3)]


def folder(name: str) -> str:
    return f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>"


def paged(second: bytes) -> Callable[[Request], bytes]:
    """A right first page, then this for ever."""

    def reply(request: Request) -> bytes:
        return second if "continuation-token" in request.query else listing(*FIRST, more="t1")

    return reply


def circling(request: Request) -> bytes:
    """Empty pages, and two tokens in turn."""
    return listing(more="a" if request.query.get("continuation-token") == "b" else "b")


def endless(request: Request) -> bytes:
    """Empty pages, each with a token of its own."""
    return listing(more=f"{request.query.get('continuation-token', '')}1")


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (lambda _: listing(*FIRST, ("other/b", 1, "e")), "does not begin with the prefix"),
        (lambda _: listing(("../../etc/passwd", 1, "e")), "does not begin with the prefix"),
        (lambda _: listing(("/data/train/0", 1, "e")), "does not begin with the prefix"),
        (lambda _: listing(("", 1, "e")), "does not begin with the prefix"),
        (lambda _: listing(("data tr", 1, "e")), "may encode the keys of its listings"),
        (lambda _: listing(*[("data/train/\ufffd", 1, "e")] * 2), "each byte that is not UTF-8"),
        (lambda _: listing(*FIRST, inside=folder("data/train/")), "it has folders"),
        (circling, "does not advance"),
        (endless, "3 successive pages are empty"),
        (paged(listing(more="t1")), "does not advance"),
        (paged(listing(*FIRST)), "does not advance"),
        (paged(listing(("data/train/9", 1, "e"), ("data/train/1", 1, "e"))), "names the object twice"),
        (paged(answer(200)), "the listing is invalid"),
        (
            lambda _: answer(200, b"<html><body>Welcome to the hotel</body></html>"),
            "not S3's: 200 ok .it says 'Welcome to the hotel'",
        ),
        (paged(answer(204)), "no valid IsTruncated"),
        (lambda _: listing(("data/train/0", 1 << 64, "e")), "object size: over 2"),
        (lambda _: listing(("data/train/" + "k" * 70_000, 1, "e")), "a key of over"),
        (lambda _: listing(("data/train/0", -1, "e")), "object size: -1"),
        (lambda _: listing(*FIRST, inside="<a/>" * 200_000), "more than 200000 tags"),
    ],
)
async def test_what_no_listing_can_say_makes_no_plan(
    reply: Callable[[Request], bytes], words: str, monkeypatch: pytest.MonkeyPatch, pages_from: PagesFrom
) -> None:
    monkeypatch.setattr(subject, "MOST_EMPTY", 3)
    with raw_server(reply) as server:
        async with pages_from(server) as pages:
            with pytest.raises(PenstockError, match=words):
                await plan_prefix(pages, S3Uri("b", PREFIX))
    assert len(server.seen) < 20


ENTRY = "<Contents><Key>data/train/0</Key><Size>1</Size><ETag>&quot;e&quot;</ETag></Contents>"


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("ETag", ENTRY.replace("</ETag>", "</ETag><ETag>&quot;f&quot;</ETag>")),
        ("Size", ENTRY.replace("</Size>", "</Size><Size>2</Size>")),
        ("Key", ENTRY.replace("</Key>", "</Key><Key>data/train/1</Key>")),
        ("IsTruncated", f"<IsTruncated>true</IsTruncated>{ENTRY}"),
    ],
)
async def test_what_comes_twice_where_it_comes_once_is_refused_by_name(
    name: str, inside: str, pages_from: PagesFrom
) -> None:
    """With `IsTruncated` twice the rest of the listing would be lost without a word."""
    with raw_server(lambda _: listing(inside=inside)) as server:
        async with pages_from(server) as pages:
            with pytest.raises(BadAnswer, match=f"<{name}> comes 2 times where S3 sends it once"):
                await plan_prefix(pages, S3Uri("b", PREFIX))


@pytest.mark.parametrize("status", [400, 401, 403])
async def test_a_refusal_whose_reason_is_cut_off_is_asked_again(status: int, pages_from: PagesFrom) -> None:
    """Like any response that breaks off: the reason may be credentials that have expired."""
    refusal = answer(status, b"<Error><Co", Content_Length="300")
    with raw_server(lambda _: listing(*FIRST) if len(server.seen) > 1 else refusal) as server:
        async with pages_from(server) as pages:
            assert (await plan_prefix(pages, S3Uri("b", PREFIX))).objects(0) == len(FIRST)


async def test_a_refusal_that_is_always_cut_off_may_pass(pages_from: PagesFrom) -> None:
    refusal = answer(403, b"<Error><Co", Content_Length="300")
    with raw_server(lambda _: refusal) as server:
        async with pages_from(server, stall_timeout=2) as pages:
            with pytest.raises(Truncated, match="status 403 broke off before its error code: s3://b/data"):
                await plan_prefix(pages, S3Uri("b", PREFIX))


def test_a_key_that_is_not_below_the_prefix_is_no_file() -> None:
    """A second line of defence: it was written to the tail of its own name."""
    assert relative_path("data/train/0", PREFIX) == "train/0"
    for key in ("other/b", "data", "dat/../x", "/data/train"):
        with pytest.raises(ConfigError, match="not below"):
            relative_path(key, PREFIX)


async def test_what_never_was_is_missing_and_not_gone() -> None:
    with raw_server(lambda _: answer(404, b"<Error><Code>NoSuchKey</Code></Error>")) as server:
        async with clients_of(server) as clients:
            with pytest.raises(Missing, match="no such object .S3 responded 404 NoSuchKey.") as caught:
                await plan_manifest(alone(clients), S3Uri("b", "manifest"))
            assert exit_code(caught.value) is Exit.MISSING
    with raw_server(lambda _: answer(404)) as server:
        async with clients_of(server) as clients:
            with open_inspector(clients, give_up_after=1) as inspector:
                with pytest.raises(ObjectMissing, match="no such object .S3 responded 404.:") as caught:
                    await inspector.stat("b", "k")
                assert exit_code(caught.value) is Exit.MISSING


async def test_what_is_not_offered_is_not_asked_for_again_and_again(pages_from: PagesFrom) -> None:
    with raw_server(lambda _: answer(501, b"<Error><Code>NotImplemented</Code></Error>")) as server:
        async with pages_from(server) as pages:
            with pytest.raises(BadAnswer, match="does not support"):
                await plan_prefix(pages, S3Uri("b", PREFIX))
    assert len(server.seen) == 1


async def test_tls_to_a_port_without_it(stub: S3Stub, pages_from: PagesFrom) -> None:
    stub.url = stub.url.replace("http:", "https:")
    async with pages_from(stub) as pages:
        with pytest.raises(PenstockError, match="http://"):
            await plan_prefix(pages, S3Uri("b", PREFIX))


@pytest.mark.parametrize(
    "uri",
    ["s3://tenant:bucket/x", "s3://a b/x", "s3://b\u00e9/x", "s3://@b/x", "s3://b?x/", "s3://./x", "s3://.."],
)
def test_a_bucket_that_cannot_be_is_an_error_of_the_job(uri: str) -> None:
    with pytest.raises(ConfigError, match="does not name a bucket"):
        parse_s3_uri(uri)


def test_the_arn_of_an_access_point_is_a_bucket() -> None:
    arn = "arn:aws:s3:eu-west-1:123456789012:accesspoint:mine"
    assert parse_s3_uri(f"s3://{arn}/x") == S3Uri(arn, "x")
    slashed = arn.replace("accesspoint:", "accesspoint/")
    assert parse_s3_uri(f"s3://{slashed}/x/y") == S3Uri(slashed, "x/y")
    outpost = "arn:aws:s3-outposts:eu-west-1:123456789012:outpost/op-1/accesspoint/mine"
    assert parse_s3_uri(f"s3://{outpost}/x/y") == S3Uri(outpost, "x/y")


@pytest.mark.parametrize(
    ("spoiled", "by_aiobotocore"),
    [
        (answer(200, b"<ListBucketResult><IsTruncated>fal"), False),
        (answer(200, b"<html>the page of a proxy</html>"), False),
        (listing(("elsewhere/x", 1, "e")), False),
        (b"HTTP/1.1 2OO OK\r\n\r\n", False),
        (listing(inside="<KeyCount>9</KeyCount>"), False),
        (listing(inside="<KeyCount>9</KeyCount>"), True),
    ],
    ids=["cut", "html", "prefix", "header", "KeyCount", "aiobotocore"],
)
async def test_a_page_that_cannot_be_is_requested_twice_more(spoiled: bytes, *, by_aiobotocore: bool) -> None:
    """A proxy may have damaged it. The third one is an error."""

    async def objects(times: int) -> int:
        with raw_server(lambda _: spoiled if len(server.seen) <= times else listing(*FIRST)) as server:
            async with clients_of(server, by_aiobotocore=by_aiobotocore) as clients:
                with open_pages(clients) as pages:
                    return (await plan_prefix(pages, S3Uri("b", PREFIX))).objects(0)

    assert await objects(2) == len(FIRST)
    with pytest.raises(BadAnswer):
        await objects(3)


async def test_a_page_that_always_counts_too_many_keys_is_believed(pages_from: PagesFrom) -> None:
    """The first one is requested twice more: its entries may have been lost on their way."""

    def reply(request: Request) -> bytes:
        after = request.query.get("start-after", "")
        return listing(
            *[each for each in FIRST if each[0] > after], inside="<KeyCount>9</KeyCount>" * (not after)
        )

    with raw_server(reply) as server:
        async with pages_from(server) as pages:
            assert (await plan_prefix(pages, S3Uri("b", PREFIX))).objects(0) == len(FIRST)
    assert [bool(request.query.get("start-after")) for request in server.seen] == [False] * 3 + [True]


async def test_a_head_that_cannot_be_is_sent_twice_more() -> None:
    spoiled = answer(200, Content_Length="5")
    right = answer(200, Content_Length="5", ETag='"e"')
    with raw_server(lambda _: spoiled if len(server.seen) <= 2 else right) as server:
        async with clients_of(server) as clients:
            with open_inspector(clients, give_up_after=30) as inspector:
                assert (await inspector.stat("b", "k")).size == 5
