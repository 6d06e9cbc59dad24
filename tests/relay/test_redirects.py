"""Nothing is sent to an address that neither the job file names nor AWS's endpoint rules yield."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.utils import S3RegionRedirectorv2

from sidecar.process.exits import Exit, exit_code
from streamer.errors import PenstockError, SourceError, Transient, WrongEndpoint
from streamer.plan import ObjectRef, Plan, S3Uri
from streamer.retry import RetryPolicy
from streamer.s3.client.endpoint import Endpoint, RequestOptions
from streamer.s3.client.session import open_clients
from streamer.s3.pages.object_info import open_inspector
from streamer.s3.signing.requests import RangeSigner
from tests.kit.harness import EAGER, PagesFrom, RunChannel, clients_of
from tests.kit.pipes import eventually, off_loop
from tests.kit.planning import alone, plan_manifest, plan_prefix
from tests.kit.raw import RawServer, Request, answer, listing, raw_server
from tests.kit.stub import S3Stub

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking")

BODY = b"b" * 1000
REF = ObjectRef("b", "data/0000", len(BODY), "e")
SOON = RetryPolicy(give_up_after=0.2, first_wait=0.001, longest_wait=0.01)
READING = RequestOptions(sse_customer_key=bytes(range(32)))


def foreign(_: Request) -> bytes:
    """What would be streamed: a right answer, by somebody else."""
    return answer(206, b"X" * len(BODY), Content_Range=f"bytes 0-{len(BODY) - 1}/{len(BODY)}", ETag='"e"')


@contextlib.contextmanager
def redirecting(status: int = 307, **headers: str) -> Iterator[Any]:
    """A server that sends every request to another, and that other."""
    with raw_server(foreign) as other:
        place = headers.pop("Location", "{other}{path}")

        def reply(request: Request) -> bytes:
            location = place.format(other=other.url, host=other.url[7:], path=request.target, own=own.url)
            bare = request.method == "HEAD" or status == 304
            body = b"" if bare else b"<Error><Code>TemporaryRedirect</Code></Error>"
            return answer(status, body, Location=location, **headers)

        with raw_server(reply) as own:
            yield own, other


@pytest.fixture(autouse=True)
def token(credentials: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "a-session-token")


async def failed(
    run: RunChannel,
    server: RawServer,
    tmp_path: Path,
    **options: Any,
) -> SourceError:
    """How a channel of one object fails there."""

    async def plan(_: Any) -> Plan:
        return Plan.of([REF])

    async with run(server, tmp_path, policy=SOON, make_plan=plan, reading=READING, **options) as running:
        reader = await off_loop(os.open, running.fifo(0), os.O_RDONLY)
        await eventually(lambda: running.channel.error)
        os.close(reader)
        running.channel.drain()
        await running.task
        assert isinstance(running.channel.error, SourceError)
        return running.channel.error


async def test_a_body_is_not_fetched_elsewhere(run: RunChannel, tmp_path: Path) -> None:
    with redirecting() as (own, other):
        error = await failed(run, own, tmp_path)
    assert not other.seen
    assert isinstance(error, WrongEndpoint)
    assert exit_code(error) is Exit.CONFIG
    assert other.url in str(error)
    assert "Penstock.Endpoint.Url" in str(error)
    assert all(request.headers["x-amz-security-token"] for request in own.seen)


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("http://169.254.169.254/latest/meta-data/", "169.254.169.254"),
        ("https://{host}{path}", "Penstock.Endpoint.Url"),
        ("http://user:hunter2hunter2@{host}{path}", "Penstock.Endpoint.Url"),
        ("//{host}{path}", "Penstock.Endpoint.Url"),
        ("{own}/b/another", "another path"),
        ("/b/another", "another path"),
        ("http://[", "an address that is no URL"),
        ("gopher://{host}/", "gopher://"),
        ("", "without an address"),
    ],
)
async def test_what_is_refused_is_named(
    tmp_path: Path, location: str, words: str, pages_from: PagesFrom
) -> None:
    with redirecting(301, Location=location) as (own, other):
        async with pages_from(own) as pages:
            with pytest.raises(WrongEndpoint) as caught:
                await plan_prefix(pages, S3Uri("b", "data/"))
    assert not other.seen
    assert words in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert len(own.seen) <= 2  # by our own client, and by aiobotocore, which judges redirects


@pytest.mark.parametrize("region", [{}, {"x-amz-bucket-region": "eu-west-3"}])
async def test_not_modified_is_no_redirect(
    run: RunChannel, tmp_path: Path, pages_from: PagesFrom, region: dict[str, str]
) -> None:
    with redirecting(304, **region) as (own, _):
        async with pages_from(own) as pages:
            with pytest.raises(WrongEndpoint, match=r"304 \(Not Modified\), which no request asked for"):
                await plan_prefix(pages, S3Uri("b", "data/"))
        assert "responded 304" in str(await failed(run, own, tmp_path))


@pytest.mark.parametrize("status", [300, 301, 302, 303, 305, 307, 308])
async def test_a_manifest_and_its_objects_are_not_asked_for_elsewhere(status: int) -> None:
    with redirecting(status) as (own, other):
        async with clients_of(own, reading=READING) as clients:
            with pytest.raises(WrongEndpoint):
                await plan_manifest(alone(clients), S3Uri("b", "manifest"))
            for each in (alone(clients), clients):
                with open_inspector(each, give_up_after=5) as inspector, pytest.raises(WrongEndpoint):
                    await inspector.stat("b", "data/0000")
    assert not other.seen
    assert len(own.seen) <= 5  # nothing goes round in circles


async def test_the_same_place_once_more_is_asked_again(
    run: RunChannel, tmp_path: Path, pages_from: PagesFrom
) -> None:
    """Once the server is done with it the body is taken; until then it may pass."""
    with redirecting(Location="{own}{path}") as (own, _):
        error = await failed(run, own, tmp_path)
        async with pages_from(own, stall_timeout=1) as pages:
            with pytest.raises(Transient):
                await plan_prefix(pages, S3Uri("b", "data/"))
    assert "the very same URL" in str(error)


@pytest.mark.parametrize("region", ["evil.com/#", "eu-west-1\u00e9", "a b", "x" * 70])
async def test_a_region_that_is_none_is_not_believed(run: RunChannel, tmp_path: Path, region: str) -> None:
    with redirecting(301, x_amz_bucket_region=region) as (own, other):
        error = await failed(run, own, tmp_path)
    assert not other.seen
    assert isinstance(error, WrongEndpoint)
    scopes = {request.headers["authorization"].split("/")[2] for request in own.seen}
    assert scopes == {"us-east-1"}


def malformed(region: str) -> bytes:
    return answer(
        400, f"<Error><Code>AuthorizationHeaderMalformed</Code><Region>{region}</Region></Error>".encode()
    )


def in_paris(request: Request) -> bytes:
    """A server that takes signatures for eu-west-3 alone."""
    if "/eu-west-3/" not in request.headers["authorization"]:
        return answer(400) if request.method == "HEAD" else malformed("eu-west-3")
    if not request.key:
        return listing(("data/0000", len(BODY), "e"))
    if request.span is None:
        return answer(200, b"" if request.method == "HEAD" else BODY, ETag='"e"', Content_Length="1000")
    return answer(206, BODY, Content_Range=f"bytes 0-{len(BODY) - 1}/{len(BODY)}", ETag='"e"')


async def test_requests_are_signed_anew_for_the_region_that_s3_names(
    run: RunChannel, tmp_path: Path, pages_from: PagesFrom
) -> None:
    """Listing and bodies; our own client too, from its second request on."""
    with raw_server(in_paris) as server:

        async def plan(_: Any) -> Plan:
            return Plan.of([REF] * 4)

        async with run(
            server, tmp_path, requests_in_flight=1, part_size=1000, policy=EAGER, make_plan=plan
        ) as running:
            with open(await off_loop(os.open, running.fifo(0), os.O_RDONLY), "rb") as reader:
                assert await off_loop(reader.read, 4000) == 4 * BODY
        refused = [r for r in server.seen if r.key and "/us-east-1/" in r.headers["authorization"]]
        assert len(refused) <= 2
        async with pages_from(server) as pages:
            assert [*(await plan_prefix(pages, S3Uri("b", "data/"))).refs(0)]


async def test_a_region_that_is_elsewhere_is_named(
    run: RunChannel, tmp_path: Path, pages_from: PagesFrom
) -> None:
    """The endpoint that the job file names is another region's: which, and what to write."""

    def reply(request: Request) -> bytes:
        body = b"" if request.method == "HEAD" else b"<Error><Code>PermanentRedirect</Code></Error>"
        return answer(301, body, x_amz_bucket_region="eu-west-3")

    with raw_server(reply) as server:
        error = await failed(run, server, tmp_path)
        async with pages_from(server) as pages:
            with pytest.raises(WrongEndpoint, match="eu-west-3") as caught:
                await plan_prefix(pages, S3Uri("b", "data/"))
    for each in (error, caught.value):
        assert isinstance(each, WrongEndpoint)
        assert "the bucket is in region eu-west-3" in str(each)
        assert "Penstock.Endpoint.Region: eu-west-3" in str(each)
        assert exit_code(each) is Exit.CONFIG


