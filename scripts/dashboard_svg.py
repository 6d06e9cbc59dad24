"""A panel with its data as HTML and SVG; pure, and no more of Grafana than our dashboards use.

`draw` takes a panel as it stands in a dashboard's JSON, and what its queries answered as `Series`. Colours,
units, thresholds, mappings and stacking follow Grafana's; the legend is left to the browser to lay out. A
kind of panel that is not known here is an error, lest a picture leave something out.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from html import escape
from typing import Any

Points = list[tuple[float, float]]

COLORS = {
    "green": "#73bf69", "orange": "#ff9830", "red": "#f2495c", "purple": "#b877d9", "blue": "#5794f2",
    "yellow": "#fade2a", "text": "#9fa7b3", "transparent": "#00000000",
}  # fmt: skip
PALETTE = (
    "#73bf69", "#fade2a", "#5794f2", "#ff9830", "#f2495c", "#8ab8ff", "#b877d9", "#96d98d", "#ffcb7d",
)  # fmt: skip
"""Grafana's classic palette, in which series without a colour of their own are drawn."""
_TITLE, _LEGEND_LINE, _TIMES = 30, 17, 16
_GLYPH = 6.1
"""Pixels of an average letter of a legend."""


@dataclass(frozen=True, slots=True)
class Series:
    """One series of an answer: its legend, its labels, and its points as (Unix seconds, value)."""

    name: str
    labels: dict[str, str]
    points: Points
    ref: str = "A"


def draw(
    panel: dict[str, Any], series: list[Series], *, size: tuple[float, float], span: tuple[float, float]
) -> str:
    """The panel's HTML, for a box of `size` pixels; `span` is the time it shows. Raises ValueError."""
    kind, width, height = panel["type"], size[0] - 16, size[1] - _TITLE - 8
    if kind == "timeseries":
        inside = _graph(panel, series, (width, height), span)
    elif kind in ("stat", "gauge"):
        inside = _stat(panel, series, height)
    elif kind == "bargauge":
        inside = _bars(panel, series)
    elif kind == "table":
        inside = _table(panel, series)
    elif kind == "text":
        inside = f"<p>{escape(panel['options']['content'])}</p>"
    else:
        raise ValueError(f"no picture can be drawn of a {kind} panel: teach scripts/dashboard_svg.py")
    return f"<h3>{escape(panel['title'])}</h3>{inside}"


# Values in words


def words(value: float, unit: str, decimals: int | None = None) -> str:
    """A value in Grafana's unit."""
    if math.isnan(value):
        return "-"
    if unit == "percentunit":
        return f"{value * 100:.{1 if decimals is None else decimals}f}%".replace(".0%", "%")
    if unit == "bool_yes_no":
        return "Yes" if value else "No"
    if unit == "s":
        return _seconds(value)
    if unit in ("bytes", "binBps", "decbytes", "Bps"):
        step, names = (1000, "kMGTP") if unit in ("decbytes", "Bps") else (1024, "KMGTP")
        power = min(5, int(math.log(max(abs(value), 1), step)))
        name = "B" if not power else names[power - 1] + ("B" if step == 1000 else "iB")
        return f"{_short(value / step**power)} {name}{'/s' if unit in ('binBps', 'Bps') else ''}"
    suffix = {"ops": " ops/s", "reqps": " req/s", "short": "", "none": "", "currencyUSD": ""}.get(unit)
    if suffix is None:
        raise ValueError(f"the unit {unit!r} has no words: teach scripts/dashboard_svg.py")
    text = f"{value:.{decimals}f}" if decimals is not None else _thousands(value)
    return f"${text}" if unit == "currencyUSD" else text + suffix


def _short(value: float) -> str:
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f}".rstrip("0").rstrip(".") if digits else f"{value:.0f}"


def _thousands(value: float) -> str:
    for name, size in (("Mil", 1e6), ("K", 1e3)):
        if abs(value) >= size:
            return f"{_short(value / size)} {name}"
    return _short(value)


