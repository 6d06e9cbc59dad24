"""File channels: the same objects as files, whole or absent, and never outside of their directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.job.download import DownloadLimits, download, file_paths, relative_path
from streamer.errors import ConfigError, Missing, SinkError, SourceChanged
from streamer.plan import ObjectRef, Plan, S3Uri
from streamer.s3.aiobotocore_source import AiobotocoreSource
from streamer.s3.catalog.listing import plan_prefix
from streamer.s3.catalog.pages import AiobotocorePages
from tests.kit.harness import EAGER, clients_of, fill
from tests.kit.pipes import read_all
from tests.kit.processes import job, leftovers, penstock, sidecar, write_job
from tests.kit.stub import S3Stub, fails, stalls

LIMITS = DownloadLimits(part_size=50_000, workers=4, policy=EAGER)


async def fetch(
    stub: S3Stub, directory: Path, prefix: str = "data/", before: Callable[[], None] | None = None
) -> bool:
    async with clients_of(stub) as clients:
        uri = S3Uri("b", prefix)
        plan = await plan_prefix(AiobotocorePages(clients.control), uri)
        if before:
            before()
        source = AiobotocoreSource(clients.data)
        return await download(plan, source, directory=str(directory), channel="c", limits=LIMITS)


def tree(directory: Path) -> dict[Any, Any]:
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


async def test_objects_become_files_and_paths_are_kept(stub: S3Stub, tmp_path: Path) -> None:
    stub.objects |= {
        "b/data/a": os.urandom(170_001),
        "b/data/sub/deep/b.csv": b"1,2\n",
        "b/data/sub/empty": b"",
        "b/data/marker/": b"",
        "b/other": b"x",
    }
    assert await fetch(stub, tmp_path)
    assert tree(tmp_path / "c") == {
        "a": stub.objects["b/data/a"], "sub/deep/b.csv": b"1,2\n", "sub/empty": b""
    }  # fmt: skip
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

    with pytest.raises(ExceptionGroup) as caught:
        await fetch(stub, tmp_path, before=replaced)
    assert caught.group_contains(SourceChanged)
    assert os.listdir(tmp_path) == []


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
        await fetch(stub, tmp_path, prefix="nothing")


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


def mixed(stub: S3Stub, tmp_path: Path) -> str:
    document = job(stub.url, tmp_path / "ml", "b/train/", "b/files/")
    document["InputDataConfig"][1]["InputMode"] = "File"
    return write_job(tmp_path / "job.yaml", document)


def test_a_mixed_job(stub: S3Stub, tmp_path: Path) -> None:
    """A trainer finds the files at once and the stream as ever; a restart does not fetch again."""
    train, files = fill(stub, [70_000], prefix="b/train/"), fill(stub, [30_000], prefix="b/files/", seed=2)
    for word in ("downloaded", "downloaded before"):
        with sidecar(mixed(stub, tmp_path)) as running:
            assert running.wait_for("host")["of"] == 1
            running.wait_for(word, channel="files")
            running.wait_for("ready")
            data = tmp_path / "ml" / "input" / "data"
            assert tree(data / "files") == {"0000": files}
            assert not (data / "files_0").exists()
            assert read_all(data / "train_0") == train
            assert running.end() == 0


def test_a_signal_ends_a_download_and_leaves_nothing(stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, [5], prefix="b/train/")
    fill(stub, [30_000], prefix="b/files/", seed=2)
    stub.script(stalls(stub, after=10_000), key="b/files/0000")
    with sidecar(mixed(stub, tmp_path)) as running:
        running.wait_for("downloading", channel="files")
        assert running.end() == 0
    assert leftovers(tmp_path / "ml") == []


def test_exec_tells_the_trainer_where_the_files_are(stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, [5], prefix="b/train/")
    fill(stub, [30_000], prefix="b/files/", seed=2)
    script = 'test "$SM_CHANNELS" = \'["files","train"]\' && cat "$SM_CHANNEL_FILES/0000" | wc -c'
    done = penstock("exec", "-c", mixed(stub, tmp_path), "sh", "-c", script)
    assert (done.returncode, done.stdout.strip()) == (0, "30000"), done.stderr


def test_no_fifo_is_offered_if_the_files_do_not_come(stub: S3Stub, tmp_path: Path) -> None:
    fill(stub, [5], prefix="b/train/")
    stub.objects["b/files/a"] = b"1"
    stub.objects["b/files/a/b"] = b"2"
    done = penstock("run", "-c", mixed(stub, tmp_path))
    assert done.returncode == 2
    assert "cannot both be files" in done.stderr
    assert not (tmp_path / "ml" / "input" / "data" / "train_0").exists()
