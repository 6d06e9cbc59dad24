"""The writer of key lists: objects skipped on delivery, and a list that a second sidecar goes on with."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamer.key_list import KeyListLine, parsed
from streamer.plan import ObjectRef, ObjectStart, Plan
from streamer.plan.object_starts import object_starts
from streamer.sink.key_list import AHEAD, KeyListWriter


def lines(path: Path) -> list[KeyListLine]:
    return list(map(parsed, path.read_bytes().splitlines()[1:]))


def plan_of(*sizes: int) -> Plan:
    return Plan.of([ObjectRef("b", f"k{number}", size, "e") for number, size in enumerate(sizes)])


def test_a_skipped_object_has_no_byte(tmp_path: Path) -> None:
    """Offsets in the stream are those that delivery reports, and of one offset the last line is valid."""
    path = tmp_path / "list"
    writer = KeyListWriter(
        str(path), "r", object_starts(plan_of(10, 20, 30, 0, 40), 0), ahead=False, held=False
    )
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
    whole = KeyListWriter(str(path), "r", object_starts(plan, 0, 3), ahead=True, held=False)
    whole.reach(3, sum(sizes) - 3, 3)
    whole.close()
    due = path.read_bytes()
    assert len(lines(path)) == len(sizes)
    path.write_bytes(b"".join(due.splitlines(keepends=True)[: died + 1]) + b"[1, ")
    again = KeyListWriter(str(path), "r", object_starts(plan, 0, 3), ahead=True, held=True)
    for at in range(12, sum(sizes)):
        again.reach(at, 1, at)
    again.close()
    assert path.read_bytes() == due
    with pytest.raises(ValueError, match="of this run"):
        KeyListWriter(str(path), "s", iter(()), ahead=True, held=True)


def test_a_fifo_that_begins_inside_an_object_has_its_line(tmp_path: Path) -> None:
    path = tmp_path / "list"
    writer = KeyListWriter(str(path), "r", object_starts(plan_of(10, 20, 30), 0, 15), ahead=True, held=False)
    writer.reach(15, 1, 15)
    writer.close()
    assert [(line.offset, line.key) for line in lines(path)] == [(10, "k1"), (30, "k2")]


def test_an_open_plan_knows_its_next_object_later(tmp_path: Path) -> None:
    path = tmp_path / "list"
    starts = iter([ObjectStart(0, 0, "a", "b"), None, ObjectStart(9, 0, "c", "b")])
    writer = KeyListWriter(str(path), "r", starts, ahead=True, held=False)
    writer.reach(0, 9, 0)
    assert [line.key for line in lines(path)] == ["a"]
    writer.reach(9, 1, 9)
    writer.close()
    assert [line.key for line in lines(path)] == ["a", "c"]
