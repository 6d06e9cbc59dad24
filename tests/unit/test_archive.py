"""The archive of a directory: what tar makes of it again is that directory, and no link leads out of it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import shutil
import stat
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sidecar.upload.archive import Archive
from sidecar.upload.uploads import FileChanged, Unreadable
from streamer.directory import Directory
from tests.kit.users import NOBODY

MODES = st.integers(0, 0o777)


class Node(NamedTuple):
    """A file (bytes), a link (its target), or a directory (None)."""

    content: bytes | str | None
    mode: int
    modified: int
    """Seconds since 1970."""


def found(root: str) -> dict[bytes, Node]:
    """What is below a directory, by path."""
    nodes: dict[bytes, Node] = {}
    for folder, folders, files in os.walk(os.fsencode(root)):
        for each in (*folders, *files):
            path = os.path.join(folder, each)
            status, content = os.lstat(path), b""
            name = os.path.relpath(path, os.fsencode(root))
            if stat.S_ISLNK(status.st_mode):
                target = os.path.relpath(os.path.join(folder, os.readlink(path)), folder)
                nodes[name] = Node(os.fsdecode(target), 0, 0)  # Python restores no time of a link
                continue
            if stat.S_ISREG(status.st_mode):
                content = Path(os.fsdecode(path)).read_bytes()
            kept = content if stat.S_ISREG(status.st_mode) else None
            nodes[name] = Node(kept, stat.S_IMODE(status.st_mode), int(status.st_mtime_ns // 10**9))
    return nodes


def archived(root: str, count: int = 8 << 20) -> tuple[bytes, set[str]]:
    """The archive, read by `count` bytes, and the names that are left out."""

    async def read() -> bytes:
        data = b""
        while True:
            more = await archive.read(count)
            data += more
            if len(more) < count:
                assert await archive.read(count) == b""
                await archive.check()
                return data

    with Directory.at(root) as directory:
        archive = Archive(directory)
        data = asyncio.run(read())
        archive.close()
    assert len(data) <= archive.most
    return data, {each.name for each in archive.left_out}


def by_gnu_tar(data: bytes, into: str) -> None:
    listed = subprocess.run(["tar", "-tzf", "-"], input=data, capture_output=True, check=True)
    assert listed.stderr == b""
    subprocess.run(["tar", "-xzpf", "-", "-C", into], input=data, check=True)


def by_python(data: bytes, into: str) -> None:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar:
            assert (member.uid, member.gid) == (0, 0)
            filters: Any = {"filter": "data" if member.issym() else "fully_trusted"}
            tar.extract(member, into, **(filters if hasattr(tarfile, "data_filter") else {}))
        for member in reversed([each for each in tar if each.isdir()]):  # as `extractall` does at its end
            path = os.path.join(into, member.name)
            os.chmod(path, member.mode)
            os.utime(path, (member.mtime, member.mtime))


NAMES = st.one_of(
    st.sampled_from(
        ["a", "b", "dir", "ümläut", "with space", "-x", "d" * 250, os.fsdecode(b"\xff\xfe"), "n\nl"]
    ),
    st.binary(min_size=1, max_size=30).map(
        lambda name: os.fsdecode(name.replace(b"/", b"_").replace(b"\0", b"_"))
    ),
).filter(lambda name: name not in {".", ".."})
CONTENTS = st.one_of(
    st.none(),
    st.sampled_from([0, 1, 511, 512, 513, 300_000]),
    st.lists(st.sampled_from(["..", ".", "a", "b", "dir", "", "secret"]), min_size=1, max_size=6)
    .map("/".join)
    .filter(bool),
)
TREES = st.lists(
    st.tuples(st.lists(NAMES, min_size=1, max_size=5), CONTENTS, MODES, st.integers(0, 10**9)),
    max_size=12,
)


def make(root: str, tree: list[tuple[list[str], int | str | None, int, int]]) -> None:
    made: list[tuple[str, int, int]] = []
    for names, content, mode, modified in tree:
        path = os.path.join(root, *names)
        with contextlib.suppress(OSError):  # a file is where a directory would be
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if content is None:
                os.makedirs(path, exist_ok=True)
            elif isinstance(content, str):
                os.symlink(content, path)
                continue
            else:
                Path(path).write_bytes(os.urandom(content))
            made.append((path, mode, modified))
    for path, mode, modified in sorted(made, reverse=True):
        os.chmod(path, mode | (0o700 if os.path.isdir(path) else 0o400))
        os.utime(path, (modified, modified))


@contextlib.contextmanager
def directories() -> Iterator[tuple[str, str]]:
    """A directory with a secret beside it, and an empty one."""
    with tempfile.TemporaryDirectory() as place:
        for name in ("tree", "again"):
            os.mkdir(os.path.join(place, name))
        Path(place, "secret").write_bytes(b"secret")
        yield os.path.join(place, "tree"), os.path.join(place, "again")


CLIMBS = [
    (["dir", "b", "a"], "../../", 0, 0),
    (["x"], "dir/b/a/../secret", 0, 0),
    (["y"], "x", 0, 0),
]
"""The first link stays inside, the second one leads out by it."""


@example(CLIMBS, by_python, 8 << 20)
@given(TREES, st.sampled_from([by_python, by_gnu_tar]), st.sampled_from([8 << 20, 100_003, 4096]))
def test_what_tar_makes_of_it_is_the_directory(
    tree: list[tuple[list[str], int | str | None, int, int]],
    unpack: Callable[[bytes, str], None],
    count: int,
) -> None:
    with directories() as (root, again):
        make(root, tree)
        data, left_out = archived(root, count)
        expected = found(root)
        unpack(data, again)
        assert found(again) == {
            name: node for name, node in expected.items() if os.fsdecode(name) not in left_out
        }
        for name, node in expected.items():
            here = os.path.join(os.fsencode(again), name)
            if os.fsdecode(name) in left_out:
                target = os.readlink(os.path.join(root, os.fsdecode(name)))
                path = os.path.normpath(os.path.join(os.path.dirname(os.fsdecode(name)), target))
                assert path.startswith(("..", "/")) or ".." in target.lstrip("./"), "it stays inside"
            elif isinstance(node.content, str):
                assert os.path.realpath(here).startswith(os.fsencode(os.path.realpath(again)))


def test_what_is_no_file_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    os.mkfifo(tmp_path / "fifo")
    for name, target in {"in": str(tmp_path / "file"), "out": str(tmp_path.parent), "up": "../file"}.items():
        os.symlink(target, tmp_path / name)
    data, left_out = archived(str(tmp_path))
    assert left_out == {"fifo", "out", "up"}
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert [(each.name, each.linkname) for each in tar] == [("file", ""), ("in", "file")]


def test_an_empty_directory_is_an_archive(tmp_path: Path) -> None:
    data, _ = archived(str(tmp_path))
    assert subprocess.run(["tar", "-tzf", "-"], input=data, capture_output=True, check=True).stdout == b""
    subprocess.run(["gzip", "-t"], input=data, check=True)


def test_a_file_of_more_than_8_gib_has_its_size(tmp_path: Path) -> None:
    size = (8 << 30) + 5
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(size)
    with Directory.at(str(tmp_path)) as directory:
        archive = Archive(directory)
        data = asyncio.run(archive.read(1000))
        archive.close()
    assert archive.most > size
    begin = zlib.decompressobj(31).decompress(data)[: tarfile.BLOCKSIZE]
    assert tarfile.TarInfo.frombuf(begin, "utf-8", "strict").size == size


def instead(make: Callable[[Path], object]) -> Callable[[Path], object]:
    """Make something in the place of the file `b`."""

    def change(tree: Path) -> None:
        (tree / "b").unlink()
        make(tree / "b")

    return change


def dated_back(path: Path) -> None:
    before = path.stat()
    path.write_bytes(os.urandom(before.st_size))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES: dict[str, Callable[[Path], object]] = {
    "grows": lambda tree: os.truncate(tree / "b", 2_000_001),
    "shrinks": lambda tree: os.truncate(tree / "b", 5),
    "is written again": lambda tree: (tree / "b").write_bytes(os.urandom(2_000_000)),
    "is removed": lambda tree: (tree / "b").unlink(),
    "becomes a link": instead(lambda path: path.symlink_to("/etc/passwd")),
    "becomes a FIFO": instead(os.mkfifo),
    "becomes a directory": instead(os.mkdir),
    "is written again, and dated back": lambda tree: dated_back(tree / "b"),
    "has another mode": lambda tree: (tree / "b").chmod(0o600),
    "one that was read grows": lambda tree: os.truncate(tree / "a", 1_000_001),
    "one is new": lambda tree: (tree / "new").write_bytes(b"x"),
    "a folder is new": lambda tree: (tree / "folder").mkdir(),
    "the directory is removed": shutil.rmtree,
}


@pytest.mark.parametrize("read", [0, 1_500_000, 3_500_000], ids=["before", "meanwhile", "after"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_told(tmp_path: Path, change: Callable[[Path], object], read: int) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for name, size in (("a", 1_000_000), ("b", 2_000_000), ("c", 500)):
        (tree / name).write_bytes(os.urandom(size))

    async def whole() -> None:
        await archive.read(read)
        change(tree)
        while await archive.read(100_000):
            pass
        await archive.check()

    with Directory.at(str(tree)) as directory:
        archive = Archive(directory)
        with pytest.raises(FileChanged, match=r"changed while it was read|a change"):
            asyncio.run(whole())
        archive.close()
    assert "tree" not in "".join(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("name", ["file", "folder"])
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / name).chmod(0)
    tmp_path.chmod(0o755)
    user = os.geteuid()
    with Directory.at(str(tmp_path)) as directory:
        if user == 0:
            os.seteuid(NOBODY)
        try:
            with pytest.raises(Unreadable, match=rf"{name}\S* cannot be read \(Permission denied\)"):
                archive = Archive(directory)
                asyncio.run(archive.read(100))
        finally:
            os.seteuid(user)
    (tmp_path / name).chmod(0o700)
