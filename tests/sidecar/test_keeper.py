"""A sidecar that dies under a reader, a keeper that does not, and the next sidecar."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import itertools
import json
import os
import random
import re
import select
import signal
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from streamer.formats.recordio import encode
from streamer.helpers.keeper.protocol import address
from streamer.readers import PipeReader
from streamer.readers.core.position import ReaderPosition
from tests.kit.harness import MORE_THAN_A_FIFO, fill
from tests.kit.patience import Patience
from tests.kit.processes import PENSTOCK, Sidecar, job, leftovers, penstock, sidecar, write_job
from tests.kit.stub import S3Stub
from tests.kit.trailers import published_trailer

EPOCHS = 3
SIZES = [3_000_000, 0, 1, 5_500_000, 70_000, 2_000_000]


class Reader:
    """A trainer that reads epoch after epoch, and tells how many bytes it has."""

    def __init__(self, data: Path, epochs: int = EPOCHS, *, first: int = 0) -> None:
        self.received = 0
        self.digests: list[str] = []
        self.error: Exception | None = None
        self._data = data
        self._epochs = range(first, first + epochs)
        self._news = threading.Condition()
        self._due: int | None = None
        self._thread = threading.Thread(target=self._read, name="trainer", daemon=True)
        self._thread.start()

    def _read(self) -> None:
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

    def wait_for(self, count: int) -> None:
        """Wait until it has `count` bytes in all, or has ended."""
        with self._news:
            while self.received < count and self._thread.is_alive():
                self._news.wait(1)

    def join(self) -> list[str]:
        self._thread.join()
        assert not self._thread.is_alive()
        assert self.error is None
        return self.digests


@contextlib.contextmanager
def open_after_ready(path: str, data: Path) -> Iterator[io.FileIO]:
    """A reader of epoch 0 whose sidecar has died."""
    with sidecar(path, "--keeper", "auto") as started:
        started.wait_for("ready")
        file = open(data / "train_0", "rb", buffering=0)  # noqa: SIM115 - closed below
        file.read(1)
    with file:
        yield file


def keeper_of(started: Sidecar) -> Any:
    return started.wait_for("keeper")["pid"]


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def place(stub: S3Stub, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """A job's path and data directory; keepers that are left over end with the test."""

    def make(**options: Any) -> Any:
        document = job(stub.url, tmp_path / "ml", "b/train/", **options.pop("penstock", {}))
        document["InputDataConfig"][0] |= options
        return write_job(tmp_path / "job.yaml", document), tmp_path / "ml" / "input" / "data"

    yield make
    with (
        contextlib.suppress(OSError),
        address(str(tmp_path / "ml" / "input" / "data" / ".penstock.keeper")) as reachable,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client,
    ):
        client.connect(reachable)
        pid = int.from_bytes(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], "little")
        os.kill(pid, signal.SIGKILL)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("transport", ["splice", "aiobotocore"])
def test_a_killed_sidecar_is_a_pause(stub: S3Stub, place: Any, transport: str) -> None:
    """SIGKILL at seeded places, epoch turns among them; the reader is the same throughout."""
    content = fill(stub, SIZES, prefix="b/train/")
    path, data = place(penstock={"Transport": transport})
    size, dice = len(content), random.Random(transport)
    kills = [dice.randrange(EPOCHS * size) for _ in range(3)] + [size, 2 * size - 1]
    killed(path, data, [sha(content)] * EPOCHS, kills)
    assert [published_trailer(data, "train", epoch).state for epoch in range(EPOCHS)] == ["complete"] * 3
    left = [name for name in leftovers(data.parent.parent) if name != ".penstock.keeper"]  # it ends by itself
    assert left == [f".train_{epoch}.penstock.json" for epoch in range(EPOCHS)]


def killed(path: str, data: Path, truth: list[str], kills: list[int]) -> None:
    """Kill a sidecar when its reader has some bytes, and the next; compare what the reader got."""
    reader = None
    for kill_at in sorted(kills):
        with sidecar(path, "--keeper", "auto") as started:
            started.wait_for("ready")
            reader = reader or Reader(data, len(truth))
            reader.wait_for(kill_at)
    with sidecar(path, "--keeper", "auto") as started:
        started.wait_for("ready")
        assert reader is not None
        assert reader.join() == truth
        assert started.end() == 0


