"""Draws results as one picture: per scenario, throughput and CPU per GB of every client, with their range."""

from __future__ import annotations

from typing import Any

from benchmarks.stats import Spread, rows

OURS, PEER = "#0b6e8a", "#b9bec4"


def draw(results: dict[str, Any], path: str) -> None:
    """Write a PNG file. Raises ImportError without matplotlib, ValueError if nothing was measured."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measured = {
        name: [row for row in rows(scenario) if row.throughput and row.cpu]
        for name, scenario in results["scenarios"].items()
        if not scenario.get("problem")
    }
    measured = {name: made for name, made in measured.items() if made}
    if not measured:
        raise ValueError("nothing was measured")
    heights = [len(made) + 1.2 for made in measured.values()]
    figure = Figure(figsize=(10, 0.27 * sum(heights) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(measured), 2, squeeze=False, gridspec_kw={"height_ratios": heights})
    for (name, made), (left, right) in zip(measured.items(), axes, strict=True):
        names = [row.client for row in made]
        _bars(left, names, [row.throughput for row in made if row.throughput])
        _bars(right, names, [row.cpu for row in made if row.cpu])
        left.set_title(f"{name}: GB/s (more is better)", loc="left", fontsize=9, fontweight="bold")
        right.set_title("CPU-seconds per GB (less is better)", loc="left", fontsize=9)
        right.set_yticklabels([])
    figure.savefig(path, dpi=110)


def _bars(axis: Any, names: list[str], values: list[Spread]) -> None:
    places = range(len(names))
    medians = [value.median for value in values]
    around = [
        [value.median - value.low for value in values],
        [value.high - value.median for value in values],
    ]
    colours = [OURS if name.startswith("penstock") else PEER for name in names]
    axis.barh(places, medians, xerr=around, color=colours, height=0.72, error_kw={"lw": 1, "ecolor": "#444"})
    for place, value in zip(places, values, strict=True):
        axis.annotate(
            f"{value.median:.{2 if value.median >= 0.1 else 3}f}",
            (value.high, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axis.set_yticks(places, names, fontsize=8)
    axis.invert_yaxis()
    axis.margins(x=0.14)
    axis.tick_params(axis="x", labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)
