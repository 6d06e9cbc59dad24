"""The admin HTTP server: metrics, probes, status. Its only secret is the admin token.

/          status page              /metrics   Prometheus text
/events    the page's data, live    /livez     200 while the event loop runs
/status    JSON, for scripts        /readyz    200 while every FIFO is offered and no channel has failed
/limits    limits that may change while the job runs; a change needs the token

`sidecar.admin.port` listens and loads this module. `sidecar.admin.access` decides which requests to admit.

The page is one file that refers to no other host. A client of `/events` gets one document a second; the
server refuses more than `MOST_FOLLOWERS` such clients.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web
from aiohttp.http import HttpProcessingError
from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from sidecar.admin.access import CLIENT_WITHIN, AccessPolicy, ConnectionLimiter, harden, refusal
from sidecar.admin.status import change_limits, limits, status, view
from sidecar.observe.collector import exposition
from streamer.aio import first_of
from streamer.errors import ConfigError

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from prometheus_client import Metric

    from sidecar.observe.state import JobState

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

PAGE = Path(__file__).with_name("page.html")
MOST_FOLLOWERS = 16
"""Clients of `/events` at one time."""
MOST_BODY = 16 * 1024
"""Bytes of a request body."""
SERVERS = 8
"""Servers of each address. uvloop accepts one connection for each of them in one turn of the event loop.

More make a queue of thousands short. Fewer than `MOST_CONNECTIONS` let a request be read before further
connections close its own.
"""
PAGES_APART = 0.02
"""Seconds from the end of a page that takes milliseconds to make until the next one is made.

So strangers take at most a fifth of the event loop, and the next turn accepts the connections of probes.
"""
EVENT_WITHIN = 2.0
"""Seconds until the next document of `/events` if there is no snapshot, as while the job starts."""
BODY_WITHIN = 5.0
"""Seconds in which the body of a request must arrive."""
OF_THE_CLIENT = (HttpProcessingError, web.RequestPayloadError)
"""What aiohttp raises for a request that is not HTTP, or whose body does not have the encoding it names."""
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{script}'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy of the page: its own script only, and nothing from another host."""