@pytest.mark.timeout(120)
def test_inflated_objects_go_on_at_the_exact_byte(stub: S3Stub, place: Any) -> None:
    """What was inflated before is inflated again from an object's begin, and dropped."""
    dice = random.Random(5)
    contents = [dice.randbytes(1_000_000) * 9 for _ in range(5)]
    stub.objects |= {f"b/train/{i}": gzip.compress(data, 1) for i, data in enumerate(contents)}
    whole = b"".join(map(encode, contents))
    path, data = place(CompressionType="Gzip", RecordWrapperType="RecordIO")
    kills = [dice.randrange(len(whole)), len(whole) + dice.randrange(len(whole))]
    killed(path, data, [sha(whole)] * 2, kills)
    assert published_trailer(data, "train", 1).bytes_delivered == len(whole)


@pytest.mark.timeout(120)
def test_every_epoch_of_an_arranged_channel_goes_on(stub: S3Stub, place: Any) -> None:
    """Shuffled and wrapped, the rest of each epoch is of that epoch's own order."""
    fill(stub, [200_000 + i for i in range(40)], prefix="b/train/")
    path, data = place(ShuffleConfig={"Seed": 7}, RecordWrapperType="RecordIO")
    with sidecar(path) as started:
        started.wait_for("ready")
        truth = Reader(data).join()
        assert started.end() == 0
    assert len(set(truth)) == EPOCHS
    dice = random.Random(3)
    killed(path, data, truth, [dice.randrange(EPOCHS * 8_000_000) for _ in range(3)])


def test_a_reader_that_leaves_while_no_sidecar_is_there(stub: S3Stub, place: Any) -> None:
    content = fill(stub, SIZES, prefix="b/train/")
    path, data = place()
    with open_after_ready(path, data) as file:
        assert file.read(10)
    with sidecar(path, "--keeper", "auto") as started:
        started.wait_for("epoch abandoned", epoch=0)
        assert Reader(data, 1, first=1).join() == [sha(content)]
        assert started.end() == 0


@pytest.mark.parametrize("options", [(), ("--keeper", "auto")])
def test_a_reader_that_comes_when_another_has_left_does_not_wait_for_ever(
    stub: S3Stub, place: Any, options: tuple[str, ...]
) -> None:
    """The keeper has closed the FIFO by then, which cannot be withdrawn: its directory has another name."""
    content = fill(stub, SIZES, prefix="b/train/")
    path, data = place()
    moved = data.with_name("moved")
    for _ in range(20):
        with sidecar(path, *options) as started:
            started.wait_for("ready")
            first = os.open(data / "train_0", os.O_RDONLY | os.O_NONBLOCK)
            data.rename(moved)
            started.wait_for("waiting for this machine")
            os.close(first)
            if 'penstock_reader_connects_total{channel="train"} 1.0\n' not in started.get("/metrics")[1]:
                moved.rename(data)  # noticed before the reader, so the FIFO was not opened
                started.end()
                continue
            patience = Patience(30)
            while (
                'penstock_reader_disconnects_total{channel="train"} 1.0\n' not in started.get("/metrics")[1]
            ):
                assert not patience.exhausted()
            # Without O_NONBLOCK this would wait here for a writer.
            with open(os.open(moved / "train_0", os.O_RDONLY | os.O_NONBLOCK), "rb") as second:
                moved.rename(data)
                assert select.select([second], [], [], 30)[0]
                os.set_blocking(second.fileno(), True)
                assert sha(second.read()) == sha(content)
            assert published_trailer(data, "train", 0).state == "complete"
            assert started.end() == 0
            return
    pytest.fail("the rename was always noticed before the reader")


@pytest.mark.parametrize("options", [(), ("--keeper", "auto")])
def test_bytes_that_a_reader_leaves_in_the_fifo_are_not_read(
    stub: S3Stub, place: Any, options: tuple[str, ...]
) -> None:
    """The FIFO has all bytes of the epoch when the reader leaves, which reads ten of them."""
    fill(stub, [40_000], prefix="b/train/")
    path, data = place()
    with sidecar(path, *options) as started:
        started.wait_for("ready")
        for epoch in range(8):
            with open(data / f"train_{epoch}", "rb", buffering=0) as file:
                assert len(file.read(10)) == 10
            started.wait_for("epoch abandoned", epoch=epoch)
        assert started.end() == 0


@pytest.mark.parametrize("options", [(), ("--keeper", "auto")])
def test_a_fifo_that_is_replaced_while_it_waits_is_offered_again(
    stub: S3Stub, place: Any, options: tuple[str, ...]
) -> None:
    """By the process that waits in the one before: sidecar or keeper."""
    content = fill(stub, SIZES, prefix="b/train/")
    path, data = place()
    with sidecar(path, *options) as started:
        started.wait_for("ready")
        for replaced in range(1, 4):
            os.mkfifo(data / "other")
            (data / "other").rename(data / "train_0")
            stated = started.wait_for(
                "the FIFO was removed or replaced before its reader came, and is offered again",
                path=str(data / "train_0"),
                times=replaced,
            )
            assert stated["channel"] == "train"
        assert Reader(data, 2).join() == [sha(content)] * 2
        assert started.end() == 0


