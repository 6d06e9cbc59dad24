"""The sidecar's side of its TLS terminators: it starts them, hands connections over, and ends them.

A terminator that dies takes its connections with it: what they carried is asked for again, as after any
broken connection, and another process is started with the next connection that would have gone there.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import ssl
import subprocess
from typing import TYPE_CHECKING

from streamer import bare
from streamer.source import terminator as program

if TYPE_CHECKING:
    from typing import Self

SEND_BUFFER = 208 * 1024
"""Bytes; the most that a socket may ask for where nobody has raised net.core.wmem_max (socket(7))."""


class Terminator:
    """One process."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(control.fileno(), self._heard)
        self._waiting: dict[int, asyncio.Future[dict[str, str]]] = {}
        self.alive = True

    @classmethod
    async def start(cls, trust: str) -> Terminator:
        """Start one. `trust`: a file with the certificates to believe."""
        return cls(*await asyncio.to_thread(_start, trust))

    async def join(self, number: int, host: str, tcp: socket.socket, plain: socket.socket) -> None:
        """Have `plain` carry what `tcp` does once its handshake with `host` is over; both stay the caller's.

        Raises ssl.SSLCertVerificationError, OSError.
        """
        answer = self._waiting[number] = self._loop.create_future()
        message = json.dumps({"lane": number, "host": host}).encode()
        try:
            socket.send_fds(self._control, [message], [tcp.fileno(), plain.fileno()])
            told = await answer
        finally:
            del self._waiting[number]
        if "untrusted" in told:
            raise ssl.SSLCertVerificationError(1, told["untrusted"])
        if "broken" in told:
            raise OSError(told["broken"])

    def _heard(self) -> None:
        try:
            message = self._control.recv(program.LONGEST_MESSAGE)
        except OSError:
            message = b""
        if not message:
            self._let_go()
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_result({"broken": "the TLS process has ended"})
            return
        told = json.loads(message)
        waiting = self._waiting.get(told["lane"])
        if waiting is not None and not waiting.done():
            waiting.set_result(told)

    def _let_go(self) -> None:
        if self.alive:
            self.alive = False
            self._loop.remove_reader(self._control.fileno())
            self._control.close()

    async def close(self) -> None:
        """End the process, and with it its connections."""
        self._let_go()
        await asyncio.to_thread(self._process.wait)


def _start(trust: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and file
            bare.command(program, str(theirs.fileno())),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # it ends with us, and with nothing else
            cwd="/",
            env=bare.environment(),
        )
    control.settimeout(0)
    control.send(json.dumps({"trust": trust}).encode())
    return process, control


class Terminators:
    """Processes that connections are handed to in turn."""

    def __init__(self, trust: str, count: int) -> None:
        """`trust`: a file with the certificates to believe."""
        self._trust = trust
        self._count = count
        self._numbers = itertools.count()
        self._processes: list[Terminator] = []
        self._replacing = asyncio.Lock()

    async def __aenter__(self) -> Self:
        for _ in range(self._count):
            self._processes.append(await Terminator.start(self._trust))
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self._processes:
            await process.close()

    async def join(self, host: str, tcp: socket.socket) -> socket.socket:
        """A plain socket, the caller's, that stands for the connection; `tcp` is closed.

        Raises ssl.SSLCertVerificationError, OSError.
        """
        number = next(self._numbers)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with tcp, theirs:
                ours.settimeout(0)
                theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
                await (await self._process(number % self._count)).join(number, host, tcp, theirs)
        except BaseException:
            ours.close()
            raise
        return ours

    async def _process(self, index: int) -> Terminator:
        """One of them, alive."""
        async with self._replacing:
            found = self._processes[index]
            if not found.alive:
                await found.close()
                found = self._processes[index] = await Terminator.start(self._trust)
            return found
