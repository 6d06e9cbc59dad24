"""What only the splice transport can get wrong: requests, heads, pipes, and when to step aside."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from streamer.aio import FairPoller, OnReadable
from streamer.errors import ErrorContext, Transient
from streamer.linux import PIPE_SIZE
from streamer.relay.staging import pipes
from streamer.s3.client.endpoint import Endpoint
from streamer.s3.client.session import open_clients
from streamer.s3.http import body
from streamer.s3.http.client import Response
from streamer.s3.http.pool import ConnectionPool
from streamer.s3.http_source import why_not, why_not_splice
from tests.kit.faults import chunked, resets_after
from tests.kit.harness import MORE_THAN_A_FIFO, Running, fill, running_channel
from tests.kit.pipes import eventually, off_loop, read_all
from tests.kit.raw import etag
from tests.kit.stub import Answer, S3Stub, cut_after, fails, turns

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking")


def kernel(stub: S3Stub, directory: Path, **options: Any) -> AbstractAsyncContextManager[Running]:
    return running_channel(stub, directory, transport="splice", **options)


def raw(*pieces: bytes) -> Callable[[Answer], Coroutine[Any, Any, web.StreamResponse]]:
    """Write these bytes as the answer, one send each; `{body}` stands for the right body."""

    async def fault(answer: Answer) -> web.StreamResponse:
        transport = answer.request.transport
        assert transport is not None
        for piece in pieces:
            transport.write(piece.replace(b"{body}", answer.body))
            await asyncio.sleep(0.01)  # a packet of its own, as a network would make it
        transport.close()
        return web.Response()

    return fault


def head(
    stub: S3Stub, *, status: bytes = b"206 Partial Content", extra: bytes = b"", length: int | None = None
) -> bytes:
    data: bytes = stub.objects["b/data/0000"]
    length = len(data) if length is None else length
    return (
        b"HTTP/1.1 " + status + b"\r\nContent-Range: bytes 0-%d/%d\r\n" % (len(data) - 1, len(data))
        + b"Content-Length: %d\r\n" % length + b'ETag: "%s"\r\n' % etag(data).encode() + extra + b"\r\n"
    )  # fmt: skip


async def test_heads_in_pieces_and_interim_answers(stub: S3Stub, tmp_path: Path) -> None:
    """A head may come byte by byte, its end split, behind a 100 Continue; the body's first byte after it."""
    truth = fill(stub, [40_000])
    whole = head(stub)
    stub.script(
        raw(b"HTTP/1.1 100 Continue\r\n\r\n", whole[:5], whole[5:-3], whole[-3:-1], whole[-1:], b"{body}")
    )
    async with kernel(stub, tmp_path, requests_in_flight=1) as running:
        assert await off_loop(read_all, running.fifo(0)) == truth
        assert running.channel.statistics().counts["retries"] == {}


async def test_connections_are_reused_and_a_closed_one_is_replaced(stub: S3Stub, tmp_path: Path) -> None:
    """A server may close an idle connection at any time; that costs neither a retry nor an error."""
    truth = fill(stub, [10_000] * 30)
    stub.script(raw(head(stub, extra=b"Connection: close\r\n"), b"{body}"), key="b/data/0000")
    async with kernel(stub, tmp_path, requests_in_flight=1) as running:
        assert await off_loop(read_all, running.fifo(0)) == truth
        assert running.channel.statistics().counts["retries"] == {}
    assert stub.connections <= 3


async def test_a_request_that_crosses_with_a_close_is_sent_again(stub: S3Stub, tmp_path: Path) -> None:
    """The server closes a kept connection as we ask for more on it: nobody has read that request."""
    truth = fill(stub, [10_000, 20_000])
    stub.script(raw(), key="b/data/0001")
    async with kernel(stub, tmp_path, requests_in_flight=1) as running:
        assert await off_loop(read_all, running.fifo(0)) == truth
        assert running.channel.statistics().counts["retries"] == {}
    assert [seen.key for seen in stub.seen[:3]] == ["data/0000", "data/0001", "data/0001"]


@pytest.mark.parametrize("stated", [b"", b"HTTP/1.1 408 Request Timeout\r\n\r\n"])
async def test_an_idle_connection_closes_when_the_server_says_anything(stated: bytes) -> None:
    """Be it the end alone: such a connection is of no use, and would keep a file open until it is taken."""
    arrived: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
    server = await asyncio.start_server(lambda _, writer: arrived.put(writer), "127.0.0.1")
    host, port = server.sockets[0].getsockname()
    poller = FairPoller()
    pool = ConnectionPool(host, port, poller)
    connection, peer = await pool.take(ErrorContext()), await arrived.get()
    connection.watch(lambda: None)
    pool.give(connection)
    assert await pool.take(ErrorContext()) is connection
    pool.give(connection)
    peer.write(stated)
    peer.close()
    await eventually(lambda: connection.closed)
    other = await pool.take(ErrorContext())
    assert other is not connection
    other.close()
    (await arrived.get()).close()
    poller.close()
    server.close()
    await server.wait_closed()