def test_a_machine_without_inotify_says_so_once(stub: S3Stub, place: Any) -> None:
    """It streams nevertheless."""
    content = fill(stub, SIZES, prefix="b/train/")
    path, data = place()
    refusing = ["strace", "-D", "-f", "-o", "/dev/null", "-e", "inject=inotify_init1:error=EMFILE"]
    with sidecar(path, prefix=refusing) as started:
        stated = started.wait_for("names of FIFOs are not watched", directory=str(data))
        assert stated["error"] == "Too many open files"
        started.wait_for("ready")
        assert Reader(data, 2).join() == [sha(content)] * 2
        assert started.end() == 0
    assert len([each for each in started.events if each["event"] == stated["event"]]) == 1


def test_a_changed_plan_fails_by_name_and_the_fifo_stays_open(stub: S3Stub, place: Any) -> None:
    fill(stub, SIZES, prefix="b/train/")
    path, data = place()
    with open_after_ready(path, data) as file:
        received = len(file.read(100))
        stub.objects["b/train/more"] = b"more"
        with sidecar(path, "--keeper", "auto") as started:
            failed = started.wait_for("epoch failed", epoch=0)
            assert "the plan has changed" in failed["error"]
            assert failed["fifo"] == "held open"
            assert "`penstock restart` goes on at the exact byte" in failed["do"]
            assert started.get("/readyz")[0] == 503
            trailer = published_trailer(data, "train", 0)
            assert trailer.state == "failed"
            assert trailer.bytes_delivered >= received
            assert started.end() == 6
        assert published_trailer(data, "train", 0).state == "failed"


def test_a_keeper_that_dies_ends_the_sidecar_and_proves_nothing(stub: S3Stub, place: Any) -> None:
    """The reader sees an end, as without a keeper, and the trailer does not say complete."""
    fill(stub, [MORE_THAN_A_FIFO], prefix="b/train/")
    path, data = place()
    with sidecar(path, "--keeper", "auto") as started:
        started.wait_for("ready")
        with open(data / "train_0", "rb", buffering=0) as file:
            file.read(10)
            os.kill(keeper_of(started), signal.SIGKILL)
            assert started.process.wait() == 7
    assert published_trailer(data, "train", 0).state == "stopped"
    lost, ended = started.events[-3:-1]  # before the harness's own
    assert (lost["event"], ended["event"], ended["code"]) == ("the keeper is lost", "ended", 7)
    assert lost["error"] == ended["error"]
    assert "has died" in ended["error"]


def test_a_keeper_that_is_not_there(stub: S3Stub, place: Any, tmp_path: Path) -> None:
    fill(stub, [10], prefix="b/train/")
    path, _ = place()
    with sidecar(path, "--keeper", str(tmp_path / "none")) as started:
        assert started.process.wait() == 7
    assert "penstock keeper" in started.wait_for("ended", code=7)["error"]


def began(admin: str) -> float:
    """The start that the metrics of a sidecar have."""
    with urllib.request.urlopen(admin + "metrics") as answer:
        text = answer.read().decode()
    return float(re.findall(r"^process_start_time_seconds (.*)$", text, re.MULTILINE)[0])


@pytest.mark.timeout(120)
@pytest.mark.parametrize("options", [(), ("--keeper", "auto")])
def test_sigusr2_is_a_pause(stub: S3Stub, place: Any, options: tuple[str, str]) -> None:
    """One process, its code loaded anew, under a reader in mid-epoch and one that has not come."""
    content = fill(stub, SIZES, prefix="b/train/")
    path, data = place()
    with sidecar(path, *options) as started:
        first = began(started.wait_for("ready")["admin"])
        started.process.send_signal(signal.SIGUSR2)
        assert began(started.wait_for("ready", times=2)["admin"]) > first, "the counters begin anew"
        reader = Reader(data)
        reader.wait_for(len(content) + 7)
        base = str(data.parent.parent)
        done = penstock("restart", "--base-directory", base)
        assert done.returncode == 0, done.stderr
        assert f"process {started.process.pid}, is ready again" in done.stdout
        assert reader.join() == [sha(content)] * EPOCHS
        started.wait_for("epoch complete", epoch=EPOCHS - 1)
        started.wait_for("ready", times=3)
        assert started.end() == 0


