"""Who may ask the admin server what: browsers lured elsewhere, guests without the token, clients that dawdle.

    Host     a server on loopback answers to IP addresses and `localhost` alone, so that a page whose own name
             has been made to point here (DNS rebinding) reads nothing. Elsewhere names are the operator's
             (a Service, a compose service), and who reaches the port is the network's affair
    Origin   a request that a page of another origin makes is refused, whatever it asks for
    token    `PATCH /limits` always, and under `Protect: all` everything but the probes, since kubelet has
             none. As `Bearer TOKEN`, or as the password of Basic, which is what a browser can send
    time     a connection that has not brought a whole request in `HEAD_WITHIN` seconds is cut off, and of
             more than `MOST_CONNECTIONS` the newest are closed unheard: descriptors are for streaming

Nothing here waits, and nothing is on the path of a byte that streams.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import ipaddress
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

from aiohttp import web

MOST_CONNECTIONS = 64
HEAD_WITHIN = 10.0
"""Seconds for the first request of a connection to arrive whole."""
PROBES = ("/livez", "/readyz")
"""Never need the token."""
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Of every answer."""


def refusal(code: int, why: str, **headers: str) -> web.Response:
    """An error as all of them look."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return web.json_response({"error": why}, status=code, headers=named)


class AccessPolicy:
    """The rules of one server. `host`: what it listens on; `token`: None if there is none."""

    def __init__(self, host: str, *, token: str | None, protect_all: bool) -> None:
        self._loopback = host == "localhost" or _is_loopback(host)
        self._token = token
        self._protect_all = protect_all

    def admits(self, authorization: str) -> bool:
        """Whether the header holds the token, compared in a time that does not tell how much is right."""
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() == "basic":
            try:
                given = base64.b64decode(given, validate=True).decode().partition(":")[2]
            except ValueError:
                return False
        elif scheme.lower() != "bearer":
            return False
        told = given.strip().encode("utf-8", "surrogateescape")  # as aiohttp decodes a head
        return self._token is not None and hmac.compare_digest(told, self._token.encode())

    def check(self, *, method: str, path: str, headers: dict[str, str]) -> web.Response | None:
        """Why a request is refused before its handler sees it; `headers` by lower-case names."""
        host = headers.get("host", "")
        if self._loopback and not _is_address(host):
            return refusal(421, "this server answers to an IP address or localhost, not to another name")
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            return refusal(403, "a page of another origin may not ask")
        changes = method not in ("GET", "HEAD")
        if changes and self._token is None:
            return refusal(403, "limits cannot be changed: the job file names no Penstock.Admin.TokenFile")
        wanted = changes or (self._protect_all and path not in PROBES)
        if wanted and not self.admits(headers.get("authorization", "")):
            why = "this is not the token in Penstock.Admin.TokenFile"
            return refusal(401, why, WWW_Authenticate='Basic realm="penstock", charset="UTF-8"')
        return None


async def harden(_: web.Request, response: web.StreamResponse) -> None:
    """Before every answer (`on_response_prepare`)."""
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    response.headers.popall("Server", None)


class ConnectionLimiter:
    """Lets connections in: not too many, and none that never asks."""

    def __init__(self) -> None:
        self._inside: set[asyncio.BaseTransport] = set()
        self._silent: set[asyncio.BaseTransport] = set()
        """Those that have not brought a whole request yet."""

    def before(self, server: Callable[[], asyncio.Protocol]) -> Callable[[], asyncio.Protocol]:
        """What makes the protocols of connections that come in, as `server` does behind it."""
        return lambda: _Watched(server(), self)

    def heard(self, transport: asyncio.BaseTransport | None) -> None:
        """A whole request has come."""
        if transport is not None:
            self._silent.discard(transport)

    def enter(self, transport: asyncio.Transport) -> None:
        """One more; perhaps one too many."""
        self._inside.add(transport)
        if len(self._inside) > MOST_CONNECTIONS:
            transport.abort()
            return
        self._silent.add(transport)
        asyncio.get_running_loop().call_later(HEAD_WITHIN, self._expire, transport)

    def leave(self, transport: asyncio.BaseTransport) -> None:
        """One less."""
        self._inside.discard(transport)
        self._silent.discard(transport)

    def _expire(self, transport: asyncio.Transport) -> None:
        if transport in self._silent:
            transport.abort()


class _Watched(asyncio.Protocol):
    """The server's protocol of one connection, with `ConnectionLimiter` told of its begin and its end."""

    def __init__(self, inner: asyncio.Protocol, door: ConnectionLimiter) -> None:
        self._inner = inner
        self._door = door
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._inner.connection_made(transport)
        self._door.enter(cast("asyncio.Transport", transport))  # uvloop's is none by class

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._door.leave(self._transport)
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
    """Whether a Host header is an IP address or `localhost`, with any port."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if name == "localhost":
            return True
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
