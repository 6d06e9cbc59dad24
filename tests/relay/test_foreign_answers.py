"""Whose word an error is: S3's own, which comes first in the text, or that of a server in front of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sidecar.doctor.remedies import remedy
from streamer.errors import Denied, ForeignAnswer, SourceError, Throttled, Transient
from streamer.plan import ObjectRef, S3Uri
from streamer.retry import RetryPolicy
from streamer.s3.client.session import Clients
from streamer.s3.pages.object_get import ControlClient, read_first
from streamer.s3.pages.object_info import open_inspector
from tests.kit.harness import RunChannel, clients_of
from tests.kit.pipes import off_loop, read_all
from tests.kit.planning import plan_prefix
from tests.kit.raw import Request, answer, etag, listing, raw_server

pytestmark = pytest.mark.usefixtures("credentials", "no_leaks", "no_blocking")

HTML = b"<!DOCTYPE html><html><head><style>b {}</style><title>Access\n Blocked</title></head></html>"
PATIENT = RetryPolicy(give_up_after=30, first_wait=0.001, longest_wait=0.01)
ACTION = "User: arn:aws:iam::1:user/u is not authorized to perform: kms:Decrypt on resource: k"
POLICY = f"{ACTION} because no VPC endpoint policy allows the kms:Decrypt action"
BARE = "Access Denied"
SSE_C = "The object was stored using a form of Server Side Encryption."


def reply(code: str, message: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()


@pytest.fixture(params=[False, True], ids=["own", "aiobotocore"])
def by_aiobotocore(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


async def listed(clients: Clients) -> None:
    await plan_prefix(clients, S3Uri("b", "data/"))


async def got(clients: Clients) -> None:
    control = ControlClient(clients)
    try:
        await read_first(control, ObjectRef("b", "k", 1, "e"), {"Range": "bytes=0-0"})
    finally:
        control.close()


async def stated(clients: Clients) -> None:
    with open_inspector(clients, give_up_after=0.1) as inspector:
        await inspector.stat("b", "k")


async def error_of(
    request: Callable[[Clients], object],
    *,
    by_aiobotocore: bool,
    status: int,
    body: bytes = b"",
    **fields: str,
) -> SourceError:
    with raw_server(lambda _: answer(status, body, **fields)) as server:
        async with clients_of(server, by_aiobotocore=by_aiobotocore) as clients:
            with pytest.raises(SourceError) as caught:
                await request(clients)  # type: ignore[misc]
    return caught.value


@pytest.mark.parametrize("request_", [listed, got, stated])
@pytest.mark.parametrize("status", [403, 404])
async def test_a_page_of_a_server_in_front_is_not_s3_s_word(
    request_: Callable[[Clients], object], status: int, *, by_aiobotocore: bool
) -> None:
    body = b"" if request_ is stated else HTML
    fields = {"Content_Type": "text/html", "Server": "squid/6", "Via": "1.1 proxy.corp"}
    error = await error_of(request_, by_aiobotocore=by_aiobotocore, status=status, body=body, **fields)
    assert type(error) is ForeignAnswer
    assert f"not S3's: {status} " in str(error)
    assert "s3:ListBucket" not in str(error)
    assert "Server: squid/6, Via: 1.1 proxy.corp" in str(error)
    assert ("Access Blocked" in str(error)) == bool(body)
    assert "See to the proxy" in remedy(error, "s3:GetObject")


@pytest.mark.parametrize("request_", [listed, got])
async def test_a_page_of_html_with_the_status_of_a_success(
    request_: Callable[[Clients], object], *, by_aiobotocore: bool
) -> None:
    error = await error_of(request_, by_aiobotocore=by_aiobotocore, status=200, body=HTML)
    assert type(error) is ForeignAnswer
    assert str(error).startswith(
        "the answer is not S3's: 200 ok (it says 'Access Blocked'); see to the proxy"
    )


@pytest.mark.parametrize("status", [200, 302, 403, 404])
async def test_what_has_worked_is_waited_for(run: RunChannel, tmp_path: Path, status: int) -> None:
    """A part, after another one; the first request of a run would end it."""
    data = os.urandom(300_000)
    refusals: list[int] = []

    def reply(request: Request) -> bytes:
        if "list-type" in request.query:
            found = not request.query.get("start-after")
            return listing(*[("data/a", len(data), etag(data))] * found)
        assert request.span is not None
        first, end = request.span
        if first and len(refusals) < 5:
            refusals.append(status)
            return answer(status, HTML, Location="http://login.corp/", Content_Type="text/html")
        span = f"bytes {first}-{end - 1}/{len(data)}"
        return answer(206, data[first:end], ETag=f'"{etag(data)}"', Content_Range=span)

    with raw_server(reply) as server:
        async with run(server, tmp_path, policy=PATIENT, requests_in_flight=1) as running:
            assert await off_loop(read_all, running.fifo(0)) == data
    assert refusals == [status] * 5


@pytest.mark.parametrize(("status", "kind"), [(502, Transient), (503, Throttled), (429, Throttled)])
async def test_a_server_in_front_that_is_busy_is_waited_for(
    status: int, kind: type[SourceError], *, by_aiobotocore: bool
) -> None:
    fields = {"Content_Type": "text/html", "Server": "nginx"}
    error = await error_of(got, by_aiobotocore=by_aiobotocore, status=status, body=HTML, **fields)
    assert type(error) is kind
    assert "Server: nginx" in str(error)


async def test_a_denial_is_told_in_s3_s_words(*, by_aiobotocore: bool) -> None:
    """They name the policy; what else a policy needs would lead away from it."""
    error = await error_of(got, by_aiobotocore=by_aiobotocore, status=403, body=reply("AccessDenied", POLICY))
    assert str(error).startswith(f"{POLICY} (S3 responded 403 AccessDenied); change the policy")
    assert "s3:ListBucket" not in str(error) + remedy(error, "s3:GetObject")
    bare = await error_of(
        got, by_aiobotocore=by_aiobotocore, status=403, body=reply("AccessDenied", "Access Denied")
    )
    assert str(bare).startswith("access denied; the credentials need s3:ListBucket")


async def test_an_object_encrypted_with_a_customer_s_key_names_the_setting(*, by_aiobotocore: bool) -> None:
    error = await error_of(
        got, by_aiobotocore=by_aiobotocore, status=400, body=reply("InvalidRequest", SSE_C)
    )
    assert type(error) is Denied
    assert str(error).startswith(f"{SSE_C.removesuffix('.')} (S3 responded 400 InvalidRequest); set ")
    assert "SseCustomerKeyFile" in remedy(error, "s3:GetObject")
    error = await error_of(stated, by_aiobotocore=by_aiobotocore, status=400)
    assert "SseCustomerKeyFile" in str(error)