def _seconds(value: float) -> str:
    for name, size in (("h", 3600), ("min", 60), ("s", 1), ("ms", 1e-3)):
        if abs(value) >= size:
            return f"{_short(value / size)} {name}"
    return f"{_short(value * 1e6)} µs" if value else "0 s"


def _ticks(low: float, high: float, unit: str) -> list[float]:
    """Some five round values from `low` to `high`."""
    if unit == "bool_yes_no":
        return [0, 1]
    base = 1024 if unit in ("bytes", "binBps") else 60 if unit == "s" else 1000
    scale = base ** max(0, math.floor(math.log(max(high, 1e-9), base))) if high >= base else 1.0
    rough = (high - low) / scale / 4
    power = 10 ** math.floor(math.log10(rough))
    step = next(each for each in (1, 2, 2.5, 5, 10) if each * power >= rough * 0.999) * power * scale
    return [step * i for i in range(math.ceil(low / step), math.floor(high / step * 1.0001) + 1)]


# What a field is set to


def _field(panel: dict[str, Any], name: str, key: str, default: Any = None) -> Any:
    """A property of the field called `name`: its override, else the panel's default."""
    config = panel["fieldConfig"]
    for override in config["overrides"]:
        if override["matcher"] == {"id": "byName", "options": name}:
            for each in override["properties"]:
                if each["id"] in (key, f"custom.{key}"):
                    return each["value"]
    found = config["defaults"]
    return found.get(key, found.get("custom", {}).get(key, default))


def _color(panel: dict[str, Any], name: str, index: int) -> str:
    chosen = _field(panel, name, "color")
    if isinstance(chosen, dict) and "fixedColor" in chosen:
        return COLORS.get(chosen["fixedColor"], chosen["fixedColor"])
    return PALETTE[index % len(PALETTE)]


def _text(panel: dict[str, Any], name: str, value: float) -> tuple[str, str]:
    """A value in words and its colour, by mappings and thresholds."""
    steps = (_field(panel, name, "thresholds") or {}).get("steps", [])
    color = next(
        (each["color"] for each in reversed(steps) if each["value"] is None or value >= each["value"]), "text"
    )
    text = words(value, _field(panel, name, "unit", "short"), _field(panel, name, "decimals"))
    for mapping in _field(panel, name, "mappings", []):
        options = mapping["options"]
        if mapping["type"] == "range":
            low, high = options["from"], options["to"]
            found = (low is None or value >= low) and (high is None or value <= high)
            result = options["result"] if found else None
        else:
            result = options.get(f"{value:g}") if mapping["type"] == "value" else None
        if result:
            text, color = result.get("text", text), result.get("color", color)
            break
    return text, COLORS.get(color, color)


def _last(series: Series) -> float:
    return series.points[-1][1] if series.points else math.nan


# The kinds of panel


def _stat(panel: dict[str, Any], series: list[Series], height: float) -> str:
    options, parts = panel["options"], []
    for one in series:
        text, color = _text(panel, one.name, _last(one))
        if options.get("textMode") == "name":
            text = one.name
        paint = "inherit" if options.get("colorMode") == "none" else color
        parts.append(
            f'<b style="color:{paint};font-size:{_fit(text, height, len(series))}px">{escape(text)}</b>'
        )
    if not parts:
        parts = [f"<b>{escape(panel['fieldConfig']['defaults'].get('noValue', 'No data'))}</b>"]
    return f'<div class="stat" style="height:{height}px">{"".join(parts)}</div>'


def _fit(text: str, height: float, count: int) -> float:
    return min(34, height / count * 0.6, 300 / max(len(text), 1))


def _bars(panel: dict[str, Any], series: list[Series]) -> str:
    rows = []
    for one in series:
        value, high = _last(one), _field(panel, one.name, "max") or max(map(_last, series)) or 1
        text, color = _text(panel, one.name, value)
        share = 0 if math.isnan(value) else min(1, value / high)
        rows.append(
            f'<div class="bar"><span>{escape(one.name)}</span><i><u style="width:{share * 100:.1f}%;'
            f'background:{color}"></u></i><b style="color:{color}">{escape(text)}</b></div>'
        )
    return f'<div class="bars">{"".join(rows)}</div>'


