"""What other users may have put where the sidecar makes its files, and what they may do beside it."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sidecar.config.job import load_job
from sidecar.doctor.machine import fifo_directory
from sidecar.job.layout import Layout
from streamer.errors import SinkError
from streamer.helpers.keeper.protocol import listen
from streamer.helpers.keeper_connect import command, connected
from streamer.plan import Position
from streamer.sink.fifo import FifoDirectory
from streamer.trailer import SIDECAR_LOCK, Trailer, read_trailer, replace_file, trailer_path, write_trailer
from tests.kit.children import output_of
from tests.kit.harness import fill
from tests.kit.processes import job, penstock, sidecar, write_job
from tests.kit.stub import S3Stub
from tests.kit.users import NOBODY, root, two_users


def opened(epoch: int) -> Trailer:
    return Trailer(channel="train", epoch=epoch, state="open", bytes_total=1)


def as_nobody(code: str, *arguments: Path, **options: Any) -> subprocess.Popen[str]:
    """A Python program of another user's, started and not waited for."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        user=NOBODY, group=NOBODY, extra_groups=[], stdout=subprocess.PIPE, text=True, cwd="/", **options,
    )  # fmt: skip


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that other users can reach; pytest's own is root's alone."""
    with tempfile.TemporaryDirectory(prefix="penstock-") as made:
        os.chmod(made, 0o755)
        yield Path(made)


def regular(path: Path) -> None:
    path.write_text("kept")


def symlink_to_fifo(path: Path) -> None:
    os.mkfifo(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def dangling(path: Path) -> None:
    path.symlink_to(path.with_name("nothing"))


def foreign_fifo(path: Path) -> None:
    os.mkfifo(path, 0o666)
    os.chown(path, NOBODY, NOBODY)


@pytest.mark.parametrize(
    "made", [regular, symlink_to_fifo, dangling, os.mkdir, pytest.param(foreign_fifo, marks=root)]
)
def test_what_lies_at_the_fifo_s_name_is_refused(
    tmp_path: Path, made: Callable[[Path], None] | Callable[..., None]
) -> None:
    """And left as it is."""
    made(tmp_path / "train_0")
    before = os.lstat(tmp_path / "train_0")
    fifos = FifoDirectory(str(tmp_path), "train", opening=opened)
    fifos.clear()
    with pytest.raises(SinkError, match="not a FIFO of ours"):
        fifos.prepare(0)
    after = os.lstat(tmp_path / "train_0")
    assert (before.st_ino, before.st_mode, before.st_uid) == (after.st_ino, after.st_mode, after.st_uid)
    assert not (tmp_path / "nothing").exists()
    fifos.close()
    assert os.path.lexists(tmp_path / "train_0")


async def test_a_fifo_that_is_exchanged_is_not_the_one_that_is_opened(tmp_path: Path) -> None:
    fifos = FifoDirectory(str(tmp_path), "train", opening=opened)
    fifos.prepare(0)
    os.rename(tmp_path / "train_0", tmp_path / "ours")
    os.mkfifo(tmp_path / "train_0")
    readers = {name: os.open(tmp_path / name, os.O_RDONLY | os.O_NONBLOCK) for name in ("train_0", "ours")}
    outlet = await fifos.open(Position(), on_gone=lambda: None)
    with pytest.raises(BlockingIOError):  # a writer has it open, and nothing is in it
        os.read(readers["ours"], 1)
    assert os.read(readers["train_0"], 1) == b""  # no writer
    outlet.close()
    fifos.close()
    for fd in readers.values():
        os.close(fd)


@two_users
def test_other_users_neither_read_nor_inject(stub: S3Stub, place: Path) -> None:
    fill(stub, [10], prefix="b/train/")
    attempt = (
        "import os, sys\n"
        "for path in sys.argv[1:]:\n"
        "    for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):\n"
        "        try: os.open(path, flags | os.O_NONBLOCK); print('opened', path, flags)\n"
        "        except PermissionError: print('refused')\n"
        "    for act in (os.unlink, os.mkfifo, lambda path: os.rename(path, path + '.old')):\n"
        "        try: act(path); print('did', path)\n"
        "        except (PermissionError, FileExistsError): print('refused')\n"
    )
    with sidecar(
        write_job(place / "job.yaml", job(stub.url, place / "ml", "b/train/")), "--keeper", "auto"
    ) as running:
        running.wait_for("ready")
        data = place / "ml/input/data"
        paths = [data / "train_0", data / SIDECAR_LOCK, data / ".penstock.keeper"]
        output, _ = as_nobody(attempt, *paths).communicate()
        assert output == "refused\n" * 6 * len(paths)
        assert stat.S_IMODE(os.stat(data / "train_0").st_mode) == 0o640
        assert not [event for event in running.events if event.get("event") == "directory exposed"]
        assert running.end() == 0


def link(path: Path, victim: Any) -> None:
    path.symlink_to(victim)


def hard_link(path: Path, victim: Any) -> None:
    os.link(victim, path)


def fifo(path: Path, victim: Any) -> None:
    os.mkfifo(path)


def foreign_file(path: Path, victim: Any) -> None:
    path.write_text("")
    os.chmod(path, 0o666)
    os.chown(path, NOBODY, NOBODY)


@pytest.mark.parametrize("made", [link, hard_link, fifo, pytest.param(foreign_file, marks=root)])
@pytest.mark.parametrize("temporary", [True, False])
def test_what_lies_at_a_file_s_name_is_replaced_not_followed(
    tmp_path: Path, made: Callable[[Path, Any], None], temporary: bool
) -> None:
    """Trailers, config files and state: the file is ours alone, and what was linked to is as it was."""
    victim = tmp_path / "victim"
    victim.write_text("kept")
    path = tmp_path / "file"
    made(path.with_name(f"file.{os.getpid()}.tmp") if temporary else path, victim)
    replace_file(str(path), b"new")
    assert (victim.read_text(), path.read_bytes()) == ("kept", b"new")
    found = os.lstat(path)
    assert (stat.S_ISREG(found.st_mode), found.st_uid, found.st_nlink) == (True, os.geteuid(), 1)
    assert sorted(os.listdir(tmp_path)) == ["file", "victim"]


def test_a_trailer_is_read_from_a_regular_file(tmp_path: Path) -> None:
    """A reader neither follows a link nor waits for a FIFO, nor fills its memory."""
    path = Path(trailer_path(str(tmp_path), "train", 0))
    write_trailer(str(tmp_path), opened(0))
    os.rename(path, tmp_path / "real")
    path.symlink_to(tmp_path / "real")
    with pytest.raises(OSError, match="symbolic links"):
        read_trailer(str(tmp_path), "train", 0)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match="not a regular file"):
        read_trailer(str(tmp_path), "train", 0)
    path.unlink()
    path.write_bytes(b" " * (2 << 20))
    with pytest.raises(ValueError, match="longer than a trailer"):
        read_trailer(str(tmp_path), "train", 0)


@pytest.mark.parametrize("made", [link, hard_link, fifo, pytest.param(foreign_file, marks=root)])
def test_a_lock_that_is_not_ours(tmp_path: Path, made: Callable[[Path, Any], None]) -> None:
    layout = Layout(str(tmp_path))
    layout.create()
    victim = tmp_path / "victim"
    victim.write_text("kept")
    made(Path(layout.data, SIDECAR_LOCK), victim)
    with pytest.raises(SinkError, match=r"not a sidecar's lock|symbolic links"), layout.locked():
        pass
    assert victim.read_text() == "kept"


def test_an_error_names_the_file_that_it_is_of(tmp_path: Path) -> None:
    """A trailer that is a link to itself, in a tree without a lock."""
    layout = Layout(str(tmp_path))
    layout.create()
    trailer = Path(layout.data, ".train_0.penstock.json")
    trailer.symlink_to(trailer)
    with (
        pytest.raises(SinkError, match=rf"^{trailer}: Too many levels of symbolic links; remove it"),
        layout.locked(),
    ):
        pass


@two_users
@pytest.mark.parametrize("says", [b"1\n", b"nonsense", b"", b"-1\n", b"4194305\n"])
def test_restart_signals_no_process_of_another_user(place: Path, says: bytes) -> None:
    """A lock of nobody's, held, that names init, or no process at all."""
    layout = Layout(str(place))
    layout.create()
    path = Path(layout.data, SIDECAR_LOCK)
    path.write_bytes(says)
    os.chown(path, NOBODY, NOBODY)
    hold = (
        "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.flock(f, fcntl.LOCK_EX);"
        "print('held', flush=True); sys.stdin.read()"
    )
    with as_nobody(hold, path, stdin=subprocess.PIPE) as holder:
        assert output_of(holder).readline() == "held\n"
        with pytest.raises(SinkError, match="names no process of its owner"):
            layout.owner()
        if says == b"1\n":
            done = penstock("restart", "--base-directory", str(place))
            assert (done.returncode, "names no process of its owner" in done.stderr) == (7, True)


