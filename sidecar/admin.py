"""The admin HTTP server: metrics, probes, status. Holds no secret but the token of `PATCH /limits`.

/          the status page        /metrics   Prometheus text
/events    its data, live         /livez     200 while the loop turns
/status    JSON, for scripts      /readyz    200 while every FIFO is offered and no channel failed
/limits    what may be changed while the job runs; changing it needs the token

The page is one file without any reference to another host. Those who follow `/events` are sent a document a
second; more than `MOST_FOLLOWERS` are turned away, and one that does not read is cut off by its own socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
from importlib import resources
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from sidecar import limits
from sidecar.collector import exposition
from sidecar.status import status, view
from streamer.errors import ConfigError, SinkError
from streamer.relay.race import first_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from sidecar.supervisor import Supervisor

MOST_FOLLOWERS = 16
MOST_BODY = 16 * 1024
"""Bytes of a request."""
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:"
)
"""Of the page: nothing from anywhere else."""


class Admin:
    """The handlers of one supervisor."""

    def __init__(self, supervisor: Supervisor) -> None:
        """Raises ConfigError if the file of the token does not hold one."""
        self._supervisor = supervisor
        self._token = supervisor.job.penstock.admin.token()
        self._page = resources.files("sidecar").joinpath("page.html").read_text(encoding="utf-8")
        self._followers = 0
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)
        self._closing = asyncio.Event()

    def app(self) -> web.Application:
        """All routes."""
        app = web.Application(client_max_size=MOST_BODY)
        app.add_routes(
            [
                web.get("/", self._index),
                web.get("/metrics", self._metrics),
                web.get("/livez", self._livez),
                web.get("/readyz", self._readyz),
                web.get("/status", self._status),
                web.get("/events", self._events),
                web.get("/limits", self._limits),
                web.patch("/limits", self._change),
            ]
        )
        app.on_shutdown.append(self._dismiss)
        return app

    async def _index(self, _: web.Request) -> web.Response:
        headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"}
        return web.Response(text=self._page, content_type="text/html", headers=headers)

    async def _metrics(self, _: web.Request) -> web.Response:
        body = exposition(self._supervisor).encode() + generate_latest(self._registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    async def _livez(self, _: web.Request) -> web.Response:
        return web.Response(text="alive\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        if self._supervisor.ready:
            return web.Response(text="ready\n")
        return web.Response(status=503, text=self._supervisor.why_not_ready() + "\n")

    async def _status(self, _: web.Request) -> web.Response:
        return web.json_response(status(self._supervisor))

    async def _limits(self, _: web.Request) -> web.Response:
        return web.json_response(limits.shown(self._supervisor))

    async def _change(self, request: web.Request) -> web.Response:
        if self._token is None:
            return _refusal(403, "limits cannot be changed: the job file names no Penstock.Admin.TokenFile")
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            return _refusal(401, "this is not the token in Penstock.Admin.TokenFile")
        try:
            found = limits.change(self._supervisor, await request.json())
        except (ConfigError, json.JSONDecodeError) as error:
            return _refusal(400, str(error))
        return web.json_response(found)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events (HTML Standard, section 9.2)."""
        if self._followers >= MOST_FOLLOWERS:
            return _refusal(503, f"{MOST_FOLLOWERS} follow already; close a page, or read /status")
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        )
        await response.prepare(request)
        self._followers += 1
        try:
            with contextlib.suppress(ConnectionResetError):
                while not self._closing.is_set():
                    document = json.dumps(view(self._supervisor), separators=(",", ":"))
                    await response.write(f"data: {document}\n\n".encode())
                    await first_of(self._supervisor.pulse.following(), self._closing.wait())
        finally:
            self._followers -= 1
        return response

    async def _dismiss(self, _: web.Application) -> None:
        self._closing.set()


def _refusal(code: int, why: str) -> web.Response:
    return web.json_response({"error": why}, status=code)


@contextlib.asynccontextmanager
async def serve_admin(supervisor: Supervisor, *, host: str, port: int) -> AsyncIterator[int]:
    """Serve until the end of the block; yields the port.

    Raises SinkError if the port cannot be had, ConfigError for a token file that holds no token.
    """
    runner = web.AppRunner(Admin(supervisor).app(), access_log=None, shutdown_timeout=1)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise SinkError(
                f"cannot listen on {host}:{port} ({error.strerror or error}); "
                "set Penstock.Admin.Port, 0 for any free one"
            ) from error
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