class Admin:
    """HTTP handlers that serve the state of one job."""

    def __init__(self, state: JobState, token: str | None) -> None:
        self._state = state
        admin = state.job.penstock.admin
        self._access = AccessPolicy(admin.host, token=token, protect_all=admin.protect == "all")
        self._page = PAGE.read_text(encoding="utf-8")
        self._content_policy = POLICY.format(script=_script_digest(self._page))
        self._followers = 0
        self._registry = CollectorRegistry()
        _Process(registry=self._registry).began = state.began
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)
        self._closing = asyncio.Event()
        self._page_made = asyncio.Lock()
        """Held while a page is made, and for `PAGES_APART` seconds after it."""

    @contextlib.asynccontextmanager
    async def serving(self, sockets: list[socket.socket], *, backlog: int) -> AsyncIterator[None]:
        """Accept connections from sockets that listen, until the end of the block. Raises OSError.

        `backlog`: of the sockets.
        """
        limiter = ConnectionLimiter()
        logging.getLogger("aiohttp.server").addFilter(_concerns_server)
        runner = web.AppRunner(self._app(limiter), access_log=None, shutdown_timeout=1)
        await runner.setup()
        assert runner.server is not None  # noqa: S101 - set up
        loop, factory = asyncio.get_running_loop(), limiter.limited(runner.server)
        try:
            async with contextlib.AsyncExitStack() as stack:
                for sock in sockets:
                    for _ in range(SERVERS):
                        # The server closes the socket that it is given; `sock` is the caller's.
                        server = await loop.create_server(factory, sock=sock.dup(), backlog=backlog)
                        stack.callback(server.close)
                yield
        finally:
            await runner.cleanup()

    def _app(self, limiter: ConnectionLimiter) -> web.Application:
        """Return the application with all routes."""

        @web.middleware
        async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
            headers = {name.lower(): value for name, value in request.headers.items()}
            refused = self._access.check(method=request.method, path=request.path, headers=headers)
            limiter.request_received(request.transport)
            if refused is not None:
                return refused
            if request.path == "/events" or request.method not in ("GET", "HEAD"):
                with limiter.kept(request.transport):
                    return await handler(request)
            return await handler(request)

        app = web.Application(client_max_size=MOST_BODY, middlewares=[check])
        app.on_response_prepare.append(harden)
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
        app.on_shutdown.append(self._end_events)
        return app

    async def _index(self, _: web.Request) -> web.Response:
        headers = {"Content-Security-Policy": self._content_policy, "Cache-Control": "no-cache"}
        return web.Response(text=self._page, content_type="text/html", headers=headers)

    async def _metrics(self, request: web.Request) -> web.Response:
        slices = []
        async with self._turn(request):
            for lines in exposition(self._state):
                slices.append(lines)
                await asyncio.sleep(0)  # bytes move between two slices
            body = b"".join((*slices, generate_latest(self._registry)))
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    async def _livez(self, _: web.Request) -> web.Response:
        return web.Response(text="alive\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        if self._state.ready:
            return web.Response(text="ready\n")
        return web.Response(status=503, text=self._state.why_not_ready() + "\n")

    @contextlib.asynccontextmanager
    async def _turn(self, request: web.Request) -> AsyncIterator[None]:
        """Wait for the turn to make a page. Raises CancelledError if the client has gone meanwhile."""
        await self._page_made.acquire()
        if request.transport is None:
            self._page_made.release()
            raise asyncio.CancelledError
        try:
            yield
        finally:
            asyncio.get_running_loop().call_later(PAGES_APART, self._page_made.release)

    async def _status(self, request: web.Request) -> web.Response:
        async with self._turn(request):
            return web.json_response(status(self._state))

    async def _limits(self, _: web.Request) -> web.Response:
        return web.json_response(limits(self._state))

    async def _change(self, request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(BODY_WITHIN):
                body = await request.read()
        except TimeoutError:
            return refusal(408, f"the body did not come in {BODY_WITHIN:g} s")
        except web.RequestPayloadError as error:
            return refusal(400, f"the body cannot be decoded: {error}")
        try:
            document = json.loads(body.decode())
        except (ValueError, RecursionError) as error:
            return refusal(400, f"the body is not JSON: {error}")
        try:
            return web.json_response(change_limits(self._state, document))
        except (ConfigError, ValueError) as error:
            return refusal(400, str(error))

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Stream server-sent events (HTML Standard, section 9.2). The last one has phase `ended`."""
        if self._followers >= MOST_FOLLOWERS:
            return refusal(503, f"{MOST_FOLLOWERS} follow already; close a page, or read /status")
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        )
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        self._followers += 1
        try:
            with contextlib.suppress(ConnectionResetError):
                while not self._closing.is_set():
                    await _write(request, response, view(self._state))
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(EVENT_WITHIN):
                            await first_of(self._state.history.following(), self._closing.wait())
                await _write(request, response, view(self._state, ended=True))
        finally:
            self._followers -= 1
        return response

    async def _end_events(self, _: web.Application) -> None:
        self._closing.set()


class _Process(ProcessCollector):
    """Collector of the process. Its start is when its counters were 0, which a restart by execve(2) moves."""

    began = 0.0

    def collect(self) -> Iterator[Metric]:
        for metric in super().collect():
            if metric.name == "process_start_time_seconds":
                metric.samples = [metric.samples[0]._replace(value=self.began)]
            yield metric


def _concerns_server(record: logging.LogRecord) -> bool:
    """Return whether a log record is about the server, and not about a request that is not HTTP.

    Everybody who reaches the port could fill the log with tracebacks; the response says what is wrong.
    """
    return record.exc_info is None or not isinstance(record.exc_info[1], OF_THE_CLIENT)


async def _write(request: web.Request, response: web.StreamResponse, document: dict[str, Any]) -> None:
    """Write a server-sent event. Raises ConnectionResetError if the client does not read or has gone."""
    try:
        async with asyncio.timeout(CLIENT_WITHIN):
            await response.write(b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n")
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the client does not read") from None


def _script_digest(page: str) -> str:
    """Return the SHA-256 of the page's only script, in the form of a Content-Security-Policy."""
    script = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)[0]
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
