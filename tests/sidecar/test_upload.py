"""`penstock upload`: each file is whole or absent, nothing is overwritten, and all are told."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.kit.processes import PENSTOCK, penstock, penstock_with
from tests.kit.stub import S3Stub

FILES = {
    "config.json": b"{}",
    "empty": b"",
    "variables/variables.data": bytes(range(256)) * 40,
    "variables/deep/names of ümläuts": b"u" * 3001,
}
IN_PARTS = "streamer.s3.object_put.PART = 3000"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "model"
    for name, data in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def uploaded(stub: S3Stub, prefix: str = "b/run/") -> dict[str, bytes]:
    return {name.removeprefix(prefix): data for name, data in stub.objects.items()}


def upload(
    stub: S3Stub, tree: Path, *options: str, uri: str = "s3://b/run", settings: tuple[str, ...] = (IN_PARTS,)
) -> subprocess.CompletedProcess[str]:
    command = [*penstock_with(*settings), "upload", str(tree), uri, *options, "--path-style", "--json"]
    return subprocess.run(
        [*command, "--endpoint-url", stub.url], capture_output=True, text=True, check=False, timeout=120
    )


def figures(done: subprocess.CompletedProcess[str]) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Exit code, closing line, and the reasons of the files that were left out."""
    *events, last = map(json.loads, done.stderr.splitlines())
    return done.returncode, last, {event["file"]: event["reason"] for event in events if "file" in event}


@pytest.mark.parametrize("settings", [(IN_PARTS,), ("streamer.s3.object_put.MOST_PARTS = 2", IN_PARTS)])
@pytest.mark.parametrize("uri", ["s3://b/run", "s3://b/run/", "s3://b"])
def test_a_tree_is_uploaded_whole_and_twice_is_as_once(
    stub: S3Stub, tree: Path, uri: str, settings: tuple[str, ...]
) -> None:
    prefix = "b/run/" if "run" in uri else "b/"
    for _ in range(2):
        code, last, left = figures(upload(stub, tree, uri=uri, settings=settings))
        assert (code, last["objects"], last["bytes"], left) == (0, 4, sum(map(len, FILES.values())), {})
        assert uploaded(stub, prefix) == FILES
    conditions = {seen[2] for seen in stub.puts.seen if seen[0] in {"PutObject", "CompleteMultipartUpload"}}
    assert conditions == {"*"}
    assert not stub.puts.uploads
    most = max(int(each) for each in [len(FILES["variables/variables.data"]) / 3000])
    parts = [seen for seen in stub.puts.seen if seen[0] == "UploadPart" and "data" in seen[1]]
    assert len(parts) == 2 * (2 if "MOST_PARTS" in settings[0] else most + 1)


def test_another_object_stays_and_is_named(stub: S3Stub, tree: Path) -> None:
    stub.objects |= {"b/run/config.json": b"live", "b/run/variables/variables.data": b"live"}
    code, last, left = figures(upload(stub, tree))
    assert (code, last["objects"], last["left_out"]) == (9, 2, 2)
    assert set(left) == {"config.json", "variables/variables.data"}
    assert all(reason.startswith("another object has its key; remove that") for reason in left.values())
    live = {"config.json": b"live", "variables/variables.data": b"live"}
    assert uploaded(stub) == FILES | live
    assert not stub.puts.uploads

    code, last, left = figures(upload(stub, tree, "--replace"))
    assert (code, last["objects"], left) == (0, 4, {})
    assert uploaded(stub) == FILES


