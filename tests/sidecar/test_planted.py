"""Links, and other things, that whoever may write on the volume plants where the sidecar writes.

No file outside of the base directory is made, changed or removed, even if a name becomes a link between two
steps. At worst the job ends with an error, and the next start mends what was planted.
"""

from __future__ import annotations

import os
import random
import resource
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest

from sidecar.job.layout import Layout
from sidecar.job.reader_state import set_reader_state
from streamer.directory import Directory
from streamer.errors import Denied, SinkError
from streamer.key_list import key_list_path
from streamer.plan import ObjectStart
from streamer.sink.fifo import FifoDirectory
from streamer.sink.key_list import KeyListWriter
from streamer.trailer import SIDECAR_LOCK, Trailer
from tests.kit.harness import fill
from tests.kit.processes import job, penstock, sidecar, write_job
from tests.kit.stub import S3Stub, fails
from tests.sidecar.test_download import fetch, tree

NAMES = [
    ".c.penstock.new", ".c.penstock.new/sub", ".c.penstock.new/sub/deep", ".c.penstock.part", "c", "c/sub",
    ".c.penstock.begun", ".c.penstock.files",
]  # fmt: skip
"""What a download of `c` makes, files and directories."""


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A directory beside the volume, with files that a download would have the names of."""
    place = tmp_path / "outside"
    for name in ("0", "0000", "sub/0001", "sub/deep/0002", "old/0"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(b"kept")
    return place


@pytest.fixture
def data(tmp_path: Path) -> Path:
    place = tmp_path / "data"
    place.mkdir()
    return place


def nested(stub: S3Stub) -> dict[str, bytes]:
    """Fill the stub with objects in three folders; return the files that they are."""
    due = {
        f"{('', 'sub/', 'sub/deep/')[number % 3]}{number:04}": os.urandom(2000) for number in range(30)
    } | {"sub/empty": b""}
    stub.objects |= {f"b/data/{path}": content for path, content in due.items()}
    return due


def files_of(directory: Path, due: dict[str, bytes]) -> dict[str, bytes]:
    """The files of `directory` that are due: what somebody else has put beside them is not the download's."""
    return {path: (directory / path).read_bytes() for path in due}


def link(path: Path, target: Path) -> None:
    path.symlink_to(target)


def link_to_file(path: Path, target: Path) -> None:
    path.symlink_to(target / "0000")


def hard_link(path: Path, target: Path) -> None:
    path.hardlink_to(target / "0000")


def fifo(path: Path, target: Path) -> None:
    del target
    os.mkfifo(path)


def deep(path: Path, target: Path) -> None:
    nest(path, target, 10)


def nest(path: Path, target: Path, depth: int) -> None:
    """Make directories in directories, with odd names and with links beside them."""
    path.mkdir()
    here = os.open(path, os.O_RDONLY)
    for number in range(depth):
        os.symlink(target, f"link {number}", dir_fd=here)
        os.mkdir(b"\xff\n" if number % 2 else "0", dir_fd=here)
        step = os.open(b"\xff\n" if number % 2 else "0", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = step
    os.close(here)


PLANTS = [link, link_to_file, hard_link, fifo, deep]


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "c" and not name.startswith("c/")])
async def test_what_is_planted_before_a_start_is_replaced_and_not_followed(
    stub: S3Stub, outside: Path, data: Path, name: str, plant: Callable[[Path, Path], None]
) -> None:
    """At a start that finds nothing, and at one that finds a download that has not ended."""
    due, kept = nested(stub), tree(outside)
    await interrupted_at(stub, data)
    for _ in range(2):
        path = data / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(path):
            path.rename(data / f"aside {random.random()}")
        plant(path, outside)
        assert await fetch(stub, data)
        assert (files_of(data / "c", due), tree(outside)) == (due, kept)
        (data / "c").rename(data / f"old {random.random()}")


