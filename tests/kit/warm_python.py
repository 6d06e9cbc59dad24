"""Starts Python programs from a process that has imported a framework: 0.2 s of CPU each, and not several.

    test ── Popen([warm_python(), "-c", PROGRAM]) ──> client ──arguments, environment, 0, 1, 2──> warm process
                                                        │ <──process id, later the exit code──       │ fork
                                                        └──SIGINT, SIGTERM──> program <──────────────┘

The program is a fork of the warm process, with the standard streams, the directory and the environment of its
client. The client ends as the program does, and the program is killed if the client is. Two things differ
from a program that imports the framework itself: its process id is not the client's, and the framework has
read its variables in the environment of the warm process.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from tests.kit.warm import import_all

_LONGEST = 1 << 17
"""Bytes of a request: arguments and environment."""

_CLIENT = """#!{python} -IS
import json, os, signal, socket, sys

if sys.argv[1] not in ("-c", "-m"):
    os.execv({python!r}, sys.argv)  # a program without a framework
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect({path!r})
    request = [sys.argv[1:], dict(os.environ), os.getcwd()]
    socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)  # the program's alone, so that its end is an end
    program = int(server.recv(16))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: os.kill(program, number))
    code = int(server.recv(16))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
"""


@functools.cache
def warm_python(framework: Literal["tensorflow", "torch", "none"] = "tensorflow") -> str:
    """Return the path of a `python` whose programs, by `-c` and `-m`, find the framework imported.

    With "none" they find the sidecar imported.
    """
    directory = tempfile.mkdtemp(prefix="warm-")
    client, path = Path(directory, "python"), str(Path(directory, "socket"))
    client.write_text(_CLIENT.format(python=sys.executable, path=path))
    client.chmod(0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.kit.warm_python", str(listener.fileno()), framework],
            pass_fds=[listener.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )

    def close() -> None:
        process.communicate()  # closes its standard input, which ends it
        shutil.rmtree(directory)

    atexit.register(close)
    return str(client)


def warm_module(name: str, framework: Literal["tensorflow", "torch"] = "tensorflow") -> list[str]:
    """Return a command like `python -m NAME`, a process of its own, that starts warm Python programs."""
    code = f"import runpy, sys; sys.executable = {warm_python(framework)!r}; "
    return [sys.executable, "-c", code + f"runpy.run_module({name!r}, run_name='__main__', alter_sys=True)"]


# In the warm process, and in its forks


def _serve(listener: socket.socket) -> list[Any]:
    """Fork for each client, until standard input ends. Returns the request in each program."""
    guards: dict[int, int] = {}
    """Process ids, by pidfd."""
    while 0 not in (ready := select.select([0, listener.fileno(), *guards], [], [])[0]):
        for pidfd in guards.keys() & ready:
            os.waitpid(guards.pop(pidfd), 0)
            os.close(pidfd)
        if listener.fileno() in ready:
            client = listener.accept()[0]
            if (pid := os.fork()) == 0:
                return _guard(client)
            guards[os.pidfd_open(pid)] = pid
            client.close()
    os._exit(0)


def _guard(client: socket.socket) -> list[Any]:
    """Start the program of one client, and bring its exit code. Returns the request in the program."""
    data, fds, _, _ = socket.recv_fds(client, _LONGEST, 3)
    if (pid := os.fork()) == 0:
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
        os.closerange(3, 1 << 20)
        return list(json.loads(data))
    for fd in (0, 1, *fds):
        os.close(fd)
    client.send(str(pid).encode())
    pidfd = os.pidfd_open(pid)
    if (
        client.fileno() in select.select([client.fileno(), pidfd], [], [])[0]
    ):  # it sends nothing more, so it is gone
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        client.send(str(code).encode())
    os._exit(0)


def _become(environment: dict[str, str], directory: str) -> None:
    """In a program: be as an interpreter is when its first line runs."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - until the process ends, as the interpreter's own
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115


def _run(how: str, program: str, *arguments: str) -> None:
    sys.path[0] = "" if how == "-c" else os.getcwd()
    sys.argv = [how, *arguments]
    if how == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        assert how == "-c", how
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), main.__dict__)


def main() -> None:
    """Serve; in a fork, run the program."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as the test wishes, for each fork
    sys.modules["jax"] = None  # type: ignore[assignment]  # TensorFlow would import it, for a fifth of the CPU
    if sys.argv[2] == "tensorflow":
        importlib.import_module("tensorflow").keras  # noqa: B018 - it imports Keras
    elif sys.argv[2] == "torch":
        importlib.import_module("torch.utils.data")
    else:
        import_all()
    gc.collect()
    gc.freeze()  # no collection in a fork touches, and so copies, what was there before
    arguments, environment, directory = _serve(socket.socket(fileno=int(sys.argv[1])))
    _become(environment, directory)
    _run(*arguments)


if __name__ == "__main__":
    main()
