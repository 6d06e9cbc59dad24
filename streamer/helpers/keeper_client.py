"""The sidecar's side of the keeper (`streamer.helpers.keeper`): a connection, and what the keeper holds.

Requests go out in order, as the keeper has room for them: one that stands still for a while is waited for,
and so are its answers. `open` and `settle` have one for a channel; `adopt` and `expect` are repeated until
confirmed. What the keeper lacks now (descriptors, a thread) is a Shortage; whoever asked asks again. When the
connection ends, the keeper has died and with it every FIFO's write end: all waits raise SinkError, for the
readers have seen an end that no trailer proves, and nothing can mend that but a new start of both.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import socket
import subprocess
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from streamer.errors import KeeperLost, ReaderGone, Shortage, SinkError
from streamer.helpers import keeper as keeper_module
from streamer.helpers import spawn as bare
from streamer.helpers.keeper import LONGEST_MESSAGE, VERSION
from streamer.plan import Position, ResumePoint

ANSWER_WITHIN = 60.0
"""Seconds for the keeper's first answer. It serves one sidecar, the next when the last is gone."""
FLUSH_WITHIN = 10.0
"""Seconds for the keeper to take the last requests of a process that ends."""
AT_ONCE = 64
"""Answers taken in one turn of the loop, which takes long where channels are many."""
AGAIN = 0.2
"""Seconds until what the keeper or this process lacked is tried again."""
IDLE_FOR = 600
"""Seconds that a keeper of our own waits for a sidecar while no reader is there either."""


_LIMITS = "raise `ulimit -n`, or the limit of memory"

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
        mark = ResumePoint(*self.mark) if self.mark else ResumePoint()
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
        self._count = -1
        """How many channels the keeper holds; -1 until it has said so."""
        self._greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unsent: deque[tuple[bytes, int]] = deque()
        """Requests that the keeper has no room for yet, each with a descriptor of ours or -1."""
        self._given: dict[str, tuple[dict[str, Any], int]] = {}
        """What another sidecar is to find, by channel: asked, and not confirmed yet."""
        self._idle = asyncio.Event()
        """Set when everything has been sent and what was given is confirmed."""
        self._idle.set()
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
                await self._greeted
        except TimeoutError:
            raise _unanswered(self._path) from None

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
        """Give a FIFO's write end away, which has accepted the bytes up to `position`; see `flush`.

        `fd` is this object's now, and open until the keeper has it. Raises SinkError.
        """
        moved = position.offset - position.skipped
        message = self._opening(channel, position, digest) | {"moved": moved, "mark": position.mark}
        self._give(message | {"do": "adopt"}, fd)

    def expect(self, channel: str, position: Position, path_fd: int, *, digest: str) -> None:
        """Have a FIFO opened for the next sidecar; see `flush`. Raises SinkError."""
        self._give(self._opening(channel, position, digest) | {"do": "expect"}, os.dup(path_fd))

    def _give(self, message: dict[str, Any], fd: int) -> None:
        """Ask until the keeper has it; `fd` is ours now."""
        self._given[message["channel"]] = message, fd
        self._idle.clear()
        self._send(message, fd)

    async def flush(self) -> None:
        """Wait until the keeper has been told everything and has confirmed what it was given.

        What it has not got ends with this process. Raises SinkError.
        """
        await self._idle.wait()
        if self._dead:
            raise self._death()

    def mark(self, channel: str, mark: ResumePoint) -> None:
        """Keep a mark for the next sidecar. Raises SinkError."""
        self._send({"do": "mark", "channel": channel, "mark": mark})

    def done(self, channel: str) -> None:
        """Close the channel's FIFO: the next epoch is due. Raises SinkError."""
        self._send({"do": "close", "channel": channel})

    def forget(self, channel: str) -> None:
        """The channel is over. Raises SinkError."""
        self._send({"do": "forget", "channel": channel})

    async def _ask(self, answer: str, message: dict[str, Any], fd: int = -1) -> _Answer:
        key = answer, str(message["channel"])
        future: asyncio.Future[_Answer] = self._loop.create_future()
        self._waits[key] = future
        try:
            self._send(message, fd)
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                _close(future.result()[1])
            raise
        finally:
            del self._waits[key]

    def _send(self, message: dict[str, Any], fd: int = -1) -> None:
        """Send a request when there is room; `fd` stays the caller's. Raises SinkError, OSError."""
        if self._dead:
            raise self._death()
        packet = json.dumps(message).encode()
        if not self._unsent and self._sent(packet, fd):
            return
        self._unsent.append((packet, fd if fd < 0 else os.dup(fd)))
        self._idle.clear()

    def _sent(self, packet: bytes, fd: int) -> bool:
        """Send a packet if there is room now; else have `_send_more` called when it is time."""
        try:
            socket.send_fds(self._socket, [packet], [] if fd < 0 else [fd])
        except BlockingIOError:
            self._loop.add_writer(self._socket.fileno(), self._send_more)
            return False
        except (BrokenPipeError, ConnectionResetError):
            self._lost()
            return False
        except OSError:  # memory, or too many descriptors under way: it passes
            self._loop.remove_writer(self._socket.fileno())
            self._loop.call_later(AGAIN, self._send_more)
            return False
        return True

    def _send_more(self) -> None:
        while self._unsent and not self._dead:
            packet, fd = self._unsent[0]
            if not self._sent(packet, fd):
                return
            self._unsent.popleft()
            _close(fd)
        if not self._dead:
            self._loop.remove_writer(self._socket.fileno())
            self._note_idle()

    def _note_idle(self) -> None:
        if self._dead or not (self._unsent or self._given):
            self._idle.set()

    def _death(self) -> KeeperLost:
        return KeeperLost(
            f"the keeper at {self._path} has died, and every FIFO that it held has ended without proof; "
            "start sidecar and trainer again"
        )

    def _receive(self) -> None:
        for _ in range(AT_ONCE):
            try:
                data, fds, _, _ = socket.recv_fds(self._socket, LONGEST_MESSAGE, 4)
            except ConnectionResetError:
                continue  # what was said comes next, and the end; libuv reports a socket in error once
            except OSError:
                return  # none now, or it passes
            if not data:
                self._lost()
                return
            try:
                self._note(json.loads(data), fds)
            finally:
                for fd in fds:  # nobody waits for it any more
                    _close(fd)

    def _note(self, message: dict[str, Any], fds: list[int]) -> None:
        did, channel = message["did"], message.get("channel", "")
        if did == "hello":
            self._greet(message)
        elif did == "held":
            self.held[channel] = _held(message)
        elif did in ("adopted", "expected"):
            _close(self._given.pop(channel)[1])
            self._note_idle()
        elif did == "failed" and message["do"] != "open":
            self._loop.call_later(AGAIN, self._give_again, channel)
        else:
            key = "opened" if did == "failed" else did, channel
            future = self._waits.get(key)
            if future is not None and not future.done():
                if did == "failed":
                    future.set_exception(_refusal(channel, message["errno"]))
                else:
                    future.set_result((_held(message), fds.pop() if fds else -1))
        if len(self.held) == self._count and not self._greeted.done():
            self._greeted.set_result(None)

    def _greet(self, message: dict[str, Any]) -> None:
        if message["version"] == VERSION:
            self.pid, self._count = int(message["pid"]), int(message["channels"])
        elif not self._greeted.done():
            self._greeted.set_exception(
                SinkError(
                    f"the keeper at {self._path} is of another version of Penstock; end it when no trainer "
                    "runs"
                )
            )

    def _give_again(self, channel: str) -> None:
        with contextlib.suppress(SinkError):  # `flush` raises it
            if channel in self._given:
                self._send(*self._given[channel])

    def _lost(self) -> None:
        if not self._dead:
            self._dead = True
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            waits: list[asyncio.Future[Any]] = [self._greeted, *self._waits.values()]
            for future in waits:
                if not future.done():
                    future.set_exception(self._death())
            self._note_idle()

    def close(self) -> None:
        """End the connection; the keeper goes on."""
        self._lost()
        if not self._greeted.cancelled() and self._greeted.done():
            self._greeted.exception()  # nobody need be told
        for _, fd in [*self._unsent, *self._given.values()]:
            _close(fd)
        self._unsent.clear()
        self._given.clear()
        self._socket.close()


