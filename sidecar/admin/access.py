"""Access control of the admin server: Host and Origin checks, bearer token, limits on connections.

    Host     a server on loopback accepts only IP addresses and `localhost`, so that a page whose name points
             to this machine (DNS rebinding) reads nothing. On other addresses any name is accepted: the
             operator chooses it (a Service, a compose service), and the network restricts who connects
    Origin   a request from a page of another origin is refused, whatever its path
    token    required for `PATCH /limits`, and under `Protect: all` for everything but the probes, because
             kubelet has no token. Accepted as `Bearer TOKEN` or as the password of Basic, which browsers send
    time     a connection whose client has owed a complete request, or has not read its response, for
             `CLIENT_WITHIN` seconds is closed
    number   a connection over `MOST_CONNECTIONS` closes the one that has waited longest for its client. So
             clients that hold connections keep no probe out

No check waits or is on the path of streamed bytes.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import ipaddress
from collections.abc import Callable, Iterator
from typing import cast
from urllib.parse import urlsplit

from aiohttp import web

MOST_CONNECTIONS = 64
"""Connections at one time: file descriptors are for streaming."""
CLIENT_WITHIN = 10.0
"""Seconds in which a client must send its next request, and in which it must read a response."""
PROBES = ("/livez", "/readyz")
"""Paths that never need the token."""
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Headers of every response."""


def refusal(code: int, why: str, **headers: str) -> web.Response:
    """Make an error response; all have the same JSON form. `headers`: with `_` for `-`."""
    dashed = {name.replace("_", "-"): value for name, value in headers.items()}
    return web.json_response({"error": why}, status=code, headers=dashed)


class AccessPolicy:
    """Access rules of one server. `host`: the address it listens on; `token`: None if there is none."""

    def __init__(self, host: str, *, token: str | None, protect_all: bool) -> None:
        self._loopback = host == "localhost" or _is_loopback(host)
        self._token = token
        self._protect_all = protect_all

    def admits(self, authorization: str) -> bool:
        """Return whether an Authorization header has the token. The comparison takes constant time."""
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() == "basic":
            try:
                token = base64.b64decode(token, validate=True).decode().partition(":")[2]
            except ValueError:
                return False
        elif scheme.lower() != "bearer":
            return False
        encoded = token.strip().encode("utf-8", "surrogateescape")  # as aiohttp decodes headers
        return self._token is not None and hmac.compare_digest(encoded, self._token.encode())

    def check(self, *, method: str, path: str, headers: dict[str, str]) -> web.Response | None:
        """Return the refusal of a request, None if it is admitted. `headers`: by lower-case name."""
        host = headers.get("host", "")
        if self._loopback and not _is_address(host):
            return refusal(421, "this server answers to an IP address or localhost, not to another name")
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            return refusal(403, "a page of another origin may not ask")
        changes = method not in ("GET", "HEAD")
        if changes and self._token is None:
            return refusal(403, "limits cannot be changed: the job file names no Penstock.Admin.TokenFile")
        needs_token = changes or (self._protect_all and path not in PROBES)
        if needs_token and not self.admits(headers.get("authorization", "")):
            why = "this is not the token in Penstock.Admin.TokenFile"
            return refusal(401, why, WWW_Authenticate='Basic realm="penstock", charset="UTF-8"')
        return None


async def harden(_: web.Request, response: web.StreamResponse) -> None:
    """Add `HEADERS` to a response and remove `Server` (aiohttp's `on_response_prepare`)."""
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    response.headers.popall("Server", None)


class ConnectionLimiter:
    """Closes connections that wait too long for their client, and of too many the one that waits longest."""

    def __init__(self) -> None:
        self._idle: dict[asyncio.BaseTransport, asyncio.TimerHandle] = {}
        """Connections that wait for their client, the longest first, each with the timer that closes it."""
        self._kept: set[asyncio.BaseTransport] = set()
        """Connections in `kept`."""

    def limited(self, factory: Callable[[], asyncio.Protocol]) -> Callable[[], asyncio.Protocol]:
        """Return a protocol factory like `factory`, whose connections this object counts and closes."""
        return lambda: _LimitedProtocol(factory(), self)

    def opened(self, transport: asyncio.BaseTransport) -> None:
        """Count a new connection; close another one if there are too many."""
        self._wait(transport)
        if len(self._idle) + len(self._kept) > MOST_CONNECTIONS:
            self._end(next(iter(self._idle)))

    def request_received(self, transport: asyncio.BaseTransport | None) -> None:
        """Note that a connection has sent a complete request, apart from its body."""
        if transport is not None and transport in self._idle:
            self._wait(transport)

    @contextlib.contextmanager
    def kept(self, transport: asyncio.BaseTransport | None) -> Iterator[None]:
        """Leave a connection alone, whose handler itself limits how long it waits for the client."""
        if transport is None or transport not in self._idle:  # closed
            yield
            return
        self._idle.pop(transport).cancel()
        self._kept.add(transport)
        try:
            yield
        finally:
            if transport in self._kept:
                self._kept.remove(transport)
                self._wait(transport)

    def closed(self, transport: asyncio.BaseTransport) -> None:
        """Forget a connection."""
        if (timer := self._idle.pop(transport, None)) is not None:
            timer.cancel()
        self._kept.discard(transport)

    def _wait(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the client from now on: it reads its response, and sends the next request."""
        if (timer := self._idle.pop(transport, None)) is not None:
            timer.cancel()
        self._idle[transport] = asyncio.get_running_loop().call_later(CLIENT_WITHIN, self._end, transport)

    def _end(self, transport: asyncio.BaseTransport) -> None:
        self.closed(transport)
        # `close` would wait for a client that does not read. uvloop's class is no subclass of asyncio's.
        cast("asyncio.Transport", transport).abort()


class _LimitedProtocol(asyncio.Protocol):
    """The server's protocol of one connection; reports its begin and its end to a `ConnectionLimiter`."""

    def __init__(self, inner: asyncio.Protocol, limiter: ConnectionLimiter) -> None:
        self._inner = inner
        self._limiter = limiter
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._inner.connection_made(transport)
        self._limiter.opened(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._limiter.closed(self._transport)
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_address(host: str) -> bool:
    """Return whether a Host header is an IP address or `localhost`, with any port."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if name == "localhost":
            return True
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
