"""A keeper whose system calls fail, one that lacks descriptors or threads, and processes that stand still.

Also a keeper whose installation is removed, or has modules beside it that hide the standard library's.

None of that may end a FIFO: what its reader got by then would look like a whole epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import json
import os
import random
import resource
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import streamer
from streamer.errors import KeeperLost
from streamer.helpers.keeper_client import KeeperClient
from streamer.helpers.keeper_connect import connected
from streamer.plan import Position, ResumePoint
from tests.kit.harness import fill
from tests.kit.keeping import KeeperProcess, Talk, injected, keeper_process
from tests.kit.pipes import eventually
from tests.kit.processes import job, sidecar, write_job
from tests.kit.stub import S3Stub

CHANNELS = 3
SIZE = 3_000_000
"""Bytes of each: more than FIFO and pipe hold."""


class Trainer:
    """Reads FIFOs to their ends, each in a thread; `got` has what came so far, `ended` who saw an end."""

    def __init__(self, directory: Path, names: Iterable[str]) -> None:
        self.got = {name: bytearray() for name in names}
        self.ended: set[str] = set()
        self._threads = [
            threading.Thread(target=self._read, args=(directory, name), daemon=True) for name in names
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, directory: Path, name: str) -> None:
        with open(directory / f"{name}_0", "rb", buffering=0) as file:
            while chunk := file.read(1 << 16):
                self.got[name] += chunk
        self.ended.add(name)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()
            assert not thread.is_alive()


def write(fd: int, data: bytes) -> None:
    """All of `data`, as the pipe has room."""
    os.set_blocking(fd, True)
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]
    os.close(fd)


def stream(directory: Path, talk: Talk, contents: dict[str, bytes]) -> None:
    """One epoch of every channel by way of the keeper; fails if one ends before it is told to."""
    for name in contents:
        os.mkfifo(directory / f"{name}_0")
        talk.open(name, directory / f"{name}_0")
    trainer = Trainer(directory, contents)
    writers = []
    for name, data in contents.items():
        _, fd = talk.hear("opened", name)
        writers.append(threading.Thread(target=write, args=(fd, data), daemon=True))
        writers[-1].start()
    for writer in writers:
        writer.join()
    for name, data in contents.items():
        talk.say("settle", name)
        assert talk.hear("settled", name)[0]["accepted"] == len(data)
    assert not trainer.ended
    for name in contents:
        talk.say("close", name)
    trainer.join()
    assert trainer.got == contents


def test_the_next_sidecar_is_told_of_bytes_in_the_pipe(tmp_path: Path) -> None:
    """The first sidecar fills FIFO and pipe of a reader that does not read, and dies."""
    fifo = tmp_path / "train_0"
    os.mkfifo(fifo)
    with (
        keeper_process(tmp_path / "keeper"),
        open(os.open(fifo, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as reader,
    ):
        with Talk(tmp_path / "keeper") as first:
            first.open("train", fifo)
            _, fd = first.hear("opened", "train")
            room = fcntl.fcntl(reader, fcntl.F_GETPIPE_SZ) + fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ)
            write(fd, bytes(room))  # ends when the keeper has filled the FIFO
        with Talk(tmp_path / "keeper") as second:
            assert second.hello()["train"]["accepted"] == room


FAULTS = {
    "accept4": ("EMFILE", "ENFILE", "ENOMEM", "ECONNABORTED"),
    "recvmsg": ("ENOMEM", "ENOBUFS", "EIO"),
    "sendmsg": ("ENOMEM", "ENOBUFS", "ETOOMANYREFS"),
    "splice": ("ENOMEM", "EIO", "EINVAL"),
    "epoll_ctl": ("ENOMEM", "ENOSPC"),
    "epoll_wait": ("ENOMEM", "EINVAL"),
    "pipe2": ("EMFILE", "ENFILE", "ENOMEM"),
    "clone3": ("EAGAIN", "ENOMEM"),
    "ioctl": ("EIO", "ENOMEM"),
    "poll": ("ENOMEM",),
    "getsockopt": ("ENOBUFS",),
}
"""Calls that the keeper makes for a channel, and how each can fail."""


def drawn(seed: int, count: int) -> Iterator[str]:
    """`strace` options for `count` faults, each call at least once."""
    dice = random.Random(seed)
    for call, _ in zip(itertools.cycle(FAULTS), range(count), strict=False):
        when = f"{dice.randint(1, 12)}+{dice.choice((97, 5, 9))}"
        yield f"{call}:error={dice.choice(FAULTS[call])}:when={when}"


@pytest.mark.timeout(180)
def test_no_errno_ends_a_fifo(tmp_path: Path) -> None:
    """One call or every few fail from a place on; the calls are those of the whole process."""
    contents = {f"c{number}": random.Random(number).randbytes(SIZE) for number in range(CHANNELS)}
    for index, fault in enumerate(drawn(1, 2 * len(FAULTS))):
        directory = tmp_path / str(index)
        directory.mkdir()
        try:
            with (
                keeper_process(directory / "keeper") as keeper,
                injected(keeper, fault),
                Talk(directory / "keeper") as talk,
            ):
                stream(directory, talk, contents)
                assert keeper.alive
        except BaseException:
            print(fault)
            raise


@contextlib.contextmanager
def descriptors(pid: int, count: int) -> Iterator[None]:
    """A process that may open no more than `count` descriptors until the end of the block."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (count, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def test_a_lack_of_descriptors_is_told_and_waited_for(
    stub: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight channels under a keeper that has descriptors for four of them."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIATEST")
    names = [f"c{number}" for number in range(8)]
    contents = {name: fill(stub, [SIZE], prefix=f"b/{name}/", seed=i) for i, name in enumerate(names)}
    document = job(stub.url, tmp_path / "ml", *(f"b/{name}/" for name in names))
    data = tmp_path / "ml" / "input" / "data"
    with (
        keeper_process(tmp_path / "keeper") as keeper,
        descriptors(keeper.pid, 24),
        sidecar(write_job(tmp_path / "job.yaml", document), "--keeper", str(tmp_path / "keeper")) as running,
    ):
        running.wait_for("ready")
        trainer = Trainer(data, names)
        reported = running.wait_for("waiting for this machine")
        assert "the keeper cannot open a FIFO of" in reported["error"]
        assert "ulimit -n" in reported["error"]
        with descriptors(keeper.pid, 1024):
            trainer.join()
        assert trainer.got == contents
        assert running.end() == 0