def _held(message: dict[str, Any]) -> Held:
    names = ("epoch", "state", "accepted", "digest", "skipped", "mark")
    return Held(**{name: message[name] for name in names})


def _refusal(channel: str, number: int) -> SinkError:
    """Why the keeper does not open a FIFO of `channel`."""
    text = f"the keeper cannot open a FIFO of {channel}: {os.strerror(number)}"
    if number in (errno.EACCES, errno.EPERM):
        return SinkError(f"{text}; run keeper and sidecar as the same user")
    return Shortage(f"{text}; it tries again, raise its `ulimit -n`, threads or memory")


def _unanswered(path: str) -> SinkError:
    return SinkError(
        f"the keeper at {path} did not answer in {ANSWER_WITHIN:g} s; it serves one sidecar at a time: is "
        "another one connected?"
    )


class _Absent(SinkError):
    """No keeper listens."""


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


async def connected(path: str) -> KeeperClient:
    """A connection to the keeper that listens at `path`. Raises SinkError."""
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    except OSError as error:
        raise SinkError(f"cannot connect to the keeper at {path}: {error.strerror}; {_LIMITS}") from error
    try:
        await _connect(sock, path)
        uid = keeper_module.peer(sock)
        if uid not in (0, os.geteuid()):
            raise SinkError(  # noqa: TRY301 - closed as after any other refusal
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
    """Connect, however many sidecars wait there. Raises OSError, SinkError."""
    began = time.monotonic()
    while True:
        try:
            with keeper_module.address(path) as reachable:
                sock.connect(reachable)
        except BlockingIOError:
            if time.monotonic() - began > ANSWER_WITHIN:
                raise _unanswered(path) from None
            await asyncio.sleep(AGAIN)
        else:
            return


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