@pytest.mark.parametrize("computed", [False, True])
async def test_on_aws_our_own_client_asks_the_endpoint_of_the_region(
    monkeypatch: pytest.MonkeyPatch, *, computed: bool
) -> None:
    """Where botocore's own requests go, and not the global endpoint that its presigned URLs name.

    Without keys botocore resolves the endpoint; with keys our own code computes it.
    """
    if computed:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDTEST")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-a-secret")
    async with open_clients(Endpoint(region="eu-west-1"), connections=1) as clients:
        signer = RangeSigner(clients.data, clients.credentials, anonymous=False, reading=RequestOptions())
        place = await signer.endpoint("some-bucket")
        assert place.host == "some-bucket.s3.eu-west-1.amazonaws.com"
        client = await clients.data.opened()
        redirectors = [each for each in gc.get_objects() if isinstance(each, S3RegionRedirectorv2)]
        for named, host in (
            ("eu-west-3", "some-bucket.s3.eu-west-3.amazonaws.com"),
            ("evil.com/#", "some-bucket.s3.eu-west-1.amazonaws.com"),
        ):
            for redirector in redirectors:
                redirector._cache["some-bucket"] = named  # noqa: SLF001 - botocore's
            await client.generate_presigned_url("get_object", Params={"Bucket": "some-bucket", "Key": "k"})
            assert (await signer.endpoint("some-bucket")).host == host


