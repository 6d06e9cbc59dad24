"""Starts `penstock` from a process that has imported it: a tenth of a second of CPU, and not a whole one.

    test ──arguments, environment, descriptors──> warm process ──fork──> penstock, from its entry point on
    test <────────────── the exit code, over a pipe of its own ────────────────┘

The fork is a process of its own with the standard streams that the test gives. At its end it waits for its
threads, calls the functions of `atexit` and flushes its streams, as an interpreter does. Three things differ:
module globals are those of the import, /proc/PID/cmdline is the warm process's, and after an exit code the
modules are not taken down, which is most of the CPU time of a short command. A test to which that matters
starts the command itself, by `PENSTOCK`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import pkgutil
import selectors
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

_LONGEST = 1 << 17
"""Bytes of a request: arguments and environment."""


class Started:
    """A process that was forked for us; what of `subprocess.Popen` the tests use."""

    def __init__(self, pid: int, ended: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = ended
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """The exit code, if it has ended."""
        with self._lock:
            if self.returncode is None:
                with selectors.DefaultSelector() as ready:
                    ready.register(self._ended, selectors.EVENT_READ)
                    if not ready.select(0):
                        return None
                self._end()
        return self.returncode

    def wait(self) -> int:
        """Wait for the exit code; negative for a signal."""
        with self._lock:
            if self.returncode is None:
                self._end()
        assert self.returncode is not None
        return self.returncode

    def _end(self) -> None:
        self.returncode = int(os.read(self._ended, 16) or -signal.SIGKILL)
        os.close(self._ended)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Warm:
    """The warm process, which ends with this one."""

    def __init__(self) -> None:
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        command = [sys.executable, "-m", "tests.kit.warm", str(other.fileno())]
        with other:
            self._process = subprocess.Popen(
                command, pass_fds=[other.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )

    def start(
        self, *arguments: str, stdin: int, stdout: int, stderr: int, env: dict[str, str] | None = None
    ) -> Started:
        """Start `penstock` with these arguments and descriptors, in this directory and environment."""
        request = {"arguments": arguments, "env": dict(env or os.environ), "cwd": os.getcwd()}
        ours, theirs = os.pipe()
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [stdin, stdout, stderr, theirs])
            os.close(theirs)
            return Started(int(self._socket.recv(16)), ours)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


@functools.cache
def warm() -> Warm:
    """The one of this process."""
    made = Warm()
    atexit.register(made.close)
    return made


# In the warm process


def _serve(requests: socket.socket) -> dict[str, Any]:
    """Fork as asked, and tell exit codes, until the socket closes. Returns the request in each fork."""
    running: dict[int, tuple[int, int]] = {}
    """By pidfd: the process id, and the descriptor that wants the exit code."""
    with selectors.DefaultSelector() as ready:
        ready.register(requests, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if key.fd in running:
                    ready.unregister(key.fd)
                    pid, ended = running.pop(key.fd)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    with contextlib.suppress(BrokenPipeError):
                        os.write(ended, str(code).encode())
                    os.close(ended)
                    os.close(key.fd)
                    continue
                data, fds, _, _ = socket.recv_fds(requests, _LONGEST, 4)
                if not data:
                    os._exit(0)
                if (pid := os.fork()) == 0:
                    for number in range(3):
                        os.dup2(fds[number], number)
                    os.closerange(3, 1 << 20)
                    return dict(json.loads(data))
                for fd in fds[:3]:
                    os.close(fd)
                pidfd = os.pidfd_open(pid)
                running[pidfd] = pid, fds[3]
                ready.register(pidfd, selectors.EVENT_READ)
                requests.send(str(pid).encode())


def import_all() -> None:
    """Import what a run imports, the late imports too, and no readers: those bring TensorFlow and PyTorch."""
    packages = ["sidecar", "streamer"]
    while packages:
        package = importlib.import_module(packages.pop())
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            if module.name == "streamer.readers" or module.name.endswith("__main__"):
                continue
            importlib.import_module(module.name)
            packages += [module.name] if module.ispkg else []
    for name in ("aiobotocore.session", "aiobotocore.httpsession", "uvloop", "yaml", "rich.table"):
        importlib.import_module(name)
    assert "tensorflow" not in sys.modules
    assert threading.active_count() == 1, threading.enumerate()
    gc.collect()
    gc.freeze()  # no collection in a fork touches, and so copies, what was there before


def _become(request: dict[str, Any]) -> None:
    """In a fork: be as `python -m sidecar` is when its first line runs."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = ["penstock", *request["arguments"]]
    sys.orig_argv = [sys.executable, "-m", "sidecar", *request["arguments"]]
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - until the process ends, as the interpreter's own
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    gc.unfreeze()


class _Ending:
    """Ends a fork with its exit code, after all else that ends with the process."""

    def __init__(self) -> None:
        self.code: int | None = None
        # Called after every function that is registered later.
        atexit.register(self._end)

    def _end(self) -> None:
        if self.code is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self.code)


def main() -> None:
    """Serve; in a fork, run the command."""
    ending = _Ending()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as the test wishes, for each fork
    import_all()
    _become(_serve(socket.socket(fileno=int(sys.argv[1]))))
    from sidecar.__main__ import main as penstock

    try:
        penstock()
    except SystemExit as end:
        if isinstance(end.code, int):
            ending.code = end.code
        raise


if __name__ == "__main__":
    main()
