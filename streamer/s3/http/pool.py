"""Opens connections to one host and keeps idle ones.

The pool resolves the host every few seconds and uses its addresses in turn, because S3 has many front ends
and a single front end is a bottleneck. One task of the pool asks DNS; requests wait for it only while no
address is known that accepts connections, since one of them may be the head of line. The requests in flight
determine the number of connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import math
import os
import socket
import ssl
from typing import TYPE_CHECKING, Any

from streamer.errors import ErrorContext, Transient
from streamer.s3.client.barriers import tls_failed
from streamer.s3.http.connection import Connection, TlsConnection

if TYPE_CHECKING:
    from streamer.aio import FairPoller
    from streamer.s3.http.tls import TlsContext

CONNECT_TIMEOUT = 10.0
DNS_TTL = 10.0
"""Seconds for which a DNS response is used; the time to live in S3's responses is shorter."""
DEAD_FOR = 60.0
"""Seconds for which an address that has refused a connection, or did not accept it in time, is tried last."""
KEEP_ALIVE = 30
"""Seconds of silence after which the kernel probes a connection. Firewalls and NAT gateways of clouds forget
one after four to six minutes."""
LOOKED = 0.003
"""Seconds for which a look at a connection counts: about a turn of the event loop. Most small objects are
requested within that time after the body before them, so that one look serves for both."""
PROBES, PROBE_INTERVAL = 4, 10
"""Unanswered probes, and seconds between them, after which the kernel reports a connection as broken."""


