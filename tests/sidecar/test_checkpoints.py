"""Checkpoints that are uploaded while a trainer writes them: order, changes, failures, kills, hosts."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from sidecar.upload.admission import Admission
from sidecar.upload.checkpoints import Checkpoints
from sidecar.upload.journal import Journal, journal_of
from sidecar.upload.markers import newest_complete, parse_marker
from sidecar.upload.store import Store
from streamer.directory import Directory
from streamer.plan import S3Uri
from streamer.retry import RetryPolicy
from tests.kit.harness import clients_of
from tests.kit.pipes import eventually, until_equal
from tests.kit.puts import error
from tests.kit.raw import etag
from tests.kit.stub import Answer, S3Stub
from tests.kit.users import NOBODY, root

pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking", "credentials")
CLOCK_REALTIME_COARSE = 5
"""Its number (clock_gettime(2))."""
POLICY = RetryPolicy(give_up_after=30, first_wait=0.001, longest_wait=0.01)
PREFIX = "b/run/"
URI = S3Uri("b", "run/")


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamer.s3.object_put.PART", 3000)
    monkeypatch.setattr("sidecar.upload.store.PART", 3000)
    monkeypatch.setattr("sidecar.upload.checkpoints.LONGEST_WAIT", 0.01)


class Visible(dict[str, bytes]):
    """The objects of a stub, which notes them in the order in which they become visible."""

    def __init__(self) -> None:
        super().__init__({"b/other": b""})
        self.log: list[tuple[str, bytes]] = []
        self.on_visible: Callable[[str, bytes], None] = lambda _, __: None

    def __setitem__(self, name: str, data: bytes) -> None:
        super().__setitem__(name, data)
        if name.startswith(PREFIX):
            self.log.append((name.removeprefix(PREFIX), data))
            self.on_visible(*self.log[-1])

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.log]

    @property
    def uploaded(self) -> dict[str, bytes]:
        return {name.removeprefix(PREFIX): data for name, data in self.items() if name.startswith(PREFIX)}


@pytest.fixture
def visible(stub: S3Stub) -> Visible:
    stub.objects = found = Visible()
    return found


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "checkpoints").mkdir()
    return tmp_path / "checkpoints"


@contextlib.asynccontextmanager
async def uploading(
    stub: S3Stub,
    base: Path,
    *,
    hosts: tuple[int, Sequence[str]] = (0, ["algo-1"]),
    job: str = "job",
    policy: RetryPolicy = POLICY,
    proved: bool = False,
) -> AsyncIterator[Checkpoints]:
    """Checkpoints that are watched and uploaded; cancelled at the end, unless they have ended."""
    async with clients_of(stub) as clients:
        await clients.control.opened()
        with contextlib.ExitStack() as stack:
            root = stack.enter_context(await asyncio.to_thread(Directory.at, str(base)))
            journal = await asyncio.to_thread(Journal, root, journal_of(URI))
            stack.callback(journal.close)
            store = Store(
                URI,
                clients.control,
                policy,
                lambda _: None,
                asyncio.Semaphore(4),
                {"Metadata": {"penstock-job": job, "penstock-host": hosts[1][hosts[0]]}},
                journal,
                Admission(),
            )
            await store.abort_left()
            if proved:
                await store.prove("", instead="Penstock.Checkpoints")
            checkpoints = Checkpoints(root, store, hosts)
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(checkpoints.run())
                try:
                    yield checkpoints
                finally:
                    running.cancel()


def content(base: Path) -> dict[str, bytes]:
    """What S3 must have at the end."""
    files = [path for path in base.rglob("*") if path.is_file() and ".penstock" not in str(path)]
    return {str(path.relative_to(base)): path.read_bytes() for path in files}


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def replace(path: Path, data: bytes) -> None:
    """Write as TensorFlow and others do: beside, and rename."""
    write(path.with_name(f"{path.name}.tmp{random.getrandbits(32):x}"), data)
    os.rename(next(path.parent.glob(f"{path.name}.tmp*")), path)


class Trainer:
    """Does random things in a directory, and knows what may be visible, and when."""

    acts = ("write", "write", "replace", "remove", "rename", "link", "hold")

    def __init__(self, base: Path, seed: int) -> None:
        self._base = base
        self._draw = random.Random(seed)
        self._held: dict[str, Any] = {}
        self.closed: list[tuple[str, bytes]] = []
        """Every version, in the order in which they were closed."""
        self._latest: dict[str, int | None] = {}
        """By name, the number of the version that the file has now; None while it changes."""
        self._shown: dict[str, int] = {}
        """The version that is visible."""
        self.errors: list[str] = []

    def _name(self) -> str:
        folder = self._draw.choice(["", "s1/", "s2/", "s2/deep/er/"])
        return folder + self._draw.choice(["checkpoint", "data", "meta"])

    def _data(self) -> bytes:
        return b"%d " % self._draw.getrandbits(64) * self._draw.choice([1, 1, 200, 900])

    def _now(self, name: str, data: bytes) -> None:
        self._latest[name] = len(self.closed)
        self.closed.append((name, data))
        next_tick()

    def act(self) -> None:
        name, data = self._name(), self._data()
        path = self._base / name
        match self._draw.choice(self.acts):
            case "write" if name not in self._held:
                self._latest[name] = None
                write(path, data)
                self._now(name, data)
            case "replace" if name not in self._held:
                self._latest[name] = None
                replace(path, data)
                self._now(name, data)
            case "remove" if name not in self._held:
                self._latest[name] = None
                path.unlink(missing_ok=True)
            case "hold":
                held = self._held.setdefault(f"{name}.log", (self._base / f"{name}.log"))
                if isinstance(held, Path):
                    held.parent.mkdir(parents=True, exist_ok=True)
                    self._held[f"{name}.log"] = held.open("ab", buffering=0)
                self._held[f"{name}.log"].write(data)
            case "rename":
                step = f"step{len(self.closed)}"
                files = {f"{number}": self._data() for number in range(3)} | {"checkpoint": data}
                for file, each in files.items():
                    write(self._base / "tmp-step" / file, each)
                    next_tick()
                os.rename(self._base / "tmp-step", self._base / step)
                for file, each in files.items():
                    self._now(f"{step}/{file}", each)
            case "link" if name not in self._held and not path.exists():
                self._latest[name] = None
                write(self._base / "link.tmp", data)
                path.parent.mkdir(parents=True, exist_ok=True)
                os.link(self._base / "link.tmp", path)
                os.unlink(self._base / "link.tmp")
                self._now(name, data)
            case _:
                pass

    def end(self) -> None:
        while self._held:
            name, file = self._held.popitem()
            file.close()
            self._now(name, (self._base / name).read_bytes())

    async def aclose(self) -> None:
        self.end()

    def see(self, name: str, data: bytes) -> None:
        """Judge the moment when an object becomes visible."""
        if (name, data) not in self.closed:
            if not name.endswith(".log"):
                self.errors.append(f"{name} is torn: {data[:30]!r}, {len(data)} bytes")
            return
        number = max(at for at, each in enumerate(self.closed) if each == (name, data))
        self._shown[name] = number
        for earlier in range(number):
            other = self.closed[earlier][0]
            if other.endswith("checkpoint") and not other.startswith("step"):
                continue  # it may have gone to the end with a file that it names
            if self._latest[other] == earlier and self._shown.get(other, -1) < earlier:
                self.errors.append(f"{name} ({number}) is visible before {other} ({earlier})")


@pytest.mark.parametrize("seed", range(4))
async def test_random_writers(stub: S3Stub, visible: Visible, base: Path, seed: int) -> None:
    """Whatever a trainer does, no object is torn or early, and at its end all is there."""
    trainer, draw = Trainer(base, seed), random.Random(seed)
    visible.on_visible = trainer.see
    async with uploading(stub, base) as checkpoints, contextlib.aclosing(trainer):
        for _ in range(60):
            trainer.act()
            if draw.random() < 0.1:
                stub.puts.refused.append((403, "AccessDenied"))
            if draw.random() < 0.3:
                await asyncio.sleep(draw.random() / 50)
        trainer.end()
        stub.puts.refused.clear()
        assert await checkpoints.finish() == []
        assert not trainer.errors
        assert visible.uploaded.items() >= content(base).items(), "what was removed may be in S3"
        assert checkpoints.waiting_bytes == 0
    stub.puts.refused.clear()
    visible.log.clear()
    async with uploading(stub, base) as checkpoints:
        assert await checkpoints.finish() == []
    assert visible.log == [], "nothing is uploaded again"
    assert not stub.puts.uploads, "those whose abort was refused are aborted now"


async def test_files_that_are_closed_later_keep_no_checkpoint_old(
    stub: S3Stub, visible: Visible, base: Path
) -> None:
    """There may always be one, such as a table of figures that each step writes again."""
    refused = {"/b/run/ckpt-1"}

    def spoil(_: str, request: web.Request, response: web.Response) -> web.Response:
        if request.path not in refused:
            return response
        visible.pop(request.path[1:], None)
        return error(403, "AccessDenied")

    stub.puts.spoil = spoil
    async with uploading(stub, base) as checkpoints:
        write(base / "ckpt-1", b"1")
        await eventually(lambda: bool(stub.puts.seen))
        write(base / "figures", b"1")
        await until_equal(2, lambda: checkpoints.waiting_files)
        refused.add("/b/run/figures")
        refused.remove("/b/run/ckpt-1")
        await until_equal((base / "ckpt-1").stat().st_mtime, lambda: checkpoints.newest)
        assert checkpoints.waiting_files == 1
        refused.clear()


def next_tick() -> None:
    """Await the next tick of the clock that dates files: two files of one tick have no order."""
    began = time.clock_gettime_ns(CLOCK_REALTIME_COARSE)
    while time.clock_gettime_ns(CLOCK_REALTIME_COARSE) == began:
        pass


def tensorflow(base: Path, step: int) -> None:
    replace(base / f"ckpt-{step}.data-00000-of-00001", b"d%d" % step * 2000)
    replace(base / f"ckpt-{step}.index", b"i%d" % step)
    replace(base / "checkpoint", b"ckpt-%d" % step)


def keras_backup(base: Path, step: int) -> None:
    write(base / "latest.weights.h5", b"w%d" % step * 1700)
    write(base / "training_metadata.json", b'{"epoch": %d}' % step)


def hugging_face(base: Path, step: int) -> None:
    tmp = base / f"tmp-checkpoint-{step}"
    for name in ("model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json"):
        write(tmp / name, f"{name} {step} ".encode() * 400)
    os.rename(tmp, base / f"checkpoint-{step}")


def distributed(base: Path, step: int) -> None:
    for rank in range(2):
        write(base / f"step_{step}" / f"__{rank}_0.distcp", b"%d" % rank * 4000)
    replace(base / f"step_{step}" / ".metadata", b"m%d" % step)


def orbax(base: Path, step: int) -> None:
    tmp = base / f"{step}.orbax-checkpoint-tmp-{step}"
    write(tmp / "default" / "d" / "array", b"a%d" % step * 2000)
    write(tmp / "default" / "manifest.ocdbt", b"manifest")
    write(tmp / "_CHECKPOINT_METADATA", b"metadata")
    os.rename(tmp, base / str(step))


WRITERS: dict[Callable[[Path, int], None], list[str]] = {
    tensorflow: ["ckpt-{}.data-00000-of-00001", "ckpt-{}.index", "checkpoint"],
    keras_backup: ["latest.weights.h5", "training_metadata.json"],
    hugging_face: [
        f"checkpoint-{{}}/{name}"
        for name in ("model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json")
    ],
    distributed: ["step_{}/__0_0.distcp", "step_{}/__1_0.distcp", "step_{}/.metadata"],
    orbax: ["{}/default/d/array", "{}/default/manifest.ocdbt", "{}/_CHECKPOINT_METADATA"],
}
"""How frameworks write a checkpoint, and what must become visible, the last one last."""


@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.__name__)
async def test_frameworks(
    stub: S3Stub, visible: Visible, base: Path, writer: Callable[[Path, int], None]
) -> None:
    async with uploading(stub, base) as checkpoints:
        for step in range(3):
            visible.log.clear()
            writer(base, step)
            order = [name.format(step) for name in WRITERS[writer]]
            await until_equal(len(order), lambda: len(visible.log))
            assert sorted(visible.names) == sorted(order), "no temporary name is in S3"
            assert visible.names[-1] == order[-1]
        assert await checkpoints.finish() == []
    assert visible.uploaded == content(base)
    metadata = {"x-amz-meta-penstock-job": "job", "x-amz-meta-penstock-host": "algo-1"}
    assert all(stub.puts.metadata[PREFIX + name] == metadata for name in visible.uploaded)


async def test_a_state_is_never_newer_than_files_that_are_written_again(
    stub: S3Stub, visible: Visible, base: Path
) -> None:
    """Neither if they are closed again before their turn, nor if they are open when it comes."""

    def save(step: int) -> None:
        write(base / "weights", b"%d" % step * 4000)
        next_tick()
        replace(base / "penstock-state.json", b"%d" % step)

    def judge(name: str, data: bytes) -> None:
        if name == "penstock-state.json":
            states.append((data, visible[f"{PREFIX}weights"][:1]))

    states: list[tuple[bytes, bytes]] = []
    visible.on_visible = judge
    async with uploading(stub, base) as checkpoints:
        write(base / "first", b"1")
        await until_equal(["first"], lambda: visible.names)
        stub.puts.refused.extend([(503, "SlowDown")] * 9999)
        save(1)
        await until_equal(4001, lambda: checkpoints.waiting_bytes)
        write(base / "weights", b"2" * 4000)
        await eventually(lambda: next(iter(checkpoints._order._entries)) == "weights")  # noqa: SLF001
        stub.puts.refused.clear()
        await until_equal(0, lambda: checkpoints.waiting_bytes)
        assert states == [(b"1", b"2")]
        save(3)
        with (base / "weights").open("r+b") as weights:
            entries = checkpoints._order._entries  # noqa: SLF001
            await eventually(lambda: any(each.changing for each in entries.values()))
            weights.write(b"4" * 4000)
        await until_equal(0, lambda: checkpoints.waiting_bytes)
        assert states == [(b"1", b"2"), (b"3", b"4")]
        assert await checkpoints.finish() == []


async def test_a_file_that_is_held_open_comes_at_the_end(stub: S3Stub, visible: Visible, base: Path) -> None:
    with (base / "events.tfevents").open("wb", buffering=0) as events:
        async with uploading(stub, base) as checkpoints:
            events.write(b"first")
            for number in range(3):
                write(base / f"{number}", b"x")
                events.write(b"more")
            await eventually(lambda: len(visible.log) == 3)
            assert visible.names == ["0", "1", "2"]
            assert await checkpoints.finish() == []
            assert visible.log[-1] == ("events.tfevents", b"firstmoremoremore")


async def test_many_small_files_and_directories_faster_than_watches(
    stub: S3Stub, visible: Visible, base: Path
) -> None:
    async with uploading(stub, base) as checkpoints:
        write(base / "first", b"1")
        for number in range(400):
            write(base / f"{number % 7}" / f"{number % 50}" / f"{number}", b"%d" % number)
        write(base / "last", b"2")
        await eventually(lambda: len(visible.log) == 402)
        assert visible.names[0] == "first"
        assert visible.names[-1] == "last"
        assert checkpoints.newest == pytest.approx((base / "last").stat().st_mtime)
    assert visible.uploaded == content(base)


async def test_an_overflow_of_events_loses_nothing(stub: S3Stub, visible: Visible, base: Path) -> None:
    most = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    async with uploading(stub, base):
        write(base / "a", b"1")
        await eventually(lambda: visible.log)
        fds = [os.open(base / name, os.O_CREAT | os.O_WRONLY) for name in "bc"]
        for _ in range(most // 2 + 10):
            for name in "bc":
                os.close(os.open(base / name, os.O_WRONLY))
        for fd in fds:
            os.close(fd)
        write(base / "late" / "file", b"2")
        await eventually(lambda: "late/file" in visible.names)
    assert visible.uploaded == content(base)


async def test_what_is_removed_before_its_upload_is_no_error(
    stub: S3Stub, visible: Visible, base: Path
) -> None:
    stub.puts.refused.extend([(403, "AccessDenied")] * 9999)
    async with uploading(stub, base) as checkpoints:
        write(base / "removed", b"x")
        write(base / "gone" / "too", b"x" * 5000)
        await eventually(lambda: checkpoints._store.failed["denied"] >= 2)  # noqa: SLF001
        (base / "removed").unlink()
        os.rename(base / "gone", base / "there")
        write(base / "kept", b"yy")
        await until_equal(5002, lambda: checkpoints.waiting_bytes)
        stub.puts.refused.clear()
        assert await checkpoints.finish() == []
    assert visible.uploaded == {"there/too": b"x" * 5000, "kept": b"yy"}
    assert not stub.puts.uploads


async def test_a_file_that_changes_under_its_upload_is_begun_again(
    stub: S3Stub, visible: Visible, base: Path
) -> None:
    parts: list[int] = []

    def change() -> None:
        parts.append(len(parts))
        if len(parts) == 2:
            (base / "data").write_bytes(b"2" * 7000)

    stub.puts.on_part = change
    async with uploading(stub, base) as checkpoints:
        write(base / "data", b"1" * 9000)
        write(base / "checkpoint", b"names data")
        await eventually(lambda: len(visible.log) == 2)
        assert await checkpoints.finish() == []
    assert visible.uploaded == {"data": b"2" * 7000, "checkpoint": b"names data"}
    assert not stub.puts.uploads


async def test_what_fails_holds_up_what_follows_until_the_end(
    stub: S3Stub, visible: Visible, base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def deny(_: str, request: web.Request, response: web.Response) -> web.Response:
        denied = request.match_info["key"] == "run/denied" and request.method == "PUT"
        if denied:
            stub.objects.pop("b/run/denied", None)
        return error(403, "AccessDenied") if denied else response

    stub.puts.spoil = deny
    caplog.set_level("INFO", "penstock")
    async with uploading(stub, base) as checkpoints:
        write(base / "before", b"1")
        write(base / "denied", b"2")
        write(base / "after", b"3" * 9000)
        store = checkpoints._store  # noqa: SLF001
        await eventually(lambda: store.failed["denied"] >= 5 and store.admission.sent >= 9001)
        assert store.admission.sent == 9001  # the parts of a file that is not visible count
        assert sorted(visible.uploaded) == ["before"]
        assert checkpoints.waiting_bytes == 9001
        [left] = await checkpoints.finish()
    assert left.name == "denied"
    assert "they need s3:PutObject on it" in left.reason
    assert visible.uploaded == {"before": b"1", "after": b"3" * 9000}
    events = [each.getMessage() for each in caplog.records if each.name == "penstock"]
    assert events == [
        "checkpoints cannot be uploaded", "file not uploaded", "checkpoints are uploaded again",
    ]  # fmt: skip


async def test_storage_that_stays_away_ends_the_upload(stub: S3Stub, visible: Visible, base: Path) -> None:
    stub.puts.refused.extend([(503, "SlowDown")] * 9999)
    policy = RetryPolicy(give_up_after=1, first_wait=0.001, longest_wait=0.01)
    async with uploading(stub, base, policy=policy) as checkpoints:
        for number in range(30):
            write(base / f"{number}", b"x")
        left = await checkpoints.finish()
    assert len(left) == 30
    assert all("gave up after" in each.reason for each in left)
    assert visible.uploaded == {}


@pytest.mark.parametrize("date", [{}, {"Date": ""}, {"Date": "Sun, 29 Nov 2026 17:00:00 -0000"}])
async def test_only_what_is_this_jobs_is_replaced(
    stub: S3Stub, visible: Visible, base: Path, date: dict[str, str]
) -> None:
    """What was there before is replaced, what another program makes meanwhile is not."""

    async def earlier(answer: Answer) -> web.Response:
        return web.Response(
            headers=answer.headers | {"Last-Modified": "Wed, 01 Jan 2020 00:00:00 GMT"} | date
        )

    stub.script_head(earlier, earlier, key="b/run/earlier")  # the first one is `put_object`'s
    names = ("earlier", "ours", "foreign", "large")
    dict.update(visible, {f"b/run/{name}": b"1" * (5000 if name == "large" else 1) for name in names})
    ours = {"x-amz-meta-penstock-job": "job", "x-amz-meta-penstock-host": "algo-1"}
    stub.puts.metadata |= {"b/run/ours": ours, "b/run/foreign": ours | {"x-amz-meta-penstock-host": "algo-2"}}
    async with uploading(stub, base) as checkpoints:
        for name in (*names, "new"):
            write(base / name, b"2" * (5000 if name == "large" else 1))
        await eventually(lambda: "new" in visible.names)
        write(base / "new", b"3")
        await eventually(lambda: ("new", b"3") in visible.log)
        stub.objects["b/run/new"] = b"another program's"
        stub.puts.metadata["b/run/new"] = {}
        write(base / "new", b"4")
        left = await checkpoints.finish()
    async with uploading(stub, base) as checkpoints:
        assert {*await checkpoints.finish()} == {*left}, "nor does a restart take others' objects"
    assert sorted(each.name for each in left) == ["foreign", "large", "new"]
    assert all("another program or host has written its key" in each.reason for each in left)
    assert visible.uploaded == {
        "earlier": b"2", "ours": b"2", "foreign": b"1", "large": b"1" * 5000, "new": b"another program's",
    }  # fmt: skip


PROGRAM = """
import asyncio, os, sys
from tests.kit.harness import EAGER, clients_of
from tests.sidecar.test_checkpoints import uploading
import sidecar.upload.store, streamer.s3.object_put
class Stub:
    url = sys.argv[1]
