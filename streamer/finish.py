#!/usr/bin/env python3
"""`penstock-finish -- python train.py`: runs the trainer, and ends when its results are in S3.

Python 3.8 and its library are enough: the sidecar puts this file on the volume, for images without Penstock.

    process 1         if this is it: forwards signals to a child, and removes zombies (`fork_if_first`)
    penstock-finish   finds a sidecar, starts the trainer, forwards signals, waits for the trainer's end;
                      then: request ─▶ FIFO ─▶ sidecar, which uploads ─▶ other FIFO ─▶ reply
    trainer           in a session of its own; under a terminal in this one, for Ctrl-C and terminal input

The exit code is the trainer's, 128 + n if signal n ended it, and `NOT_UPLOADED` in place of 0 without the
proof that all is in S3: the sidecar says so, or no sidecar is there, or it ends before it has replied.

Nothing polls. A sidecar holds both FIFOs open. So the request FIFO cannot be opened without one (ENXIO), and
poll(2) reports POLLERR there when the sidecar ends, however it ends. A requester locks that FIFO, because
another one could take its reply. A reply repeats the id of its request, because replies to requesters that
were killed are still in the FIFO, and a request begins with a line feed, to end the half line of such a one.

`penstock exec` waits for the trainer on an event loop, since channels may fail meanwhile; it shares the rest.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import select
import signal
import stat
import sys

PROGRAM = "penstock-finish"
"""Name of this file on the volume, in `input/config`."""
REQUESTS, REPLIES = ".penstock.finish", ".penstock.finished"
"""Names of the FIFOs, in `input/data`."""
NOT_UPLOADED = 9
"""`sidecar.process.exits.Exit.NOT_UPLOADED`."""
REASON = 1024
"""Most characters of the reason of a failure, as SageMaker reads them from `output/failure`."""
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
FORWARDED = (*_STOPS, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that the trainer gets."""


def main() -> None:
    """Run the command line."""
    command = sys.argv[2 if sys.argv[1:2] == ["--"] else 1 :]
    if not command or sys.argv[1] in ("-h", "--help"):
        _say("usage: penstock-finish [--] COMMAND [ARGUMENT]...")
        _say(f"runs COMMAND, the trainer; ends with its code, or {NOT_UPLOADED} for 0 if not all is in S3")
        sys.exit(0 if command else 2)
    fork_if_first()
    sys.exit(_finish(command))


def _finish(command: list[str]) -> int:
    """Run the trainer and wait for the upload; return the exit code."""
    config = os.path.dirname(os.path.abspath(__file__))
    on_volume, environment = config.endswith("/input/config"), os.environ.get("SAGEMAKER_BASE_DIR")
    base = config[: -len("/input/config")] if on_volume else environment or "/opt/ml"
    try:
        os.close(_open(base, REQUESTS, os.O_WRONLY))
    except ConnectionError as error:
        _say(f"the trainer is not started: {error}")
        return NOT_UPLOADED
    numbers = {signal.SIGCHLD, *FORWARDED}
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # as by nohup(1)
        numbers.remove(signal.SIGHUP)
    code = _run(command, numbers)
    _say(f"the trainer ended with {code}; waiting until the sidecar has uploaded its results")
    _note_stops(numbers.intersection(_STOPS))
    try:
        uploaded, text = _ask(base, code)
    except ConnectionError as error:
        uploaded, text = NOT_UPLOADED, f"nothing proves that its results are in S3: {error}"
    if text:
        _say(text)
    return code or uploaded


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it any more
        os.write(2, f"{PROGRAM}: {text}\n".encode())  # a signal may come while sys.stderr is written to


