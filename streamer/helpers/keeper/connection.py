"""The connection to a sidecar, one at a time: packets in, packets out.

The next sidecar waits in the listener's backlog until this one has disconnected, and the kernel closes a dead
sidecar's connection after its last write. A sidecar that breaks the protocol sees an end of file; it still
counts as connected until it disconnects, because it may still write to its pipes.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

from streamer.helpers.keeper.channel import HeldChannel, close_all
from streamer.helpers.keeper.loop import EventLoop
from streamer.helpers.keeper.protocol import LONGEST_MESSAGE, peer


class SidecarConnection:
    """The connected sidecar, if any."""

    def __init__(
        self,
        listener: socket.socket,
        loop: EventLoop,
        *,
        handle: Callable[[dict[str, Any], list[int]], None],
        ended: Callable[[], None],
    ) -> None:
        """`handle` gets a message and its descriptors, and removes from the list those that it keeps.

        If it raises OSError or MemoryError, the message is handled again; any other exception is the
        message's fault. `ended` is called when the sidecar has disconnected.
        """
        self.client: socket.socket | None = None
        self._listener = listener
        self._loop = loop
        self._handle_message = handle
        self._ended = ended
        self._refused = False
        """Whether the client has broken the protocol: the keeper only waits for it to disconnect."""
        self._broken = False
        """Whether sending to the client fails; it still counts as connected until its end of file."""
        self._message: tuple[bytes, list[int]] | None = None
        """The client's message in progress, and its descriptors: -1 alone if the kernel dropped them all."""
        self._unsent: deque[tuple[str, HeldChannel | None, dict[str, object]]] = deque()
        """Replies that wait for room in the client's socket: kind, channel, further fields."""

    def accept(self) -> None:
        """Accept the next sidecar if no sidecar is connected, and serve it. Raises OSError."""
        # The next sidecar waits in the backlog until this one's connection, and so its writes, have ended.
        if self.client is None:
            with contextlib.suppress(BlockingIOError):
                self.client, _address = self._listener.accept()
                self._refused = False
        self.serve()

    def serve(self) -> None:
        """Send the waiting replies, and only then handle the client's next message. Raises OSError."""
        if self.client is None:
            return
        if self.client.fileno() not in self._loop.watched:
            self.client.settimeout(0)  # recv_fds and send_fds of the standard library ignore flags
            if peer(self.client) not in (0, os.geteuid()):
                self._hang_up()
                return
        self.flush()
        if (self._unsent and not self._broken) or (self._message is None and not self._receive()):
            return
        if self._message is not None:
            self._handle(*self._message)
        self.flush()

    def reply(self, kind: str, subject: HeldChannel | None = None, **fields: object) -> None:
        """Queue a reply and send it when there is room; a channel's state is added at that time."""
        if self.client is not None and not self._refused:
            self._unsent.append((kind, subject, fields))
            self._loop.perform((SidecarConnection.flush, self))

    def flush(self) -> None:
        """Send the waiting replies, as far as the client's socket has room. Raises OSError."""
        if self.client is None:
            return
        self._broken = False
        while self._unsent:
            kind, channel, fields = self._unsent[0]
            message, fds = {"did": kind} | fields, []
            if channel is not None:
                message |= {"channel": channel.name} | channel.account()
                if kind == "opened" and channel.state == "open":
                    fds = [channel.write_fd]
            try:
                socket.send_fds(self.client, [json.dumps(message).encode()], fds)
            except BlockingIOError:
                break
            except (BrokenPipeError, ConnectionResetError):
                self._broken = True  # the client is dying; its last messages come first, then its end
                self._loop.repeat((SidecarConnection.serve, self))
                break
            self._unsent.popleft()
        wants_room = self._unsent and not self._broken
        self._loop.watch(self.client.fileno(), select.EPOLLOUT if wants_room else select.EPOLLIN)

    def pause(self) -> tuple[int, ...]:
        """Return the client's socket; as `Subject`."""
        return () if self.client is None else (self.client.fileno(),)

    def _receive(self) -> bool:
        """Receive a message, if there is one; return false if the client has disconnected."""
        assert self.client is not None  # noqa: S101 - for the type checker
        try:
            data, fds, flags, _ = socket.recv_fds(self.client, LONGEST_MESSAGE, 4)
        except (BlockingIOError, ConnectionResetError):
            return True  # reset: the client died; its last messages come next, then its end
        if not data:
            close_all(*fds)
            self._hang_up()
            return False
        if flags & socket.MSG_CTRUNC and not fds:
            fds = [-1]  # the kernel dropped the descriptor: too many are open
        self._message = data, fds
        return True

    def _handle(self, data: bytes, fds: list[int]) -> None:
        """Handle a message. If that raises, it is handled again."""
        assert self.client is not None  # noqa: S101 - for the type checker
        if not self._refused:
            try:
                self._handle_message(json.loads(data), fds)
            except (OSError, MemoryError):
                raise
            except Exception:  # noqa: BLE001 - any other error is the message's fault: do not repeat
                # The message breaks the protocol. The client sees an end of file, but may still write.
                self._refused = True
                self._unsent.clear()
                with contextlib.suppress(OSError):
                    self.client.shutdown(socket.SHUT_WR)
        self._message = None
        close_all(*fds)

    def _hang_up(self) -> None:
        client, self.client = self.client, None
        self._unsent.clear()
        self._ended()
        self._loop.repeat_now((SidecarConnection.accept, self))
        if client is not None:
            self._loop.unwatch(client.fileno())
            client.close()