@pytest.fixture
def installation(tmp_path: Path) -> Path:
    """A copy of the package `streamer`, among modules that would hide those of the standard library."""
    site = tmp_path / "site"
    shutil.copytree(streamer.__path__[0], site / "streamer", ignore=shutil.ignore_patterns("__pycache__"))
    for name in {*sys.stdlib_module_names, "sitecustomize", "usercustomize"}:
        (site / f"{name}.py").write_text("raise SystemExit('not the standard library')")
    return site / "streamer"


def test_a_keeper_survives_the_removal_of_its_installation(installation: Path, tmp_path: Path) -> None:
    """Every request, and each end of a sidecar, while no module is left to import."""
    with keeper_process(tmp_path / "keeper", installation=installation) as keeper:
        shutil.rmtree(installation.parent)
        with Talk(tmp_path / "keeper") as first:
            assert first.hello() == {}
            stream(tmp_path, first, {"train": bytes(SIZE)})
            first.say("forget", "train")
            os.mkfifo(tmp_path / "expected")
            path_fd = os.open(tmp_path / "expected", os.O_PATH)
            first.say("expect", "expected", path_fd, epoch=2, digest="d", skipped=5)
            first.hear("expected")
            read_fd, write_fd = os.pipe()
            adopted = {"epoch": 1, "digest": "d", "skipped": 0, "moved": 7, "mark": [1, 2]}
            first.say("adopt", "adopted", write_fd, **adopted)
            assert first.hear("adopted")[0]["accepted"] == 7
            first.say("adopt", "adopted", write_fd, **adopted)
            assert first.hear("failed")[0]["do"] == "adopt"
            first.say("mark", "adopted", mark=[3, 4])
            first.say("no such request")
            with pytest.raises(EOFError):
                first.hear("anything")
        with Talk(tmp_path / "keeper") as second:
            held = second.hello()
            assert (held["expected"]["epoch"], held["adopted"]["mark"]) == (2, [3, 4])
            second.say("settle", "adopted")
            assert second.hear("settled")[0]["state"] == "open"
            os.close(read_fd)
            while second.hello()["adopted"]["state"] != "gone":
                pass
        keeper.signal(signal.SIGTERM)
        assert keeper.process.wait() == 0
        assert not (tmp_path / "keeper").exists()
    os.close(path_fd)
    os.close(write_fd)


