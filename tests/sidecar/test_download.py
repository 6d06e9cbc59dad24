"""File channels: the same objects as files, whole or absent, and never outside of their directory."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from sidecar.download import channels as download_module
from sidecar.download.channels import Download
from sidecar.download.paths import file_paths, relative_path, without_markers
from sidecar.job.layout import Layout
from sidecar.job.rehearsal import disk
from sidecar.process.runner import start_all
from streamer.aio import first_of
from streamer.errors import ConfigError, Denied, Missing, SinkError, SourceChanged
from streamer.plan import ObjectRef, Plan, S3Uri
from streamer.relay.transport import TransportSpec, Wish
from streamer.units import MIB, decimal_bytes
from tests.kit.harness import EAGER, clients_of, fill
from tests.kit.pipes import eventually
from tests.kit.planning import plan_prefix
from tests.kit.stub import Answer, S3Stub, fails, stalls

DATA = S3Uri("b", "data/")
TRANSPORTS: list[Wish] = ["splice", "buffered", "aiobotocore"]
pytestmark = pytest.mark.usefixtures("no_leaks", "no_blocking")


async def fetch(
    stub: S3Stub,
    directory: Path,
    *,
    uri: S3Uri = DATA,
    transport: Wish = "auto",
    before: Callable[[], None] | None = None,
    bandwidth: int | None = None,
) -> bool:
    """Download the prefix; `before` runs between listing and download."""
    async with clients_of(stub) as clients:
        plan = await plan_prefix(clients, uri)
        if before:
            before()
        spec = TransportSpec(
            wish=transport,
            buckets=plan.entries.buckets,
            channels=[None],
            budget=16 * MIB,
            part_size=1 * MIB,
            requests_in_flight=4,
            bandwidth=bandwidth,
            retry=EAGER,
        )
        downloading = Download("c", plan, str(directory))
        return await downloading.run(clients, spec)


def requested(stub: S3Stub) -> set[str]:
    """Keys of the GETs so far."""
    return {seen.key.removeprefix("data/") for seen in stub.seen}


def whole(directory: Path) -> list[str]:
    """The whole files of the download of `c` that has not ended."""
    return sorted(tree(directory / ".c.penstock.new"))


async def interrupted(stub: S3Stub, directory: Path, *, least: int = 2, **options: Any) -> None:
    """Cancel a download of several objects once `least` of them are whole, while the last one stalls."""
    assert stub.loop is not None
    stub.loop.call_soon_threadsafe(stub.released.clear)
    stub.script(*[stalls(stub)] * 9, key=max(stub.objects))  # hedges too

    await first_of(fetch(stub, directory, **options), eventually(lambda: len(whole(directory)) >= least))
    stub.faults.clear()
    stub.release()
    assert not (directory / "c").exists()


def tree(directory: Path) -> dict[Any, Any]:
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_objects_become_files_and_paths_are_kept(stub: S3Stub, tmp_path: Path, transport: Wish) -> None:
    stub.objects |= {
        "b/data/a": os.urandom(5 * MIB + 1),
        "b/data/sub/deep/b.csv": b"1,2\n",
        "b/data/sub/empty": b"",
        "b/data/marker/": b"",
        "b/data/z": b"",
        "b/other": b"x",
    }
    assert await fetch(stub, tmp_path, transport=transport)
    assert tree(tmp_path / "c") == {
        "a": stub.objects["b/data/a"], "sub/deep/b.csv": b"1,2\n", "sub/empty": b"", "z": b""
    }  # fmt: skip
    assert sorted(os.listdir(tmp_path)) == [".c.penstock.files", "c"]
    assert stub.connections > 1


async def test_failures_are_retried_as_for_a_stream(stub: S3Stub, tmp_path: Path) -> None:
    due = fill(stub, [120_000, 120_000])
    stub.script(fails(503, "SlowDown"), fails(500, "InternalError"))
    assert await fetch(stub, tmp_path)
    assert b"".join(data for _, data in sorted(tree(tmp_path / "c").items())) == due


async def test_the_directory_is_whole_or_absent(stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, [100_000, 100_000])

    def replaced() -> None:
        stub.objects["b/data/0001"] = os.urandom(100_000)

    with pytest.raises(SourceChanged):
        await fetch(stub, tmp_path, before=replaced)
    assert not (tmp_path / "c").exists()
    assert await fetch(stub, tmp_path)
    assert tree(tmp_path / "c")["0001"] == stub.objects["b/data/0001"]


async def test_objects_of_no_bytes_alone(stub: S3Stub, tmp_path: Path) -> None:
    stub.objects |= {"b/data/a": b"", "b/data/deep/b": b""}
    assert await fetch(stub, tmp_path)
    assert tree(tmp_path / "c") == {"a": b"", "deep/b": b""}
    assert not stub.seen


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_an_interrupted_download_is_continued(stub: S3Stub, tmp_path: Path, transport: Wish) -> None:
    """Whole objects are not requested again; the files are those of a download at once."""
    due = fill(stub, [3 * MIB] * 6)
    await interrupted(stub, tmp_path, transport=transport)
    kept = whole(tmp_path)
    stub.seen.clear()
    assert await fetch(stub, tmp_path, transport=transport)
    assert not requested(stub) & set(kept)
    assert b"".join(data for _, data in sorted(tree(tmp_path / "c").items())) == due
    assert sorted(os.listdir(tmp_path)) == [".c.penstock.files", "c"]


async def test_only_what_has_changed_since_is_fetched_again(stub: S3Stub, tmp_path: Path) -> None:
    """Another object with a key that was fetched, a key that is gone, and one that is new."""
    fill(stub, [3 * MIB] * 6)
    await interrupted(stub, tmp_path, least=3)
    stub.objects["b/data/0000"] = os.urandom(3 * MIB)  # as long as before
    del stub.objects["b/data/0001"]
    stub.objects["b/data/0001/new"] = b"a folder where a file was"
    stub.seen.clear()
    assert await fetch(stub, tmp_path)
    assert {"0000", "0001/new"} <= requested(stub)
    assert "0002" not in requested(stub)
    assert tree(tmp_path / "c") == {key.removeprefix("b/data/"): data for key, data in stub.objects.items()}


async def test_a_version_that_comes_back_is_not_taken_for_the_file_of_another(
    stub: S3Stub, tmp_path: Path
) -> None:
    """The first version was whole; the file has part of the second one when the first one is back."""
    fill(stub, [3 * MIB] * 6)
    first = stub.objects["b/data/0000"]
    await interrupted(stub, tmp_path)
    stub.objects["b/data/0000"] = os.urandom(3 * MIB)
    await interrupted(stub, tmp_path, least=4)
    stub.objects["b/data/0000"] = first
    assert await fetch(stub, tmp_path)
    assert tree(tmp_path / "c")["0000"] == first


async def test_a_download_starts_no_thread(
    stub: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine may refuse one by then; the sidecar's event loop has its threads before it lists."""
    due = fill(stub, [3 * MIB, 0, 7, 5 * MIB])
    executor = ThreadPoolExecutor(2)
    start_all(executor, 2)
    asyncio.get_running_loop().set_default_executor(executor)

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        assert await fetch(stub, tmp_path)
    assert b"".join(data for _, data in sorted(tree(tmp_path / "c").items())) == due


