"""Runs a sidecar under lasting faults: `python -m benchmarks.endurance --gigabytes 100 [--into FILE]`.

    nginx, 1 % of requests at 256 kB/s ─ random RSTs ─▶ penstock run ─▶ FIFO ─▶ reader: SHA-256 of every epoch
                                                            └ memory and descriptors, once a second

One channel streams the same objects epoch after epoch. The reader is a `PipeStream`, so every epoch is proven
complete, and its hash is compared. A thread resets connections: it picks one of nginx's sockets at random,
duplicates it (pidfd_getfd(2), allowed to a parent) and dissolves its association (connect(2) with AF_UNSPEC),
for which the kernel sends RST at once. Another thread takes a sample of the sidecar once a second.

The exit code is 1 unless every epoch's hash is right.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Self

from benchmarks.dataset import MIB, DataSet, Shape
from benchmarks.origin import SLOW_REQUESTS, OriginFailed, missing, running_origin
from benchmarks.ours import Penstock
from benchmarks.process import Child, ProcessFailed, memory
from benchmarks.report import insert_into
from benchmarks.task import Stream, Task
from streamer.readers.core.stream import PipeStream

BEGIN = "<!-- endurance: begin; written by python -m benchmarks.endurance -->"
END = "<!-- endurance: end -->"
SHAPE = Shape("endurance", 1, 64, 16 * MIB)
CHANNEL = "channel-00"
QUARTERS = 4
_PIDFD_GETFD = 438
"""Number of the system call pidfd_getfd(2) on every architecture (since Linux 5.6)."""


@dataclass
class Sample:
    """Figures of the sidecar at one moment."""

    memory: int
    files: int
    received: int


@dataclass
class Found:
    """The results of the run."""

    epochs: int = 0
    wrong: int = 0
    bytes: int = 0
    seconds: float = 0.0
    resets: int = 0
    samples: list[Sample] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)


class Resetter:
    """Resets connections of a server's processes, one at a time, at random moments."""

    def __init__(self, master: int, *, every: float, seed: int = 0) -> None:
        """`every`: mean seconds between two resets."""
        self.made = 0
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._dice = random.Random(seed)  # noqa: S311 - chance, not a secret
        self._every = every
        self._over = threading.Event()
        self._master = master
        self._thread = threading.Thread(target=self._run, name="resetter")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._dice.expovariate(1 / self._every)):
            self.made += self.reset()

    def reset(self) -> bool:
        """Reset one connection; return whether there was one."""
        found = list(self._connections())
        chosen = self._dice.choice(found) if found else None
        for one in found:
            if one is chosen:
                # A struct sockaddr of family AF_UNSPEC; the kernel ignores its other bytes.
                self._libc.connect(one.fileno(), bytes(16), 16)
            one.close()
        return chosen is not None

    def _connections(self) -> Iterator[socket.socket]:
        """Yield duplicates of the workers' connected sockets."""
        with open(f"/proc/{self._master}/task/{self._master}/children", encoding="ascii") as file:
            workers = [int(pid) for pid in file.read().split()]
        for worker in workers:
            with contextlib.suppress(OSError):
                process = os.pidfd_open(worker)
                try:
                    for name in os.listdir(f"/proc/{worker}/fd"):
                        copy = self._libc.syscall(_PIDFD_GETFD, process, int(name), 0)
                        if copy < 0:
                            continue
                        try:
                            one = socket.socket(fileno=copy)
                        except OSError:
                            os.close(copy)  # not a socket
                            continue
                        try:
                            tcp = one.family == socket.AF_INET and one.getpeername()
                        except OSError:
                            tcp = None  # a listening socket
                        if tcp:
                            yield one
                        else:
                            one.close()
                finally:
                    os.close(process)


class Observer:
    """Takes a sample of a sidecar once a second and reads its log."""

    def __init__(self, child: Child, admin: str, found: Found) -> None:
        self._child = child
        self._admin = admin
        self._found = found
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._look, name="observer"),
            threading.Thread(target=self._drain, name="log", daemon=True),
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._threads[0].join()
        self._child.terminate()
        self._threads[1].join()

    def _look(self) -> None:
        while not self._over.wait(1.0):
            pid = self._child.pid
            files = len(os.listdir(f"/proc/{pid}/fd"))
            self._found.samples.append(Sample(memory(pid)[0], files, self._found.bytes))

    def _drain(self) -> None:
        with contextlib.suppress(ProcessFailed):
            while True:
                self._child.line(deadline=time.monotonic() + 3600)

    def status(self) -> dict[str, Any]:
        """Return the channel's section of `/status`."""
        with urllib.request.urlopen(self._admin + "status", timeout=10) as answer:  # noqa: S310 - our own child
            status: dict[str, Any] = json.load(answer)
        channel: dict[str, Any] = status["channels"][CHANNEL]
        return {"transport": status["transport"]} | channel


