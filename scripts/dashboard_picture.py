"""Draws the dashboards with data into docs/pictures: `python -m scripts.dashboard_picture`.

    dashboards/overview.py, fleet.py ──▶ PromQL ──▶ Prometheus ──▶ pandas, matplotlib ──▶ PNG

`scripts.dashboard_session` runs the sidecars and the Prometheus that scrapes them. Queries, units, colours
and widths are those of the dashboards. The drawing is matplotlib's, not Grafana's.
"""

from __future__ import annotations

import io
import re
import tempfile
import time
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator
from PIL import Image

from dashboards.fleet import FLEET
from dashboards.overview import OVERVIEW
from dashboards.panels import Column, Page, Panel
from scripts.dashboard_session import session
from tests.operate.scraping import Prometheus

PICTURES = Path(__file__).resolve().parents[1] / "docs/pictures"
STEP = 2
"""Seconds between the points of a line."""
STYLE: list[Any] = [
    "seaborn-v0_8-whitegrid",
    {
        "font.size": 8,
        "axes.titlesize": 9,
        "axes.titlelocation": "left",
        "figure.constrained_layout.use": True,
    },
]
COLORS = {name: f"tab:{name}" for name in ("green", "orange", "red", "purple", "blue")} | {
    "text": "tab:gray",
    "yellow": "gold",
    "transparent": "white",
}
SUFFIXES = {"binBps": "B/s", "bytes": "B", "ops": "/s", "reqps": "/s", "s": "s", "short": ""}


class Data(NamedTuple):
    """The samples of a Prometheus in the seconds before `end` (Unix time), of the sidecars of `instance`."""

    server: Prometheus
    end: float
    seconds: int
    instance: str = ".+"

    def ask(self, expression: str, **options: float) -> Any:
        """Return the series that a query selects: at the end, or in the range that `options` give."""
        query = expression.replace("$__rate_interval", "8s").replace("$instance", self.instance)
        query = query.replace("$__range", f"{self.seconds}s").replace("$__interval", f"{STEP}s")
        query = re.sub(r"\$(job|channel)\b", ".+", query)
        path = "query_range" if options else "query"
        return self.server.get(path, query=query, **options or {"time": self.end})["result"]

    def lines(self, panel: Panel) -> pd.DataFrame:
        """Return a column for each series, named by its legend. The index is in minutes."""
        begin, found = self.end - self.seconds, {}
        for expression, legend in panel.targets:
            for one in self.ask(expression, start=begin, end=self.end, step=STEP):
                name = title(legend, one["metric"])
                found[name] = {round((at - begin) / STEP): float(value) for at, value in one["values"]}
        frame = pd.DataFrame(found).reindex(range(self.seconds // STEP + 1))
        return frame.set_index(frame.index * STEP / 60)

    def rows(self, panel: Panel) -> pd.DataFrame:
        """Return a table's rows: the results of all queries, joined by their common labels."""
        found = pd.DataFrame(
            {**one["metric"], title: float(one["value"][1])}
            for expression, title in panel.targets
            for one in self.ask(expression)
        )
        keys = list(found.columns[found.notna().all()])
        rows = found.groupby(keys, as_index=False).first().sort_values(panel.sort, ascending=False)
        return rows.where(rows.notna(), "-")


def title(legend: str, labels: dict[str, str]) -> str:
    """Return the name of a series: `legend` with the values of its `{{labels}}`."""
    return " ".join(re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), legend).split())


def words(value: float, unit: str) -> str:
    """Return a value with three significant digits and its unit."""
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "bool_yes_no":
        return "yes" if value else "no"
    if unit == "s" and value >= 600:
        return f"{value / 60:.3g} min"
    if unit != "s" and value < 1000:
        return f"{value:.3g} {SUFFIXES[unit]}".strip()
    return EngFormatter(SUFFIXES[unit])(float(f"{value:.3g}"))


def look(field: Panel | Column, value: float | str) -> tuple[str, str]:
    """Return the text and the colour of a value, by the field's mappings and thresholds."""
    if isinstance(value, str):
        return value, "white"
    for each in field.mappings:
        if (each.low is None or value >= each.low) and (each.high is None or value <= each.high):
            return each.text, COLORS[each.color]
    reached = [color for limit, color in field.thresholds if limit is None or value >= limit]
    return words(value, field.unit), COLORS[reached[-1]] if reached else "white"


def draw_table(axes: Axes, panel: Panel, rows: pd.DataFrame) -> None:
    """Draw a table that is as wide as the panel."""
    axes.axis("off")
    columns = {column.label or column.title: column for column in panel.columns if not column.hidden}
    columns = {name: column for name, column in columns.items() if name in rows}
    cells = [[look(column, row[name]) for name, column in columns.items()] for _, row in rows.iterrows()]
    drawn = axes.table(
        [[text for text, _ in row] for row in cells],
        [[to_rgba(color, 0.3) for _, color in row] for row in cells],
        colLabels=[column.title for column in columns.values()],
        cellLoc="left",
        loc="upper left",
    )
    drawn.auto_set_font_size(value=False)
    drawn.scale(1, 1.5)
    for cell in drawn.get_celld().values():
        cell.set_edgecolor("lightgray")


