"""The pictures of the dashboards: every panel can be drawn, and what is drawn is what was answered."""

from __future__ import annotations

import json
import math
import re
from xml.etree import ElementTree as ET

import pytest

from scripts.dashboard_svg import Series, draw, words
from tests.operate.promql import ROOT

DASHBOARDS = sorted((ROOT / "dashboards").glob("penstock-*.json"))
SPAN = (6000.0, 6300.0)
TIMES = [SPAN[0] + 2 * step for step in range(151)]


PANELS = [
    pytest.param(panel, id=f"{path.stem} {panel['title']}")
    for path in DASHBOARDS
    for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]
    if panel["type"] != "row"
]


def drawn(panel, series):
    """The panel's elements; what is not well formed is no picture."""
    return ET.fromstring(f"<div>{draw(panel, series, size=(400, 220), span=SPAN)}</div>")


@pytest.mark.parametrize("panel", PANELS)
def test_every_panel_of_every_dashboard_can_be_drawn(panel):
    """With two series, one of them with a gap, inside its box; and with none."""
    rising = [(at, 0.5 + at % 60 / 120) for at in TIMES]
    holed = [(at, math.nan if 40 < at % 100 < 60 else 0.25) for at in TIMES]
    series = [Series("a <b>", {"instance": "a"}, rising), Series("c", {"instance": "c"}, holed)]
    found = drawn(panel, series)
    assert found.findtext("h3") == panel["title"]
    if panel["type"] in ("timeseries", "bargauge"):
        assert {"a <b>", "c"} <= {"".join(each.itertext()) for each in found.iter("span")}
    for svg in found.iter("svg"):
        width, height = float(svg.get("width")), float(svg.get("height"))
        lines = [each.get("points").split() for each in svg.iter("polyline")]
        assert lines or list(svg.iter("rect"))
        for x, y in (map(float, point.split(",")) for line in lines for point in line):
            assert 0 <= x <= width
            assert 0 <= y <= height
    assert drawn(panel, []).findtext("h3") == panel["title"]


def graph(**defaults):
    custom = {"custom": {"lineWidth": 1}}
    return {
        "type": "timeseries",
        "title": "t",
        "fieldConfig": {"defaults": custom | defaults, "overrides": []},
    }


def heights(found):
    """The y of the first point of every line, from the top series down."""
    return [float(each.get("points").split()[0].split(",")[1]) for each in found.iter("polyline")]


def test_a_line_is_where_its_values_are():
    """Half of the axis is half-way up, and a gap parts a line in two."""
    points = [(at, 5.0) for at in TIMES[:50]] + [(TIMES[50], math.nan)] + [(at, 10.0) for at in TIMES[51:]]
    found = drawn(graph(min=0, max=10), [Series("x", {}, points)])
    low, high = heights(found)
    (bottom,) = {float(each.get("y")) for each in found.iter("text") if each.text == "0"}
    assert low - 6 == pytest.approx((bottom - 6) / 2, abs=0.2)
    assert high == pytest.approx(6, abs=0.2)
    assert {each.text for each in found.iter("text")} >= {"0", "5", "10", "01:41", "01:44"}


def test_stacked_series_lie_on_each_other():
    stacked = graph(min=0, max=10, custom={"stacking": {"mode": "normal"}})
    below, above = (
        Series(name, {}, [(at, value) for at in TIMES]) for name, value in (("a", 4.0), ("b", 6.0))
    )
    top, first = heights(drawn(stacked, [below, above]))
    assert top == pytest.approx(6, abs=0.2)
    assert first == heights(drawn(graph(min=0, max=10), [below]))[0]


def test_a_table_has_a_row_for_each_sidecar():
    """Merged by labels, renamed, ordered, sorted as its transformations say; without what is excluded."""
    organize = {
        "excludeByName": {"Value #C": True},
        "renameByName": {"instance": "Sidecar", "Value #A": "Starved", "Value #B": "Delivered"},
        "indexByName": {"instance": 0, "version": 1, "Value #B": 2, "Value #A": 3},
    }
    panel = graph() | {
        "type": "table",
        "transformations": [{"id": "merge", "options": {}}, {"id": "organize", "options": organize}],
        "options": {"sortBy": [{"displayName": "Starved", "desc": True}]},
    }
    answers = {"A": {"x": 0.1, "y": 0.7}, "B": {"y": 3, "x": 2, "z": 1}}
    series = [
        Series("", {"instance": name}, [(0, value)], ref)
        for ref, found in answers.items()
        for name, value in found.items()
    ]
    series += [Series("", {"instance": name, "version": "1.0"}, [(0, 1)], "C") for name in "xy"]
    rows = [["".join(cell.itertext()) for cell in row] for row in drawn(panel, series).iter("tr")]
    assert rows == [
        ["Sidecar", "version", "Delivered", "Starved"],
        ["y", "1.0", "3", "0.7"],
        ["x", "1.0", "2", "0.1"],
        ["z", "", "1", ""],
    ]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.329, "percentunit", "32.9%"), (1.0, "percentunit", "100%"), (50 * 2**20, "binBps", "50 MiB/s"),
        (1536, "bytes", "1.5 KiB"), (0, "bytes", "0 B"), (0.004, "s", "4 ms"), (90, "s", "1.5 min"),
        (7200, "s", "2 h"), (1500, "short", "1.5 K"), (3, "reqps", "3 req/s"), (1, "bool_yes_no", "Yes"),
    ],
)  # fmt: skip
def test_values_in_words(value, unit, text):
    assert words(value, unit) == text


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="heatmap panel"):
        draw(graph() | {"type": "heatmap"}, [], size=(10, 10), span=SPAN)
    with pytest.raises(ValueError, match="'furlongs'"):
        words(1, "furlongs")


def test_the_pictures_are_shown_and_small():
    """Each dashboard has its picture, and the pages that show one say that it is not Grafana's."""
    for path in DASHBOARDS:
        picture = f"dashboard-{path.stem.removeprefix('penstock-')}.png"
        if (ROOT / "docs/pictures" / picture).exists():
            assert (ROOT / "docs/pictures" / picture).stat().st_size < 300_000
    for page, picture in (
        ("README.md", "dashboard-overview-top.png"),
        ("docs/metrics.md", "dashboard-overview.png"),
    ):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert re.search(rf"!\[[^\]]*\]\((docs/)?pictures/{re.escape(picture)}\)", text)
        assert "not by Grafana" in text
