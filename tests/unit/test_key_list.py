"""The writer of key lists: objects skipped on delivery, and a list that a second sidecar goes on with."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from streamer.errors import Shortage
from streamer.key_list import KeyListLine, parsed
from streamer.plan import ObjectRef, ObjectStart, Plan
from streamer.plan.folds import object_starts
from streamer.sink.key_list import AHEAD, BLOCK, MOST_LINES, KeyListWriter
from tests.kit.limits import full_after


def lines(path: Path) -> list[KeyListLine]:
    return list(map(parsed, path.read_bytes().splitlines()[1:]))


def plan_of(*sizes: int) -> Plan:
    return Plan.of([ObjectRef("b", f"k{number}", size, "e") for number, size in enumerate(sizes)])


def writer_of(
    path: Path,
    plan: Plan,
    *,
    run: str = "r",
    first: int = 0,
    consumed: int = 0,
    ahead: bool = True,
    held: bool = False,
) -> KeyListWriter:
    return KeyListWriter(
        str(path), run, partial(object_starts, plan, 0),
        first=first, consumed=consumed, ahead=ahead, held=held,
    )  # fmt: skip


def test_a_skipped_object_has_no_byte(tmp_path: Path) -> None:
    """Offsets in the stream are those that delivery reports, and of one offset the last line is valid."""
    path = tmp_path / "list"
    writer = writer_of(path, plan_of(10, 20, 30, 0, 40), ahead=False)
    writer.reach(0, 10, 0)
    writer.reach(30, 5, 10)  # the second object was skipped
    writer.reach(35, 25, 15)
    writer.reach(60, 1, 99)  # the fourth was replaced by a longer one
    writer.close()
    assert [(line.offset, line.key) for line in lines(path)] == [
        (0, "k0"), (10, "k1"), (10, "k2"), (99, "k3"), (99, "k4"),
    ]  # fmt: skip


@pytest.mark.parametrize("died", range(8))
def test_a_second_sidecar_writes_the_same_list(tmp_path: Path, died: int) -> None:
    """Killed after any number of lines, with half a line more; several empty objects have one offset."""
    sizes = [5, 0, 0, 7, 0, 9, 3, 1] * (AHEAD // 4)
    plan, path = plan_of(*sizes), tmp_path / "list"
    whole = writer_of(path, plan, first=3, consumed=3)
    whole.reach(3, sum(sizes) - 3, 3)
    whole.close()
    due = path.read_bytes()
    assert len(lines(path)) == len(sizes)
    path.write_bytes(b"".join(due.splitlines(keepends=True)[: died + 1]) + b"[1, ")
    again = writer_of(path, plan, first=3, consumed=12, held=True)
    for at in range(12, sum(sizes)):
        again.reach(at, 1, at)
    again.close()
    assert path.read_bytes() == due
    with pytest.raises(ValueError, match="of this run"):
        writer_of(path, plan, run="s", held=True)


def test_a_second_sidecar_goes_on_with_an_empty_file(tmp_path: Path) -> None:
    """The first one was killed after it had made the file; a reader may have opened it."""
    path, plan = tmp_path / "list", plan_of(10, 20)
    writer_of(path, plan).close()
    due = path.read_bytes()
    path.write_bytes(b"")
    inode = path.stat().st_ino
    writer_of(path, plan, held=True).close()
    assert (path.read_bytes(), path.stat().st_ino) == (due, inode)


@pytest.mark.parametrize("ahead", [True, False])
def test_a_refused_line_is_written_later(tmp_path: Path, ahead: bool) -> None:
    """The disk is full inside each line and between two; the same call goes on where the last one ended."""
    sizes = [3] * (MOST_LINES + 9)
    plan, path = plan_of(*sizes), tmp_path / "list"
    whole = writer_of(path, plan, ahead=ahead)
    whole.reach(0, sum(sizes), 0)
    whole.close()
    due = path.read_bytes()
    writer = writer_of(path, plan, ahead=ahead)
    first = len(due.splitlines(keepends=True)[0])
    for most in (*range(max(path.stat().st_size, first), 2_000, 7), len(due) - 30):
        with full_after(most), pytest.raises(Shortage, match="or remove RecordKeys"):
            writer.reach(0, sum(sizes), 0)
        assert path.read_bytes() == due[: max(most, path.stat().st_size)]
    writer.reach(0, sum(sizes), 0)
    writer.close()
    assert path.read_bytes() == due


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("most", [0, 5, 60])
def test_a_list_whose_begin_is_refused_is_begun_again(tmp_path: Path, most: int, ahead: bool) -> None:
    """By the next call, or by the next sidecar, which goes on with the same file."""
    plan, path = plan_of(*[3] * 9), tmp_path / "list"
    writer_of(path, plan, ahead=True).close()
    due = path.read_bytes()
    for held in (False, True):
        path.unlink()
        with full_after(most), contextlib.suppress(Shortage):
            writer_of(path, plan, ahead=ahead).close()
        assert len(path.read_bytes()) <= most
        again = writer_of(path, plan, ahead=True, held=held)
        again.close()
        assert path.read_bytes() == due


def test_a_fifo_that_begins_inside_an_object_has_its_line(tmp_path: Path) -> None:
    path = tmp_path / "list"
    writer = writer_of(path, plan_of(10, 20, 30), first=15, consumed=15)
    writer.reach(15, 1, 15)
    writer.close()
    assert [(line.offset, line.key) for line in lines(path)] == [(10, "k1"), (30, "k2")]


def test_an_open_plan_knows_its_next_object_later(tmp_path: Path) -> None:
    path = tmp_path / "list"
    starts = iter([ObjectStart(0, 0, "a", "b"), None, ObjectStart(9, 0, "c", "b")])
    writer = KeyListWriter(str(path), "r", lambda _: starts, first=0, consumed=0, ahead=True, held=False)
    writer.reach(0, 9, 0)
    assert [line.key for line in lines(path)] == ["a"]
    writer.reach(9, 1, 9)
    writer.close()
    assert [line.key for line in lines(path)] == ["a", "c"]


def test_a_second_sidecar_reads_two_blocks_and_begins_at_the_last_line(tmp_path: Path) -> None:
    """The list is longer than the blocks; its last line is not whole; two objects begin at one byte."""
    plan, path = plan_of(*[3, 0] * 9_000), tmp_path / "list"
    whole = writer_of(path, plan)
    whole.reach(0, plan.total_bytes(0), 0)
    whole.close()
    due = path.read_bytes()
    assert len(due) > 4 * BLOCK
    path.write_bytes(due[: due.rindex(b"\n", 0, 3 * BLOCK) + 5])
    asked: list[int] = []

    def starts(first: int) -> Iterator[ObjectStart | None]:
        asked.append(first)
        return object_starts(plan, 0, first)

    listed = parsed(path.read_bytes().splitlines()[-2])
    again = KeyListWriter(str(path), "r", starts, first=0, consumed=9, ahead=True, held=True)
    assert asked == [listed.offset - 1]
    again.reach(9, plan.total_bytes(0) - 9, 9)
    again.close()
    assert path.read_bytes() == due
    path.write_bytes(due + b"[" * BLOCK)
    with pytest.raises(ValueError, match="have no whole line"):
        writer_of(path, plan, held=True)
    assert os.path.getsize(path) == len(due) + BLOCK
