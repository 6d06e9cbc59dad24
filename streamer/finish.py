#!/usr/bin/env python3
"""`penstock-finish -- python train.py`: runs the trainer, and ends when its results are in S3.

Python 3.8 or newer and its library alone: the sidecar puts this file on the volume, for images that contain
nothing of Penstock.

    process 1         if this is it: forwards signals to a child, and removes zombies (`fork_if_first`)
    penstock-finish   finds a sidecar, starts the trainer, forwards signals, waits for the trainer's end;
                      then: request ─▶ FIFO ─▶ sidecar, which uploads ─▶ other FIFO ─▶ reply
    trainer           in a session of its own; under a terminal in this one, for Ctrl-C and terminal input

The exit code is the trainer's, 128 + n if signal n ended it, or `NOT_UPLOADED` without the proof that all is
in S3: the sidecar's reply says so, or no sidecar is there, or it ends before it has replied.

Nothing polls. A sidecar holds both FIFOs open. So the write end of the request FIFO cannot be opened without
a sidecar (ENXIO), and poll(2) reports POLLERR on it when the sidecar ends, however that ends. The requester
locks the request FIFO, because another one could take its reply. A reply repeats the id of its request: those
to requesters that were killed are still in the FIFO. A request begins with a line feed, which ends the half
line of such a one.

`penstock exec` has `fork_if_first` and `in_foreground` from here. Its own wait for the trainer is on an event
loop, because channels may fail meanwhile.
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
_USAGE = f"""Usage: {PROGRAM} [--] COMMAND [ARGUMENT]...

Runs COMMAND, the trainer, and waits until the sidecar has uploaded its results to S3. The exit code is
COMMAND's, or {NOT_UPLOADED} if something was not uploaded.
"""


def main() -> None:
    """Run the command line."""
    command = sys.argv[1:]
    if command[:1] in (["-h"], ["--help"]):
        sys.stdout.write(_USAGE)
        return
    if command[:1] == ["--"]:
        del command[0]
    if not command:
        sys.stderr.write(_USAGE)
        sys.exit(2)
    fork_if_first()
    sys.exit(_finish(command))


def _finish(command: list[str]) -> int:
    """Run the trainer and wait for the upload; return the exit code."""
    base = _base()
    try:
        os.close(_open_requests(base))
    except _NoReplyError as error:
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
    except _NoReplyError as error:
        uploaded, text = NOT_UPLOADED, f"nothing proves that its results are in S3: {error}"
    if text:
        _say(text)
    return uploaded or code


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it any more
        sys.stderr.write(f"{PROGRAM}: {text}\n")
        sys.stderr.flush()


def _base() -> str:
    """Return the base directory: two above this file if that is on the volume."""
    config = os.path.dirname(os.path.abspath(__file__))
    if config.endswith("/input/config"):
        return os.path.dirname(os.path.dirname(config))
    return os.environ.get("SAGEMAKER_BASE_DIR") or "/opt/ml"


# The trainer


def fork_if_first() -> None:
    """Return in a child if this process is process 1, which ends with the child's exit code; else at once.

    The kernel makes process 1 of a container the parent of every process of the trainer whose own parent has
    ended. Each stays a zombie until process 1 waits for it; subprocesses and event loops wait for their own
    children alone.
    """
    if os.getpid() != 1:
        return
    numbers = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    child = os.fork()
    if child:
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
        while True:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if ended == child:
                return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
            if not ended:
                break


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
    try:
        child = os.posix_spawnp(
            command[0],
            command,
            os.environ,
            setsid=not in_foreground(),
            setsigmask=before,
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # which Python ignores
        )
    except OSError as error:
        _say(f"cannot run {command[0]}: {error.strerror}")
        return 127 if error.errno == errno.ENOENT else 126
    return _forward(child, numbers)


# The request


class _NoReplyError(Exception):
    """The sidecar has not replied; the text says why, and what to do."""


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


def _open_requests(base: str) -> int:
    """Open the request FIFO for writing. Raises _NoReplyError."""
    path = os.path.join(base, "input", "data", REQUESTS)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENXIO):
            raise _NoReplyError(
                f"no sidecar serves {os.path.dirname(path)}: start `penstock run` with this base directory, "
                "mount its volume here, or set SAGEMAKER_BASE_DIR"
            ) from error
        raise _NoReplyError(
            f"{path}: {error.strerror}: run this as the sidecar's user, or set Penstock.FifoMode"
        ) from error
    if not stat.S_ISFIFO(os.fstat(fd).st_mode):
        raise _NoReplyError(f"{path} is not a FIFO: remove it, and start the sidecar again")
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
    """Request the end of the upload; return the code and the text of the reply. Raises _NoReplyError."""
    requests = _open_requests(base)
    path = os.path.join(base, "input", "data", REPLIES)
    try:
        replies = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise _NoReplyError(f"{path}: {error.strerror}") from error
    fcntl.flock(requests, fcntl.LOCK_EX)
    os.set_blocking(requests, True)
    request = {"id": os.urandom(8).hex(), "code": code, "reason": _reason(base) if code else ""}
    line = f"\n{json.dumps(request)}\n".encode()
    try:
        while line:
            line = line[os.write(requests, line) :]
    except BrokenPipeError:
        line = b""  # poll(2) reports it, too
    poll, received = select.poll(), b""
    poll.register(requests, 0)
    poll.register(replies, select.POLLIN)
    while dict(poll.poll()).get(replies, 0) & select.POLLIN:
        received += os.read(replies, 1 << 16)
        *lines, received = received.split(b"\n")
        for reply in map(json.loads, lines):
            if reply["id"] == request["id"]:
                return reply["code"], reply["text"]
    raise _NoReplyError("the sidecar ended before it had replied; its log says why")


if __name__ == "__main__":
    main()
