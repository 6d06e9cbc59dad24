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
import errno
import socket
from typing import TYPE_CHECKING

from sidecar.process.resources import freeze_gc
from streamer.aio import in_thread, task_group
from streamer.errors import SinkError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from sidecar.admin.server import Admin
    from sidecar.observe.state import JobState
BACKLOG = 4096
"""Connections of an address that the kernel completes before a server accepts them; it grants less, usually.

The kernel drops further ones, and their clients try again after 1 s, 3 s and 7 s: too late for a probe.
"""

SILENT = 3
"""Seconds that the kernel keeps a connection whose client has sent nothing.

So a probe is accepted together with its request. A client that is late with it, on a busy machine, would be
the one longest waited for when others connect, and lose its connection.
"""


class AdminPort:
    """The sockets that listen, and the server as soon as it is wanted."""

    def __init__(self, state: JobState, token: str | None, sockets: list[socket.socket]) -> None:
        self.number = _number(sockets)
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
        async with server.serving(self._sockets, backlog=BACKLOG):
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


@contextlib.asynccontextmanager
async def listening(host: str, port: int) -> AsyncIterator[list[socket.socket]]:
    """Listen on every address of `host` until the end of the block. Raises SinkError if the port is taken.

    Yields the sockets, from which nothing is accepted: connections wait until a server accepts them.
    """
    with contextlib.ExitStack() as stack:
        sockets: list[socket.socket] = []
        try:
            addresses = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            for family, kind, protocol, _, address in dict.fromkeys(addresses):
                sock = stack.enter_context(socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol))
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                chosen = _number(sockets) if sockets else port  # 0 is the same free port on every address
                sock.bind((address[0], chosen, *address[2:]))
                with contextlib.suppress(OSError):  # not in every sandbox
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, SILENT)
                sock.listen(BACKLOG)
                sockets.append(sock)
        except (OSError, ValueError) as error:  # ValueError: a name that cannot be looked up
            if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
                do = "raise `ulimit -n`"
            else:
                do = "set Penstock.Admin.Port, 0 for any free one"
            why = getattr(error, "strerror", None) or error
            raise SinkError(f"cannot listen on {host}:{port} ({why}); {do}") from error
        yield sockets


def _number(sockets: list[socket.socket]) -> int:
    """Return the port of the sockets of `listening`."""
    return int(sockets[0].getsockname()[1])
