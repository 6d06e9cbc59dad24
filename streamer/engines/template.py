"""The template process: an engine process is a copy of it, by fork(2).

    parent ── socket of an engine ──▶ template ── fork ──▶ engine
              ◀──── forked, pidfd ────┘                      ▲
              ──── settings ────────────────────────────────┘

The template imports all modules and loads the certificates, and then does nothing but fork. A copy starts in
5 ms and shares the template's pages: 4 engines with TLS take 36 MB in all, where 4 interpreters took 97 MB.
The template has no event loop, no thread and no secret.

Engines do not need the template. If it has ended, or an engine was not ready in time, the parent starts
another template for the next engine. A pidfd reports and ends exactly the engine that it was opened for,
whoever its parent process is. The template reaps its copies. Where this process is PID 1 or a subreaper, the
kernel makes it the parent of the copies that a template has left, and it reaps those.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

from streamer.aio import in_thread
from streamer.engines.link import Message, frame
from streamer.errors import ConfigError, SinkError
from streamer.helpers import spawn
from streamer.linux import forbid_dumps

if TYPE_CHECKING:
    from streamer.s3.http.tls import TlsContext

_MAIN = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from streamer.engines.template import main; main()"
)
END_WITHIN = 2.0
"""Seconds for a template to end; after them it is killed."""


class Template:
    """The parent's side: one template process, started when an engine is to be forked and none runs."""

    def __init__(self, certificates: str | None) -> None:
        """`certificates`: file of the certificates to trust; None: no TLS."""
        self._certificates = certificates
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._starting = asyncio.Lock()
        self._unreaped: list[int] = []
        """Pidfds of engines that have ended and may still be zombies of a template."""

    def __repr__(self) -> str:
        return f"<Template {self._process and self._process.pid}>"

    async def fork(self) -> socket.socket:
        """Ask for an engine process; return our end of its socket, which the caller owns. Raises SinkError.

        The first message is `forked` with the process id and a pidfd, or `refused` with the reason. If the
        template ends first, so does the socket.
        """
        async with self._starting:
            sock = self._sock
            if sock is None or self._process is None or self._process.poll() is not None:
                await self._end()
                sock = await self._start()
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise cannot_start(error.strerror) from error
        try:
            with theirs:
                socket.send_fds(sock, [b"f"], [theirs.fileno()])
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            pass  # the template has stopped or ended: `ours` ends too, as nobody has its other end
        except OSError as error:
            ours.close()
            raise cannot_start(error.strerror) from error
        return ours

    async def _start(self) -> socket.socket:
        def start() -> socket.socket:
            ours, theirs = socket.socketpair()
            self._sock = ours
            ours.settimeout(0)
            arguments = [json.dumps(sys.path), str(theirs.fileno()), json.dumps(self._certificates)]
            with theirs:
                self._process = subprocess.Popen(  # noqa: S603 - our own module
                    [sys.executable, "-I", "-c", _MAIN, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env=spawn.environment(),
                    pass_fds=[theirs.fileno()],
                )
            return ours

        try:
            return await in_thread(start)
        except OSError as error:
            raise cannot_start(error.strerror) from error

    def reap(self, pidfd: int) -> None:
        """Reap an engine that has ended, now or after the end of its template. Owns the pidfd."""
        self._unreaped = [each for each in (*self._unreaped, pidfd) if not _reaped(each)]

    async def discard(self) -> None:
        """Kill the template, which may be stopped."""
        if self._process is not None:
            self._process.kill()
        await self.close()

    async def close(self) -> None:
        """End the template, if it runs; the engines run on."""
        async with self._starting:
            await self._end()

    async def _end(self) -> None:
        sock, self._sock = self._sock, None
        process, self._process = self._process, None
        if sock is not None:
            sock.close()
        if process is not None:
            await in_thread(_wait, process)
        unreaped, self._unreaped = self._unreaped, []
        for pidfd in unreaped:
            if not _reaped(pidfd):  # it is a child of init, which reaps it
                os.close(pidfd)


def _reaped(pidfd: int) -> bool:
    """Reap a process that has ended, if it is our child; close its pidfd and return True if it is reaped."""
    try:
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    except ChildProcessError:  # another process is its parent
        try:
            signal.pidfd_send_signal(pidfd, 0)
        except ProcessLookupError:
            pass
        else:
            return False
    os.close(pidfd)
    return True


def _wait(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a template whose socket is closed; it reaps its copies first."""
    try:
        process.wait(END_WITHIN)
    except subprocess.TimeoutExpired:  # it is stopped
        process.kill()
        process.wait()


def cannot_start(reason: str | None) -> SinkError:
    """Return the error for an engine process that the kernel refuses."""
    return SinkError(
        f"cannot start an engine process: {reason}; raise the limits of processes and memory, "
        "or set Penstock.Processes: 0"
    )


def main() -> None:
    """Run the template. Arguments: the module path, the socket's descriptor and the certificates, as JSON."""
    from streamer.engines.process import run

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    certificates = json.loads(sys.argv[3])
    try:
        forbid_dumps()  # each copy has the setting from its first instruction
        tls = None if certificates is None else _loaded(certificates)
    except (ConfigError, SinkError) as error:
        raise SystemExit(f"penstock engine process: {error}") from None
    gc.collect()
    gc.freeze()  # a collection in a copy would write to every shared page
    engine = _forking(socket.socket(fileno=int(sys.argv[2])))
    if engine is not None:
        run(engine, tls)
    os._exit(0)  # the interpreter's own end would write to every shared page


def _loaded(certificates: str) -> TlsContext:
    from streamer.s3.http_source import tls_context

    return tls_context(certificates)


def _forking(parent: socket.socket) -> socket.socket | None:
    """Fork a copy for each socket that the parent sends; return that socket in the copy, None at the end."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(parent, 1, 1)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # copies that have ended; the parent has their pidfds
                pass
        if not data:
            return None
        for fd in descriptors:
            engine = socket.socket(fileno=fd)
            try:
                pid = os.fork()
            except OSError as error:
                _send(engine, ("refused", error.strerror))
                engine.close()
                continue
            if not pid:
                parent.close()
                return engine
            try:
                pidfd = os.pidfd_open(pid)
            except OSError as error:
                os.kill(pid, signal.SIGKILL)
                _send(engine, ("refused", error.strerror))
            else:
                _send(engine, ("forked", pid), pidfd)
                os.close(pidfd)
            engine.close()


def _send(engine: socket.socket, message: Message, *descriptors: int) -> None:
    with contextlib.suppress(OSError):  # the parent has closed its end
        socket.send_fds(engine, [frame(message, len(descriptors))], descriptors)