def fork_if_first() -> None:
    """Return in a child if this process is process 1, which ends with the child's exit code; else at once.

    The kernel makes process 1 of a container the parent of processes whose own parent has ended. Each stays a
    zombie until process 1 waits for it; subprocesses and event loops wait for their own children alone.
    """
    if os.getpid() != 1:
        return
    numbers = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    if child := os.fork():
        os._exit(_forward(child, numbers))
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _forward(child: int, numbers: set[signal.Signals]) -> int:
    """Send the child each signal of `numbers`, which are blocked, until it has ended; return its exit code.

    Remove every other child that ends.
    """
    first = os.getpid() == 1
    leader = first or os.getsid(0) == os.getpid()
    while True:
        received = signal.sigwaitinfo(numbers)
        if received.si_signo != signal.SIGCHLD:
            # The kernel sends a terminal's signals to the child too, but a hang-up to the leader alone.
            hung_up = leader and received.si_signo == signal.SIGHUP and received.si_code > 0
            if hung_up or received.si_code <= 0:
                with contextlib.suppress(OSError):
                    os.kill(-1 if first and hung_up else child, received.si_signo)
            continue
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                status = ended[1]
                return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def in_foreground() -> bool:
    """Return whether Ctrl-C in a terminal signals this process group, and so its children too."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (AttributeError, OSError, ValueError):
        return False


def _run(command: list[str], numbers: set[signal.Signals]) -> int:
    """Run the trainer; return its exit code, as a shell would. The signals of `numbers` stay blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would leave no exit code
    alone, ignored = not in_foreground(), [signal.SIGPIPE, signal.SIGXFSZ]  # by Python
    try:
        child = os.posix_spawnp(
            command[0], command, os.environ, setsid=alone, setsigmask=before, setsigdef=ignored
        )
    except OSError as error:
        _say(f"cannot run {command[0]}: {error.strerror}")
        return 127 if error.errno == errno.ENOENT else 126
    return _forward(child, numbers)


def _note_stops(numbers: set[signal.Signals]) -> None:
    """Unblock the signals; say at the first one that the wait goes on, and end at the second."""
    stops = []

    def stop(number: int, _frame: object) -> None:
        stops.append(number)
        name = signal.Signals(number).name
        if len(stops) > 1:
            _say(f"{name}: not waiting for the upload")
            os._exit(NOT_UPLOADED)
        _say(f"{name}: still waiting for the upload; another signal ends the wait with {NOT_UPLOADED}")

    for number in numbers:
        signal.signal(number, stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def _open(base: str, name: str, flags: int) -> int:
    """Open a FIFO of the sidecar's. Raises ConnectionError, with what to do."""
    path = os.path.join(base, "input", "data", name)
    try:
        fd = os.open(path, flags | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENXIO):
            raise ConnectionError(
                f"no sidecar serves {os.path.dirname(path)}: start `penstock run` with this base directory, "
                "mount its volume here, or set SAGEMAKER_BASE_DIR"
            ) from error
        do = "run this as the sidecar's user, or set Penstock.FifoMode"
        raise ConnectionError(f"{path}: {error.strerror}: {do}") from error
    if not stat.S_ISFIFO(os.fstat(fd).st_mode):
        raise ConnectionError(f"{path} is not a FIFO: remove it, and start the sidecar again")
    return fd


def _reason(base: str) -> str:
    """Return what the trainer has written about its failure, at most `REASON` characters."""
    try:
        fd = os.open(os.path.join(base, "output", "failure"), os.O_RDONLY | os.O_NONBLOCK)
        with open(fd, encoding="utf-8", errors="replace") as file:
            return file.read(REASON)
    except OSError:
        return ""


def _ask(base: str, code: int) -> tuple[int, str]:
    """Request the end of the upload; return code and text of the reply. Raises ConnectionError."""
    requests, replies = _open(base, REQUESTS, os.O_WRONLY), _open(base, REPLIES, os.O_RDONLY)
    fcntl.flock(requests, fcntl.LOCK_EX)
    os.set_blocking(requests, True)
    request = {"id": os.urandom(8).hex(), "code": code, "reason": _reason(base) if code else ""}
    line = f"\n{json.dumps(request)}\n".encode()
    with contextlib.suppress(BrokenPipeError):  # poll(2) reports it, too
        while line:
            line = line[os.write(requests, line) :]
    poll, received = select.poll(), b""
    poll.register(requests, 0)
    poll.register(replies, select.POLLIN)
    while dict(poll.poll()).get(replies, 0) & select.POLLIN:
        received += os.read(replies, 1 << 16)
        *lines, received = received.split(b"\n")
        for reply in map(json.loads, lines):
            if reply["id"] == request["id"]:
                return reply["code"], reply["text"]
    raise ConnectionError("the sidecar ended before it had replied; its log says why")


if __name__ == "__main__":
    main()
