"""Listens on the admin port.

A module of its own, because `penstock doctor` tries the port and runs no admin server.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from typing import TYPE_CHECKING

from streamer.errors import SinkError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

BACKLOG = 4096
"""Connections of an address that the kernel completes before a server accepts them; it grants less, usually.

The kernel drops further ones, and their clients try again after 1 s, 3 s and 7 s: too late for a probe.
"""

SILENT = 3
"""Seconds that the kernel keeps a connection whose client has sent nothing.

So a probe is accepted together with its request. A client that is late with it, on a busy machine, would be
the one longest waited for when others connect, and lose its connection.
"""


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
                chosen = number(sockets) if sockets else port  # 0 is the same free port on every address
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


def number(sockets: list[socket.socket]) -> int:
    """Return the port of the sockets of `listening`."""
    return int(sockets[0].getsockname()[1])