def stopped(keeper: KeeperProcess) -> None:
    keeper.signal(signal.SIGSTOP)
    while not keeper.stopped:
        time.sleep(0.001)  # nothing tells when a process has stopped that is not a child


MANY = 1024


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("first", ["settle", "mark"])
async def test_a_request_that_finds_the_keeper_dead_ends_the_wait_of_flush(
    tmp_path: Path, first: str
) -> None:
    """The request fails before the event loop reports the end of the connection."""
    with keeper_process(tmp_path / "keeper") as keeper:
        client = await connected(str(tmp_path / "keeper"))
        pid_fd = os.pidfd_open(keeper.pid)
        keeper.signal(signal.SIGKILL)
        assert select.select([pid_fd], [], []) == ([pid_fd], [], [])  # blocks the event loop until the death
        os.close(pid_fd)
        if first == "settle":
            with pytest.raises(KeeperLost):
                await client.settle("train")
        else:
            client.mark("train", ResumePoint())
        with pytest.raises(KeeperLost):
            await client.flush()
        client.close()


@pytest.mark.timeout(120)
async def test_a_thousand_fifos_outlive_a_restart_and_whoever_stands_still(
    tmp_path: Path, many_descriptors: None
) -> None:
    """The keeper stands still while a sidecar asks; then the next sidecar, while the keeper answers."""
    names = [f"channel-{number:04d}-{'x' * 64}" for number in range(MANY)]
    path_fds, read_fds = [], []
    with keeper_process(tmp_path / "keeper") as keeper:
        client = await connected(str(tmp_path / "keeper"))
        stopped(keeper)
        async with asyncio.TaskGroup() as group:
            opened = []
            for name in names:
                os.mkfifo(tmp_path / name)
                path_fds.append(os.open(tmp_path / name, os.O_PATH))
                opening = client.open(name, Position(), path_fds[-1], digest="d" * 64)
                opened.append(group.create_task(opening))
                read_fds.append(os.open(tmp_path / name, os.O_RDONLY | os.O_NONBLOCK))
            flushing = group.create_task(client.flush())
            await asyncio.sleep(0)  # the tasks run, and have asked
            assert not flushing.done(), "all requests are sent"
            keeper.signal(signal.SIGCONT)
        for number, each in enumerate(opened):
            assert os.write(each.result(), b"%d" % number)
            os.close(each.result())
        client.close()

        # The next one asks and does not listen: what it does not take must stop nothing.
        with Talk(tmp_path / "keeper") as dull:
            dull.say("hello")
            for name in names:
                dull.sock.settimeout(0.2)
                with contextlib.suppress(TimeoutError):
                    dull.say("settle", name)
                    continue
                break
            for number, fd in enumerate(read_fds):
                os.set_blocking(fd, True)
                assert os.read(fd, 100) == b"%d" % number
        again = await connected(str(tmp_path / "keeper"))
        assert [again.held[name].accepted for name in names] == [len(b"%d" % n) for n in range(MANY)]
        assert {held.state for held in again.held.values()} == {"open"}
        stopped(keeper)
        for name in names:
            again.done(name)
        flushing = asyncio.create_task(again.flush())
        await asyncio.sleep(0)
        assert not flushing.done(), "all requests are sent"
        keeper.signal(signal.SIGCONT)
        await flushing
        assert {os.read(fd, 100) for fd in read_fds} == {b""}
        again.close()
    for fd in path_fds + read_fds:
        os.close(fd)


async def test_a_keeper_that_is_killed_behind_many_replies_is_lost() -> None:
    """uvloop reports the reset of the connection once; the replies before the end take several turns."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    client = KeeperClient("keeper", ours)
    for _ in range(200):
        theirs.send(json.dumps({"did": "opened", "channel": "left"}).encode())
    ours.send(b"{}")  # the keeper ends before it reads this
    theirs.close()
    await eventually(lambda: not client.lives)
    client.close()
