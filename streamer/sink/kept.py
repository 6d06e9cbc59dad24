"""The sidecar's side of the keeper (`streamer.keeper`): a connection, and what the keeper holds.

Requests go out at once; a packet this small fits the socket's buffer unless the keeper is stuck, and then
the error says so. Two of them wait for an answer, `open` and `settle`, one of each for a channel. When the
connection ends, the keeper has died and with it every FIFO's write end: all waits raise SinkError, for the
readers have seen an end that no trailer proves, and nothing can mend that but a new start of both.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamer import bare
from streamer import keeper as keeper_module
from streamer.errors import ReaderGone, SinkError
from streamer.keeper import LONGEST_MESSAGE, VERSION
from streamer.plan import Mark, Position

if TYPE_CHECKING:
    from collections.abc import Iterator

ANSWER_WITHIN = 10.0
"""Seconds for the keeper's first answer. It serves one sidecar, the next when the last is gone."""
START_WITHIN = 10.0
"""Seconds for a keeper of our own to listen."""
IDLE_FOR = 600
"""Seconds that a keeper of our own waits for a sidecar while no reader is there either."""


_Answer = tuple["Held", int]
"""What the keeper says of a channel, and a descriptor or -1."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a keeper knows of one channel."""

    epoch: int
    state: str
    """`idle`: no reader has come; `open`: one reads; `gone`: it left before the end."""
    accepted: int
    """Bytes that the epoch's FIFO accepted or will accept."""
    digest: str
    skipped: int
    mark: list[int] | None

    @property
    def untouched(self) -> bool:
        """Whether no reader of this channel has seen a byte of any plan."""
        return self.epoch == 0 and self.state == "idle" and not self.skipped

    @property
    def position(self) -> Position:
        """Where the channel goes on."""
        mark = Mark(*self.mark) if self.mark else Mark()
        return Position(self.epoch, self.skipped + self.accepted, skipped=self.skipped, mark=mark)


