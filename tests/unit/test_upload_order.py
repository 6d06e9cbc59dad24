"""The order of checkpoints in S3, their markers, and the journal: what is decided without S3."""

from __future__ import annotations

import json
import os
import resource
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.upload.journal import FILE, Journal
from sidecar.upload.markers import Marker, newest_complete, parse_marker
from sidecar.upload.order import Entry, Order, Step
from sidecar.upload.tree import TreeFile
from sidecar.upload.watch import ClosedFile, Watch, is_written
from streamer.directory import Directory
from tests.kit.users import NOBODY, root

NAMES = ("checkpoint", "s1/data", "s1/meta", "s2/data", "s2/meta")
EVENTS = st.tuples(st.sampled_from(["close", "scan", "touch"]), st.sampled_from(NAMES))
WORK = st.tuples(st.sampled_from(["start", "show", "drop"]), st.integers(0, 9))


def found(name: str, version: int, *, event: bool = True, whole: bool = False) -> ClosedFile:
    times = {"st_mtime_ns": version, "st_ctime_ns": version}
    status = os.stat_result((0o100644, version, 0, 1, 0, 0, version, 0, 0, 0), times)
    return ClosedFile(TreeFile(name, name, status), event=event, whole=whole)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Directory]:
    with Directory.at(str(tmp_path)) as opened:
        yield opened


@given(st.lists(EVENTS | WORK, max_size=60))
def test_what_is_visible_has_all_that_was_closed_before_it(steps: list[tuple[str, Any]]) -> None:
    """Files are closed, closed again, found again and dropped in any order, and uploads end when they may."""
    order, version = Order(marked=False), 0
    closed: dict[str, int] = {}
    """By name, the version that was closed last; versions count all closes."""
    visible: dict[str, int] = {}
    started: list[Entry] = []
    for step, choice in steps:
        if step == "close":
            version = closed[choice] = version + 1
            order.take([found(choice, version)])
        elif step in {"scan", "touch"} and choice in closed:
            if closed[choice] != visible.get(choice):
                if step == "touch":  # an event that comes after the scan that has found the file
                    version += 1
                order.take([found(choice, closed[choice], event=step == "touch")])
        elif step == "start" and (entry := order.next()) is not None:
            assert entry not in started
            started.append(entry)
        elif step in {"show", "drop"} and started:
            entry = started[choice % len(started)]
            if step == "drop" or not order.has(entry):
                order.remove(entry)
                started.remove(entry)
            elif order.is_first(entry):
                assert entry.mark is not None
                mine = entry.mark[0]
                missing = [
                    name
                    for name, latest in closed.items()
                    if latest < mine and visible.get(name, 0) < latest and order.has(Entry(name))
                ]
                assert not missing
                assert mine == closed[entry.name], "older bytes are never shown"
                visible[entry.name] = mine
                order.remove(entry)
                started.remove(entry)
    while (entry := order.next()) is not None:
        started.append(entry)
    left = [each for each in started if order.has(each)]
    assert order.waiting_bytes == sum(each.mark[1] for each in left if each.mark is not None)
    assert len(order) == len({each.name for each in left}) == len(left), "each is started once"


def marked(order: Order) -> list[str]:
    """The steps whose markers are in the order."""
    return [name for name in drained(order) if name.endswith("/")]


def drained(order: Order) -> list[str]:
    """Let all of the order become visible; return the names, in order."""
    names = []
    while (entry := order.next()) is not None:
        assert order.is_first(entry)
        if entry.mark is None:
            order.steps[entry.name[:-1]] = Step.MARKED
        names.append(entry.name)
        order.remove(entry)
    return names


def test_a_step_is_over_when_another_begins_or_the_trainer_ends() -> None:
    order = Order(marked=True)
    order.take([found("s1/a", 1), found("checkpoint", 2), found("s1/b", 3)])
    assert drained(order) == ["s1/a", "checkpoint", "s1/b"]
    order.take([found("s2/a", 4), found("s1/late", 5), found("s2/b", 6)])
    assert drained(order) == ["s2/a", "s1/late", "s1/", "s2/b"], "the marker is after the late file"
    order.take([found("s1/a", 7)])
    assert drained(order) == ["s1/a"], "a step that is written again is not over by its first file"
    order.end()
    assert drained(order) == ["s1/", "s2/"]
    assert set(order.steps.values()) == {Step.MARKED}


