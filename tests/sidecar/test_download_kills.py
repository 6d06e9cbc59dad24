"""Downloads that are killed before a call that changes a name: the next start makes the directory whole.

Whatever the directory was before, it is absent, or whole as it was or as it is to be; and no file that was
whole is fetched again.
"""

from __future__ import annotations

import asyncio
import os
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamer.errors import Denied
from tests.kit.stub import S3Stub, fails
from tests.sidecar.test_download import fetch, tree

CALLS = ("rename", "mkdir", "unlink", "rmdir", "open")
"""Calls with a descriptor of a directory; of `open`, those that make a file."""
AT_ONCE = 7
"""Number of points of which one is tried, drawn anew in each run."""


def objects(version: int) -> dict[str, bytes]:
    """A listing; another version has an object less, one more, and two that have changed."""
    found = {
        f"b/data/{('', 'sub/', 'sub/deep/')[number % 3]}{number:04}": b"%d %d " % (number, version) * 300
        if number in (1, 5)
        else b"%d " % number * 500
        for number in range(9)
    } | {"b/data/sub/empty": b""}
    if version:
        del found["b/data/0003"]
        found["b/data/0003/in a folder"] = b"new"
    return found


def files(stub: S3Stub) -> dict[str, bytes]:
    return {key.removeprefix("b/data/"): content for key, content in stub.objects.items()}


def whole_files(
    data: Path, due: dict[str, bytes], of: tuple[str, ...] = ("c", ".c.penstock.new")
) -> set[str]:
    """Paths of the files in these directories that are as they are due."""
    found = (each for name in of for each in tree(data / name).items())
    return {path for path, content in found if due.get(path) == content}


def fresh(stub: S3Stub, data: Path) -> None:
    del stub, data


def unfinished(stub: S3Stub, data: Path) -> None:
    stub.script(*[fails(403, "AccessDenied")] * 9, key="b/data/sub/deep/0008")
    with pytest.raises(Denied):
        asyncio.run(fetch(stub, data))
    stub.faults.clear()


def unfinished_of_another_plan(stub: S3Stub, data: Path) -> None:
    unfinished(stub, data)
    stub.objects.clear()
    stub.objects |= objects(1)


def damaged(stub: S3Stub, data: Path) -> None:
    asyncio.run(fetch(stub, data))
    (data / "c" / "sub" / "0001").unlink()
    os.truncate(data / "c" / "0006", 5)


def of_another_plan(stub: S3Stub, data: Path) -> None:
    asyncio.run(fetch(stub, data))
    stub.objects.clear()
    stub.objects |= objects(1)


def killed_at(stub: S3Stub, data: Path, point: int) -> bool:
    """Download in a process that ends before its call number `point`; return whether it came so far."""
    with warnings.catch_warnings(action="ignore"):  # this process has threads, and none that the child needs
        pid = os.fork()
    if pid:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in (0, 9)
        return code == 9
    calls = 0

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            if options.keys() & {"dir_fd", "src_dir_fd"} and (name != "open" or arguments[1] & os.O_CREAT):
                calls += 1
                if calls == point:
                    os._exit(9)
            return real(*arguments, **options)

        return call

    try:
        for name in CALLS:
            setattr(os, name, counted(name, getattr(os, name)))
        asyncio.run(fetch(stub, data))
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.parametrize("before", [fresh, unfinished, unfinished_of_another_plan, damaged, of_another_plan])
def test_a_kill_leaves_what_the_next_start_makes_whole(
    stub: S3Stub, tmp_path: Path, before: Callable[[S3Stub, Path], None]
) -> None:
    point, tried = random.randint(1, AT_ONCE), 0
    while True:
        data = tmp_path / str(point)
        data.mkdir()
        stub.objects.clear()
        stub.objects |= objects(0)
        before(stub, data)
        old, due = tree(data / "c"), files(stub)
        kept = whole_files(data, due) if before in (unfinished, damaged) else set()
        killed = killed_at(stub, data, point)
        assert tree(data / "c") in ({}, old, due), point
        if (data / ".c.penstock.begun").exists():
            kept |= whole_files(data, due, of=(".c.penstock.new",))
        stub.seen.clear()
        asyncio.run(fetch(stub, data))
        assert tree(data / "c") == due, point
        assert not {seen.key.removeprefix("data/") for seen in stub.seen} & kept, point
        assert {name for name in os.listdir(data) if not name.endswith(".tmp")} == {".c.penstock.files", "c"}
        if not killed:
            break
        tried += 1
        point += AT_ONCE
    assert tried > 2
