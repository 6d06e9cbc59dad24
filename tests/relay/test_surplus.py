"""A server that sends more than its response: what comes on an idle connection answers no request."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from streamer.errors import ErrorContext
from streamer.s3.client.session import S3Client
from tests.kit.harness import clients_of, fill
from tests.kit.pipes import eventually, off_loop
from tests.kit.raw import etag

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking")


@pytest.mark.parametrize("secure", [False, True], ids=["http", "https"])
@pytest.mark.parametrize("seen", [False, True], ids=["in the socket", "read"])
async def test_a_response_on_an_idle_connection_is_not_that_of_the_next_request(
    request: pytest.FixtureRequest, tmp_path: Path, secure: bool, seen: bool
) -> None:
    """By aiobotocore, whose pool would use such a connection again. Our own client: test_buffered."""
    stub = request.getfixturevalue("tls_stub" if secure else "stub")
    truth = fill(stub, [1000])
    stale = (
        b"HTTP/1.1 206 Partial Content\r\nContent-Length: 1000\r\nContent-Range: bytes 0-999/1000\r\n"
        b'ETag: "%s"\r\n\r\n' % etag(truth).encode()
    ) + b"x" * 1000
    bundle: dict[str, Any] = {"ca_bundle": str(tmp_path / "ca.pem")} if secure else {}

    async def get(client: S3Client) -> bytes:
        context = ErrorContext("b", "data/0000")
        named = {"Bucket": "b", "Key": "data/0000", "Range": "bytes=0-999"}
        response = await client.send("get_object", context, **named)
        async with response["Body"] as body:
            data: bytes = await body.read()
            return data

    async with clients_of(stub, **bundle) as clients:
        assert await get(clients.data) == truth
        [transport] = stub.transports
        arrived = asyncio.run_coroutine_threadsafe(written(transport, stale), stub.loop)
        await off_loop(arrived.result)
        if seen:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert await get(clients.data) == truth
        assert await get(clients.data) == truth
        await eventually(lambda: stub.connections == 2)


async def written(transport: asyncio.Transport, data: bytes) -> None:
    """Send in the server's own thread; over loopback it has arrived then."""
    transport.write(data)
