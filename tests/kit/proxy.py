"""A TCP proxy that spoils connections, to stand before a real S3 server: signatures and TLS stay real.

Each accepted connection follows a `Line`, which `lines` gives for its number (from 0). A line shapes what
the server says to the client; requests pass as they are, after the latency. The proxy runs on a loop of its
own in a thread, as the stub does.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.kit.faults import reset
from tests.kit.stub import accept_no_more

THREAD = "tcp proxy"
"""Name of the server's thread."""
_PIECE = 64 * 1024


@dataclass(frozen=True)
class Line:
    """How one connection behaves; counts are bytes that the server sent."""

    latency: float = 0.0
    """Seconds added before each piece of a request is passed on."""
    bandwidth: float = float("inf")
    """Bytes per second towards the client."""
    reset_after: int | None = None
    """RST to the client."""
    half_close_after: int | None = None
    """FIN to the client, while its own direction stays open."""
    blackhole_after: int | None = None
    """Nothing passes any more, and nobody is told."""

    @property
    def _limits(self) -> list[int]:
        return [
            each
            for each in (self.reset_after, self.half_close_after, self.blackhole_after)
            if each is not None
        ]

    @property
    def passes(self) -> int | None:
        """Bytes that reach the client before something happens; None without end."""
        return min(self._limits, default=None)


def random_lines(seed: int, *, share: float = 0.3, typical: int = 2_000_000) -> Callable[[int], Line]:
    """A share of the connections end badly after some megabytes, all of them have some latency."""

    def line(number: int) -> Line:
        dice = random.Random(f"{seed} line {number}")
        latency, count = dice.uniform(0, 0.004), int(dice.expovariate(1 / typical))
        if dice.random() >= share:
            return Line(latency=latency)
        kind = dice.choice(["reset_after", "half_close_after", "reset_after", "blackhole_after"])
        return Line(latency=latency, **{kind: count})

    return line


class TcpProxy:
    """Passes connections on to `host:port`, from `start` to `stop`."""

    def __init__(self, host: str, port: int, *, lines: Callable[[int], Line] = lambda _: Line()) -> None:
        self.lines = lines
        self.port = 0
        """Where it listens, on 127.0.0.1."""
        self.accepted = 0
        self.on_data: Callable[[int, bytes, bool], None] | None = None
        """Called before bytes are passed on: the connection's number, and whether the client sent them."""
        self._target = (host, port)
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stopping: asyncio.Event | None = None
        self._server: asyncio.Server | None = None
        self._reserved = socket.socket()
        """Bound and not listening, so that nobody else gets the port while connecting is refused."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name=THREAD)

    def start(self) -> None:
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("127.0.0.1", 0))
        self.port = self._reserved.getsockname()[1]
        self._thread.start()
        assert self._ready.wait()

    def stop(self) -> None:
        assert self._stopping is not None
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()
        assert not self._thread.is_alive()
        self._reserved.close()

    def refuse(self) -> None:
        """Close the port: connecting is refused until `accept`. Connections that are open stay."""
        asyncio.run_coroutine_threadsafe(self._close_server(), self._loop).result(10)

    def accept(self) -> None:
        """Listen again, on the same port."""
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)

    def cut_all(self) -> None:
        """Reset every connection."""

        async def cut() -> None:
            for task in list(self._tasks):
                task.cancel()

        asyncio.run_coroutine_threadsafe(cut(), self._loop).result(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        finally:
            self._loop.close()

    async def _main(self) -> None:
        self._stopping = asyncio.Event()
        await self._listen()
        self._ready.set()
        await self._stopping.wait()
        await self._close_server()
        for task in self._tasks:
            task.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _listen(self) -> None:
        sock = socket.create_server(("127.0.0.1", self.port))
        self._server = await asyncio.start_server(self._accepted, sock=sock)

    async def _close_server(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await accept_no_more(server.sockets)
            server.close()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self.accepted = self.accepted, self.accepted + 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._carry(number, reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # an end of a connection like any other here, told to the client below
        finally:
            self._tasks.discard(task)
            reset(writer.transport)

    async def _carry(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = self.lines(number)
        from_server, to_server = await asyncio.open_connection(*self._target)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._requests(number, line, reader, to_server))
                await self._answers(number, line, from_server, writer)
                await self._over(line, writer)
                raise ConnectionResetError
        except* OSError:
            pass
        finally:
            to_server.transport.abort()

    async def _requests(
        self, number: int, line: Line, reader: asyncio.StreamReader, to_server: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(_PIECE):
            self._show(number, data, request=True)
            await asyncio.sleep(line.latency)
            to_server.write(data)
            await to_server.drain()
        raise ConnectionResetError  # the client has left

    async def _answers(
        self, number: int, line: Line, from_server: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Pass on what the server says, until it ends or the line does."""
        passed, most = 0, line.passes
        while most is None or passed < most:
            data = await from_server.read(_PIECE if most is None else min(_PIECE, most - passed))
            if not data:
                break
            self._show(number, data, request=False)
            writer.write(data)
            await writer.drain()
            passed += len(data)
            if line.bandwidth != float("inf"):
                await asyncio.sleep(len(data) / line.bandwidth)

    def _show(self, number: int, data: bytes, *, request: bool) -> None:
        if self.on_data is not None:
            self.on_data(number, data, request)

    async def _over(self, line: Line, writer: asyncio.StreamWriter) -> None:
        """What the line does at its end; returns once the connection is to be reset."""
        if line.reset_after is not None and line.passes == line.reset_after:
            return
        if line.blackhole_after is None:
            with contextlib.suppress(OSError):
                writer.write_eof()
        assert self._stopping is not None
        await self._stopping.wait()  # the client must find out by itself


@contextlib.contextmanager
def standing_before(url: str) -> Iterator[TcpProxy]:
    """A proxy, until the end of the block, to the server at `url`, on this machine."""
    proxy = TcpProxy("127.0.0.1", int(url.rsplit(":", 1)[1]))
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()