def test_a_signal_while_a_restart_loads_its_code_ends_the_sidecar(
    stub: S3Stub, place: Any, tmp_path: Path
) -> None:
    """In order, and the keeper has the FIFO. The job file is a FIFO, for whose reads the test can wait."""
    fill(stub, SIZES, prefix="b/train/")
    path, _ = place()
    document, pipe = Path(path).read_text(), tmp_path / "again.yaml"
    os.mkfifo(pipe)
    with sidecar(str(pipe)) as started:
        pipe.write_text(document)
        started.wait_for("ready")
        started.process.send_signal(signal.SIGUSR2)
        with open(pipe, "w", encoding="utf-8") as file:  # it is read before the restart, too
            pipe.unlink()
            os.mkfifo(pipe)
            file.write(document)
        with open(pipe, "w", encoding="utf-8") as file:
            started.process.send_signal(signal.SIGUSR2)
            started.process.send_signal(signal.SIGTERM)
            file.write(document)
        assert started.wait() == 0
    with sidecar(path, "--keeper", "auto") as started:
        assert started.wait_for("keeper")["holds"] == ["train"]
        assert started.end() == 0


def test_restart_says_why_there_is_none(stub: S3Stub, place: Any, tmp_path: Path) -> None:
    """The job file is wrong now, the objects are gone, and the sidecar of `exec` has no restart."""
    content = fill(stub, SIZES, prefix="b/train/")
    path, data = place()
    base = str(data.parent.parent)
    with sidecar(path) as started:
        started.wait_for("ready")
        document = Path(path).read_text()
        Path(path).write_text("Penstok: {}\n")
        done = penstock("restart", "--base-directory", base)
        assert (done.returncode, done.stdout) == (7, "")
        assert f"process {started.process.pid}, cannot restart and goes on: {path} has" in done.stderr
        assert "Penstok: is not a key" in done.stderr
        assert "Penstok" in started.wait_for("cannot restart, going on")["error"]
        assert Reader(data, 1).join() == [sha(content)]
        Path(path).write_text(document)
        stub.objects.clear()
        done = penstock("restart", "--base-directory", base)
        assert (done.returncode, done.stdout) == (7, "")
        assert f"process {started.process.pid}, ended instead of restarting" in done.stderr
        assert started.process.wait() == 4
    fill(stub, SIZES, prefix="b/train/")
    path, data = place()
    trainer = ["sh", "-c", "echo started; read line"]
    command = [*PENSTOCK, "exec", "-c", path, *trainer]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "started\n"
        done = penstock("restart", "--base-directory", str(data.parent.parent))
        assert done.returncode == 7
        assert "penstock exec serves" in done.stderr
        started.communicate("\n")
        assert started.returncode == 0


def test_resume_begins_where_a_state_was_taken(
    stub: S3Stub, place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first byte of S3 that is missing on, and with the reader's counter of epochs."""
    records = [b"%d " % number * (number % 300) for number in range(20_000)]
    stub.objects["b/train/0"] = b"".join(map(encode, records))
    path, data = place(penstock={"PartSize": "64KiB"})
    context: dict[str, Any] = {
        "pipe_dir": str(data),
        "config_dir": str(data.parent / "config"),
        "state_dir": str(tmp_path / "ml" / "pipe_state"),
    }
    with sidecar(path) as started:
        started.wait_for("ready")
        reader = PipeReader("train", "RecordIO", **context)
        list(reader)
        assert list(itertools.islice(reader, 15_000)) == records[:15_000]
        state = reader.state_dict()
        assert started.end() == 0
    assert (state["epoch"], state["records"]) == (1, 15_000)
    # What the first one asked for at last may be seen only now.
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIARESUMED")
    with sidecar(path, "--resume", json.dumps(state)) as started:
        started.wait_for("ready")
        again = PipeReader("train", "RecordIO", **context)
        again.load_state_dict(state)
        assert list(again) == records[15_000:]
        assert 'penstock_resumes_total{channel="train",of="epoch"} 1.0' in started.get("/metrics")[1]
        ranges = [get.range for get in stub.seen if "AKIARESUMED/" in (get.authorization or "")]
        starts = [int(each.removeprefix("bytes=").split("-")[0]) for each in ranges if each]
        resumed = list(itertools.takewhile(lambda start: start >= state["offset"], starts))
        assert state["offset"] in resumed  # in any order; then come epoch 2's, which begin at byte 0
        assert len(resumed) > 40  # of some 75
        trailer = published_trailer(data, "train", 1)
        assert (trailer.state, trailer.bytes_skipped) == ("complete", state["offset"])
        assert list(again) == records
        assert started.end() == 0


def test_resume_of_another_plan_is_refused(stub: S3Stub, place: Any) -> None:
    fill(stub, [10], prefix="b/train/")
    path, _ = place()
    state = ReaderPosition("train", 0, offset=5, digest="0" * 64).state()
    done = penstock("run", "-c", path, "--resume", json.dumps(state))
    assert done.returncode == 2
    assert "--resume-anyway" in done.stderr