class CountingPoller(FairPoller):
    """Counts how often it reports a socket."""

    reports = 0

    def add(self, fd: int, on_readable: OnReadable) -> None:
        def report() -> Callable[[], None] | None:
            self.reports += 1
            return on_readable()

        super().add(fd, report)


async def test_a_body_that_nobody_takes_leaves_the_event_loop_idle() -> None:
    """The FIFO is full while the trainer compiles its model for minutes."""

    peers: list[asyncio.StreamWriter] = []

    def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peers.append(writer)
        writer.write(b"HTTP/1.1 206 Partial Content\r\nContent-Length: 9\r\n\r\n123456789")

    server = await asyncio.start_server(answer, "127.0.0.1")
    with contextlib.closing(CountingPoller()) as poller:
        pool = ConnectionPool("127.0.0.1", server.sockets[0].getsockname()[1], poller)
        connection = await pool.take(ErrorContext())
        response = Response(connection, pool, ErrorContext(), within=60, stall_timeout=60)
        await response.receive_header()
        assert response.header.status == 206
        for _ in range(50):
            await asyncio.sleep(0)
        assert poller.reports <= 2
        response.end(reuse=False)
    peers[0].close()
    server.close()
    await server.wait_closed()


async def test_where_no_descriptor_is_left_the_first_connection_may_be_tried_again() -> None:
    """Not only the socket takes one."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.closing(FairPoller()) as poller:
        pool = ConnectionPool("127.0.0.1", server.sockets[0].getsockname()[1], poller)
        os.close(free := os.dup(0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            with pytest.raises(Transient, match="no descriptor is left for .* raise `ulimit -n`"):
                await pool.take(ErrorContext())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        (await pool.take(ErrorContext())).close()
    server.close()
    await server.wait_closed()


async def test_an_answer_without_a_length_goes_through_user_space(stub: S3Stub, tmp_path: Path) -> None:
    """Chunked bodies cannot be spliced; the aiobotocore transport takes the part over."""
    truth = fill(stub, [40_000, 50_000])
    stub.script(chunked, chunked, chunked)
    async with kernel(stub, tmp_path) as running:
        assert await off_loop(read_all, running.fifo(0)) == truth


async def test_what_is_handed_over_stays_within_its_room(stub: S3Stub, tmp_path: Path) -> None:
    """A server that always answers chunked must not be read faster than the reader reads."""
    truth = fill(stub, [MORE_THAN_A_FIFO])
    stub.script(*[chunked] * 1000)
    async with kernel(stub, tmp_path, part_size=4_000_000, parts=3) as running:
        with open(await off_loop(os.open, running.fifo(0), os.O_RDONLY), "rb", buffering=0) as reader:
            got = await off_loop(reader.read, 10)
            await eventually(
                lambda: sum(stage.staged == stage.part.body for stage in running.stages.undelivered) == 2
            )
            assert len(running.stages.undelivered) == 3
            got += await off_loop(reader.readall)
        assert got == truth


async def test_a_redirect_to_the_same_place_is_asked_again(stub: S3Stub, tmp_path: Path) -> None:
    truth = fill(stub, [40_000])

    async def redirect(answer: Answer) -> web.StreamResponse:
        return web.Response(status=307, headers={"Location": f"{stub.url}{answer.request.path}"})

    stub.script(redirect)
    async with kernel(stub, tmp_path, requests_in_flight=1) as running:
        assert await off_loop(read_all, running.fifo(0)) == truth


@pytest.mark.parametrize(
    ("garbage", "words"),
    [
        (b"HELLO\r\n\r\n", "not an HTTP response"),
        (b"HTTP/1.1 abc\r\n\r\n", "not an HTTP response"),
        (b"\r\n\r\n\r\n\r\n", "not an HTTP response"),
        (b"HTTP/1.1 206 OK\r\n" + b"X-Fill: y\r\n" * 9000, "response header is longer"),
    ],
    ids=["no status line", "no number", "empty", "endless"],
)
async def test_what_is_no_http_is_an_error_by_name(
    stub: S3Stub, tmp_path: Path, garbage: bytes, words: str
) -> None:
    fill(stub, [1000])
    stub.script(*[raw(garbage)] * 3)
    async with kernel(stub, tmp_path, requests_in_flight=1) as running:
        reader = await off_loop(os.open, running.fifo(0), os.O_RDONLY)
        await eventually(lambda: running.channel.error)
        os.close(reader)
        assert words in str(running.channel.error)
        running.channel.drain()
        await running.task


async def test_a_part_larger_than_its_pipe(stub: S3Stub, tmp_path: Path) -> None:
    """It stays in its socket until it is delivered, and arrives whole."""
    truth = fill(stub, [MORE_THAN_A_FIFO])
    async with kernel(stub, tmp_path, part_size=16_000_000, parts=3) as running:
        assert await off_loop(read_all, running.fifo(0)) == truth


async def test_a_slow_reader_holds_no_more_than_the_pipes(stub: S3Stub, tmp_path: Path) -> None:
    truth = fill(stub, [MORE_THAN_A_FIFO])
    async with kernel(stub, tmp_path, part_size=4_000_000, parts=3) as running:
        with open(await off_loop(os.open, running.fifo(0), os.O_RDONLY), "rb", buffering=0) as reader:
            got = await off_loop(reader.read, 10)
            further = running.quota.byte_limit // 4
            for stage in running.stages.undelivered:
                assert stage.staged <= PIPE_SIZE + further
            got += await off_loop(reader.readall)
        assert got == truth


async def test_without_pipes_bytes_go_through_memory(
    stub: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who has spent the allowance of pipe pages gets pipes too small to use (pipe(7))."""
    monkeypatch.setattr(pipes, "WORTH_HAVING", 1 << 30)
    truth = fill(stub, [3_000_000, 10, 500_000])
    stub.script(cut_after(1000), fails(503, "SlowDown"))
    async with kernel(stub, tmp_path, part_size=400_000) as running:
        assert await off_loop(read_all, running.fifo(0)) == truth
        assert await off_loop(read_all, running.fifo(1)) == truth