Row = dict[str, str | float]


def _table(panel: dict[str, Any], series: list[Series]) -> str:
    """Instant answers as rows, by Grafana's `merge` and `organize`, sorted as the panel says."""
    organize = next(
        (each["options"] for each in panel.get("transformations", ()) if each["id"] == "organize"), {}
    )
    order, left_out = organize.get("indexByName", {}), organize.get("excludeByName", {})
    rows = _merged(series)
    found = {name for row in rows for name in row if not left_out.get(name) and name != "__name__"}
    columns = sorted(found, key=lambda name: (order.get(name, len(order)), name))
    shown = {name: organize.get("renameByName", {}).get(name) or name for name in columns}
    for wanted in reversed(panel["options"].get("sortBy", ())):
        by = next((name for name in columns if shown[name] == wanted["displayName"]), None)
        if by is not None:
            rows.sort(key=lambda row, by=by: _rank(row.get(by)), reverse=bool(wanted.get("desc")))
    head = "".join(f"<th>{escape(shown[name])}</th>" for name in columns)
    lines = ["".join(_cell(panel, shown[name], row.get(name)) for name in columns) for row in rows]
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _merged(series: list[Series]) -> list[Row]:
    """One row for the answers whose common labels agree, if one has all labels of the other."""
    several = len({one.ref for one in series}) > 1
    rows: list[tuple[dict[str, str], Row]] = []
    for one in series:
        labels, value = one.labels.items(), f"Value #{one.ref}" if several else "Value"
        for known, row in rows:
            if (labels <= known.items() or labels >= known.items()) and value not in row:
                known.update(one.labels)
                row.update(one.labels, **{value: _last(one)})
                break
        else:
            rows.append((dict(one.labels), {**one.labels, value: _last(one)}))
    return [row for _, row in rows]


def _rank(value: str | float | None) -> tuple[bool, bool, Any]:
    """What is absent comes first, then numbers, then text."""
    absent = value is None or (isinstance(value, float) and math.isnan(value))
    return (not absent, isinstance(value, str), 0 if absent else value)


def _cell(panel: dict[str, Any], name: str, value: str | float | None) -> str:
    if value is None or isinstance(value, str):
        return f"<td>{escape(value or '')}</td>"
    text, color = _text(panel, name, value)
    if (_field(panel, name, "cellOptions") or {}).get("type") == "color-background":
        return f'<td style="background:{color};color:#111217">{escape(text)}</td>'
    steps = (_field(panel, name, "thresholds") or {}).get("steps", ())
    painted = _field(panel, name, "mappings", []) or len(steps) > 1
    style = f' style="color:{color}"' if painted else ""
    return f"<td{style}>{escape(text)}</td>"


