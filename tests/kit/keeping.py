"""A keeper as a process, and a sidecar's side of its protocol by hand: one packet after the other.

`KeeperProcess` runs `streamer.helpers.keeper` as users run it. `Talk` is a connection to it that asks and
waits; what it does not wait for it keeps.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import streamer
from streamer.helpers.keeper.protocol import LONGEST_MESSAGE
from streamer.helpers.keeper_connect import command

PATIENCE = 30.0
"""Seconds for any one answer."""


class Talk:
    """One connection to a keeper."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(PATIENCE)
        self.sock.connect(str(path))
        self.asked: dict[str, tuple[Path, int]] = {}
        """FIFO and epoch that each channel was to be opened with."""
        self.kept: list[tuple[dict[str, Any], int]] = []
        """Answers that nobody has waited for yet, each with its descriptor or -1."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def say(self, do: str, channel: str | None = None, *fds: int, **fields: Any) -> None:
        message = {"do": do} | ({} if channel is None else {"channel": channel}) | fields
        socket.send_fds(self.sock, [json.dumps(message).encode()], fds)

    def hear(self, did: str, channel: str | None = None) -> tuple[dict[str, Any], int]:
        """The next answer of this kind about this channel, and its descriptor or -1. Raises EOFError."""
        while True:
            for index, (message, _) in enumerate(self.kept):
                if message["did"] == did and (channel is None or message["channel"] == channel):
                    return self.kept.pop(index)
            data, fds, _, _ = socket.recv_fds(self.sock, LONGEST_MESSAGE, 4)
            if not data:
                raise EOFError("the keeper has closed the connection")
            message = json.loads(data)
            if message["did"] == "failed" and message["do"] == "open":
                time.sleep(0.05)  # something is short; as long as it is there is no other way
                self.open(message["channel"], *self.asked[message["channel"]])
            else:
                self.kept.append((message, fds[0] if fds else -1))

    def hello(self) -> dict[str, dict[str, Any]]:
        """What the keeper holds, by channel."""
        self.say("hello")
        count = self.hear("hello")[0]["channels"]
        held = [self.hear("held")[0] for _ in range(count)]
        return {message["channel"]: message for message in held}

    def open(self, channel: str, fifo: Path, epoch: int = 0) -> None:
        """Ask for the FIFO to be opened, and again while it cannot be; `hear` will say `opened`."""
        self.asked[channel] = fifo, epoch
        fd = os.open(fifo, os.O_PATH)
        try:
            self.say("open", channel, fd, epoch=epoch, digest="d", skipped=0)
        finally:
            os.close(fd)

    def close(self) -> None:
        for _, fd in self.kept:
            if fd >= 0:
                os.close(fd)
        self.sock.close()


class KeeperProcess:
    """A keeper that listens at `path`."""

    def __init__(self, path: Path, process: subprocess.Popen[str]) -> None:
        self.path = path
        self.process = process

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def stopped(self) -> bool:
        """Whether SIGSTOP has come into effect in every thread."""
        threads = Path(f"/proc/{self.pid}/task").iterdir()
        return all(_state(thread / "stat") in "tT" for thread in threads)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)


@contextlib.contextmanager
def injected(keeper: KeeperProcess, fault: str) -> Iterator[None]:
    """Have a keeper's system calls fail as `fault` says: of strace's `-e inject=`."""
    options = ["-f", "-e", f"trace={fault.partition(':')[0]}", "-e", f"inject={fault}", "-o", "/dev/null"]
    process = subprocess.Popen(["strace", *options, "-p", str(keeper.pid)], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    with process.stderr:
        try:
            assert "attached" in process.stderr.readline()
            yield
        finally:
            process.kill()
            process.wait()


def _state(stat: Path) -> str:
    return stat.read_text().rpartition(")")[2].split()[0]


@contextlib.contextmanager
def keeper_process(
    path: Path,
    *,
    limits: dict[int, int] | None = None,
    idle_for: float | None = None,
    installation: Path | None = None,
) -> Iterator[KeeperProcess]:
    """A keeper until the end of the block. `limits`: by RLIMIT_*, soft and hard alike, from its start on.

    `installation`: the directory of the package `streamer` that it is started from; this one's by default.
    """
    arguments = command(str(path), idle_for=idle_for)
    if installation is not None:
        arguments = [each.replace(streamer.__path__[0], str(installation)) for each in arguments]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    keeper = KeeperProcess(path, process)
    try:
        for kind, most in (limits or {}).items():
            resource.prlimit(process.pid, kind, (most, most))
        assert process.stdout.readline() == "ready\n"
        yield keeper
    finally:
        with contextlib.suppress(OSError):
            keeper.signal(signal.SIGCONT)
            keeper.signal(signal.SIGKILL)
        process.kill()
        process.wait()
        process.stdout.close()