def test_what_is_no_file_of_the_tree_is_named(stub: S3Stub, tree: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_bytes(b"secret")
    os.symlink("config.json", tree / "inside")
    os.symlink("../empty", tree / "variables" / "up")
    os.symlink(str(tree / "config.json"), tree / "variables" / "absolute")
    for name, target in {
        "absolute": str(tmp_path / "secret"),
        "by a link": "folder/../config.json",
        "outside": "../secret",
        "through": "folder/file",
        "folder": "../elsewhere",
        "dangling": "nowhere",
        "chain": "inside",
        "loop": "loop",
        "climbs": "variables/../../secret",
    }.items():
        os.symlink(target, tree / name)
    os.mkfifo(tree / "fifo")
    with socket.socket(socket.AF_UNIX) as listening:
        os.chdir(tree)
        listening.bind("socket")
    (tree / os.fsdecode(b"not\xffutf8")).write_bytes(b"x")
    long = "/".join(["d" * 200] * 6)
    (tree / long).parent.mkdir(parents=True)
    (tree / long).write_bytes(b"x")

    code, last, left = figures(upload(stub, tree))
    expected = FILES | {"inside": b"{}", "variables/up": b"", "variables/absolute": b"{}"}
    assert (code, last["objects"], uploaded(stub)) == (9, len(expected), expected)
    words = {
        "a link": {
            "absolute",
            "by a link",
            "outside",
            "through",
            "folder",
            "dangling",
            "chain",
            "loop",
            "climbs",
        },
        "neither a file": {"fifo", "socket"},
        "not UTF-8": {os.fsdecode(b"not\xffutf8")},
        "1024 bytes": {long},
    }
    assert {name: word for word, names in words.items() for name in names} == {
        name: next(word for word in words if word in reason) for name, reason in left.items()
    }


def test_a_file_that_changes_meanwhile_is_read_again(stub: S3Stub, tree: Path) -> None:
    growing = tree / "variables" / "variables.data"
    steps: list[int] = []

    def grow() -> None:
        if len(stub.puts.seen) > 1 and "data" in stub.puts.seen[-1][1] and len(steps) < 1:
            steps.append(growing.write_bytes(b"n" * 10_000))

    stub.puts.on_part = grow
    code, _, left = figures(upload(stub, tree))
    assert (code, left, steps) == (0, {}, [10_000])
    assert uploaded(stub) == FILES | {"variables/variables.data": b"n" * 10_000}
    assert not stub.puts.uploads, "the upload of mixed bytes was aborted"


@pytest.mark.parametrize("how", ["grows", "shrinks"])
def test_a_file_that_never_rests_is_named(stub: S3Stub, tree: Path, how: str) -> None:
    restless = tree / "variables" / "variables.data"
    sizes = iter(range(10_000, 90_000) if how == "grows" else range(10_000, 3_001, -7))
    stub.puts.on_part = lambda: os.truncate(restless, next(sizes))
    code, last, left = figures(upload(stub, tree))
    assert (code, last["objects"]) == (9, 3)
    assert left == {"variables/variables.data": "it changed 3 times while it was read"}
    assert uploaded(stub) == {name: data for name, data in FILES.items() if "data" not in name}
    assert not stub.puts.uploads


def test_an_answer_that_is_lost_is_no_conflict(stub: S3Stub, tree: Path) -> None:
    stub.puts.lost = 4
    code, last, left = figures(upload(stub, tree))
    assert (code, last["objects"], left, stub.puts.lost) == (0, 4, {}, 0)
    assert uploaded(stub) == FILES


def test_bytes_that_change_on_their_way_are_no_object(stub: S3Stub, tree: Path) -> None:
    stub.puts.garbled = 1
    (tree / "empty").unlink()
    done = upload(stub, tree)
    assert (done.returncode, stub.puts.garbled) == (0, 0), done.stderr
    assert uploaded(stub) == {name: data for name, data in FILES.items() if data}


def test_storage_that_is_away_is_waited_for(stub: S3Stub, tree: Path) -> None:
    stub.puts.refused.extend([(503, "SlowDown")] * 30)
    code, last, _ = figures(upload(stub, tree))
    assert (code, last["objects"], uploaded(stub)) == (0, 4, FILES)

    stub.objects.clear()
    stub.puts.refused.extend([(503, "SlowDown")] * 9999)
    done = upload(stub, tree, "--give-up-after", "4")
    assert (done.returncode, stub.objects) == (5, {})
    assert "gave up after" in done.stderr, done.stderr
    assert "SlowDown" in done.stderr


def test_a_server_without_conditions_needs_an_option(stub: S3Stub, tree: Path) -> None:
    stub.puts.refused.extend([(501, "NotImplemented")] * 99)
    done = upload(stub, tree)
    assert done.returncode == 5
    assert "set --if-match omit, and let one program write at a time" in done.stderr
    stub.puts.refused.clear()
    stub.puts.seen.clear()
    stub.objects["b/run/config.json"] = b"old"
    assert upload(stub, tree, "--if-match", "omit").returncode == 0
    assert uploaded(stub) == FILES
    assert {seen[2] for seen in stub.puts.seen} == {""}


@pytest.mark.parametrize(
    ("refusal", "exit_code", "words"),
    [
        ((403, "AccessDenied"), 3, "they need s3:PutObject on it"),
        ((404, "NoSuchBucket"), 4, "no such bucket"),
        ((403, "QuotaExceeded"), 3, "QuotaExceeded"),
    ],
)
def test_a_refusal_ends_the_upload(
    stub: S3Stub, tree: Path, refusal: tuple[int, str], exit_code: int, words: str
) -> None:
    stub.puts.refused.extend([refusal] * 99)
    done = upload(stub, tree)
    assert (done.returncode, stub.objects) == (exit_code, {})
    assert words in done.stderr


def test_a_directory_that_cannot_be_read_is_an_error(stub: S3Stub, tree: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "none", tree / "config.json"):
        done = penstock("upload", str(path), "s3://b/run", "--endpoint-url", stub.url)
        assert done.returncode == 2
        assert f"cannot read {path}: " in done.stderr
    os.symlink(tree, tmp_path / "link")
    assert upload(stub, tmp_path / "link").returncode == 0, "the directory itself may be a link"
    assert uploaded(stub) == FILES


def test_a_killed_upload_is_repeated(stub: S3Stub, tree: Path) -> None:
    """Whatever was not completed is absent, and a second start makes it whole."""
    running: list[subprocess.Popen[bytes]] = []
    stub.puts.on_part = lambda: running[0].send_signal(signal.SIGKILL)
    command = [*penstock_with(IN_PARTS), "upload", str(tree), "s3://b/run", "--endpoint-url", stub.url]
    running.append(subprocess.Popen([*command, "--path-style"], stderr=subprocess.DEVNULL))
    assert running[0].wait() == -signal.SIGKILL
    assert all(FILES[name] == data for name, data in uploaded(stub).items())
    stub.puts.on_part = lambda: None
    assert upload(stub, tree).returncode == 0
    assert uploaded(stub) == FILES


def test_the_help_names_the_page() -> None:
    done = subprocess.run([*PENSTOCK, "upload", "--help"], capture_output=True, text=True, check=True)
    assert "docs/how-to/uploading.md" in done.stdout
