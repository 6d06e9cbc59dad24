"""The keeper as a process: its socket's file, signals and limits.

The parent process reads one line from standard output, `ready` or the reason of a failure, and then its end.
With IDLE_SECONDS the keeper exits when it has had neither sidecar nor reader for so long, and at once when a
sidecar disconnects that has left no channel. Otherwise it runs until SIGTERM or SIGINT.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import resource
import signal

from streamer.helpers.keeper.protocol import listen
from streamer.helpers.keeper.server import Keeper

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