async def interrupted_at(stub: S3Stub, data: Path) -> None:
    """A download that has some whole files, and ends by an error."""
    stub.script(*[fails(403, "AccessDenied")] * 9, key="b/data/sub/deep/0029")
    with pytest.raises(Denied):
        await fetch(stub, data)
    stub.faults.clear()


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("name", ["c/sub", "c/sub/deep", "c/0000"])
async def test_what_is_planted_in_a_published_directory_is_replaced_and_not_followed(
    stub: S3Stub, outside: Path, data: Path, name: str, plant: Callable[[Path, Path], None]
) -> None:
    due, kept = nested(stub), tree(outside)
    assert await fetch(stub, data)
    (data / name).rename(data / "aside")
    plant(data / name, outside)
    assert await fetch(stub, data)
    assert (files_of(data / "c", due), tree(outside)) == (due, kept)


class Swapper:
    """A thread that replaces names of `data` by links to `outside`, until it is stopped."""

    def __init__(self, data: Path, outside: Path) -> None:
        self.plants = 0
        self._data, self._outside = data, outside
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        dice = random.Random(1)
        while not self._stop.is_set():
            *above, name = dice.choice(NAMES).split("/")
            planted, aside = self._data.with_name("planted"), self._data.with_name(f"aside {self.plants}")
            try:
                if not os.path.lexists(planted):
                    planted.symlink_to(dice.choice([self._outside, self._outside / "sub"]))
                with Directory.at(str(self._data)) as data, data.enter(*above) as here:
                    if here.status(name):
                        os.rename(name, aside, src_dir_fd=here.fd)
                    os.rename(planted, name, dst_dir_fd=here.fd)
                self.plants += 1
            except OSError:  # the download was faster
                continue


async def test_directories_that_become_links_while_downloads_run(
    stub: S3Stub, outside: Path, data: Path
) -> None:
    due, kept = nested(stub), tree(outside)
    with Swapper(data, outside) as race:
        for number in range(100):
            stub.objects["b/data/version"] = str(number).encode()
            try:
                await fetch(stub, data)
            except SinkError:
                assert tree(outside) == kept
            if race.plants > 1000:
                break
    assert race.plants > 50
    assert tree(outside) == kept
    for name in os.listdir(data):  # and the next start mends it all
        if name == "c":
            (data / name).rename(data.with_name("taken away"))
    assert await fetch(stub, data)
    assert tree(data / "c") == due | {"version": stub.objects["b/data/version"]}


def opened(epoch: int) -> Trailer:
    return Trailer(channel="train", epoch=epoch, state="open", bytes_total=1)


@pytest.mark.parametrize("step", ["prepare", "publish", "clear", "conclude", "key_list"])
def test_a_replaced_fifo_directory_is_not_followed(data: Path, outside: Path, step: str) -> None:
    """Neither for FIFOs and trailers nor for key lists; and once it is back, the step is repeated."""
    (outside / ".train_0.penstock.json").write_bytes(b"kept")
    (outside / "train_0").write_bytes(b"kept")
    fifos, kept = FifoDirectory(str(data), "train", opening=opened), tree(outside)
    steps: dict[str, Callable[[], Any]] = {
        "prepare": lambda: fifos.prepare(1),
        "publish": lambda: fifos.publish(opened(0)),
        "clear": fifos.clear,
        "conclude": lambda: fifos.conclude(opened(0)),
        "key_list": lambda: fifos.key_list(
            0, lambda _: iter(()), first=0, consumed=0, ahead=True, held=False
        ).close(),
    }
    fifos.prepare(0)
    data.rename(data.with_name("away"))
    data.symlink_to(outside)
    with pytest.raises(SinkError, match="Not a directory"):
        steps[step]()
    assert tree(outside) == kept
    data.unlink()
    data.with_name("away").rename(data)
    steps[step]()
    fifos.close(forget=True)
    assert not [name for name in os.listdir(data) if "json" in name]