def test_a_renamed_directory_is_over_at_once() -> None:
    order = Order(marked=True)
    order.take([found("s1/a", 1, whole=True), found("s1/b", 2, whole=True)])
    assert drained(order) == ["s1/a", "s1/b", "s1/"]


def test_steps_of_an_earlier_process_get_their_markers() -> None:
    order = Order(marked=True)
    order.resume(["s0/a", "checkpoint", "s1/a", "s2/a"], ["s1", "s2"])
    assert order.steps == {"s0": Step.MARKED, "s1": Step.DUE, "s2": Step.BEGUN}
    order.take([found("s3/a", 9)])
    assert drained(order) == ["s1/", "s2/", "s3/a"]
    alone = Order(marked=False)
    alone.resume(["s0/a"], ["s1"])
    alone.take([found("s2/a", 1)])
    alone.end()
    assert drained(alone) == ["s2/a"], "one host has no markers"


def marker(step: str, host: int, modified: int = 1, *, hosts: int = 2, etag: str = "e") -> Marker:
    names = tuple(f"algo-{number}" for number in range(1, hosts + 1))
    return Marker(step, f"algo-{host}", names, modified, {f"{step}/{host}": (1, etag)})


def test_the_newest_complete_step_is_that_of_all_hosts() -> None:
    etags = {f"{step}/{host}": "e" for step in ("s9", "s10", "s11") for host in (1, 2, 3)}
    nine = [marker("s9", 1, 90), marker("s9", 2, 91)]
    ten = [marker("s10", 1, 100), marker("s10", 2, 99)]
    eleven = [marker("s11", 1, 110)]
    assert newest_complete([], etags) is None
    assert newest_complete(eleven, etags) is None
    assert newest_complete([*eleven, *ten, *nine], etags) == "s10", "by time, not by name or order"
    assert newest_complete([*nine, *ten], etags | {"s10/2": "another"}) == "s9", "it was written again"
    assert newest_complete([*nine, *ten], {n: e for n, e in etags.items() if n != "s10/1"}) == "s9"
    fewer = [marker("s10", 1, 200, hosts=1), *ten, marker("s10", 3, 50, hosts=3)]
    assert newest_complete([*nine, *fewer], etags) == "s10", "hosts of an earlier job are not waited for"
    more = [marker("s10", 1, 200, hosts=3), *ten]
    assert newest_complete([*nine, *more], etags) == "s9"


def test_a_marker_is_read_as_it_was_written() -> None:
    one = marker("step-ü", 1, 2**62)
    assert one.name == ".penstock/step-ü/algo-1.json"
    assert parse_marker(one.document()) == one
    for rubbish in (b"", b"{}", b"[]", b"\xff", b"[" * 99_999, one.document()[:-1], b'{"step": 1}'):
        assert parse_marker(rubbish) is None
    assert parse_marker(one.document().replace(b'{"step', b'{"new": 1, "step', 1)) is None
    for number in (b"1e999", b"NaN", b"[]"):
        assert parse_marker(one.document().replace(str(2**62).encode(), number)) is None
    odd = parse_marker(json.dumps(one._asdict() | {"step": ["s"], "host": {}}).encode())
    assert newest_complete(filter(None, [odd]), {}) is None


RECORDS = st.lists(
    st.tuples(st.just("file"), st.text(max_size=5), st.integers(0, 9))
    | st.tuples(st.just("upload"), st.sampled_from("abc"), st.booleans())
    | st.tuples(st.just("step"), st.sampled_from("abc"), st.booleans()),
    max_size=20,
)