def read_epochs(data: DataSet, directory: str, *, wanted: int, found: Found) -> None:
    """Read whole epochs until `wanted` bytes are read. Raises StreamError for an epoch that is not proven."""
    expected = data.expected_sha256(0, data.shape.stream_bytes)
    buffer = bytearray(MIB)
    view = memoryview(buffer)
    while found.bytes < wanted:
        digest = sha256()
        with PipeStream(os.path.join(directory, f"{CHANNEL}_{found.epochs}")) as stream:
            while count := stream.readinto(buffer):
                digest.update(view[:count])
                found.bytes += count
        found.epochs += 1
        if digest.hexdigest() != expected:
            found.wrong += 1
            print(f"epoch {found.epochs - 1} is wrong", file=sys.stderr)
        print(f"{time.strftime('%H:%M:%S')} {found.bytes / 1e9:.1f} GB", flush=True)


def endure(*, gigabytes: float, every: float, factor: float = 1.0, shared: str = "/dev/shm") -> Found:  # noqa: S108 - a tmpfs
    """Do the whole run and return its results. Raises OriginFailed, ProcessFailed, StreamError."""
    found = Found()
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-endurance-", dir=shared))
        data = DataSet(SHAPE.scaled(factor), os.path.join(directory, "data"))
        data.create()
        origin = stack.enter_context(running_origin(data, os.path.join(directory, "origin")))
        ours = Penstock("penstock", {"default": {}}, {"default": {}}, {})
        shape = data.shape
        keys = [shape.key(index) for index in range(shape.objects)]
        stream = Stream(bucket=shape.bucket(0), keys=keys, size=shape.size, fifo=ours.fifo(directory, 0))
        task = Task(url=origin.urls["uneven"], ca_bundle=None, streams=[stream], setting={})
        running = ours.start(task, directory)
        stack.callback(running.close)
        observer = stack.enter_context(Observer(running.child, running.admin, found))
        resetter = stack.enter_context(Resetter(origin.pid, every=every))
        began = time.monotonic()
        fifos = os.path.dirname(stream.fifo)
        read_epochs(data, fifos, wanted=int(gigabytes * 1e9), found=found)
        found.seconds = time.monotonic() - began
        found.status, found.resets = observer.status(), resetter.made
    return found


def markdown(found: Found) -> str:
    """Return the section of docs/explanation/reliability.md."""
    status = found.status
    hedges = {name: count for name, count in status["hedges"].items() if count}
    retries = {name: count for name, count in status["retries"].items() if count}
    state = "every hash right" if not found.wrong else f"{found.wrong} EPOCHS WRONG"
    rate = found.bytes / found.seconds / 1e9
    reported = (
        f"Measured on {time.strftime('%Y-%m-%d')}: {found.bytes / 1e9:.1f} GB in {found.epochs} epochs and "
        f"{found.seconds:.0f} s ({rate:.2f} GB/s, the reader's SHA-256 included), {state}, transport "
        f"{status['transport']}. {SLOW_REQUESTS} of all requests were slow, {found.resets} connections "
        f"were reset. Retries: {_listed(retries)}; hedges: {_listed(hedges)}."
    )
    lines = [reported, "", "| quarter | resident memory, MiB | open descriptors |", "|---|---|---|"]
    for quarter, samples in enumerate(_quarters(found.samples), 1):
        memories = [each.memory / MIB for each in samples]
        files = [each.files for each in samples]
        lines.append(f"| {quarter} | {_range(memories)} | {_range(files)} |")
    lines += ["", "Minimum, median and maximum of a look every second."]
    return "\n".join(lines) + "\n"


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"


def _quarters(samples: list[Sample]) -> list[list[Sample]]:
    """Return the samples of each quarter of the time; fewer groups if there are too few samples."""
    size = -(-len(samples) // QUARTERS) or 1
    return [samples[at : at + size] for at in range(0, len(samples), size)]


def _range(values: list[float] | list[int]) -> str:
    return f"{min(values):.0f} / {statistics.median(values):.0f} / {max(values):.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.endurance", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--gigabytes", type=float, default=100.0, help="at least so much is read")
    parser.add_argument("--every", type=float, default=0.5, help="mean seconds between two resets")
    parser.add_argument("--scale", type=float, default=1.0, help="of the objects; 1 takes 1 GiB of /dev/shm")
    parser.add_argument("--into", metavar="FILE", help="replace the results in this Markdown file")
    options = parser.parse_args()
    if reason := missing():
        parser.error(reason)
    try:
        found = endure(gigabytes=options.gigabytes, every=options.every, factor=options.scale)
    except (OriginFailed, ProcessFailed) as error:
        print(error, file=sys.stderr)
        return 1
    text = markdown(found)
    print(text)
    if options.into:
        insert_into(options.into, text, begin=BEGIN, end=END)
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
