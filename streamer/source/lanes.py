"""Lanes: persistent connections to one host, one request at a time on each.

Addresses are looked up again every few seconds and used in turn, since S3 answers from many front ends
and one of them is a bottleneck. A lane that the server has closed while idle is found out when it is
taken. How many lanes there are is decided above, by how many requests run at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import time
from typing import Any

from streamer.errors import Transient, Where

CONNECT_TIMEOUT = 10.0
ADDRESSES_FOR = 10.0
"""Seconds that a DNS answer is used; S3's own time to live is shorter than that."""


class Lane:
    """One connection: a non-blocking socket, closed once."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.requests = 0
        """Requests sent on it so far."""

    @property
    def fd(self) -> int:
        return self.sock.fileno()

    def usable(self) -> bool:
        """Whether an idle lane may carry another request: nothing has arrived, not even an end."""
        try:
            self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def close(self) -> None:
        self.sock.close()


class LanePool:
    """Idle lanes to one host, and the making of new ones."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._idle: list[Lane] = []
        self._addresses: list[tuple[Any, ...]] = []
        self._turn = itertools.count()
        self._asked_at = 0.0

    async def take(self, where: Where) -> Lane:
        """An idle lane that is still good, or a new one. Raises Transient if no connection can be had."""
        while self._idle:
            lane = self._idle.pop()
            if lane.usable():
                return lane
            lane.close()
        return Lane(await self._connect(where))

    def give(self, lane: Lane) -> None:
        """Return a lane whose last answer was read to its end."""
        self._idle.append(lane)

    def close(self) -> None:
        """Close the idle lanes; those in use are their users' to close."""
        while self._idle:
            self._idle.pop().close()

    async def _connect(self, where: Where) -> socket.socket:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                family, kind, protocol, _, address = await self._next_address(loop)
                sock = socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, protocol)
                with contextlib.ExitStack() as undo:
                    undo.callback(sock.close)
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    await loop.sock_connect(sock, address)
                    undo.pop_all()
                return sock
        except TimeoutError as error:
            raise Transient(
                f"no connection to {self._host}:{self._port} in {CONNECT_TIMEOUT:g} s", where
            ) from error
        except OSError as error:
            self._asked_at = 0.0
            said = error.strerror or str(error)
            raise Transient(
                f"cannot connect to {self._host}:{self._port} ({said}); is the endpoint up, and "
                "Penstock.Endpoint.Url right?",
                where,
            ) from error

    async def _next_address(self, loop: asyncio.AbstractEventLoop) -> tuple[Any, ...]:
        now = time.monotonic()
        if not self._addresses or now - self._asked_at > ADDRESSES_FOR:
            self._asked_at = now
            self._addresses = list(await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM))
        return self._addresses[next(self._turn) % len(self._addresses)]
