"""The buffered transport over real TLS, and what all transports owe to a slow or demanding server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from hashlib import md5
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import trustme
from aiohttp import web

from streamer.aio import FairPoller
from streamer.errors import Barred, ErrorContext
from streamer.s3.client.doubt import DOUBTED
from streamer.s3.client.endpoint import RequestOptions
from streamer.s3.http.pool import ConnectionPool
from streamer.s3.http_source import tls_context
from tests.kit.harness import RunChannel, Running, fill, running_channel
from tests.kit.pipes import eventually, off_loop, read_all
from tests.kit.stub import Answer, S3Stub, cut_after, fails, stalls
from tests.kit.tls import serving

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking")


@pytest.fixture
def streaming() -> RunChannel:
    """`running_channel` by the buffered transport."""

    def start(stub: S3Stub, directory: Path, **options: Any) -> AbstractAsyncContextManager[Running]:
        if stub.url.startswith("https:"):
            options |= {"ca_bundle": str(directory / "ca.pem")}
        return running_channel(stub, directory, transport="buffered", **options)

    return start


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=lambda v: v.name)
async def test_the_same_stream_over_tls(
    credentials: None,
    authority: trustme.CA,
    tmp_path: Path,
    version: ssl.TLSVersion,
    streaming: RunChannel,
) -> None:
    """Records, buffers and parts have different sizes, and their borders are not to be seen."""
    with serving(authority, version=version) as stub:
        truth = fill(stub, [0, 1, 16_383, 16_384, 16_385, 131_072, 131_073, 3_000_001])
        async with streaming(stub, tmp_path, part_size=400_000) as running:
            for epoch in range(2):
                assert await off_loop(read_all, running.fifo(epoch)) == truth
            assert running.channel.statistics().counts["retries"] == {}


async def test_the_portable_transport_gives_the_same_over_tls(tls_stub: S3Stub, tmp_path: Path) -> None:
    truth = fill(tls_stub, [1, 131_073, 1_000_000])
    bundle = str(tmp_path / "ca.pem")
    async with running_channel(tls_stub, tmp_path, transport="aiobotocore", ca_bundle=bundle) as running:
        assert await off_loop(read_all, running.fifo(0)) == truth


async def test_many_small_objects_on_few_connections(
    tls_stub: S3Stub,
    tmp_path: Path,
    streaming: RunChannel,
) -> None:
    truth = fill(tls_stub, [number * 17 for number in range(400)])
    async with streaming(tls_stub, tmp_path, requests_in_flight=4, parts=16) as running:
        assert await off_loop(read_all, running.fifo(0)) == truth
        assert running.channel.statistics().counts["retries"] == {}
    assert len(tls_stub.seen) >= 399
    assert tls_stub.connections <= 4


async def test_an_unknown_authority_is_refused_with_the_fix(tls_stub: S3Stub) -> None:
    url = urlsplit(tls_stub.url)
    with contextlib.closing(FairPoller()) as poller:
        assert url.hostname is not None
        assert url.port is not None
        pool = ConnectionPool(url.hostname, url.port, poller, tls=tls_context(None))
        with pytest.raises(Barred, match="TLS failed.*CaBundle"):
            await pool.take(ErrorContext("b"))


@pytest.mark.parametrize(
    ("certificate", "remedy"),
    [
        ({"name": "other.test"}, "Endpoint.Url a name in the server's certificate"),
        ({"not_after": datetime(2011, 1, 1, tzinfo=UTC)}, "renew the server's certificate"),
    ],
)
async def test_a_certificate_that_does_not_hold_is_refused_with_the_fix(
    credentials: None, authority: trustme.CA, tmp_path: Path, certificate: dict[str, Any], remedy: str
) -> None:
    with serving(authority, **certificate) as stub:
        url = urlsplit(stub.url)
        with contextlib.closing(FairPoller()) as poller:
            assert url.hostname is not None
            assert url.port is not None
            pool = ConnectionPool(url.hostname, url.port, poller, tls=tls_context(str(tmp_path / "ca.pem")))
            with pytest.raises(Barred, match=f"TLS failed.*{remedy}"):
                await pool.take(ErrorContext("b"))


@contextlib.asynccontextmanager
async def cut_line(stub: S3Stub, *, after: int) -> AsyncIterator[list[int]]:
    """Lead `stub.url` over a line that breaks once, `after` bytes of what the server says on a connection.

    Yields the bytes that had passed when it broke.
    """
    origin = urlsplit(stub.url)
    broken: list[int] = []
    ended: set[asyncio.Task[Any]] = set()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, breaks: bool) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := await reader.read(4096):
                if breaks and not broken and passed + len(data) > after:
                    writer.write(data[: after - passed])
                    await writer.drain()
                    broken.append(after)
                    break
                passed += len(data)
                writer.write(data)
                await writer.drain()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        ended.add(task)
        back, forth = await asyncio.open_connection(origin.hostname, origin.port)
        ways = [
            asyncio.create_task(carry(reader, forth, breaks=False)),
            asyncio.create_task(carry(back, writer, breaks=True)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.wait(ways)
        for end in (writer, forth):
            end.close()
            with contextlib.suppress(OSError):
                await end.wait_closed()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    stub.url = f"{origin.scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield broken
    finally:
        server.close()
        if ended:
            await asyncio.wait(ended, timeout=5)
        await server.wait_closed()


@pytest.mark.parametrize("after", [100_000, 1_000_003, 2_500_000])
async def test_a_line_that_breaks_in_mid_record_is_resumed(
    tls_stub: S3Stub,
    tmp_path: Path,
    after: int,
    streaming: RunChannel,
) -> None:
    """An end without close_notify is no end; what was decrypted before it stays valid."""
    truth = fill(tls_stub, [3_000_000])
    async with cut_line(tls_stub, after=after) as broken:
        async with streaming(
            tls_stub, tmp_path, part_size=4_000_000, parts=2, requests_in_flight=1
        ) as running:
            assert await off_loop(read_all, running.fifo(0)) == truth
            assert sum(running.channel.statistics().counts["retries"].values()) == 1
        assert broken == [after]
    starts = [int(seen.range.removeprefix("bytes=").split("-")[0]) for seen in tls_stub.seen]
    assert starts[0] == 0
    assert after - 50_000 < starts[1] < after  # no more is asked for again than was under way


async def test_close_notify_in_the_middle_of_a_body_is_resumed(
    tls_stub: S3Stub,
    tmp_path: Path,
    streaming: RunChannel,
) -> None:
    truth = fill(tls_stub, [3_000_000, 5])
    tls_stub.script(cut_after(70_000), cut_after(1), fails(503, "SlowDown"), cut_after(0))
    async with streaming(tls_stub, tmp_path, part_size=1_000_000, requests_in_flight=2) as running:
        assert await off_loop(read_all, running.fifo(0)) == truth
        retries = running.channel.statistics().counts["retries"]
    assert retries == {"truncated": 3, "throttled": 1}


async def test_close_notify_after_a_body_costs_no_retry(
    tls_stub: S3Stub,
    tmp_path: Path,
    streaming: RunChannel,
) -> None:
    """`Connection: close`: the request is not used again."""

    async def last(answer: Answer) -> web.StreamResponse:
        response = web.Response(status=206, body=answer.body, headers=answer.headers)
        response.force_close()
        return response

    truth = fill(tls_stub, [20_000] * 6)
    tls_stub.script(*[last] * 6)
    async with streaming(tls_stub, tmp_path, requests_in_flight=1) as running:
        assert await off_loop(read_all, running.fifo(0)) == truth
        assert running.channel.statistics().counts["retries"] == {}
    assert tls_stub.connections >= 6


@pytest.mark.parametrize("kind", ["stub", "tls_stub"])
async def test_an_idle_connection_that_the_server_has_closed(
    request: pytest.FixtureRequest,
    authority: trustme.CA,
    tmp_path: Path,
    kind: str,
    streaming: RunChannel,
) -> None:
    stub = request.getfixturevalue(kind)
    truth = fill(stub, [50_000] * 60)
    async with streaming(stub, tmp_path, requests_in_flight=2, parts=4) as running:
        assert await off_loop(read_all, running.fifo(0)) == truth
        before = stub.connections
        await eventually(
            lambda: not running.channel.statistics().requests_in_flight
        )  # the next epoch's first parts are here, and wait
        for transport in list(stub.transports):
            stub.loop.call_soon_threadsafe(transport.close)
        assert await off_loop(read_all, running.fifo(1)) == truth
        assert running.channel.statistics().counts["retries"] == {}
        assert stub.connections > before


async def test_little_data_does_not_wait_for_more(server: S3Stub, run_own: RunChannel) -> None:
    """A socket wakes us for 256 KiB at a time; if a server sends less and rests, all that may go on does."""
    truth = fill(server, [2_000_000])
    server.script(stalls(server, after=DOUBTED + 1000))
    async with run_own(part_size=2_000_000, parts=2) as running:
        with open(await off_loop(os.open, running.fifo(0), os.O_RDONLY), "rb", buffering=0) as reader:

            def at_least(count: int) -> bytes:
                got = b""
                while len(got) < count:
                    got += reader.read(count - len(got))
                return got

            # If these bytes waited for more, the stall would end the request, which is a retry.
            got = await off_loop(at_least, 1000)
            server.release()
            assert got + await off_loop(reader.readall) == truth
        assert running.channel.statistics().counts["retries"] == {}


@pytest.mark.parametrize("requester_pays", [True, False])
async def test_every_read_says_who_pays_and_what_decrypts(
    stub: S3Stub, tmp_path: Path, run: RunChannel, requester_pays: bool
) -> None:
    truth, key = fill(stub, [100, 120_000]), bytes(range(32))
    reading = RequestOptions(requester_pays=requester_pays, sse_customer_key=key)
    async with run(stub, tmp_path, reading=reading) as running:
        assert await off_loop(read_all, running.fifo(0)) == truth
    prefix = "x-amz-server-side-encryption-customer-"
    due = {
        f"{prefix}algorithm": "AES256",
        f"{prefix}key": b64encode(key).decode(),
        f"{prefix}key-md5": b64encode(md5(key).digest()).decode(),
    }
    if requester_pays:
        due["x-amz-request-payer"] = "requester"
    assert len(stub.seen) >= 4
    for seen in stub.seen:
        stated = {n: v for n, v in seen.amz.items() if n.startswith(prefix) or n == "x-amz-request-payer"}
        assert stated == due
        assert all(name in (seen.authorization or "") for name in due)  # signed, too


async def test_nothing_of_it_is_said_unasked(stub: S3Stub, tmp_path: Path, run: RunChannel) -> None:
    fill(stub, [100])
    async with run(stub, tmp_path) as running:
        await off_loop(read_all, running.fifo(0))
    for seen in stub.seen:
        assert not [name for name in seen.amz if "customer" in name or "payer" in name]


@pytest.mark.parametrize("apart", [False, True], ids=["at once", "apart"])  # over TLS: a record, or two
async def test_what_comes_behind_an_answer_is_never_part_of_the_next(
    server: S3Stub, run_own: RunChannel, apart: bool
) -> None:
    truth = fill(server, [5000] * 3)

    async def too_much(answer: Answer) -> web.StreamResponse:
        headers = answer.headers | {"Content-Length": str(len(answer.body))}
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        right = f"HTTP/1.1 206 Partial Content\r\n{head}\r\n".encode()
        wrong = right + b"x" * len(answer.body)
        transport = answer.request.transport
        assert transport is not None
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)  # all arrives at once, in records apart
        for data in [right + answer.body, wrong] if apart else [right + answer.body + wrong]:
            transport.write(data)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 0)
        await server.released.wait()
        return web.Response()

    server.script(too_much)
    async with run_own(requests_in_flight=1) as running:
        assert await off_loop(read_all, running.fifo(0)) == truth
        assert running.channel.statistics().counts["retries"] == {"bad_answer": 1}
        assert server.connections == 2
    server.release()
