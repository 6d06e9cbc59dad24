"""Bodies that break, end late or end wrongly: no byte of a response that nobody vouches for reaches a reader.

The server sends the first bytes of a body, then text of its own, as a gateway does that meets an error after
the response header; or the beginning of another response. Most faults strike the first GETs of each object.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiohttp import ClientPayloadError
from botocore.awsrequest import AWSPreparedRequest, HTTPHeaders

from streamer.aio import FairPoller
from streamer.plan import S3Uri
from streamer.retry import RetryPolicy
from streamer.s3.client.redirects import PinnedSession, surplus_after
from streamer.s3.manifests.body import read_manifest
from tests.kit.harness import Running, clients_of, failure, running_channel
from tests.kit.pipes import eventually, off_loop, read_all
from tests.kit.raw import After, Wired, WireServer, answer, wire_server

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking", "credentials")

KIB = 1024
TEXT = b"<html><body><h1>502 Bad Gateway</h1>upstream broke off while the body was sent</body></html>\n"
PAUSES = 512 * KIB
"""Unread bytes at most for which aiohttp's parser goes on."""
RETRIES = RetryPolicy(give_up_after=20, first_wait=0.001, longest_wait=0.01)
WAYS = ["splice", "buffered", "buffered tls", "aiobotocore", "aiobotocore tls"]
SHAPES = {
    "large": ([2_500_000], 2_500_000),
    "parts": ([1_500_000], 300_000),
    "small": ([40_000, 1, 90_000, 17_000, 250_000, 3] * 3, 1_000_000),
}
"""Sizes of objects, and of parts."""


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    way: str = request.param
    return way


@pytest.fixture
def server(way: str, authority: trustme.CA) -> Iterator[WireServer]:
    context = None
    if way.endswith("tls"):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(context)
    with wire_server(context) as server:
        yield server


@pytest.fixture
def run(way: str, server: WireServer, tmp_path: Path) -> Callable[..., AbstractAsyncContextManager[Running]]:
    def start(**options: Any) -> AbstractAsyncContextManager[Running]:
        if way.endswith("tls"):
            options["ca_bundle"] = str(tmp_path / "ca.pem")
        options.setdefault("policy", RETRIES)
        transport: Any = way.split(maxsplit=1)[0]
        return running_channel(server, tmp_path, transport=transport, **options)

    return start


def contents(sizes: list[int], seed: int = 1) -> dict[str, bytes]:
    source = random.Random(seed)
    return {f"b/data/{number:04d}": source.randbytes(size) for number, size in enumerate(sizes)}


def struck(times: int, fault: Callable[[Wired], After]) -> Callable[[Wired], After]:
    """The fault at the first `times` GETs of each object; -1: at all."""
    return lambda wired: fault(wired) if times < 0 or wired.number <= times else wired.right()


def broken(at: float, after: After, *, chunked: bool = False, text: bytes = TEXT) -> Callable[[Wired], After]:
    """Send the body up to `at`, then text, then the end; a negative `at` counts from the body's end."""

    def fault(wired: Wired) -> After:
        length = len(wired.data)
        count = (
            int(at * length) if 0 < at < 1 else int(at) if at >= 0 else max(0, length + int(at) - len(text))
        )
        body = wired.data[:count] + text
        if len(body) >= length:
            body = body[: length - 1]
        if not body:
            return wired.right()
        if chunked:
            wired.send(wired.header(chunked=True) + b"%x\r\n%b\r\n" % (len(body), body))
        else:
            wired.send(wired.header() + body)
        return after

    return fault


def followed(at: float, surplus: float) -> Callable[[Wired], After]:
    """Send a part of the body, then so much of another response that a part of it follows the body's end."""

    def fault(wired: Wired) -> After:
        length = len(wired.data)
        count = int(at * length)
        other = answer(206, random.Random(7).randbytes(2 * length), ETag='"other"')
        wired.send(wired.header() + wired.data[:count] + other[: length - count + int(surplus * length) + 1])
        return "keep"

    return fault


async def stream(
    run: Callable[..., AbstractAsyncContextManager[Running]], server: WireServer, **options: Any
) -> bytes:
    async with run(**options) as running:
        return await off_loop(read_all, running.fifo(0))


BREAKS = [0.5, 0, 1, -1, -(16 * KIB - 1), -16 * KIB, -(16 * KIB + 1), 16 * KIB - 1, 16 * KIB, 16 * KIB + 1]
ENDS: tuple[After, After] = "fin", "reset"


def in_turn(*cases: Any) -> list[tuple[Any, ...]]:
    """Return all combinations of the cases, each with one shape; each case meets several shapes."""
    return [
        (shape, *case)
        for case, shape in zip(itertools.product(*cases), itertools.cycle(SHAPES), strict=False)
    ]


