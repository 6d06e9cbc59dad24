"""aiobotocore's clients, which are opened by their first request."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from streamer.errors import ConfigError, ErrorContext
from streamer.s3.client.endpoint import Endpoint
from streamer.s3.client.session import open_clients
from tests.kit.harness import clients_of
from tests.kit.stub import S3Stub, stalls

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking")


async def test_requests_at_once_open_one_client(stub: S3Stub) -> None:
    stub.objects["b/k"] = b"bytes"
    async with clients_of(stub) as clients:
        assert clients.data.settings is not None
        opened: list[Any] = []
        clients.data.when_open(opened.append)
        requests = [
            clients.data.send("get_object", ErrorContext("b", "k"), Bucket="b", Key="k") for _ in range(3)
        ]
        for response in await asyncio.gather(*requests):
            async with response["Body"] as body:
                assert await body.read() == b"bytes"
        clients.data.when_open(opened.append)
        client = await clients.data.opened()
        assert opened == [client, client]
        assert await clients.control.opened() is not client


async def test_a_request_that_is_cancelled_leaves_the_others_their_client(stub: S3Stub) -> None:
    stub.objects["b/k"] = b"bytes"
    async with clients_of(stub) as clients:
        first, second = (
            asyncio.create_task(
                clients.control.send("head_object", ErrorContext("b", "k"), Bucket="b", Key="k")
            )
            for _ in range(2)
        )
        await asyncio.sleep(0)
        first.cancel()
        assert (await second)["ContentLength"] == 5
        assert first.cancelled()


@pytest.mark.parametrize("closing", [False, True])
async def test_a_body_of_aiobotocore_given_up_over_tls_closes_its_socket(
    tls_stub: S3Stub, tmp_path: Path, *, closing: bool
) -> None:
    """Without waiting for the server's end of the connection, which would outlast the event loop."""
    tls_stub.objects["b/k"] = b"bytes"
    tls_stub.faults["b/k"].append(stalls(tls_stub, after=1))
    async with clients_of(tls_stub, ca_bundle=str(tmp_path / "ca.pem")) as clients:
        response = await clients.data.send("get_object", ErrorContext("b", "k"), Bucket="b", Key="k")
        transport = response["Body"].raw_stream.connection.transport
        fd = transport.get_extra_info("socket").fileno()
        os.fstat(fd)
        if closing:
            transport.close()
        response["Body"].close()
        for _ in range(3):
            await asyncio.sleep(0)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


async def test_an_endpoint_that_botocore_refuses_is_an_error_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"correct Penstock\.Endpoint"):
        async with open_clients(Endpoint(url="http://a_b", region="us-east-1"), connections=1):
            pass
