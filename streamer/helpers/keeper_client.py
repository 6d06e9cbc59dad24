"""The sidecar's connection to the keeper (`streamer.helpers.keeper`).

Requests are sent in order, as the socket has room, and wait while the keeper pauses; so do waits for its
replies. `open` and `settle` get one reply per channel; `adopt` and `expect` are repeated until confirmed. If
the keeper lacks descriptors or a thread, the request raises Shortage, and the caller repeats it. When the
connection ends, the keeper has died, and with it every FIFO's write end. All waits then raise SinkError: the
readers have seen an end without proof, so sidecar and trainer must be started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import socket
from collections import deque
from dataclasses import dataclass
from typing import Any

from streamer.errors import KeeperLost, ReaderGone, Shortage, SinkError
from streamer.helpers.keeper.protocol import LONGEST_MESSAGE, STATE_FIELDS, VERSION
from streamer.plan import Position, ResumePoint

REPLY_TIMEOUT = 60.0
"""Seconds for the keeper's first reply. It serves one sidecar at a time, so the previous one must be gone."""
FLUSH_WITHIN = 10.0
"""Seconds for the keeper to accept the last requests of a sidecar that ends."""
AT_ONCE = 64
"""Replies read in one turn of the event loop; reading those of many channels would block it."""
RETRY_AFTER = 0.2
"""Seconds until a request is repeated that the keeper or this process lacked resources for."""

_Reply = tuple["Held", int]
"""The state of a channel in the keeper, and a descriptor or -1."""


@dataclass(frozen=True, slots=True)
class Held:
    """The state of one channel in the keeper."""

    epoch: int
    state: str
    """`idle`: no reader has opened the FIFO; `open`: a reader reads; `gone`: it left before the end."""
    accepted: int
    """Bytes that the epoch's FIFO accepted or will accept."""
    digest: str
    skipped: int
    mark: list[int] | None

    @property
    def untouched(self) -> bool:
        """Whether no reader of this channel has received a byte."""
        return self.epoch == 0 and self.state == "idle" and not self.skipped

    @property
    def position(self) -> Position:
        """The position from which the channel resumes."""
        mark = ResumePoint(*self.mark) if self.mark else ResumePoint()
        return Position(self.epoch, self.skipped + self.accepted, skipped=self.skipped, mark=mark)


