"""The addresses of a host: used in turn, looked up again without a wait, and a dead one last."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Any

import pytest

from sidecar.doctor import storage
from streamer.aio import FairPoller
from streamer.errors import ErrorContext, Transient
from streamer.s3.client.endpoint import Endpoint
from streamer.s3.client.session import open_clients
from streamer.s3.http import pool as pools
from streamer.s3.http.pool import ConnectionPool
from tests.kit.pipes import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking")

HOST = "many.test"
ONE, OTHER, THIRD = "127.0.0.1", "127.0.0.2", "127.0.0.3"


class Names:
    """Stands for DNS: it gives these addresses, as soon as it is not `slow`."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses
        self.lookups = self.ended = 0
        self.failure: OSError | None = None
        self.answers = asyncio.Event()
        self.answers.set()
        self._loop = asyncio.get_running_loop()
        self._numeric = self._loop.getaddrinfo
        self._loop.getaddrinfo = self.resolve  # type: ignore[method-assign]

    async def resolve(self, host: Any, port: Any, **options: Any) -> list[Any]:
        if host != HOST:  # uvloop's sock_connect asks for numeric addresses too
            return await self._numeric(host, port, **options)
        self.lookups += 1
        try:
            await self.answers.wait()
        finally:
            self.ended += 1
        if self.failure is not None:
            raise self.failure
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in self.addresses]


@contextlib.asynccontextmanager
async def listening(*addresses: str) -> AsyncIterator[int]:
    """Accept connections at these addresses, at the port of the block."""
    port = 0
    async with contextlib.AsyncExitStack() as servers:
        for address in addresses:
            server = await asyncio.start_server(lambda _, writer: writer.close(), address, port)
            port = server.sockets[0].getsockname()[1]
            servers.push_async_callback(server.wait_closed)
            servers.callback(server.close)
        yield port


@contextlib.contextmanager
def silent(address: str, port: int) -> Iterator[None]:
    """Listen with a queue of connections that is full: further ones get no answer."""
    with contextlib.ExitStack() as sockets:
        server, *clients = [sockets.enter_context(socket.socket()) for _ in range(4)]
        server.bind((address, port))
        server.listen(0)
        for each in clients:
            each.setblocking(False)
            each.connect_ex((address, port))
        yield


@contextlib.contextmanager
def opened(port: int) -> Iterator[ConnectionPool]:
    with (
        contextlib.closing(FairPoller()) as poller,
        contextlib.closing(ConnectionPool(HOST, port, poller)) as pool,
    ):
        yield pool


async def peer(pool: ConnectionPool, *, within: float = 10.0, avoid: str | None = None) -> str:
    """Return the address of a new connection."""
    connection = await pool.take(ErrorContext(), within=within, avoid=avoid, fresh=True)
    connection.close()
    return str(connection.peer)


async def test_connections_spread_over_all_addresses() -> None:
    names = Names(ONE, OTHER, THIRD)
    async with listening(*names.addresses) as port:
        with opened(port) as pool:
            assert [await peer(pool) for _ in range(6)] == [ONE, OTHER, THIRD] * 2
            assert ONE not in [await peer(pool, avoid=ONE) for _ in range(6)]
            assert names.lookups == 1


async def test_a_slow_lookup_holds_no_request_while_addresses_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of them may be the head of line. One lookup serves for all requests, and close ends it."""
    names = Names(ONE)
    async with listening(ONE, OTHER) as port:
        with opened(port) as pool:
            assert await peer(pool) == ONE
            monkeypatch.setattr(pools, "DNS_TTL", -1.0)
            names.answers.clear()
            names.addresses = (OTHER,)
            assert [await peer(pool, within=5) for _ in range(3)] == [ONE] * 3
            await eventually(lambda: names.lookups == 2)
            names.answers.set()
            await eventually(lambda: names.ended == 2)
            assert await peer(pool) == OTHER
            await eventually(lambda: names.ended == names.lookups)
            names.answers.clear()
            assert await peer(pool) == OTHER
            await eventually(lambda: names.lookups > names.ended)
        await eventually(lambda: names.lookups == names.ended)


async def test_requests_without_an_address_wait_for_one_lookup() -> None:
    """It fails them all, and the next one asks again; one that gives up ends neither it nor the others."""
    names = Names(ONE)
    names.answers.clear()
    names.failure = socket.gaierror(socket.EAI_AGAIN, "no answer")
    async with listening(ONE) as port:
        with opened(port) as pool:
            waiting = [asyncio.create_task(peer(pool)) for _ in range(3)]
            await eventually(lambda: names.lookups == 1)
            waiting[0].cancel()
            await asyncio.wait(waiting[:1])
            names.answers.set()
            for each in waiting[1:]:
                with pytest.raises(Transient, match="no answer"):
                    await each
            assert names.lookups == 1
            names.failure = None
            assert await peer(pool) == ONE


async def test_where_dns_fails_the_known_addresses_serve_on(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(ONE)
    monkeypatch.setattr(pools, "DNS_TTL", -1.0)
    async with listening(ONE) as port:
        with opened(port) as pool:
            assert await peer(pool) == ONE
            names.failure = socket.gaierror(socket.EAI_AGAIN, "no answer")
            for _ in range(3):
                assert await peer(pool) == ONE
                await eventually(lambda: names.lookups == names.ended > 1)


@pytest.mark.parametrize("dead", ["refuses", "is silent"])
async def test_a_dead_address_of_several_fails_one_request(
    dead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried last for a while, so also where no other is left."""
    names = Names(ONE, OTHER, THIRD)
    async with listening(OTHER, THIRD) as port:
        with opened(port) as pool:
            server = silent(ONE, port) if dead == "is silent" else contextlib.nullcontext()
            with server, pytest.raises(Transient):
                await peer(pool, within=0.5 if dead == "is silent" else 10)
            assert {await peer(pool) for _ in range(9)} == {OTHER, THIRD}
            monkeypatch.setattr(pools, "DNS_TTL", -1.0)
            names.addresses = (ONE,)
            await peer(pool)
            await eventually(lambda: names.lookups == names.ended)
            again = await asyncio.start_server(lambda _, writer: writer.close(), ONE, port)
            assert await peer(pool) == ONE
            names.addresses = (ONE, OTHER)
            await eventually(lambda: names.lookups == names.ended)
            assert {await peer(pool) for _ in range(9)} == {ONE, OTHER}
            again.close()
            await again.wait_closed()


async def test_a_dead_address_is_tried_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "DEAD_FOR", -1.0)
    names = Names(ONE, OTHER)
    async with listening(OTHER) as port:
        with opened(port) as pool:
            for _ in range(2):
                with pytest.raises(Transient):
                    await peer(pool)
                assert await peer(pool) == OTHER
            assert names.lookups > 1, "a failure asks DNS again"


async def test_doctor_names_the_addresses_that_accept_no_connection(
    credentials: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "CONNECT", 0.2)
    Names(ONE, OTHER, THIRD)
    async with listening(ONE) as port:
        with silent(THIRD, port):
            async with open_clients(Endpoint(url=f"http://{HOST}:{port}"), connections=1) as clients:
                finding = await storage.addresses(clients)
    assert finding.state == "warning"
    dead = f"{OTHER} (Connection refused), {THIRD} (no answer in 0.2 s)"
    assert finding.text == f"{HOST} has 3 addresses; no connection to {dead}"
