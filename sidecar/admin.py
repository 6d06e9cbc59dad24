"""The admin HTTP server: metrics, probes, status. Reads state, changes nothing, holds no secret.

/metrics   Prometheus text          /livez   200 while the loop turns
/status    JSON, for people         /readyz  200 while every FIFO is offered and no channel failed
"""

from __future__ import annotations

import contextlib
import resource
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from aiohttp import web
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.aiohttp import make_aiohttp_handler

from sidecar.metrics import ChannelCollector
from streamer import __version__
from streamer.errors import SinkError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from sidecar.supervisor import Supervisor


def status(supervisor: Supervisor) -> dict[str, Any]:
    """The document of `/status`."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "version": __version__,
        "ready": supervisor.ready,
        "transport": supervisor.transport,
        "process": {
            "cpu_seconds": time.process_time(),
            "max_rss_bytes": usage.ru_maxrss * 1024,
        },
        "channels": {
            name: {
                field: value
                for field, value in asdict(statistics).items()
                if field not in ("first_byte", "part")  # histograms are for /metrics
            }
            for name, statistics in supervisor.statistics().items()
        },
    }


@contextlib.asynccontextmanager
async def serve_admin(supervisor: Supervisor, *, host: str, port: int) -> AsyncIterator[int]:
    """Serve until the end of the block; yields the port. Raises SinkError if it cannot be had."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    registry.register(ChannelCollector(supervisor))

    async def livez(_: web.Request) -> web.Response:
        return web.Response(text="alive\n")

    async def readyz(_: web.Request) -> web.Response:
        if supervisor.ready:
            return web.Response(text="ready\n")
        return web.Response(status=503, text=supervisor.why_not_ready() + "\n")

    async def show(_: web.Request) -> web.Response:
        return web.json_response(status(supervisor))

    async def index(_: web.Request) -> web.Response:
        return web.Response(text="penstock: /status /metrics /livez /readyz\n")

    app = web.Application()
    app.add_routes(
        [
            web.get("/", index),
            web.get("/metrics", make_aiohttp_handler(registry)),
            web.get("/livez", livez),
            web.get("/readyz", readyz),
            web.get("/status", show),
        ]
    )
    runner = web.AppRunner(app, access_log=None)
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
