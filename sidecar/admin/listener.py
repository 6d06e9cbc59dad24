"""Listens on the admin port.

A module of its own, because `penstock doctor` tries the port and runs no admin server.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from streamer.errors import SinkError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


@contextlib.asynccontextmanager
async def listening(factory: Callable[[], asyncio.BaseProtocol], host: str, port: int) -> AsyncIterator[int]:
    """Accept connections until the end of the block; yields the port. Raises SinkError if it is taken."""
    try:
        server = await asyncio.get_running_loop().create_server(factory, host, port)
    except (OSError, ValueError) as error:  # ValueError: a name that cannot be looked up
        raise SinkError(
            f"cannot listen on {host}:{port} ({getattr(error, 'strerror', None) or error}); "
            "set Penstock.Admin.Port, 0 for any free one"
        ) from error
    if not server.sockets:  # without a free descriptor uvloop makes no socket and raises no error
        raise SinkError(f"cannot listen on {host}:{port}: no descriptor is left; raise `ulimit -n`")
    try:
        try:
            bound = server.sockets[0].getsockname()[1]
        except (AttributeError, OSError) as error:  # listen(2) failed, and uvloop has closed the socket
            raise SinkError(
                f"cannot listen on {host}:{port}; set Penstock.Admin.Port, 0 for any free one"
            ) from error
        yield bound
    finally:
        server.close()
