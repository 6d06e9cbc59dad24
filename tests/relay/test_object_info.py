"""HEADs by our own client: the same objects and errors as by aiobotocore's, on few connections, patiently."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from streamer.errors import BadAnswer, Denied, ErrorContext, GaveUp, Missing, PenstockError, SourceError
from streamer.plan import ObjectRef, S3Uri
from streamer.retry import RetryPolicy, retry_while_unavailable
from streamer.s3.client.endpoint import Endpoint, RequestOptions
from streamer.s3.client.session import open_clients
from streamer.s3.manifests.object_finder import ObjectClients
from streamer.s3.pages.object_info import AIOBOTOCORE_HEADS, HEADS, ObjectInspector, open_inspector
from tests.kit.harness import clients_of, fill
from tests.kit.planning import alone, plan_augmented, plan_manifest
from tests.kit.raw import etag
from tests.kit.stub import Answer, S3Stub, fails

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking")

MANIFEST = S3Uri("b", "manifest")
BOTH = pytest.mark.parametrize("by_aiobotocore", [True, False], ids=["aiobotocore", "own"])


@contextlib.asynccontextmanager
async def heads_of(
    stub: S3Stub, *, by_aiobotocore: bool = False, give_up_after: float = 30.0, stall_timeout: float = 30.0
) -> AsyncIterator[ObjectInspector]:
    async with clients_of(stub, stall_timeout=stall_timeout, by_aiobotocore=by_aiobotocore) as clients:
        with open_inspector(clients, give_up_after=give_up_after) as inspector:
            await clients.control.send(
                "get_object", ErrorContext("b", "manifest"), Bucket="b", Key="manifest"
            )  # botocore reads its models
            yield inspector


@pytest.fixture
def objects(stub: S3Stub) -> S3Stub:
    """Three objects, and any manifest."""
    fill(stub, [10, 0, 70_000])
    stub.objects["b/manifest"] = b"[]"
    return stub


def raw(*pieces: bytes) -> Callable[[Answer], Coroutine[Any, Any, web.StreamResponse]]:
    """Write these bytes as the answer, one send each, and close."""

    async def fault(answer: Answer) -> web.StreamResponse:
        transport = answer.request.transport
        assert transport is not None
        for piece in pieces:
            transport.write(piece)
            await asyncio.sleep(0.01)  # a packet of its own, as a network would make it
        transport.close()
        return web.Response()

    return fault


def answer(data: bytes, extra: bytes = b"") -> bytes:
    return (
        b'HTTP/1.1 200 OK\r\nContent-Length: %d\r\nETag: "%s"\r\n' % (len(data), etag(data).encode())
        + extra + b"\r\n"
    )  # fmt: skip


async def test_both_ways_make_the_same_plan(stub: S3Stub) -> None:
    """Rows of several objects, old versions, odd keys, other buckets: equal to the digest."""
    fill(stub, [10] * 60)
    odd = ["a b", "a+b", "é/ü", "a%2Fb", "a~b", "a=b&c"]
    stub.objects |= {f"other/{key}": key.encode() for key in odd}
    stub.versions["b/data/0000?v+1é"] = b"as it was"
    names = [f"s3://b/data/{number:04}" for number in range(60)] + [f"s3://other/{key}" for key in odd]
    rows = [{"a-ref": name, "n": number, "b-ref": names[-1 - number]} for number, name in enumerate(names)]
    rows.append({"a-ref": "s3://b/data/0000?versionId=v+1é", "n": 0, "b-ref": names[0]})
    stub.objects["b/manifest"] = "\n".join(map(json.dumps, rows)).encode()
    plans = []
    for by_aiobotocore in (True, False):
        counts: list[int] = []
        async with clients_of(stub, by_aiobotocore=by_aiobotocore) as clients:
            with open_inspector(clients, give_up_after=30) as inspector:
                asked = await plan_augmented(
                    alone(clients),
                    MANIFEST,
                    ["a-ref", "n", "b-ref"],
                    object_clients=ObjectClients(inspector),
                    progress=counts.append,
                )
        assert [*dict.fromkeys(counts)] == [*range(len(rows) + 1)]
        plans.append(asked)
    assert plans[0].digest == plans[1].digest
    assert [*plans[1].refs(0)][-2].version == "v+1é"
    assert [*plans[1].refs(0)][-2].size == len(b"as it was")


@BOTH
async def test_never_more_at_once_than_the_bound(stub: S3Stub, *, by_aiobotocore: bool) -> None:
    """Many at once, on no more connections than that, each used again."""
    bound = AIOBOTOCORE_HEADS if by_aiobotocore else HEADS
    fill(stub, [10] * 600)
    names = [f"{number:04}" for number in range(600)]
    stub.objects["b/manifest"] = json.dumps([{"prefix": "s3://b/data/"}, *names]).encode()
    stub.together = {f"head b/data/{name}" for name in names[:bound]}
    async with clients_of(stub, by_aiobotocore=by_aiobotocore) as clients:
        with open_inspector(clients, give_up_after=30) as inspector:
            plan = await plan_manifest(alone(clients), MANIFEST, object_clients=ObjectClients(inspector))
    assert [ref.key for ref in plan.refs(0)] == [f"data/{name}" for name in names]
    assert stub.most_heads == bound
    assert stub.head_count == 600
    assert stub.head_connections <= bound


async def test_one_connection_serves_one_after_the_other(objects: S3Stub) -> None:
    async with heads_of(objects) as inspector:
        for _ in range(5):
            assert (await inspector.stat("b", "data/0002")).size == 70_000
    assert objects.head_connections == 1


@BOTH
@pytest.mark.parametrize(
    ("status", "error"), [(404, Missing), (403, Denied), (409, BadAnswer), (400, BadAnswer)]
)
async def test_a_refusal_names_the_object_and_the_request(
    objects: S3Stub,
    *,
    by_aiobotocore: bool,
    status: int,
    error: type[SourceError],
) -> None:
    """Without a body the status decides; the same words whoever asked."""
    objects.script_head(*[fails(status, "Whatever")] * 2, key="b/data/0000")
    async with heads_of(objects, by_aiobotocore=by_aiobotocore) as inspector:
        with pytest.raises(error, match=rf"responded {status}[ )].*s3://b/data/0000 \(request id REQERR\)"):
            await inspector.stat("b", "data/0000")
        assert (await inspector.stat("b", "data/0001")).size == 0


async def test_both_ways_say_the_same(objects: S3Stub) -> None:
    stated = []
    for by_aiobotocore in (True, False):
        objects.script_head(*[fails(403, "AccessDenied")] * 2, key="b/data/0000")
        async with heads_of(objects, by_aiobotocore=by_aiobotocore) as inspector:
            for key in ("data/0000", "absent"):
                with pytest.raises(PenstockError) as caught:
                    await inspector.stat("b", key)
                stated.append((type(caught.value), str(caught.value)))
    assert stated[:2] == stated[2:]
    assert "s3:ListBucket" in stated[0][1]


async def test_what_may_pass_is_asked_again(objects: S3Stub) -> None:
    """Server errors, throttling and broken connections cost time, not the plan."""
    objects.script_head(
        fails(503, "SlowDown", **{"Retry-After": "0"}),
        fails(500, "InternalError"),
        fails(408, ""),
        fails(425, ""),
        raw(b"HTTP/1.1 200 OK\r\nContent-Le"),
        key="b/data/0000",
    )
    async with heads_of(objects) as inspector:
        assert (await inspector.stat("b", "data/0000")).size == 10
    assert len(objects.head_requests) == 6


async def test_what_does_not_pass_is_given_up(objects: S3Stub) -> None:
    objects.script_head(*[fails(503, "SlowDown")] * 3, key="b/data/0000")
    async with heads_of(objects, give_up_after=0.0) as inspector:
        with pytest.raises(
            GaveUp, match=r"gave up after 0 s without an answer; .*error: .*503.*s3://b/data/0000"
        ):
            await inspector.stat("b", "data/0000")


async def test_an_idle_connection_that_was_closed_is_replaced(objects: S3Stub) -> None:
    """The server may close it as we send: that is neither an error nor a retry."""
    data = objects.objects["b/data/0000"]
    objects.script_head(raw(answer(data)), raw(b""), key="b/data/0000")
    async with heads_of(objects) as inspector:
        for _ in range(3):
            assert (await inspector.stat("b", "data/0000")).etag == etag(data)


async def test_heads_in_pieces_and_interim_answers(objects: S3Stub) -> None:
    data = objects.objects["b/data/0000"]
    whole = answer(data)
    objects.script_head(
        raw(b"HTTP/1.1 100 Continue\r\n\r\n" + whole[:9], whole[9:-3], whole[-3:-1], whole[-1:]),
        key="b/data/0000",
    )
    async with heads_of(objects) as inspector:
        assert await inspector.stat("b", "data/0000") == ObjectRef("b", "data/0000", 10, etag(data), None)
    assert len(objects.head_requests) == 1


async def test_a_body_against_the_rules_is_not_the_next_answer(objects: S3Stub) -> None:
    """A connection with bytes behind the head is not used again."""
    whole = answer(objects.objects["b/data/0000"])

    async def bodied(answered: Answer) -> web.StreamResponse:
        assert answered.request.transport is not None
        answered.request.transport.write(whole + b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        return web.Response()

    objects.script_head(bodied, key="b/data/0000")
    async with heads_of(objects) as inspector:
        assert (await inspector.stat("b", "data/0000")).size == 10
        assert (await inspector.stat("b", "data/0002")).size == 70_000
    assert objects.head_connections == 2


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        (b"SSH-2.0-OpenSSH_9.7\r\n\r\n", "not an HTTP response"),
        (b'HTTP/1.1 200 OK\r\nETag: "x"\r\n\r\n', "HEAD has no Content-Length, or neither"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n", "HEAD has no Content-Length, or neither"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000, "longer than 65536 bytes"),
    ],
)  # fmt: skip
async def test_an_answer_that_cannot_be_is_an_error(objects: S3Stub, stated: bytes, words: str) -> None:
    objects.script_head(*[raw(stated)] * 3, key="b/data/0000")
    async with heads_of(objects) as inspector:
        with pytest.raises(BadAnswer, match=words):
            await inspector.stat("b", "data/0000")


async def test_silence_is_a_broken_connection(objects: S3Stub) -> None:
    """After `StallTimeout` without an answer the HEAD is asked again, elsewhere."""

    async def never(_: Answer) -> web.StreamResponse:
        await objects.released.wait()
        return web.Response()

    objects.script_head(never, key="b/data/0000")
    async with heads_of(objects, stall_timeout=0.5) as inspector:
        assert (await inspector.stat("b", "data/0000")).size == 10
    assert objects.head_connections == 2


async def test_a_redirected_bucket_is_left_to_aiobotocore(objects: S3Stub) -> None:
    """Our client does not follow; the bucket's other objects are not sent round again."""
    objects.script_head(
        fails(307, "TemporaryRedirect", Location=f"{objects.url}/b/data/0002"), key="b/data/0000"
    )
    async with heads_of(objects) as inspector:
        assert (await inspector.stat("b", "data/0000")).size == 10
        assert (await inspector.stat("b", "data/0001")).size == 0
    agents = [seen["user-agent"] for seen in objects.head_requests]
    assert agents[0].startswith("penstock/")
    assert all("aiobotocore" in agent for agent in agents[1:])
    assert len(agents) == 3


