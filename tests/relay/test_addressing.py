"""The bucket in the host name: at an endpoint of one's own, by every client."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sidecar.config.settings import EndpointConfig
from streamer.errors import Denied
from streamer.plan import S3Uri
from streamer.s3.client.endpoint import Endpoint
from streamer.s3.client.session import open_clients
from streamer.s3.pages.object_get import ControlClient, read_first
from streamer.s3.pages.pages import PageSource
from tests.kit.planning import plan_prefix
from tests.kit.raw import RawServer, Request, answer, listing, raw_server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from streamer.s3.client.session import Clients

pytestmark = pytest.mark.usefixtures("credentials", "no_leaks", "no_blocking")

BUCKETS = ("b", "bucket")
DATA = b"some bytes"
MESSAGE = b"<Message>Please use virtual hosted style.</Message>"
REFUSAL = b"<Error><Code>SecondLevelDomainForbidden</Code>%b</Error>" % MESSAGE


def reply(request: Request) -> bytes:
    """Answer by the bucket in the Host header alone."""
    bucket, _, host = request.headers["host"].partition(":")[0].partition(".")
    if (bucket, host) not in [(each, "store.test") for each in BUCKETS]:
        return answer(403, REFUSAL)
    if "list-type" in request.query and request.path == "/":
        return listing(("data/a", len(DATA), "e"))
    assert request.path == "/data/a"
    return answer(206, DATA[:1], ETag='"e"', Content_Range=f"bytes 0-0/{len(DATA)}")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[RawServer]:
    """A server whose URL has a name, and DNS that has it and all names below it."""
    resolve = socket.getaddrinfo

    def found(host: Any, *rest: Any, **options: Any) -> Any:
        ours = str(host).endswith("store.test")
        return resolve("127.0.0.1" if ours else host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", found)
    with raw_server(reply) as server:
        yield RawServer(server.url.replace("127.0.0.1", "store.test"), server.seen)


@contextlib.asynccontextmanager
async def clients(endpoint: Endpoint, *, by_aiobotocore: bool) -> Any:
    async with open_clients(endpoint, connections=1, by_aiobotocore=by_aiobotocore) as found:
        loop: Any = asyncio.get_running_loop()  # uvloop resolves names by itself
        loop.getaddrinfo = lambda *names, **options: asyncio.to_thread(socket.getaddrinfo, *names, **options)
        yield found


async def first_byte(found: Clients, bucket: str) -> bytes:
    with contextlib.closing(ControlClient(found)) as control:
        plan = await plan_prefix(PageSource(control), S3Uri(bucket, "data/"))
        _, data = await read_first(control, next(plan.refs(0)), {"Range": "bytes=0-0"})
    return data


@pytest.mark.parametrize("by_aiobotocore", [False, True])
@pytest.mark.parametrize("by_file", [False, True])
@pytest.mark.parametrize("bucket", BUCKETS)
async def test_the_bucket_is_in_the_host_name(
    store: RawServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bucket: str,
    *,
    by_file: bool,
    by_aiobotocore: bool,
) -> None:
    """PathStyle: false or AWS's configuration file asks for it."""
    if by_file:
        (tmp_path / "config").write_text("[default]\ns3 =\n    addressing_style = virtual\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    endpoint = Endpoint(url=store.url, region="us-east-1", path_style=None if by_file else False)
    async with clients(endpoint, by_aiobotocore=by_aiobotocore) as found:
        assert await first_byte(found, bucket) == DATA[:1]
    assert {request.headers["host"].partition(".")[0] for request in store.seen} == {bucket}


@pytest.mark.parametrize("by_aiobotocore", [False, True])
async def test_a_server_that_refuses_the_path_is_told_apart_from_a_policy(
    store: RawServer, *, by_aiobotocore: bool
) -> None:
    async with clients(Endpoint(url=store.url), by_aiobotocore=by_aiobotocore) as found:
        with pytest.raises(Denied, match=r"virtual hosted style .S3 responded 403.*; set .*PathStyle: false"):
            await first_byte(found, "bucket")


@pytest.mark.parametrize("by_aiobotocore", [False, True])
async def test_an_endpoint_may_have_a_path(*, by_aiobotocore: bool) -> None:
    """Gateways of Hugging Face and Supabase have one."""

    def behind(request: Request) -> bytes:
        assert request.path.startswith("/storage/v1/s3/bucket")
        if "list-type" in request.query:
            return listing(("data/a", len(DATA), "e"))
        return answer(206, DATA[:1], ETag='"e"', Content_Range=f"bytes 0-0/{len(DATA)}")

    with raw_server(behind) as server:
        endpoint = EndpointConfig.model_validate({"Url": f"{server.url}/storage/v1/s3"}).resolved()
        async with open_clients(endpoint, connections=1, by_aiobotocore=by_aiobotocore) as found:
            assert await first_byte(found, "bucket") == DATA[:1]
