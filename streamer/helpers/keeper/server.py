"""Serves sidecars: the act that an event leads to, the call that a request leads to, and idleness.

`main` is the process: its socket's file, signals and limits. The parent process reads one line from standard
output, `ready` or the reason of a failure, and then its end. With IDLE_SECONDS the keeper exits when it has
had neither sidecar nor reader for so long, and at once when a sidecar disconnects that has left no channel.
Otherwise it runs until SIGTERM or SIGINT.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import resource
import select
import signal
import socket
import time
from typing import Any

from streamer.helpers.keeper.connection import SidecarConnection
from streamer.helpers.keeper.held_fifos import HeldFifos
from streamer.helpers.keeper.loop import RETRY, Act, EventLoop
from streamer.helpers.keeper.protocol import VERSION, listen


class Keeper:
    """Serves one listening socket until told to stop, or until it is idle."""

    def __init__(
        self, listener: socket.socket, *, idle_for: float | None = None, epoll: select.epoll | None = None
    ) -> None:
        """`idle_for`: seconds without sidecar and reader after which `run` ends. `epoll`: default, a new one.

        Raises OSError.
        """
        self._idle_for = idle_for
        self._idle_since: float | None = None
        self.over = False
        """Whether `run` ends."""
        self.loop = EventLoop(epoll or select.epoll())
        self.connection = SidecarConnection(
            listener, self.loop, handle=self._handle, ended=self._disconnected
        )
        self.fifos = HeldFifos(self.loop, reply=self.connection.reply)
        self._listener_fd = listener.fileno()
        listener.settimeout(0)
        # Edge-triggered: a sidecar that waits in the backlog must not wake the loop again and again.
        self.loop.watch_edges(self._listener_fd)

    def stop(self, *_: object) -> None:
        """End `run`; a signal handler."""
        self.over = True
        self.loop.wake()

    def run(self) -> None:
        """Serve until `stop` or idleness, then close every FIFO."""
        while not self.over:
            for act in self.ready():
                self.loop.perform(act)
        self.fifos.end_all()

    def ready(self, longest: float | None = None) -> list[Act]:
        """Wait at most `longest` seconds for events; return the acts that they lead to."""
        try:
            events = self.loop.poll(self._timeout(longest))
            acts = [self._act(*event) for event in events]
        except Exception:  # noqa: BLE001 - any failure is retried; readers wait meanwhile
            time.sleep(RETRY)
            return [(SidecarConnection.accept, self.connection), (HeldFifos.collect, self.fifos)]
        acts += self.loop.take_due()
        if not acts and self._idle_since is not None and self._idle_for is not None:
            self.over = time.monotonic() - self._idle_since >= self._idle_for
        return acts

    def _timeout(self, longest: float | None) -> float | None:
        """Return the seconds until acts are repeated, the keeper is idle, or `longest` have passed."""
        now = time.monotonic()
        waits = [longest, self.loop.until_repeat(now)]
        if self._idle_for is not None:
            channels = self.fifos.channels.values()
            busy = self.connection.client is not None or any(c.state == "open" for c in channels)
            self._idle_since = None if busy else self._idle_since or now
            if self._idle_since is not None:
                waits.append(max(0.0, self._idle_since + self._idle_for - now))
        return min((wait for wait in waits if wait is not None), default=None)

    def _act(self, fd: int, event: int) -> Act:
        """Return the act that an event leads to."""
        if fd == self.loop.wake_fd:
            return HeldFifos.collect, self.fifos
        if fd == self._listener_fd:
            return SidecarConnection.accept, self.connection
        pump = self.fifos.pump
        if (owner := pump.owners.get(fd)) is not None:
            return pump.act_on(owner, fd, event), owner
        return SidecarConnection.serve, self.connection

    def _handle(self, message: dict[str, Any], fds: list[int]) -> None:
        """Handle a sidecar's message; as `SidecarConnection` needs it."""
        kind, name, fifos = message["do"], str(message.get("channel")), self.fifos
        if kind == "hello":
            self._greet()
        elif kind in ("open", "expect", "adopt"):
            try:
                (fifos.adopt if kind == "adopt" else fifos.open)(name, message, fds)
            except (OSError, MemoryError) as error:
                fifos.fail(kind, name, error)
        elif kind == "mark":
            fifos.mark(name, message)
        elif kind == "settle":
            fifos.settle(name)
        elif kind == "close":
            fifos.close(name)
        elif kind == "forget":
            fifos.forget(name)
        else:
            raise ValueError(kind)

    def _greet(self) -> None:
        """Reply the state of every channel."""
        channels, reply = self.fifos.channels, self.connection.reply
        reply("hello", version=VERSION, pid=os.getpid(), channels=len(channels))
        for channel in channels.values():
            reply("held", channel)

    def _disconnected(self) -> None:
        self.fifos.forget_sidecar()
        if self._idle_for is not None and not self.fifos.channels:
            self.over = True


_STACK = 128 * 1024
"""Bytes of a thread's stack; there may be a thousand threads."""


def _report_failure(path: str, error: OSError) -> int:
    """Write the error to standard output, if that is open; return the exit code."""
    with contextlib.suppress(OSError):
        os.write(1, f"{path}: {error.strerror or error}\n".encode())
    return 7


def main(arguments: list[str]) -> int:
    """Serve the socket that the first argument names; the second is IDLE_SECONDS."""
    path = arguments[0]
    try:
        listener = listen(path)
        keeper = Keeper(listener, idle_for=float(arguments[1]) if len(arguments) > 1 else None)
    except OSError as error:
        return _report_failure(path, error)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, keeper.stop)
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    _thread.stack_size(_STACK)
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    try:
        null = os.open(os.devnull, os.O_RDWR)
        os.write(1, b"ready\n")  # unbuffered, so an error is raised here
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(path)
        return _report_failure(path, error)
    # The parent process may wait for the end of our output.
    for output in (1, 2):
        os.dup2(null, output)
    try:
        keeper.run()
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
    return 0