async def test_what_reading_must_say_is_said(objects: S3Stub) -> None:
    """Requester pays, the key of SSE-C, and a signature."""
    reading = RequestOptions(requester_pays=True, sse_customer_key=bytes(32))
    endpoint = Endpoint(url=objects.url, path_style=True, reading=reading)
    async with open_clients(endpoint, connections=1) as clients:
        await clients.control.send("get_object", ErrorContext("b", "manifest"), Bucket="b", Key="manifest")
        for each in (alone(clients), clients):
            with open_inspector(each, give_up_after=30) as inspector:
                await inspector.stat("b", "data/0000")
    reported, own = (
        {k: v for k, v in seen.items() if k.startswith("x-amz-")} for seen in objects.head_requests
    )
    for headers in (reported, own):
        del headers["x-amz-date"]
    assert own.items() <= reported.items()
    assert own["x-amz-request-payer"] == "requester"
    assert "x-amz-server-side-encryption-customer-key-md5" in own
    assert "SignedHeaders=host;x-amz-" in objects.head_requests[1]["authorization"]


async def test_anonymous_requests_are_unsigned_and_missing_credentials_told(objects: S3Stub) -> None:
    async with clients_of(objects) as clients:
        await clients.control.send("get_object", ErrorContext("b", "manifest"), Bucket="b", Key="manifest")
        anonymous = replace(clients, anonymous=True, credentials=None)
        with open_inspector(anonymous, give_up_after=30) as inspector:
            await inspector.stat("b", "data/0000")
        assert "authorization" not in objects.head_requests[0]
        with (
            open_inspector(replace(clients, credentials=None), give_up_after=30) as inspector,
            pytest.raises(Denied, match="no usable credentials.*s3://b/data/0000"),
        ):
            await inspector.stat("b", "data/0000")