def _graph(
    panel: dict[str, Any], series: list[Series], size: tuple[float, float], span: tuple[float, float]
) -> str:
    defaults = panel["fieldConfig"]["defaults"]
    custom, unit, width = defaults.get("custom", {}), defaults.get("unit", "short"), size[0]
    if not series:
        return f'<div class="stat" style="height:{size[1]}px"><small>No data</small></div>'
    used, lines = 0.0, 1
    for one in series:
        used += len(one.name) * _GLYPH + 28
        if used > width:
            used, lines = len(one.name) * _GLYPH + 28, lines + 1
    height = size[1] - min(lines, 3) * _LEGEND_LINE - 4
    stacked = custom.get("stacking", {}).get("mode") == "normal"
    tops = _stack(series) if stacked else [one.points for one in series]
    seen = [value for points in tops for _, value in points if math.isfinite(value)]
    low, high = defaults.get("min"), defaults.get("max")
    low = min([0.0, *seen]) if low is None else low
    high = (max([low, *seen]) * 1.05 or 1.0) if high is None else high
    high = high if high > low else low + 1
    ticks = _ticks(low, high, unit)
    texts = [words(tick, unit, defaults.get("decimals")) for tick in ticks]
    left, bottom = max(map(len, texts)) * _GLYPH + 8, height - _TIMES

    def place(when: float, value: float) -> str:
        x = left + (when - span[0]) / (span[1] - span[0]) * (width - left - 4)
        y = bottom - (min(max(value, low), high) - low) / (high - low) * (bottom - 6)
        return f"{x:.1f},{y:.1f}"

    parts = [_axes(ticks, texts, place=place, span=span, right=width, left=left, bottom=bottom)]
    colors = [_color(panel, one.name, index) for index, one in enumerate(series)]
    fill = custom.get("fillOpacity", 0) / 100
    stroke = 0 if stacked else custom.get("lineWidth", 1) * 1.3
    bars = custom.get("drawStyle") == "bars"
    for index in range(len(series) - 1, -1, -1):
        under = tops[index - 1] if stacked and index else None
        if bars:
            parts += _columns(tops[index], under, place=place, color=colors[index])
            continue
        for piece in _pieces(tops[index]):
            points = _steps(piece) if custom.get("lineInterpolation") == "stepAfter" else piece
            line = " ".join(place(*point) for point in points)
            ground = under or [(points[0][0], low), (points[-1][0], low)]
            first, last = points[0][0], points[-1][0]
            back = " ".join(place(*point) for point in reversed(ground) if first <= point[0] <= last)
            parts.append(f'<polygon points="{line} {back}" fill="{colors[index]}" fill-opacity="{fill}"/>')
            drawn = f'stroke="{colors[index]}" stroke-width="{stroke or 0.6}"'
            parts.append(f'<polyline points="{line}" fill="none" {drawn}/>')
    legend = "".join(
        f'<span><i style="background:{color}"></i>{escape(one.name)}</span>'
        for color, one in zip(colors, series, strict=True)
    )
    svg = f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}">{"".join(parts)}</svg>'
    return f'{svg}<div class="legend">{legend}</div>'


def _columns(points: Points, under: Points | None, *, place: Any, color: str) -> list[str]:
    """A bar of three pixels for each point, upon what is below it."""
    ground, found = dict(under or ()), []
    for when, value in points:
        x, top = (float(each) for each in place(when, value).split(","))
        bottom = float(place(when, ground.get(when, 0.0)).split(",")[1])
        if bottom - top > 0.1:
            box = f'x="{x - 1.5:.1f}" y="{top}" width="3" height="{bottom - top:.1f}"'
            found.append(f'<rect {box} fill="{color}"/>')
    return found


def _axes(
    ticks: list[float], texts: list[str], *, place: Any, span: Any, right: float, left: float, bottom: float
) -> str:
    parts = []
    for tick, text in zip(ticks, texts, strict=True):
        y = place(span[0], tick).split(",")[1]
        parts.append(f'<line x1="{left}" x2="{right - 4}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{left - 6}" y="{y}" dy="3.5" text-anchor="end">{escape(text)}</text>')
    for minute in range(math.ceil(span[0] / 60), math.floor(span[1] / 60) + 1):
        x = float(place(minute * 60, ticks[0]).split(",")[0])
        clock = f"{minute // 60 % 24:02}:{minute % 60:02}"
        parts.append(f'<line x1="{x}" x2="{x}" y1="6" y2="{bottom}"/>')
        if left + 12 < x < right - 16:
            parts.append(f'<text x="{x}" y="{bottom + 13}" text-anchor="middle">{clock}</text>')
    return "".join(parts)


def _pieces(points: Points) -> list[Points]:
    """The stretches without a gap."""
    found: list[Points] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            found[-1].append(point)
        elif found[-1]:
            found.append([])
    return [piece for piece in found if piece]


def _steps(points: Points) -> Points:
    return [
        each for before, after in itertools.pairwise(points) for each in (before, (after[0], before[1]))
    ] + points[-1:]


def _stack(series: list[Series]) -> list[Points]:
    """Each series upon those before it, at every time at which any has a value."""
    times = sorted({when for one in series for when, _ in one.points})
    below, found = dict.fromkeys(times, 0.0), []
    for one in series:
        for when, value in one.points:
            below[when] += value if math.isfinite(value) else 0
        found.append([(when, below[when]) for when in times])
    return found