def test_a_key_list_that_is_another_file_s_name_is_not_continued(data: Path, outside: Path) -> None:
    """The sidecar would cut it off, or write its lines there."""
    victim = outside / "0"
    victim.write_bytes(b"")
    path = Path(key_list_path(str(data), "train", 0))
    for plant in (Path.hardlink_to, Path.symlink_to):
        plant(path, victim)
        with pytest.raises(OSError, match="not of this user alone|symbolic links"):
            KeyListWriter(
                str(path), "r", lambda _: iter([ObjectStart(0, 0, "k", "b")]),
                first=0, consumed=0, ahead=True, held=True,
            )  # fmt: skip
        path.unlink()
    assert victim.read_bytes() == b""


@pytest.mark.parametrize("name", ["input", "input/config", "pipe_state", "output"])
def test_a_directory_of_the_tree_that_is_a_link_is_refused(tmp_path: Path, outside: Path, name: str) -> None:
    layout, kept = Layout(str(tmp_path / "ml")), sorted(outside.rglob("*"))
    (tmp_path / "ml" / name).parent.mkdir(parents=True)
    (tmp_path / "ml" / name).symlink_to(outside)

    def laid_out() -> None:
        layout.create()
        set_reader_state(layout, {"train": 1})

    with pytest.raises(SinkError, match=f"{name}.*(is a link|Not a directory)"):
        laid_out()
    assert sorted(outside.rglob("*")) == kept


def test_config_files_do_not_follow_a_link(stub: S3Stub, tmp_path: Path, outside: Path) -> None:
    fill(stub, [10], prefix="b/train/")
    (tmp_path / "ml" / "input").mkdir(parents=True)
    (tmp_path / "ml" / "input" / "config").symlink_to(outside)
    kept = tree(outside)
    done = penstock("run", "-c", write_job(tmp_path / "job.yaml", job(stub.url, tmp_path / "ml", "b/train/")))
    assert done.returncode == 7
    assert "below the base directory input/data alone may be a link" in done.stderr
    assert tree(outside) == kept


def test_the_data_directory_may_be_a_link_to_another_disk(stub: S3Stub, tmp_path: Path) -> None:
    """It is resolved once: another link in its place is not followed later."""
    due = fill(stub, [300_000], prefix="b/train/")
    disk, data = tmp_path / "disk", tmp_path / "ml" / "input" / "data"
    data.parent.mkdir(parents=True)
    disk.mkdir()
    (tmp_path / "other").mkdir()
    data.symlink_to(disk)
    document = job(stub.url, tmp_path / "ml", "b/train/", "b/train/")
    document["InputDataConfig"][1] |= {"InputMode": "File", "ChannelName": "files"}
    with sidecar(write_job(tmp_path / "job.yaml", document)) as running:
        running.wait_for("ready")
        assert (disk / "files" / "0000").read_bytes() == due
        data.unlink()
        data.symlink_to(tmp_path / "other")
        with open(disk / "train_0", "rb") as reader:
            assert reader.read() == due
        running.wait_for("epoch complete", epoch=0)
        assert running.end() == 0
    assert not os.listdir(tmp_path / "other")


def test_a_note_is_not_written_to_what_has_the_lock_s_name(tmp_path: Path) -> None:
    layout, victim = Layout(str(tmp_path / "ml")), tmp_path / "victim"
    layout.create()
    victim.write_bytes(b"kept")
    for plant in (Path.hardlink_to, Path.symlink_to):
        plant(Path(layout.data, SIDECAR_LOCK), victim)
        layout.note("ready")
        Path(layout.data, SIDECAR_LOCK).unlink()
    assert victim.read_bytes() == b"kept"


def test_a_tree_of_any_depth_is_removed(data: Path, outside: Path) -> None:
    """Deeper than Python's stack and than the limit of open files; and nothing that a link leads to."""
    kept, depth = tree(outside), 2000
    nest(data / "deep", outside, depth)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))  # earlier tests' libraries keep hundreds open
    assert highest + 100 < depth
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 100, hard))
    try:
        with Directory.at(str(data.parent)) as parent:
            parent.remove_tree("data")
            assert parent.status("data") is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        # What a failure leaves is too deep for pytest, which ends every later run at its removal.
        subprocess.run(["rm", "-rf", data], check=True)
    assert tree(outside) == kept