@given(RECORDS, st.integers(0, 3000))
def test_a_journal_that_is_cut_short_has_what_was_whole(records: list[Any], cut: int) -> None:
    with tempfile.TemporaryDirectory() as folder, Directory.at(folder) as directory:
        path = Path(folder, FILE)
        journal, states = Journal(directory), []
        ends = [path.stat().st_size]
        uploads: dict[tuple[str, str], bool] = {}
        states.append((dict(journal.files), list(journal.steps), list(uploads)))
        for kind, name, value in records:
            if kind == "file":
                journal.note_file(name, found(name, value).file.status, "etag")
            elif kind == "upload":
                journal.note_upload(name, "id", value)
                uploads.pop((name, "id"), None) if not value else uploads.setdefault((name, "id"), True)
            else:
                journal.note_step(name, value)
            ends.append(path.stat().st_size)
            states.append((dict(journal.files), list(journal.steps), list(uploads)))
        journal.close()
        os.truncate(path, min(ends[0] + cut, ends[-1]))
        whole = max(number for number, end in enumerate(ends) if end <= path.stat().st_size)
        for _ in range(2):  # compaction keeps all
            again = Journal(directory)
            assert again.began == journal.began
            assert (again.files, list(again.steps), again.left) == states[whole]
            again.note_step("after the cut", unmarked=True)
            again.close()
            last = Journal(directory)
            assert "after the cut" in last.steps
            last.note_step("after the cut", unmarked=False)
            last.close()


PLANTED = b'\n["upload", ["key", "id"], true]\n["file", "a", [[1, 1, 1], "e"]]'


def test_what_is_planted_for_the_journal_does_no_harm(directory: Directory, tmp_path: Path) -> None:
    path, elsewhere = tmp_path / FILE, tmp_path / "elsewhere"
    for plant in ("link", "hard link", "directory", "fifo", "rubbish"):
        elsewhere.write_bytes(PLANTED)
        if plant == "link":
            path.symlink_to(elsewhere)
        elif plant == "hard link":
            path.hardlink_to(elsewhere)
        elif plant == "directory":
            (path / "below").mkdir(parents=True)
        elif plant == "fifo":
            os.mkfifo(path)
        else:
            path.write_bytes(b'\xff\n{}\n["file", 1, 2]\n["upload", "x", 1]\n' + b"[" * 99_999 + b"\nnull")
        journal = Journal(directory)
        assert (journal.left, journal.files, journal.steps) == ([], {}, {}), plant
        journal.note_step("s", unmarked=True)
        journal.close()
        assert elsewhere.read_bytes() == PLANTED
        assert path.is_file()
        assert not path.is_symlink()
        assert Journal(directory).steps == {"s": True}
        path.unlink()


@root
def test_a_journal_of_another_user_is_not_read(directory: Directory, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(PLANTED)
    os.chown(tmp_path / FILE, NOBODY, NOBODY)
    journal = Journal(directory)
    assert (journal.left, journal.files) == ([], {})
    journal.close()


def test_a_full_disk_is_logged_once(
    directory: Directory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(directory)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        for number in range(3):
            journal.note_step(f"s{number}", unmarked=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    journal.note_step("later", unmarked=True)
    journal.close()
    assert [each.getMessage() for each in caplog.records] == ["uploads cannot be noted"]
    assert list(Journal(directory).steps) == ["later"], "the line that was cut short spoils no other"


@root
def test_the_kernel_says_who_writes_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as writer:
        fd = os.open(path, os.O_RDONLY)
        assert is_written(fd) is True
        with path.open("ab"):
            writer.close()
            assert is_written(fd) is True, "by another description"
        assert is_written(fd) is False
    os.seteuid(NOBODY)
    try:
        assert is_written(fd) is None, "the file of another user"
    finally:
        os.seteuid(0)
    os.close(fd)


def test_without_inotify_scans_find_all(
    directory: Directory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        watch = Watch(directory, "", lambda _, __: True)
        watch.open()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "file").write_bytes(b"x")
    assert [each.file.name for each in watch.scan()] == ["step/file"]
    assert watch.fd == -1
    watch.close()
    assert [each.getMessage() for each in caplog.records] == ["checkpoints are found by scans alone"]


def test_names_of_what_will_be_renamed_wait(directory: Directory, tmp_path: Path) -> None:
    held = [
        "a.tmp",
        "checkpoint.tmp1b2",
        "tmp-checkpoint-5/model",
        "x.orbax-checkpoint-tmp-1/d/0",
        "_temp/part",
    ]
    taken = ["temperature.json", "template/x", "attempt", "stmp", "checkpoint", ".penstocks"]
    for name in [*held, *taken, ".penstock.uploads", ".penstock/s/h.json"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    watch = Watch(directory, "", lambda _, __: True)
    assert sorted(each.file.name for each in watch.scan()) == sorted(taken)
    assert sorted(each.file.name for each in watch.scan(ended=True)) == sorted([*held, *taken])
    assert watch.scan(rested=60) == []
    watch.close()
