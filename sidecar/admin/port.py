"""The admin port of a job, and the load of the admin server that answers on it.

    open_admin   reads the token and listens before the job does anything else, so that a taken port is the
                 job's first error. Connections wait in the backlog of the sockets
    load         imports `sidecar.admin.server` in a thread and accepts the connections: when the first client
                 connects, or when the job is ready (`AdminPort.serve`), whichever comes first

The import of the server (aiohttp, prometheus_client) would be a third of the CPU time of a job's start.
A client that connects before `ready` waits for the import, and planning goes on meanwhile. An error of the
import or of the server ends the job: it leaves the block of `open_admin` in an exception group.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from sidecar.admin.listener import listening, number
from sidecar.process.resources import freeze_gc
from streamer.aio import in_thread, task_group

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator

    from sidecar.admin.server import Admin
    from sidecar.observe.state import JobState


class AdminPort:
    """The sockets that listen, and the server as soon as it is wanted."""

    def __init__(self, state: JobState, token: str | None, sockets: list[socket.socket]) -> None:
        self.number = number(sockets)
        self._state = state
        self._token = token
        self._sockets = sockets
        self._wanted = asyncio.Event()

    def serve(self) -> None:
        """Load the server now, although no client has connected."""
        self._wanted.set()

    async def run(self) -> None:
        """Load the server when it is wanted, and serve until cancelled. Raises ImportError, OSError."""
        loop = asyncio.get_running_loop()
        for sock in self._sockets:
            loop.add_reader(sock, self._wanted.set)
        try:
            await self._wanted.wait()
        finally:
            for sock in self._sockets:
                loop.remove_reader(sock)
        server = await in_thread(_load, self._state, self._token)
        async with server.serving(self._sockets):
            freeze_gc()  # the modules just loaded too
            await asyncio.Event().wait()


def _load(state: JobState, token: str | None) -> Admin:
    from sidecar.admin.server import Admin

    return Admin(state, token)


@contextlib.asynccontextmanager
async def open_admin(state: JobState, *, port: int) -> AsyncIterator[AdminPort]:
    """Listen until the end of the block, and serve as soon as it is wanted.

    Raises SinkError if the port cannot be had, ConfigError if the token file does not contain a token.
    """
    config = state.job.penstock.admin
    token = await in_thread(config.token)
    async with listening(config.host, port) as sockets, task_group() as tasks:
        admin = AdminPort(state, token, sockets)
        serving = tasks.create_task(admin.run(), name="admin server")
        try:
            yield admin
        finally:
            serving.cancel()
