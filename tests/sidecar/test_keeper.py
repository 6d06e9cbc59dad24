"""A sidecar that dies under a reader, a keeper that does not, and the next sidecar."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import socket
import threading

import pytest

from streamer.trailer import read_trailer
from tests.kit.harness import fill
from tests.kit.processes import Sidecar, job, leftovers, write_job

EPOCHS = 3
SIZES = [3_000_000, 0, 1, 5_500_000, 70_000, 2_000_000]


class Reader:
    """A trainer that reads epoch after epoch, and tells how many bytes it has."""

    def __init__(self, data, epochs=EPOCHS, *, first=0):
        self.received = 0
        self.digests: list[str] = []
        self.error: Exception | None = None
        self._data = data
        self._epochs = range(first, first + epochs)
        self._news = threading.Condition()
        self._due: int | None = None
        self._thread = threading.Thread(target=self._read, name="trainer", daemon=True)
        self._thread.start()

    def _read(self):
        try:
            for epoch in self._epochs:
                digest = hashlib.sha256()
                with open(self._data / f"train_{epoch}", "rb", buffering=0) as file:
                    while chunk := file.read(1 << 16):
                        digest.update(chunk)
                        with self._news:
                            self.received += len(chunk)
                            self._news.notify_all()
                self.digests.append(digest.hexdigest())
        except OSError as error:
            self.error = error
        with self._news:
            self._news.notify_all()

    def wait_for(self, count):
        """Wait until it has so many bytes in all, or has ended."""
        with self._news:
            assert self._news.wait_for(lambda: self.received >= count or not self._thread.is_alive(), 20)

    def join(self):
        self._thread.join(20)
        assert not self._thread.is_alive()
        assert self.error is None
        return self.digests


@contextlib.contextmanager
def running(path, *options):
    """A sidecar, killed at the end of the block as the kernel kills for memory."""
    started = Sidecar(path, *options)
    try:
        yield started
    except BaseException:
        print(*started.events, sep="\n")
        raise
    finally:
        if started.process.poll() is None:
            started.process.kill()
        started.wait()


def keeper_of(started):
    return started.wait_for("keeper")["pid"]


def sha(data):
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def place(stub, tmp_path):
    """A job's path and data directory; keepers that are left over end with the test."""

    def make(**options):
        document = job(stub.url, tmp_path / "ml", "b/train/", **options.pop("penstock", {}))
        document["InputDataConfig"][0] |= options
        return write_job(tmp_path / "job.yaml", document), tmp_path / "ml" / "input" / "data"

    yield make
    socket_path = str(tmp_path / "ml" / "input" / "data" / ".penstock.keeper")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client, contextlib.suppress(OSError):
        client.connect(socket_path)
        pid = int.from_bytes(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], "little")
        os.kill(pid, signal.SIGKILL)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("transport", ["kernel", "copying", "portable"])
def test_a_killed_sidecar_is_a_pause(stub, place, transport):
    """SIGKILL at seeded places, epoch turns among them; the reader is the same throughout."""
    content = fill(stub, SIZES, prefix="b/train/")
    path, data = place(penstock={"Transport": transport})
    size, dice = len(content), random.Random(transport)
    kills = sorted([dice.randrange(EPOCHS * size) for _ in range(3)] + [size, 2 * size - 1])
    reader = None
    for kill_at in kills:
        with running(path, "--keeper", "auto") as started:
            started.wait_for("ready")
            reader = reader or Reader(data)
            reader.wait_for(kill_at)
    with running(path, "--keeper", "auto") as started:
        assert reader.join() == [sha(content)] * EPOCHS
        started.wait_for("epoch complete", epoch=EPOCHS - 1)
        assert started.end() == 0
    assert [read_trailer(str(data), "train", epoch).verdict for epoch in range(EPOCHS)] == ["complete"] * 3
    assert leftovers(data.parent.parent) == [f".train_{epoch}.penstock.json" for epoch in range(EPOCHS)]