streamer.s3.object_put.PART = sidecar.upload.store.PART = 3000
async def main():
    async with uploading(Stub, sys.argv[2], proved=True) as checkpoints:
        print(*await checkpoints.finish())
asyncio.run(main())
"""


@pytest.mark.parametrize("requests", [1, 2, 4, 6, 9, 12, 14])
def test_a_kill_leaves_nothing_torn_and_nothing_behind(
    stub: S3Stub, visible: Visible, base: Path, requests: int
) -> None:
    """The process is killed after a number of requests, when S3 has done the last one and not answered."""
    running: list[subprocess.Popen[str]] = []
    left = [requests]

    def kill(_: str, __: web.Request, response: web.Response) -> web.Response:
        left[0] -= 1
        if left[0] == 0:
            running[0].kill()
            running[0].wait()
        return response

    def run() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PROGRAM, stub.url, str(base)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    for number, size in enumerate((7000, 10, 3000, 4000, 20)):
        write(base / f"{number}", b"%d" % number * size)
    stub.puts.spoil = kill
    running.append(run())
    assert running[0].communicate() == ("", "")
    assert running[0].returncode == -signal.SIGKILL
    assert visible.uploaded.items() <= content(base).items()
    assert visible.names == [f"{number}" for number in range(len(visible.names))]
    with Directory.at(str(base)) as root:
        journal = Journal(root, journal_of(URI))
        journal.close()
    visible.log.clear()
    again = run()
    assert again.communicate() == ("\n", "")
    assert visible.uploaded == content(base)
    assert not stub.puts.uploads
    assert not journal.files.keys() & set(visible.names), "what was reported is not uploaded again"


@pytest.mark.parametrize("lost", ["of the proof", "of a file"])
async def test_an_upload_whose_id_was_lost_is_aborted_at_the_next_start(
    stub: S3Stub, visible: Visible, base: Path, lost: str
) -> None:
    loses = iter([True] if lost == "of the proof" else [False, True])

    def lose(operation: str, _: web.Request, response: web.Response) -> web.Response:
        if operation == "CreateMultipartUpload" and next(loses, False):
            return error(503, "ServiceUnavailable")
        return response

    stub.puts.spoil = lose
    write(base / "large", b"1" * 7000)
    for uploads in (1, 0):
        async with uploading(stub, base, proved=True) as checkpoints:
            assert await checkpoints.finish() == []
        assert len(stub.puts.uploads) == uploads
    assert visible.uploaded == content(base)


def markers(visible: Visible) -> str | None:
    """The newest complete step by what is in S3."""
    etags = {name: etag(data) for name, data in visible.uploaded.items()}
    found = [parse_marker(data) for name, data in visible.uploaded.items() if name.startswith(".penstock/")]
    return newest_complete([each for each in found if each is not None], etags)


async def test_a_step_is_complete_when_all_hosts_have_marked_it(
    stub: S3Stub, visible: Visible, tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    names = ("algo-1", "algo-2")
    one.mkdir()
    two.mkdir()
    async with (
        uploading(stub, one, hosts=(0, names)) as first,
        uploading(stub, two, hosts=(1, names)) as second,
    ):
        write(one / "s1" / "0", b"1" * 4000)
        write(two / "s1" / "1", b"2" * 4000)
        await until_equal(2, lambda: len(visible.log))
        assert markers(visible) is None, "more files of the step may come"
        write(one / "s1" / ".metadata", b"m")
        write(one / "s2" / "0", b"1")
        write(two / "s2" / "1", b"2")
        await eventually(lambda: markers(visible) == "s1")
        write(two / "tmp-s3" / "1", b"3")
        write(one / "tmp-s3" / "0", b"3")
        os.rename(one / "tmp-s3", one / "s3")
        await eventually(lambda: ".penstock/s3/algo-1.json" in visible.names)
        assert markers(visible) == "s1", "s2 is over on one host, and so is s3"
        os.rename(two / "tmp-s3", two / "s3")
        await eventually(lambda: markers(visible) == "s3")
        write(two / "s1" / "1", b"again")
        await eventually(lambda: ("s1/1", b"again") in visible.log)
        assert markers(visible) == "s3"
        write(two / "s4" / "1", b"4")
        await eventually(lambda: markers(visible) == "s1")
        assert await second.finish() == []
        assert await first.finish() == []
    write(one / "s4" / "0", b"5" * 5000)
    async with uploading(stub, one, hosts=(0, names)) as first:
        assert await first.finish() == []
    assert markers(visible) == "s4"
    document = parse_marker(visible[f"{PREFIX}.penstock/s1/algo-2.json"])
    assert document is not None
    assert document.files == {"s1/1": (5, etag(b"again"))}, "a step that is written again is marked again"


async def test_a_step_that_a_kill_left_without_a_marker_gets_it(
    stub: S3Stub, visible: Visible, base: Path
) -> None:
    hosts = (0, ("algo-1", "algo-2"))
    async with uploading(stub, base, hosts=hosts):
        write(base / "s1" / "a", b"x")
        await until_equal(1, lambda: len(visible.log))
    async with uploading(stub, base, hosts=hosts) as checkpoints:
        write(base / "s2" / "a", b"y")
        await eventually(lambda: ".penstock/s1/algo-1.json" in visible.names)
        assert await checkpoints.finish() == []
    assert visible.names == ["s1/a", ".penstock/s1/algo-1.json", "s2/a", ".penstock/s2/algo-1.json"]


CAP_LEASE = 28


@contextlib.contextmanager
def without_leases() -> Iterator[None]:
    """Let this thread have no lease on the files of others, as an ordinary user has none (capset(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = struct.pack("Ii", 0x20080522, 0)
    before = ctypes.create_string_buffer(24)
    assert libc.capget(header, before) == 0
    effective, *others = struct.unpack("6I", before.raw)
    try:
        assert libc.capset(header, struct.pack("6I", effective & ~(1 << CAP_LEASE), *others)) == 0
        yield
    finally:
        assert libc.capset(header, before.raw) == 0


@root
async def test_a_file_of_another_user_must_rest(
    stub: S3Stub, visible: Visible, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sidecar.upload.checkpoints.CLOSED_REST", 0.3)
    monkeypatch.setattr("sidecar.upload.checkpoints.FOUND_REST", 0.3)
    rested = []
    visible.on_visible = lambda name, _: rested.append(abs(time.time() - (base / name).stat().st_mtime))
    with without_leases():
        async with uploading(stub, base) as checkpoints:
            for name in ("event", "found/by/scan"):
                write(base / name, b"1")
                os.chown(base / name, NOBODY, NOBODY)
            write(tomorrow := base.with_name("tomorrow"), b"by another clock")
            os.chown(tomorrow, NOBODY, NOBODY)
            os.utime(tomorrow, (time.time() + 86_400,) * 2)
            tomorrow.rename(base / "tomorrow")
            for _ in range(20):
                with (base / "event").open("ab") as file:
                    file.write(b"2")
                await asyncio.sleep(0.02)
            await eventually(lambda: visible.uploaded == content(base))
            assert min(rested) >= 0.3
            write(base / "last", b"3")
            os.chown(base / "last", NOBODY, NOBODY)
            assert await checkpoints.finish() == []
    assert visible.uploaded == content(base)


@pytest.mark.parametrize("scans", [False, True], ids=["at the end", "while it trains"])
@pytest.mark.parametrize("removed", [False, True], ids=["renamed", "removed"])
async def test_a_directory_that_the_trainer_makes_anew_is_uploaded(
    stub: S3Stub, visible: Visible, base: Path, monkeypatch: pytest.MonkeyPatch, *, scans: bool, removed: bool
) -> None:
    """Its journal, too, has all files again."""
    if scans:
        monkeypatch.setattr("sidecar.upload.checkpoints.SCAN_EVERY", 0.05)
    async with uploading(stub, base) as checkpoints:
        (base / "first").write_bytes(b"1")
        await until_equal(["first"], lambda: visible.names)
        if removed:
            await asyncio.to_thread(shutil.rmtree, base)
        else:
            await asyncio.to_thread(os.rename, base, base.with_name("old"))
        base.mkdir()
        (base / "second").write_bytes(b"2")
        if scans:
            await until_equal(["first", "second"], lambda: visible.names)
        assert await checkpoints.finish() == []
    assert visible.names == ["first", "second"]
    journal = await asyncio.to_thread((base / journal_of(URI)).read_text)
    assert '"first"' in journal
    assert '"second"' in journal


async def test_a_directory_in_whose_place_is_a_link_is_named(
    stub: S3Stub, visible: Visible, base: Path, tmp_path: Path
) -> None:
    async with uploading(stub, base) as checkpoints:
        await asyncio.to_thread(os.rename, base, base.with_name("old"))
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "secret").write_bytes(b"1")
        base.symlink_to(tmp_path / "elsewhere")
        assert [(each.name, each.reason) for each in await checkpoints.finish()] == [
            (".", "it cannot be read (Not a directory)")
        ]
    assert visible.names == []
