"""A process that has imported everything once, and forks sidecars and keepers that begin at once.

A start of the interpreter with the sidecar's libraries takes a second, most of it in imports, whose system
calls tell nothing about Penstock. So one process warms up (it plans a job over each transport), and each
sidecar or keeper of a run is a fork of its fork that calls the command's own entry point. Requests come over
a socket; a fork's standard error, and the way to its filter, are descriptors beside them.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

from tests.kit.credentials import set_credentials
from tests.machines.crash.notify import CONTROL_FD, install

_LONGEST = 1 << 16


class Zygote:
    """The requesting side. The process is a fork of this one, which has no thread yet, and ends with it."""

    def __init__(self) -> None:
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._socket.close()
                _serve(other)
            finally:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
        other.close()

    def start(
        self, program: str, arguments: list[str], output: int, calls: list[str] | None, control: int | None
    ) -> int:
        """Fork one, and return its process id.

        `program`: sidecar or keeper. `output`: a descriptor for its standard error, and a keeper's output.
        `control`: where the filter's descriptor is sent, if it is to have a filter; `calls` as of `install`.
        """
        request = {"program": program, "arguments": arguments, "calls": calls}
        fds = [output] if control is None else [output, control]
        socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
        return int(self._socket.recv(64))

    def wait(self, pid: int) -> int:
        """The exit code of one that has ended; negative for a signal."""
        self._socket.send(json.dumps({"wait": pid}).encode())
        return os.waitstatus_to_exitcode(int(self._socket.recv(64)))

    def close(self) -> None:
        self._socket.close()
        os.waitpid(self.pid, 0)


def _serve(requests: socket.socket) -> NoReturn:
    """In the warmed process: fork and wait as told, until the socket closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        data, fds, _, _ = socket.recv_fds(requests, _LONGEST, 2)
        if not data:
            os._exit(0)
        request = json.loads(data)
        if "wait" in request:
            requests.send(str(os.waitpid(request["wait"], 0)[1]).encode())
            continue
        pid = os.fork()
        if pid == 0:
            requests.close()
            _begin(request, *fds)
        for fd in fds:
            os.close(fd)
        requests.send(str(pid).encode())


def warm_up(commands: list[list[str]]) -> None:
    """Set the credentials, import all, and run commands of `penstock`."""
    from sidecar import cli
    from sidecar.job import supervisor
    from streamer.helpers.keeper import server

    assert supervisor is not None
    assert server is not None
    set_credentials()
    sys.stdout.flush()
    stdout = os.dup(1)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    for arguments in commands:
        with contextlib.suppress(SystemExit):
            cli.cli.main(arguments)
    sys.stdout.flush()
    os.dup2(stdout, 1)
    os.close(stdout)
    # A fork takes over this thread alone; libuv makes its own anew.
    assert threading.active_count() == 1, threading.enumerate()
    gc.collect()
    gc.freeze()  # no collection in a fork touches, and so copies, what was there before


def _begin(request: dict[str, Any], output: int, control: int = -1) -> NoReturn:
    """In the fork: become the program."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    keeper = request["program"] == "keeper"
    with open(os.devnull, "r+b", buffering=0) as nowhere:
        os.dup2(nowhere.fileno(), 0)
        os.dup2(output if keeper else nowhere.fileno(), 1)
    os.dup2(output, 2)
    if control >= 0:
        os.dup2(control, CONTROL_FD, inheritable=False)
    os.closerange(3, CONTROL_FD)
    sys.argv = ["penstock", *request["arguments"]]
    sys.orig_argv = [sys.executable, "-m", "sidecar", *request["arguments"]]
    code: Any = 1
    try:
        if control >= 0:
            install(request["calls"])
        code = _run_keeper(request["arguments"]) if keeper else _run_sidecar()
    except BaseException:  # noqa: BLE001 - as the interpreter would show it
        sys.excepthook(*sys.exc_info())
    finally:
        # The interpreter ends in the same way, but for taking down a hundred megabytes of modules.
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def _run_sidecar() -> Any:
    from sidecar import cli

    try:
        cli.main()
    except SystemExit as end:
        return end.code or 0
    return 0


def _run_keeper(arguments: list[str]) -> int:
    from streamer.helpers.keeper import server

    return server.main(arguments)


def scratch() -> Path:
    """A directory in memory, if there is one: a run makes and removes a hundred small files."""
    return Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path("/tmp")