@pytest.mark.parametrize(("shape", "at", "after"), in_turn(BREAKS, ENDS))
async def test_text_in_a_broken_body_reaches_nobody(
    run: Callable[..., AbstractAsyncContextManager[Running]],
    server: WireServer,
    shape: str,
    at: float,
    after: After,
) -> None:
    sizes, part_size = SHAPES[shape]
    server.objects = contents(sizes)
    server.fault = struck(2, broken(at, after))
    assert await stream(run, server, part_size=part_size) == b"".join(server.objects.values())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("at", [0.3, 16 * KIB + 1])
async def test_a_text_that_grows_is_not_its_own_proof(
    run: Callable[..., AbstractAsyncContextManager[Running]], server: WireServer, shape: str, at: float
) -> None:
    """A server breaks at one byte of an object, and the first response lost the end of its text.

    Then the second one agrees and goes on. It ended by name, after the text was delivered.
    """
    sizes, part_size = SHAPES[shape]
    server.objects = contents(sizes)

    def fault(wired: Wired) -> After:
        count = int(at * wired.total if at < 1 else at) - wired.start
        text = TEXT[: 50 + wired.number]
        if wired.number > 3 or count < 0 or count + len(text) >= len(wired.data):
            return wired.right()
        wired.send(wired.header() + wired.data[:count] + text)
        return "fin"

    server.fault = fault
    async with run(part_size=part_size) as running:
        assert await ended(running) == b"".join(server.objects.values())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("at", [0.5, -1, -16 * KIB])
async def test_text_in_a_broken_chunked_body_reaches_nobody(
    run: Callable[..., AbstractAsyncContextManager[Running]], server: WireServer, shape: str, at: float
) -> None:
    sizes, part_size = SHAPES[shape]
    server.objects = contents(sizes)
    server.fault = struck(2, broken(at, "fin", chunked=True))
    assert await stream(run, server, part_size=part_size) == b"".join(server.objects.values())


@pytest.mark.parametrize(("shape", "at", "surplus"), in_turn([0.5, 0.01], [0.05, 0.5]))
async def test_another_response_in_a_body_reaches_nobody(
    run: Callable[..., AbstractAsyncContextManager[Running]],
    server: WireServer,
    shape: str,
    at: float,
    surplus: float,
) -> None:
    """The count of the body is met by foreign bytes. What is delivered already ends the epoch by name."""
    sizes, part_size = SHAPES[shape]
    server.objects = contents(sizes)
    server.fault = struck(2, followed(at, surplus))
    truth = b"".join(server.objects.values())
    async with run(part_size=part_size) as running:
        outcome = await ended(running)
        assert outcome == truth or outcome.startswith(b"error: ")


@pytest.mark.parametrize("way", ["aiobotocore", "aiobotocore tls"])
async def test_a_request_that_waits_for_the_connection_hides_no_surplus(
    server: WireServer, way: str, tmp_path: Path
) -> None:
    """aiohttp closes the connection in that request, before the task that reads the body looks at it."""
    server.objects = contents([100_000])
    on = threading.Event()

    def fault(wired: Wired) -> After:
        wired.send(wired.header())
        on.wait(20)
        wired.send(wired.data + b"surplus")
        return "keep"

    server.fault = struck(1, fault)
    request = AWSPreparedRequest("GET", f"{server.url}/b/data/0000", HTTPHeaders(), None, stream_output=True)
    async with PinnedSession(
        verify=str(tmp_path / "ca.pem") if way.endswith("tls") else False, max_pool_connections=1
    ) as session:
        response = await session.send(request)
        found = surplus_after(response.raw)
        waiting = asyncio.ensure_future(session.send(request))
        pool = session._sessions[None].connector  # noqa: SLF001 - nothing else shows that a request waits
        await eventually(lambda: any(pool._waiters.values()))  # noqa: SLF001
        on.set()
        assert await response.raw.content.read() == server.objects["b/data/0000"]
        assert await found
        (await waiting).raw.close()


@pytest.mark.parametrize("way", ["aiobotocore tls"])
async def test_a_reset_hides_no_surplus_that_the_parser_holds(
    server: WireServer, way: str, tmp_path: Path
) -> None:
    """The body's last byte pauses aiohttp's parser; over TLS, a reset is noticed while nobody reads."""
    server.objects = contents([PAUSES + 1])
    send, reset = threading.Event(), threading.Event()

    def fault(wired: Wired) -> After:
        wired.send(wired.header() + wired.data[:-100])
        send.wait(20)
        wired.send(wired.data[-100:] + b"surplus")
        reset.wait(20)
        return "reset"

    server.fault = fault
    request = AWSPreparedRequest("GET", f"{server.url}/b/data/0000", HTTPHeaders(), None, stream_output=True)
    async with PinnedSession(verify=str(tmp_path / "ca.pem")) as session:
        response = (await session.send(request)).raw
        body = response.content
        assert body.get_read_buffer_limits()[1] == PAUSES
        found = surplus_after(response)
        await eventually(lambda: body.total_bytes == PAUSES + 1 - 100)
        send.set()
        await eventually(lambda: body.total_bytes == PAUSES + 1)
        assert not body.is_eof()
        reset.set()
        await eventually(lambda: response.connection is None or response.connection.transport is None)
        with pytest.raises(ClientPayloadError, match="the connection failed before the body's end"):
            await body.read()
        found.cancel()
        response.close()