async def test_behind_a_proxy_it_is_aiobotocore_that_asks(
    objects: S3Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our client serves where the transport of our own would, and nowhere else."""
    monkeypatch.setenv("http_proxy", objects.url)
    async with heads_of(objects) as inspector:
        assert (await inspector.stat("b", "data/0000")).size == 10
    assert "aiobotocore" in objects.head_requests[0]["user-agent"]


async def test_over_tls(tls_stub: S3Stub, tmp_path: Path) -> None:
    fill(tls_stub, [10] * 300)
    tls_stub.objects["b/manifest"] = json.dumps(
        [{"prefix": "s3://b/data/"}, *(f"{number:04}" for number in range(300))]
    ).encode()
    endpoint = Endpoint(url=tls_stub.url, path_style=True, ca_bundle=str(tmp_path / "ca.pem"))
    async with open_clients(endpoint, connections=1) as clients:
        with open_inspector(clients, give_up_after=30) as inspector:
            plan = await plan_manifest(alone(clients), MANIFEST, object_clients=ObjectClients(inspector))
    assert [ref.size for ref in plan.refs(0)] == [10] * 300
    assert all(seen["user-agent"].startswith("penstock/") for seen in tls_stub.head_requests)
    assert tls_stub.head_connections <= HEADS


@BOTH
async def test_a_plan_that_runs_out_of_time_names_the_first_failure(
    objects: S3Stub, by_aiobotocore: bool
) -> None:
    """Not the lack of time alone: the HEAD is repeated for longer than the plan may take."""
    async with heads_of(objects, by_aiobotocore=by_aiobotocore, give_up_after=300.0) as inspector:
        objects.script_head(*[fails(500, "InternalError")] * 200, key="b/data/0000")
        with pytest.raises(GaveUp, match=r"error: [^;]*S3 responded 500") as caught:
            await retry_while_unavailable(
                lambda _: inspector.stat("b", "data/0000"), RetryPolicy(give_up_after=1.5)
            )
        assert caught.value.context.bucket == "b"
