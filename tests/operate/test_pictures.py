"""The pictures of the dashboards in the docs; `test_prometheus.py` draws every panel with real answers."""

from __future__ import annotations

import re

import pytest

from dashboards.panels import Column, Mapping
from tests.kit.late import LATE
from tests.operate.promql import DASHBOARDS, ROOT

if LATE:
    from scripts.dashboard_picture import COLORS, look, title, words


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.3294, "percentunit", "32.9 %"), (1.0, "percentunit", "100 %"), (50e6, "binBps", "50 MB/s"),
        (1536, "bytes", "1.54 kB"), (0, "bytes", "0 B"), (0.004, "s", "4 ms"), (90, "s", "90 s"),
        (7200, "s", "120 min"), (1500, "short", "1.5 k"), (0.05, "short", "0.05"), (3, "reqps", "3 /s"),
        (1, "bool_yes_no", "yes"),
    ],
)  # fmt: skip
def test_a_value_is_written_in_its_unit(value: float, unit: str, text: str) -> None:
    assert words(value, unit) == text


def test_mappings_come_before_thresholds() -> None:
    column = Column(
        title="x",
        unit="percentunit",
        thresholds=((None, "green"), (0.2, "orange"), (0.5, "red")),
        mappings=(Mapping(low=0.9, high=None, text="all", color="purple"),),
    )
    assert look(column, 0.1) == ("10 %", COLORS["green"])
    assert look(column, 0.2) == ("20 %", COLORS["orange"])
    assert look(column, 0.9) == ("all", COLORS["purple"])
    assert look(Column(title="x"), 0.1) == ("0.1", "white")


def test_a_series_is_named_by_its_labels() -> None:
    assert title("{{instance}} {{pod}} {{cause}}", {"instance": "a", "cause": "body"}) == "a body"


def test_the_pictures_are_shown_and_small() -> None:
    """Each dashboard has its picture, and the pages that show one say that Grafana did not draw it."""
    for dashboard in DASHBOARDS:
        picture = ROOT / f"docs/pictures/dashboard-{dashboard.removeprefix('penstock-')}.png"
        assert picture.stat().st_size < 300_000
    for page, name in (
        ("docs/index.md", "dashboard-overview-top.png"),
        ("docs/reference/metrics.md", "dashboard-overview.png"),
        ("docs/reference/metrics.md", "dashboard-fleet.png"),
    ):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert re.search(rf"!\[[^\]]*\]\((docs/|\.\./)?pictures/{re.escape(name)}\)", text)
        assert re.search("not (drawn )?by Grafana|Grafana's own drawing looks different", text)