class KeeperClient:
    """A connection to a keeper. Use `connected`."""

    def __init__(self, path: str, sock: socket.socket) -> None:
        self.held: dict[str, Held] = {}
        """What the keeper held when this sidecar came, by channel."""
        self.pid = 0
        self._path = path
        self._socket = sock
        self._waits: dict[tuple[str, str], asyncio.Future[_Answer]] = {}
        self._hello: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._dead = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock.fileno(), self._receive)

    def __repr__(self) -> str:
        return f"<KeeperClient {self._path} {'dead' if self._dead else f'pid {self.pid}'}>"

    @property
    def lives(self) -> bool:
        """Whether the connection stands, as far as is known."""
        return not self._dead

    async def greet(self) -> None:
        """Learn what the keeper holds. Raises SinkError."""
        self._send({"do": "hello"})
        try:
            async with asyncio.timeout(ANSWER_WITHIN):
                found = await self._hello
        except TimeoutError:
            raise SinkError(
                f"the keeper at {self._path} did not answer in {ANSWER_WITHIN:g} s; it serves one sidecar at "
                "a time: is another one connected?"
            ) from None
        if found["version"] != VERSION:
            raise SinkError(
                f"the keeper at {self._path} is of another version of Penstock; end it when no trainer runs"
            )
        self.pid = int(found["pid"])
        self.held = {name: Held(**account) for name, account in found["channels"].items()}

    async def open(self, channel: str, position: Position, path_fd: int, *, digest: str) -> int:
        """Have the FIFO opened that `position` is in; the write end of its pipe, once a reader has come.

        Raises SinkError; ReaderGone if the reader has come and left.
        """
        held, fd = await self._ask("opened", self._opening(channel, position, digest), path_fd)
        if held.state == "gone":
            raise ReaderGone("the reader closed the pipe while no sidecar was there")
        if (held.epoch, held.position.offset) != (position.epoch, position.offset):
            _close(fd)
            raise RuntimeError(f"the keeper is at {held} of {channel}, and {position} is due")
        return fd

    @staticmethod
    def _opening(channel: str, position: Position, digest: str) -> dict[str, Any]:
        names = {"channel": channel, "epoch": position.epoch, "digest": digest, "skipped": position.skipped}
        return {"do": "open"} | names

    async def settle(self, channel: str) -> Held:
        """Wait until the FIFO has all of its pipe, or the reader has gone. Raises SinkError."""
        return (await self._ask("settled", {"do": "settle", "channel": channel}))[0]

    def adopt(self, channel: str, position: Position, fd: int, *, digest: str) -> None:
        """Give a FIFO's write end away, which has accepted the bytes up to `position`. Raises SinkError."""
        message = {"do": "adopt", "channel": channel, "epoch": position.epoch, "digest": digest}
        moved = position.offset - position.skipped
        self._send(message | {"skipped": position.skipped, "moved": moved, "mark": position.mark}, fd)

    def expect(self, channel: str, position: Position, path_fd: int, *, digest: str) -> None:
        """Have a FIFO opened for the next sidecar, which gets the answer. Raises SinkError."""
        self._send(self._opening(channel, position, digest), path_fd)

    def mark(self, channel: str, mark: Mark) -> None:
        """Keep a mark for the next sidecar. Raises SinkError."""
        self._send({"do": "mark", "channel": channel, "mark": mark})

    def done(self, channel: str) -> None:
        """Close the channel's FIFO: the next epoch is due. Raises SinkError."""
        self._send({"do": "close", "channel": channel})

    def forget(self, channel: str) -> None:
        """The channel is over. Raises SinkError."""
        self._send({"do": "forget", "channel": channel})

    async def _ask(self, answer: str, message: dict[str, Any], *fds: int) -> _Answer:
        key = answer, str(message["channel"])
        future: asyncio.Future[_Answer] = self._loop.create_future()
        self._waits[key] = future
        try:
            self._send(message, *fds)
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                _close(future.result()[1])
            raise
        finally:
            del self._waits[key]

    def _send(self, message: dict[str, Any], *fds: int) -> None:
        if self._dead:
            raise self._death()
        try:
            socket.send_fds(self._socket, [json.dumps(message).encode()], fds)
        except OSError as error:
            raise self._death() from error

    def _death(self) -> SinkError:
        return SinkError(
            f"the keeper at {self._path} has died, and every FIFO that it held has ended without proof; "
            "start sidecar and trainer again"
        )

    def _receive(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, LONGEST_MESSAGE, 4)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        if not data:
            self._lost()
            return
        message = json.loads(data)
        if message["did"] == "hello":
            self._hello.set_result(message)
            return
        for key, future in self._asked(message):
            if message["did"] == "failed":
                future.set_exception(
                    SinkError(f"the keeper cannot open a FIFO of {key[1]}: {message['error']}")
                )
            else:
                names = ("epoch", "state", "accepted", "digest", "skipped", "mark")
                held = Held(**{name: message[name] for name in names})
                future.set_result((held, fds.pop() if fds else -1))
        for fd in fds:  # nobody waits for it any more
            _close(fd)

    def _asked(self, message: dict[str, Any]) -> Iterator[tuple[tuple[str, str], asyncio.Future[Any]]]:
        """The wait that a message ends, if there is one."""
        did = "opened" if message["did"] == "failed" else message["did"]
        key = did, message["channel"]
        future = self._waits.get(key)
        if future is not None and not future.done():
            yield key, future

    def _lost(self) -> None:
        self._dead = True
        self._loop.remove_reader(self._socket.fileno())
        waits: list[asyncio.Future[Any]] = [self._hello, *self._waits.values()]
        for future in waits:
            if not future.done():
                future.set_exception(self._death())

    def close(self) -> None:
        """End the connection; the keeper goes on."""
        if not self._dead:
            self._lost()
        if not self._hello.cancelled() and self._hello.done():
            self._hello.exception()  # nobody need be told
        self._socket.close()


class _Absent(SinkError):
    """No keeper listens."""


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


async def connected(path: str) -> KeeperClient:
    """A connection to the keeper that listens at `path`. Raises SinkError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        with keeper_module.address(path) as reachable:
            sock.connect(reachable)
        uid = keeper_module.peer(sock)
        client = KeeperClient(path, sock)
    except OSError as error:
        sock.close()
        raise _Absent(
            f"no keeper listens at {path}: {error.strerror or error}; start `penstock keeper {path}` first"
        ) from error
    try:
        if uid not in (0, os.geteuid()):
            raise SinkError(  # noqa: TRY301 - closed as after any other refusal
                f"who listens at {path} is user {uid}, and no keeper of ours; remove the socket, and let "
                "nobody else write that directory"
            )
        await client.greet()
    except BaseException:
        client.close()
        raise
    return client


async def started(path: str) -> KeeperClient:
    """A connection to the keeper at `path`; one is started in a session of its own if none listens there.

    Raises SinkError.
    """
    with contextlib.suppress(_Absent):
        return await connected(path)
    await asyncio.to_thread(_start, path)
    return await connected(path)


def command(path: str, *, idle_for: float | None = None) -> list[str]:
    """What runs a keeper."""
    return bare.command(keeper_module, path, *([] if idle_for is None else [str(idle_for)]))


def _start(path: str) -> None:
    """Start a keeper and wait until it listens; then it lets go of its standard output."""
    try:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and file
            command(path, idle_for=IDLE_FOR),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd="/",
            env=bare.environment(),
        )
    except OSError as error:
        raise SinkError(f"the keeper could not be started: {error.strerror}") from error
    assert process.stdout is not None  # noqa: S101 - for the type checker
    with process.stdout:
        said = process.stdout.read().decode(errors="replace").strip()
    if said != "ready":
        raise SinkError(f"the keeper could not be started: {said}")