def cut(path: Path) -> None:
    os.truncate(path, 1)


def lengthened(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def linked(path: Path) -> None:
    path.rename(path.with_name("aside"))
    path.symlink_to("aside")


def directory(path: Path) -> None:
    path.unlink()
    (path / "deep").mkdir(parents=True)
    (path / "deep" / "file").write_bytes(b"x")


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES = [Path.unlink, cut, lengthened, linked, directory, fifo]


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_file_of_an_unfinished_download_that_is_not_whole_is_fetched_again(
    stub: S3Stub, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    due = fill(stub, [3 * MIB] * 6)
    await interrupted(stub, tmp_path)
    damaged, *kept = whole(tmp_path)
    damage(tmp_path / ".c.penstock.new" / damaged)
    stub.seen.clear()
    assert await fetch(stub, tmp_path)
    assert damaged in requested(stub)
    assert not requested(stub) & set(kept)
    assert b"".join(tree(tmp_path / "c")[f"{number:04}"] for number in range(6)) == due


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_file_of_a_published_directory_that_is_not_whole_is_fetched_again(
    stub: S3Stub, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """And no other; files that the trainer has added stay."""
    due = fill(stub, [1000, 2000, 0, 3000])
    assert await fetch(stub, tmp_path)
    damage(tmp_path / "c" / "0001")
    (tmp_path / "c" / "cache").write_bytes(b"mine")
    stub.seen.clear()
    assert await fetch(stub, tmp_path)
    assert requested(stub) == {"0001"}
    assert b"".join(tree(tmp_path / "c")[f"{number:04}"] for number in range(4)) == due
    assert tree(tmp_path / "c")["cache"] == b"mine"
    assert sorted(os.listdir(tmp_path)) == [".c.penstock.files", "c"]
    stub.seen.clear()
    assert not await fetch(stub, tmp_path)
    assert not stub.seen


async def test_a_published_directory_that_cannot_be_mended_is_no_directory(
    stub: S3Stub, tmp_path: Path
) -> None:
    """It is absent, or whole; and what somebody else puts there then is not taken for a download."""
    fill(stub, [1000, 2000])
    assert await fetch(stub, tmp_path)
    (tmp_path / "c" / "0001").unlink()
    stub.script(*[fails(403, "AccessDenied")] * 9, key="b/data/0001")
    with pytest.raises(Denied):
        await fetch(stub, tmp_path)
    assert not (tmp_path / "c").exists()
    (tmp_path / "c").mkdir()
    stub.faults.clear()
    with pytest.raises(SinkError, match="not a sidecar's download"):
        await fetch(stub, tmp_path)
    (tmp_path / "c").rmdir()
    assert await fetch(stub, tmp_path)
    assert {seen.key for seen in stub.seen} == {"data/0000", "data/0001"}


async def test_the_files_of_another_boot_are_fetched_again(stub: S3Stub, tmp_path: Path) -> None:
    """The machine may have crashed before its disk had the bytes."""
    due = fill(stub, [3 * MIB] * 6)
    await interrupted(stub, tmp_path)
    begun = tmp_path / ".c.penstock.begun"
    boot, lines = begun.read_bytes().split(b"\n", 1)
    begun.write_bytes(boot[:-1] + b"-\n" + lines)
    stub.seen.clear()
    assert await fetch(stub, tmp_path)
    assert len(requested(stub)) == 6
    assert b"".join(data for _, data in sorted(tree(tmp_path / "c").items())) == due


@pytest.mark.parametrize(
    ("status", "code", "error"), [(404, "NoSuchKey", Missing), (403, "AccessDenied", Denied)]
)
async def test_an_object_that_is_refused_ends_the_download_and_no_other_is_lost(
    stub: S3Stub, tmp_path: Path, status: int, code: str, error: type[Exception]
) -> None:
    due = fill(stub, [3 * MIB] * 6)
    refused = fails(status, code)

    async def refused_later(answer: Answer) -> web.StreamResponse:
        await eventually(lambda: whole(tmp_path))
        return await refused(answer)

    stub.script(*[refused_later] * 9, key="b/data/0004")  # asked for again on another connection
    with pytest.raises((error, SourceChanged)):
        await fetch(stub, tmp_path)
    assert not (tmp_path / "c").exists()
    stub.faults.clear()
    stub.seen.clear()
    kept = whole(tmp_path)
    assert await fetch(stub, tmp_path)
    assert kept
    assert not requested(stub) & set(kept)
    assert b"".join(data for _, data in sorted(tree(tmp_path / "c").items())) == due


async def test_free_space_is_asked_for_what_is_missing_only(stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, [3 * MIB] * 6)
    layout = Layout(str(tmp_path))
    data = Path(layout.data)
    data.mkdir(parents=True)
    await interrupted(stub, data)
    async with clients_of(stub) as clients:
        plan = await plan_prefix(clients, DATA)
    kept, begun = (
        sum(path.lstat().st_blocks for path in (data / f".c.penstock.{name}").iterdir())
        for name in ("new", "part")
    )
    assert kept * 512 >= 6 * MIB
    blocks = kept + begun  # what is begun is removed
    stated = await asyncio.to_thread(disk, layout, {"c": plan})
    assert stated.startswith(f"File channels need {decimal_bytes(18 * MIB - blocks * 512)} and ")


async def test_progress_is_logged(
    stub: S3Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(download_module, "PROGRESS_EVERY", 0.01)
    fill(stub, [3 * MIB] * 6)

    def events() -> list[dict[str, Any]]:
        return [vars(each)["fields"] for each in caplog.records if each.getMessage() == "downloading"]

    with caplog.at_level(logging.INFO, "penstock"):
        stub.script(*[stalls(stub)] * 9, key="b/data/0005")  # hedges too
        far = eventually(lambda: events() and events()[-1]["objects_done"] >= 3)
        await first_of(fetch(stub, tmp_path), far)
        stub.faults.clear()
        stub.release()
        assert events()[0] == {
            "channel": "c", "objects": 6, "bytes": 18 * MIB, "objects_done": 0, "bytes_done": 0
        }  # fmt: skip
        assert events()[-1]["bytes_done"] >= 9 * MIB
        before = len(events())
        await fetch(stub, tmp_path)
        assert events()[before]["bytes_done"] >= 6 * MIB  # what the first download has brought


async def test_the_bandwidth_limit_holds_for_files(stub: S3Stub, tmp_path: Path) -> None:
    """At one byte a second nothing after the burst is written before the end of this test."""
    fill(stub, [3 * MIB] * 6)
    await first_of(fetch(stub, tmp_path, bandwidth=1), eventually(lambda: len(stub.seen) >= 4))
    assert sum(map(len, tree(tmp_path).values())) < 3 * MIB


async def test_the_same_plan_is_not_fetched_twice_and_another_one_replaces_it(
    stub: S3Stub, tmp_path: Path
) -> None:
    fill(stub, [1000])
    assert await fetch(stub, tmp_path)
    asked = len(stub.seen)
    assert not await fetch(stub, tmp_path)
    assert len(stub.seen) == asked
    stub.objects["b/data/0000"] = b"new"
    assert await fetch(stub, tmp_path)
    assert tree(tmp_path / "c") == {"0000": b"new"}
    assert sorted(os.listdir(tmp_path)) == [".c.penstock.files", "c"]


async def test_a_directory_of_somebody_else_is_not_touched(stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, [1000])
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "mine").write_text("kept")
    with pytest.raises(SinkError, match="not a sidecar's download"):
        await fetch(stub, tmp_path)
    assert tree(tmp_path) == {"c/mine": b"kept"}


async def test_an_empty_prefix_is_an_error(stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, [1])
    with pytest.raises(Missing):
        await fetch(stub, tmp_path, uri=S3Uri("b", "nothing"))


@pytest.mark.parametrize(
    "key", ["../x", "a/../../x", "a//x", "/x", "a/./x", "a\nb", "a\x00b", "x/", "..", "a\x7f", "y" * 256]
)
def test_keys_that_are_no_safe_path(key: str) -> None:
    with pytest.raises(ConfigError, match="InputMode: Pipe"):
        relative_path(f"p/{key}", "p/")


@given(key=st.text(min_size=1), prefix=st.text())
def test_no_key_leads_out_of_the_directory(key: str, prefix: str) -> None:
    try:
        path = relative_path(prefix + key, prefix)
    except ConfigError:
        return
    assert os.path.normpath(os.path.join("/base/c", path)) == os.path.join("/base/c", path)
    assert os.path.join("/base/c", path).startswith("/base/c/")


@pytest.mark.parametrize(
    ("prefix", "key", "path"),
    [
        ("data/", "data/a/b", "a/b"),
        ("data/tr", "data/train/x", "train/x"),
        ("data/x", "data/x", "x"),
        ("", "a", "a"),
    ],
)
def test_paths_begin_below_the_last_folder_of_the_prefix(prefix: str, key: str, path: str) -> None:
    assert relative_path(key, prefix) == path


def test_a_file_cannot_be_a_directory_too() -> None:
    plan = Plan.of(ObjectRef("b", key, 1, "e") for key in ("a", "a-b", "a/b"))
    with pytest.raises(ConfigError, match="'a' and 'a/b' cannot both be files"):
        file_paths(plan)


def test_two_objects_cannot_be_one_file() -> None:
    plan = Plan.of(ObjectRef("b", "a", 1, etag) for etag in ("e", "f"))
    with pytest.raises(ConfigError, match="two objects of the channel would be the file 'a'"):
        file_paths(plan)


async def test_folder_markers_are_no_files(stub: S3Stub, tmp_path: Path) -> None:
    """An empty object beside those below it, and one byte under a key that ends in a slash."""
    stub.objects |= {
        "b/data/a": b"",
        "b/data/a/1": b"1",
        "b/data/b/": b"\n",
        "b/data/b/2": b"2",
        "b/data/c": b"",
    }
    assert await fetch(stub, tmp_path)
    assert tree(tmp_path / "c") == {"a/1": b"1", "b/2": b"2", "c": b""}
    assert requested(stub) == {"a/1", "b/2"}
    assert not await fetch(stub, tmp_path)


def test_bytes_that_cannot_be_a_file_can_be_left_out() -> None:
    for keys in (("a", "a/b"), ("b/",)):
        with pytest.raises(ConfigError, match="Exclude"):
            file_paths(without_markers(Plan.of(ObjectRef("b", key, 2, "e") for key in keys)))