def fixed_color(panel: Panel, legend: str) -> str | None:
    """The colour that the panel fixes for a series, by its legend or by a regular expression for legends."""
    for name, color in panel.colors.items():
        if name == legend or (name.startswith("/") and re.search(name.strip("/"), legend)):
            return COLORS[color]
    return None


def draw_graph(axes: Axes, panel: Panel, lines: pd.DataFrame) -> None:
    """Draw lines or stacked areas over time, without the series that are always zero."""
    colors = {name: fixed_color(panel, name) or f"C{n % 10}" for n, name in enumerate(lines)}
    lines = lines.loc[:, lines.max() > 0]
    if panel.stacked:
        lines.fillna(0).plot.area(ax=axes, color=colors, alpha=0.6, linewidth=0)
    else:
        lines.plot(ax=axes, color=colors, linewidth=1.2, drawstyle="steps-post" if panel.steps else "default")
    axes.set(xlim=(0, lines.index[-1]), ylim=(panel.low, panel.high and 1.02 * panel.high))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    ticks = 1 if panel.unit == "bool_yes_no" else 4
    axes.yaxis.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: words(value, panel.unit)))
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.1), ncols=3)


def draw_panel(axes: Axes, panel: Panel, data: Data) -> None:
    """Draw one panel with the results of its queries."""
    axes.set_title(panel.title)
    lines = data.lines(panel)
    last = lines.iloc[-1].dropna()
    if panel.kind == "table":
        draw_table(axes, panel, data.rows(panel))
    elif panel.kind == "timeseries" and (lines > 0).any(axis=None):
        draw_graph(axes, panel, lines)
    elif panel.kind == "bargauge":
        axes.bar_label(axes.barh(last.index, last), [words(value, panel.unit) for value in last], padding=3)
        axes.set(xlim=(0, 1.4), xticks=[])
        axes.grid(visible=False)
    else:
        text, color = ("always 0" if len(lines.columns) else panel.no_value or "No data"), "gray"
        if panel.kind == "stat" and len(last):
            text, color = (last.index[0], "black") if panel.show_name else look(panel, last.iloc[0])
        size = 18 if panel.height == 4 else 10
        axes.text(0.5, 0.5, text, color=color, fontsize=size, ha="center", va="center")
        axes.set(xticks=[], yticks=[])


def draw_page(page: Page, data: Data, *, rows: int | None = None) -> Figure:
    """Draw the first `rows` rows of a dashboard, or all, without those that are closed at first."""
    lines: list[tuple[str, list[Panel]]] = []
    for heading, panels in page.rows[:rows]:
        if heading in page.collapsed:
            continue
        ends = accumulate(panel.width for panel in panels)
        for number, same in groupby(zip(panels, ends, strict=True), lambda each: (each[1] - 1) // 24):
            lines.append(("" if number else heading, [panel for panel, _ in same]))
    heights = [max(5 if each.kind == "table" else each.height for each in line) + 1 for _, line in lines]
    with style.context(STYLE):
        figure = Figure(figsize=(13.6, 0.28 * sum(heights)))
        figure.suptitle(f"{page.title}, {data.seconds / 60:.0f} minutes", fontsize=13)
        parts = figure.subfigures(len(lines), 1, squeeze=False, height_ratios=heights)[:, 0]
        for part, (heading, line) in zip(parts, lines, strict=True):
            if heading:
                part.suptitle(heading, x=0.005, ha="left", fontsize=11, weight="bold")
            places = part.subplots(1, len(line), squeeze=False, width_ratios=[each.width for each in line])
            for axes, panel in zip(places[0], line, strict=True):
                draw_panel(axes, panel, data)
    return figure


def draw(data: Data, into: Path) -> None:
    """Write every picture of the docs."""
    host = data._replace(instance="digits-0")
    for name, figure in {
        "overview": draw_page(OVERVIEW, host),
        "overview-top": draw_page(OVERVIEW, host, rows=3),
        "fleet": draw_page(FLEET, data),
    }.items():
        whole = io.BytesIO()
        figure.savefig(whole, dpi=100)
        # 128 colours take a third of the bytes.
        few = Image.open(whole).convert("RGB").quantize(128, dither=Image.Dither.NONE)
        few.save(into / f"dashboard-{name}.png", optimize=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="penstock-") as work, session(Path(work), seconds=300) as server:
        draw(Data(server, time.time(), 300), PICTURES)
