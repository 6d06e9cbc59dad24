"""The measurement of recovery says what is so: a small one of each kind of fault, and of hedges."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.report import insert
from benchmarks.stats import percentile
from tests.kit import recovery

ROOT = Path(__file__).parents[2]


@pytest.mark.usefixtures("credentials")
def test_every_fault_is_met_and_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "OBJECTS", 3)
    monkeypatch.setattr(recovery, "SHARE", 0.4)
    rows = recovery.faults(1).splitlines()[2:]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == [kind.name for kind in recovery.KINDS]
    for row, kind in zip(rows, recovery.KINDS, strict=True):
        assert ("failed by its cause: 1 of 1" if kind.cause else "complete, right: 1 of 1") in row
        assert int(row.split(" | ")[1]) > 0


def test_the_page_has_room_for_the_results() -> None:
    page = (ROOT / "docs/explanation/reliability.md").read_text()
    for name in ("faults", "hedges"):
        begin, end = recovery.BEGIN.format(name), recovery.END.format(name)
        assert insert(page, "text", begin=begin, end=end) != page


def test_percentiles() -> None:
    values = [float(each) for each in range(100)]
    assert percentile(values, 0.5) == 50.0
    assert percentile(values, 0.99) == 99.0
    assert percentile([1.0], 0.99) == 1.0