class ConnectionPool:
    """The connections to one host."""

    def __init__(
        self,
        host: str,
        port: int,
        poller: FairPoller,
        *,
        tls: TlsContext | None = None,
    ) -> None:
        """`poller`: watches the connections. `tls`: the certificates to trust, for a TLS host."""
        self._host = host
        self._port = port
        self._tls = tls
        self._poller = poller
        self._idle: list[Connection] = []
        self._addresses: list[tuple[Any, ...]] = []
        self._dead: dict[str, float] = {}
        """By address that is tried last, the time of the event loop until which it is."""
        self._turn = itertools.count()
        self._loop = asyncio.get_running_loop()
        self._resolved_at = -math.inf
        self._lookup: asyncio.Task[Exception | None] | None = None

    @property
    def passed(self) -> bool:
        """Whether a response has come from the host over TLS in this run."""
        return self._tls is not None and f"{self._host}:{self._port}" in self._tls.passed

    def note_passed(self) -> None:
        """Note that a response has begun on a new connection."""
        if self._tls is not None:
            self._tls.passed.add(f"{self._host}:{self._port}")

    async def take(
        self,
        context: ErrorContext,
        *,
        avoid: str | None = None,
        within: float = CONNECT_TIMEOUT,
        fresh: bool = False,
    ) -> Connection:
        """Return a usable idle connection or a new one, to an address other than `avoid` if possible.

        `fresh`: a new one. `within`: seconds for DNS, connection and TLS handshake, at most
        `CONNECT_TIMEOUT`. Raises Transient if no connection can be opened.
        """
        idle = None if fresh else self.idle(avoid)
        return idle or await self._connect(context, avoid, min(within, CONNECT_TIMEOUT))

    def idle(self, avoid: str | None) -> Connection | None:
        """Return a usable idle connection to another address than `avoid`; None if there is none."""
        for index in range(len(self._idle) - 1, -1, -1):
            if avoid is None or self._idle[index].peer != avoid:
                connection = self._idle.pop(index)
                if connection.closed:
                    continue
                # The poller closes a resting connection on which bytes arrive, in the loop's next turn.
                if self._loop.time() - connection.looked_at < LOOKED or not connection.has_surplus():
                    return connection
                connection.close()  # surplus bytes of one response must not begin the next
        return None

    def give(self, connection: Connection) -> None:
        """Keep a connection whose last response was read to its end."""
        connection.rest()
        self._idle.append(connection)

    def drop_idle(self, peer: str) -> None:
        """Close the idle connections to an address that has sent no response on one of them.

        A firewall or a NAT gateway forgets idle connections without a word to their ends, and all of them at
        about the same time. Each one that is used costs a request the whole stall timeout.
        """
        for connection in [each for each in self._idle if each.peer == peer]:
            self._idle.remove(connection)
            connection.close()

    def close(self) -> None:
        """Close the idle connections, and ask DNS no more. Users close the connections in use."""
        if self._lookup is not None:
            self._lookup.cancel()
        while self._idle:
            self._idle.pop().close()

    async def _connect(self, context: ErrorContext, avoid: str | None, within: float) -> Connection:
        peer = None
        try:
            async with asyncio.timeout(within):
                self._poller.open()
                family, kind, protocol, _, address = await self._next_address(avoid)
                peer = str(address[0])
                sock = socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, protocol)
                with contextlib.ExitStack() as undo:
                    undo.callback(sock.close)
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    _keep_alive(sock)
                    await self._loop.sock_connect(sock, address)
                    connection = await self._connection(sock)
                    undo.pop_all()
                connection.peer = peer
                self._dead.pop(peer, None)
                return connection
        except TimeoutError as error:
            self._note_dead(peer)
            raise Transient(
                f"no connection to {self._host}:{self._port} in {within:g} s", context, silent=within
            ) from error
        except OSError as error:
            if isinstance(error, ssl.SSLError):
                refused = tls_failed(error, context, before=self.passed)
                if refused is not None:
                    raise refused from error
            reason = error.strerror or str(error)
            if error.errno is not None and reason.startswith("Connect call failed"):  # asyncio's text
                reason = os.strerror(error.errno)
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise Transient(
                    f"no descriptor is left for a connection ({reason}); raise `ulimit -n`", context
                ) from error
            self._note_dead(peer)
            raise Transient(
                f"cannot connect to {self._host}:{self._port} ({reason}); check that the endpoint is up, and "
                "Penstock.Endpoint.Url or Penstock.Endpoint.Region right",
                context,
            ) from error

    async def _connection(self, sock: socket.socket) -> Connection:
        if self._tls is None:
            connection = Connection(sock, self._poller)
            connection.widen()
            return connection
        connection = TlsConnection(sock, self._poller, self._tls, self._host)
        connection.widen()
        await connection.begin()
        return connection

    async def _next_address(self, avoid: str | None) -> tuple[Any, ...]:
        """Return where to connect, as `getaddrinfo` does. Raises its error if no address is known."""
        old = not self._addresses or self._loop.time() - self._resolved_at > DNS_TTL
        if old and self._lookup is None:
            self._lookup = self._loop.create_task(self._look_up())
        if self._lookup is not None and not self._alive():
            error = await asyncio.shield(self._lookup)
            if error is not None and not self._addresses:
                raise error
        alive = self._alive() or self._addresses
        others = [each for each in alive if each[4][0] != avoid] or alive
        return others[next(self._turn) % len(others)]

    def _alive(self) -> list[tuple[Any, ...]]:
        """Return the known addresses that are not tried last."""
        now = self._loop.time()
        return [each for each in self._addresses if self._dead.get(each[4][0], now) <= now]

    def _note_dead(self, peer: str | None) -> None:
        """Try an address last for a while, and ask DNS for others. `peer`: None if no address was known."""
        if peer is not None:
            self._dead[peer] = self._loop.time() + DEAD_FOR
        self._resolved_at = -math.inf

    async def _look_up(self) -> Exception | None:
        """Resolve the host; return the error of DNS, after which the old addresses may still work."""
        try:
            self._addresses = [*await self._loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)]
        except Exception as error:  # noqa: BLE001 - raised by the requests that wait
            return error
        finally:
            self._resolved_at, self._lookup = self._loop.time(), None
        known = {each[4][0] for each in self._addresses}
        self._dead = {peer: until for peer, until in self._dead.items() if peer in known}
        return None


def _keep_alive(sock: socket.socket) -> None:
    """Have the kernel probe the connection while it is silent, so that no router forgets it."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, KEEP_ALIVE),
        (socket.TCP_KEEPINTVL, PROBE_INTERVAL),
        (socket.TCP_KEEPCNT, PROBES),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
