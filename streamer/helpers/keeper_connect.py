"""Connects to the keeper that listens at a path, and starts one if there is none.

The keeper is run by path in a minimal interpreter, which loads no site-packages. The sidecar's environment is
not passed on, because it may hold credentials.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time

from streamer.errors import SinkError
from streamer.helpers import keeper as keeper_package
from streamer.helpers.keeper.protocol import address, peer
from streamer.helpers.keeper_client import REPLY_TIMEOUT, RETRY_AFTER, KeeperClient, no_reply

IDLE_FOR = 600
"""Seconds after which a keeper that the sidecar started exits, if it has neither sidecar nor reader."""

_LIMITS = "raise `ulimit -n`, or the limit of memory"


class _Absent(SinkError):
    """No keeper listens."""


async def connected(path: str) -> KeeperClient:
    """Connect to the keeper that listens at `path`. Raises SinkError."""
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    except OSError as error:
        raise SinkError(f"cannot connect to the keeper at {path}: {error.strerror}; {_LIMITS}") from error
    try:
        await _connect(sock, path)
        uid = peer(sock)
        if uid not in (0, os.geteuid()):
            raise SinkError(  # noqa: TRY301 - the handlers below close the socket
                f"who listens at {path} is user {uid}, and no keeper of ours; remove the socket, and let "
                "nobody else write that directory"
            )
    except OSError as error:
        sock.close()
        raise _Absent(
            f"no keeper listens at {path}: {error.strerror or error}; start `penstock keeper {path}` first"
        ) from error
    except BaseException:
        sock.close()
        raise
    try:
        client = KeeperClient(path, sock)
    except OSError as error:  # the loop cannot watch the socket
        sock.close()
        raise SinkError(f"cannot connect to the keeper at {path}: {error.strerror}; {_LIMITS}") from error
    try:
        await client.greet()
    except BaseException:
        client.close()
        raise
    return client


async def _connect(sock: socket.socket, path: str) -> None:
    """Connect a socket; wait while the backlog is full of other sidecars. Raises OSError, SinkError."""
    began = time.monotonic()
    while True:
        try:
            with address(path) as short_path:
                sock.connect(short_path)
        except BlockingIOError:
            if time.monotonic() - began > REPLY_TIMEOUT:
                raise no_reply(path) from None
            await asyncio.sleep(RETRY_AFTER)
        else:
            return


async def started(path: str) -> KeeperClient:
    """Connect to the keeper at `path`; start one in its own session if nobody listens. Raises SinkError."""
    with contextlib.suppress(_Absent):
        return await connected(path)
    await asyncio.to_thread(_start, path)
    return await connected(path)


def command(path: str, *, idle_for: float | None = None) -> list[str]:
    """Return the command line of a keeper."""
    program = os.path.join(keeper_package.__path__[0], "__main__.py")
    return [sys.executable, "-I", "-S", program, path, *([] if idle_for is None else [str(idle_for)])]


def environment() -> dict[str, str]:
    """Return the few variables of our environment that the keeper's interpreter needs."""
    return {name: value for name, value in os.environ.items() if name in ("LD_LIBRARY_PATH", "LANG")}


def _start(path: str) -> None:
    """Start a keeper and wait until it listens. It then closes our pipe on its standard output."""
    try:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and files
            command(path, idle_for=IDLE_FOR),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd="/",
            env=environment(),
        )
    except OSError as error:
        raise SinkError(f"the keeper could not be started: {error.strerror}") from error
    assert process.stdout is not None  # noqa: S101 - for the type checker
    with process.stdout:
        output = process.stdout.read().decode(errors="replace").strip()
    if output != "ready":
        raise SinkError(f"the keeper could not be started: {output}")