async def test_small_fragments_take_further_pipes(
    stub: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe of few slots is full long before its size; the reserve serves, and comes back."""
    monkeypatch.setattr(pipes, "PIPE_SIZE", 8192)
    monkeypatch.setattr(pipes, "WORTH_HAVING", 4096)
    truth = fill(stub, [200_000, 300_000])
    async with kernel(stub, tmp_path, part_size=60_000) as running:
        for epoch in range(3):
            assert await off_loop(read_all, running.fifo(epoch)) == truth


async def test_all_transports_deliver_the_same_stream(stub: S3Stub, tmp_path: Path) -> None:
    truth = fill(stub, [0, 1, 4095, 4096, 4097, 65_537, 2_000_003])
    for transport in ("aiobotocore", "buffered", "splice"):
        directory = tmp_path / transport
        directory.mkdir()
        async with running_channel(stub, directory, transport=transport, part_size=65_536) as running:
            assert await off_loop(read_all, running.fifo(0)) == truth


@pytest.mark.parametrize(
    ("url", "buckets", "environment", "words"),
    [
        ("http://h:1", {"b"}, {}, None),
        ("https://h", {"b"}, {}, None),
        ("http://h", {"b--use1-az1--x-s3"}, {}, "directory buckets"),
        ("http://h", {"b"}, {"http_proxy": "http://p"}, "proxy"),
        ("https://h", {"b"}, {"https_proxy": "http://p"}, "proxy"),
        ("http://h", {"b"}, {"http_proxy": "http://p", "no_proxy": "h"}, None),
    ],
)
async def test_our_own_client_serves_wherever_it_can(
    monkeypatch: pytest.MonkeyPatch,
    url: str,
    buckets: set[str],
    environment: dict[str, str],
    words: str | None,
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    async with open_clients(Endpoint(url=url, region="eu-west-1"), connections=1) as clients:
        reason = why_not(clients, buckets)
    assert (reason is None) if words is None else (reason is not None and words in reason)


def test_bodies_stay_in_the_kernel_only_without_tls() -> None:
    assert why_not_splice("http://h:1") is None
    assert "TLS" in (why_not_splice("https://h") or "")


async def test_a_reset_behind_a_full_pipe_is_noticed_when_there_is_room(
    stub: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is not watched then, and of a socket that is in error already uvloop tells nobody.

    A reset that comes before the pipe is full is noticed after `PATIENCE`, which is long here.
    """
    monkeypatch.setattr(body, "PATIENCE", 5.0)
    size, over = 4_000_000, asyncio.Event()
    loop = asyncio.get_running_loop()
    truth = fill(stub, [MORE_THAN_A_FIFO])

    async def resets(answer: Answer) -> web.StreamResponse:
        response = await resets_after(2_000_000)(answer)
        await turns()
        loop.call_soon_threadsafe(over.set)
        return response

    async def right(answer: Answer) -> web.StreamResponse:
        return web.Response(status=answer.status, body=answer.body, headers=answer.headers)

    stub.script(right, resets)
    async with kernel(stub, tmp_path, part_size=size, parts=2, requests_in_flight=2) as running:
        await over.wait()
        assert await off_loop(read_all, running.fifo(0)) == truth
        assert sum(running.channel.statistics().counts["retries"].values()) == 1