@two_users
async def test_a_stranger_at_the_keeper_s_address(place: Path) -> None:
    """Neither does the sidecar pass FIFOs to it, nor does a keeper listen to one."""
    os.chmod(place, 0o777)
    serve = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.bind(sys.argv[1]);"
        "s.listen(); print('listens', flush=True); c, _ = s.accept(); print(c.recv(100))"
    )
    with as_nobody(serve, place / "socket") as stranger:
        assert output_of(stranger).readline() == "listens\n"
        with pytest.raises(SinkError, match="is user 65534, and no keeper of ours"):
            await asyncio.wait_for(connected(str(place / "socket")), 10)
        assert output_of(stranger).read() == "b''\n"
    ask = (
        "import sys; from socket import *; s = socket(AF_UNIX, SOCK_SEQPACKET); s.connect(sys.argv[1]);"
        's.send(b\'{"do": "hello"}\'); print(s.recv(100))'
    )
    with subprocess.Popen(command(str(place / "keeper")), stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        os.chmod(place / "keeper", 0o777)  # past the first border, its mode
        with as_nobody(ask, place / "keeper") as stranger:
            assert output_of(stranger).read() in ("b''\n", "")  # closed, or reset before it could write
        running.terminate()


def test_the_keeper_s_socket_is_the_user_s_alone(tmp_path: Path) -> None:
    listening = listen(str(tmp_path / "keeper"))
    assert stat.S_IMODE(os.stat(tmp_path / "keeper").st_mode) == 0o600
    listening.close()
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    listen(str(tmp_path / "link")).close()
    assert (tmp_path / "file").read_text() == "kept"
    assert stat.S_ISSOCK(os.lstat(tmp_path / "link").st_mode)


@root
def test_an_exposed_directory_is_named(stub: S3Stub, place: Path) -> None:
    layout = Layout(str(place / "ml"))
    layout.create()
    path = write_job(place / "job.yaml", job(stub.url, place / "ml", "b/train/"))
    assert (layout.exposure(), fifo_directory(load_job(path), layout).state) == ([], "ok")
    os.chmod(layout.data, 0o1777)
    assert layout.exposure() == []
    os.chmod(layout.data, 0o777)
    os.chown(layout.base, NOBODY, NOBODY)
    world, owner = layout.exposure()
    assert world == f"{layout.data} may be written by all, who may replace FIFOs; chmod o-w it"
    assert owner == f"{layout.base} belongs to user 65534, who may replace FIFOs; chown it"
    found = fifo_directory(load_job(path), layout)
    assert (found.state, found.text) == ("warning", f"{world}; {owner}")
    fill(stub, [10], prefix="b/train/")
    with sidecar(path) as running:
        assert running.wait_for("directory exposed", why=world)["level"] == "warning"
        running.wait_for("directory exposed", why=owner)
        running.wait_for("ready")
        assert running.end() == 0