async def ended(running: Running) -> bytes:
    """Read the epoch to its end, or until it has failed; return its bytes, or `error: ` and the text."""
    reading = asyncio.ensure_future(off_loop(read_all, running.fifo(0)))
    while not reading.done() and running.channel.error is None:
        await asyncio.wait([reading], timeout=0.02)
    if running.channel.error is not None:
        error = running.channel.error
        running.channel.drain()
        with contextlib.suppress(Exception):
            await running.task
        await reading
        return f"error: {error}".encode()
    return reading.result()


def cut(count: int) -> Callable[[Wired], After]:
    """Send the first `count` bytes of each body, at every request."""

    def fault(wired: Wired) -> After:
        if len(wired.data) <= count:
            return wired.right()
        wired.send(wired.header() + wired.data[:count])
        return "fin"

    return fault


@pytest.mark.parametrize("count", [900, 16 * KIB + 1, 40_000])
async def test_a_body_that_breaks_again_and_again_makes_progress(
    run: Callable[..., AbstractAsyncContextManager[Running]], server: WireServer, count: int
) -> None:
    """Two responses agree, and the second goes on after the end of the first."""
    server.objects = contents([100 * count // 8 if count < KIB else 12 * count])
    server.fault = cut(count)
    began = time.process_time()
    assert await stream(run, server, part_size=2_000_000) == server.objects["b/data/0000"]
    assert time.process_time() - began < 3, "something spins"


async def test_bytes_that_stay_in_a_socket_wake_nobody(
    server: WireServer, way: str, run: Callable[..., AbstractAsyncContextManager[Running]]
) -> None:
    """The server stops in the middle of a body for a while; epoll reports the bytes that stay once."""
    server.objects = contents([3_000_000])
    on, calls = threading.Event(), 0

    def pause(wired: Wired) -> After:
        wired.send(wired.header() + wired.data[:2_000_000])
        on.wait(20)
        wired.send(wired.data[2_000_000:])
        return "keep"

    server.fault = pause
    original = FairPoller._call_ready  # noqa: SLF001 - its wake-ups are counted

    def counted(self: FairPoller, epoll: Any) -> None:
        nonlocal calls
        calls += 1
        original(self, epoll)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FairPoller, "_call_ready", counted)
        async with run(part_size=3_000_000) as running:
            reading = asyncio.ensure_future(off_loop(read_all, running.fifo(0)))
            await eventually(lambda: running.channel.statistics().written_bytes > 1_900_000)
            before = calls
            await asyncio.sleep(0.2)
            during = calls - before
            on.set()
            assert await reading == server.objects["b/data/0000"]
    assert during < 20


@pytest.mark.parametrize("after", ["fin", "reset"])
@pytest.mark.parametrize("at", [0.5, 0, -1, -16 * KIB])
async def test_text_in_a_broken_manifest_reaches_nobody(
    server: WireServer, way: str, tmp_path: Path, at: float, after: After
) -> None:
    keys = [f"data/{number:05d}" for number in range(9_000)]
    manifest = json.dumps([{"prefix": "s3://b/"}, *keys]).encode()
    server.objects = {"b/m.json": manifest}
    server.fault = struck(2, broken(at, after))
    options: dict[str, Any] = {"ca_bundle": str(tmp_path / "ca.pem")} if way.endswith("tls") else {}
    async with clients_of(server, by_aiobotocore=way.startswith("aiobotocore"), **options) as clients:
        pieces = read_manifest(clients, S3Uri("b", "m.json"), RETRIES, on_wait=None)
        assert b"".join([piece async for piece in pieces]) == manifest


async def test_a_chunked_body_longer_than_its_range_is_an_error(
    run: Callable[..., AbstractAsyncContextManager[Running]], server: WireServer
) -> None:
    """It was cut to the range, and the epoch was complete."""
    server.objects = contents([300_000])

    def longer(wired: Wired) -> After:
        body = wired.data + b"surplus"
        wired.send(wired.header(chunked=True) + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        return "keep"

    server.fault = longer
    async with run(part_size=300_000) as running:
        assert "more bytes follow" in str(await failure(running))