class KeeperClient:
    """A connection to a keeper, made by `streamer.helpers.keeper_connect`."""

    def __init__(self, path: str, sock: socket.socket) -> None:
        self.held: dict[str, Held] = {}
        """The keeper's channels when this sidecar connected, by name."""
        self.pid = 0
        self._path = path
        self._socket = sock
        self._waits: dict[tuple[str, str], asyncio.Future[_Reply]] = {}
        self._count = -1
        """The number of channels that the keeper holds; -1 before its first reply."""
        self._greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unsent: deque[tuple[bytes, int]] = deque()
        """Requests that wait for room in the socket, each with a descriptor of ours or -1."""
        self._unconfirmed: dict[str, tuple[dict[str, Any], int]] = {}
        """By channel, the `adopt` or `expect` that the keeper has not confirmed, and its descriptor."""
        self._idle = asyncio.Event()
        """Set when every request has been sent and every `adopt` and `expect` is confirmed."""
        self._idle.set()
        self._dead = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock.fileno(), self._receive)

    def __repr__(self) -> str:
        return f"<KeeperClient {self._path} {'dead' if self._dead else f'pid {self.pid}'}>"

    @property
    def lives(self) -> bool:
        """Whether the connection has not ended."""
        return not self._dead

    async def greet(self) -> None:
        """Get the keeper's channels. Raises SinkError."""
        self._send({"do": "hello"})
        try:
            async with asyncio.timeout(REPLY_TIMEOUT):
                await self._greeted
        except TimeoutError:
            raise no_reply(self._path) from None

    async def open(self, channel: str, position: Position, path_fd: int, *, digest: str) -> int:
        """Open the FIFO of `position`; return the write end of its pipe once a reader has opened it.

        Raises SinkError; ReaderGone if the reader has left already.
        """
        held, fd = await self._request("opened", self._open_request(channel, position, digest), path_fd)
        if held.state == "gone":
            raise ReaderGone("the reader closed the pipe while no sidecar was there")
        if (held.epoch, held.position.offset) != (position.epoch, position.offset):
            _close(fd)
            raise RuntimeError(f"the keeper is at {held} of {channel}, and {position} is due")
        return fd

    @staticmethod
    def _open_request(channel: str, position: Position, digest: str) -> dict[str, Any]:
        names = {"channel": channel, "epoch": position.epoch, "digest": digest, "skipped": position.skipped}
        return {"do": "open"} | names

    async def settle(self, channel: str) -> Held:
        """Wait until the FIFO has all of its pipe, or the reader has gone. Raises SinkError."""
        return (await self._request("settled", {"do": "settle", "channel": channel}))[0]

    def adopt(self, channel: str, position: Position, fd: int, *, digest: str) -> None:
        """Give the keeper a FIFO's write end, which has accepted the bytes up to `position`; see `flush`.

        This object owns `fd` from now on and keeps it open until the keeper has it. Raises SinkError.
        """
        moved = position.offset - position.skipped
        message = self._open_request(channel, position, digest) | {"moved": moved, "mark": position.mark}
        self._give(message | {"do": "adopt"}, fd)

    def expect(self, channel: str, position: Position, path_fd: int, *, digest: str) -> None:
        """Have the keeper open a FIFO for the next sidecar; see `flush`. Raises SinkError."""
        self._give(self._open_request(channel, position, digest) | {"do": "expect"}, os.dup(path_fd))

    def _give(self, message: dict[str, Any], fd: int) -> None:
        """Send a request that is repeated until the keeper confirms it; take ownership of `fd`."""
        self._unconfirmed[message["channel"]] = message, fd
        self._idle.clear()
        self._send(message, fd)

    async def flush(self) -> None:
        """Wait until every request has been sent and every `adopt` and `expect` is confirmed.

        FIFOs that the keeper does not have end with this process. Raises SinkError.
        """
        if not self._dead:
            await self._idle.wait()
        if self._dead:
            raise self._death()

    def mark(self, channel: str, mark: ResumePoint) -> None:
        """Store a resume point for the next sidecar. Raises SinkError."""
        self._send({"do": "mark", "channel": channel, "mark": mark})

    def done(self, channel: str) -> None:
        """Close the channel's FIFO and go to the next epoch. Raises SinkError."""
        self._send({"do": "close", "channel": channel})

    def forget(self, channel: str) -> None:
        """Remove the channel, which has ended. Raises SinkError."""
        self._send({"do": "forget", "channel": channel})

    async def _request(self, reply: str, message: dict[str, Any], fd: int = -1) -> _Reply:
        key = reply, str(message["channel"])
        future: asyncio.Future[_Reply] = self._loop.create_future()
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
        """Send a request now, or when there is room. The caller keeps `fd`. Raises SinkError, OSError."""
        if self._dead:
            raise self._death()
        packet = json.dumps(message).encode()
        if not self._unsent and self._try_send(packet, fd):
            return
        self._unsent.append((packet, fd if fd < 0 else os.dup(fd)))
        self._idle.clear()

    def _try_send(self, packet: bytes, fd: int) -> bool:
        """Send a packet and return true if there is room; otherwise schedule `_send_more`."""
        try:
            socket.send_fds(self._socket, [packet], [] if fd < 0 else [fd])
        except BlockingIOError:
            self._loop.add_writer(self._socket.fileno(), self._send_more)
            return False
        except (BrokenPipeError, ConnectionResetError):
            self._lost()
            return False
        except OSError:  # no memory, or too many descriptors in flight: retry
            self._loop.remove_writer(self._socket.fileno())
            self._loop.call_later(RETRY_AFTER, self._send_more)
            return False
        return True

    def _send_more(self) -> None:
        while self._unsent and not self._dead:
            packet, fd = self._unsent[0]
            if not self._try_send(packet, fd):
                return
            self._unsent.popleft()
            _close(fd)
        if not self._dead:
            self._loop.remove_writer(self._socket.fileno())
            self._note_idle()

    def _note_idle(self) -> None:
        if self._dead or not (self._unsent or self._unconfirmed):
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
                continue  # unread replies come next, then the end; libuv reports an error only once
            except OSError:
                return  # no reply now, or a passing lack of memory
            if not data:
                self._lost()
                return
            try:
                self._handle(json.loads(data), fds)
            finally:
                for fd in fds:  # `_note` removes the descriptor that a request waits for
                    _close(fd)
        self._loop.call_soon(self._receive)  # libuv may not report the rest

    def _handle(self, message: dict[str, Any], fds: list[int]) -> None:
        kind, channel = message["did"], message.get("channel", "")
        if kind == "hello":
            self._handle_hello(message)
        elif kind == "held":
            self.held[channel] = _held(message)
        elif kind in ("adopted", "expected"):
            _close(self._unconfirmed.pop(channel)[1])
            self._note_idle()
        elif kind == "failed" and message["do"] != "open":
            self._loop.call_later(RETRY_AFTER, self._repeat, channel)
        else:
            key = "opened" if kind == "failed" else kind, channel
            future = self._waits.get(key)
            if future is not None and not future.done():
                if kind == "failed":
                    future.set_exception(_open_error(channel, message["errno"]))
                else:
                    future.set_result((_held(message), fds.pop() if fds else -1))
        if len(self.held) == self._count and not self._greeted.done():
            self._greeted.set_result(None)

    def _handle_hello(self, message: dict[str, Any]) -> None:
        if message["version"] == VERSION:
            self.pid, self._count = int(message["pid"]), int(message["channels"])
        elif not self._greeted.done():
            self._greeted.set_exception(
                SinkError(
                    f"the keeper at {self._path} is of another version of Penstock; end it when no trainer "
                    "runs"
                )
            )

    def _repeat(self, channel: str) -> None:
        with contextlib.suppress(SinkError):  # `flush` raises it
            if channel in self._unconfirmed:
                self._send(*self._unconfirmed[channel])

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
        """Close the connection; the keeper keeps running."""
        self._lost()
        if not self._greeted.cancelled() and self._greeted.done():
            self._greeted.exception()  # marked as retrieved
        for _, fd in [*self._unsent, *self._unconfirmed.values()]:
            _close(fd)
        self._unsent.clear()
        self._unconfirmed.clear()
        self._socket.close()


def _held(message: dict[str, Any]) -> Held:
    return Held(**{name: message[name] for name in STATE_FIELDS})


def _open_error(channel: str, number: int) -> SinkError:
    """Return the error for a FIFO of `channel` that the keeper cannot open."""
    text = f"the keeper cannot open a FIFO of {channel}: {os.strerror(number)}"
    if number in (errno.EACCES, errno.EPERM):
        return SinkError(f"{text}; run keeper and sidecar as the same user")
    return Shortage(f"{text}; it tries again, raise its `ulimit -n`, threads or memory")


def no_reply(path: str) -> SinkError:
    """Return the error for a keeper that does not answer."""
    return SinkError(
        f"the keeper at {path} did not answer in {REPLY_TIMEOUT:g} s; it serves one sidecar at a time: is "
        "another one connected?"
    )


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)