async def test_a_question_for_credentials_is_not_redirected_either(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pages_from: PagesFrom
) -> None:
    """A web identity's token goes to STS alone."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    (tmp_path / "token").write_text("a-web-identity")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/reader")
    with redirecting() as (own, other):
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", own.url)
        with pytest.raises(PenstockError, match="is not the job's endpoint"):
            async with pages_from(own):
                pass
    assert own.seen
    assert not other.seen


async def test_a_server_s_cookies_are_not_sent_back(stub: S3Stub, pages_from: PagesFrom) -> None:
    with raw_server(
        lambda _: answer(200, listing(("data/0000", 1, "e")).partition(b"\r\n\r\n")[2], Set_Cookie="a=b")
    ) as server:
        server.url = server.url.replace("127.0.0.1", "localhost")  # addresses have no cookies
        async with pages_from(server) as pages:
            for _ in range(2):
                await plan_prefix(pages, S3Uri("b", "data/"))
    assert [request.headers.get("cookie") for request in server.seen] == [None] * 4


async def test_a_request_id_shows_no_secret(run: RunChannel, tmp_path: Path) -> None:
    """The server repeats the session token there, as one that logs requests by their headers may."""

    def reply(request: Request) -> bytes:
        return answer(206, x_amz_request_id=request.headers["x-amz-security-token"], ETag='"another"')

    with raw_server(reply) as server:
        error = await failed(run, server, tmp_path)
    assert "request id ***" in str(error)
    assert "a-session-token" not in str(error)
