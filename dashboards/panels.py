"""Panel builders: everything that all panels of a dashboard have in common, said once.

A `Panel` is a plain value: what it asks (targets), in which unit, how wide. `build()` in
`dashboards.build` turns it into Grafana's model. Every panel reads from `${datasource}`, has a title, a
description that says what to conclude from it, and a unit; a stat is an instant query, since a stat that
remembers the last value of the range would show a sidecar that is gone as if it still ran.
"""

from __future__ import annotations

import warnings
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

with warnings.catch_warnings():
    # The SDK warns for the classic dashboard in favour of schema v2, which older Grafanas cannot provision.
    warnings.simplefilter("ignore", DeprecationWarning)
    from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, timeseries
    from grafana_foundation_sdk.builders import stat as stat_builder
    from grafana_foundation_sdk.builders import table as table_builder
    from grafana_foundation_sdk.models import common as common_model
    from grafana_foundation_sdk.models import dashboard as model
    from grafana_foundation_sdk.models.prometheus import PromQueryFormat

__all__ = [
    "Column", "Mapping", "Page", "Panel", "Target", "dashboard", "datasource", "graph", "model",
    "panel_builder", "stat", "table",
]  # fmt: skip

GREEN, ORANGE, RED, PURPLE, BLUE, GREY = "green", "orange", "red", "purple", "blue", "text"
OTHER_FIFO = "yellow"
TRAINER, STORAGE, LIMIT, MOVING, IDLE = GREEN, PURPLE, ORANGE, BLUE, GREY
"""Colours of what a channel waits for, as on the status page. A wait for the trainer is healthy."""

Thresholds: TypeAlias = tuple[tuple[float | None, str], ...]
"""(from which value, colour); the first begins at None, minus infinity."""
Target: TypeAlias = tuple[str, str]
"""PromQL, and the legend of its series."""
Unit: TypeAlias = Literal["binBps", "bytes", "ops", "reqps", "s", "short", "percentunit", "bool_yes_no"]


def datasource() -> common_model.DataSourceRef:
    """The data source that the reader of the dashboard has chosen."""
    return common_model.DataSourceRef(type_val="prometheus", uid="${datasource}")


class Mapping(NamedTuple):
    """Show `text` in `color` for values from `low` to `high`; None is infinity."""

    low: float | None
    high: float | None
    text: str
    color: str


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table: a query with one value a row, or a label of the queries' answers."""

    title: str
    expression: str | None = None
    _: KW_ONLY
    label: str | None = None
    unit: Unit = "short"
    decimals: int | None = None
    thresholds: Thresholds = ()
    """Colours of the cells' background; none: plain."""
    mappings: tuple[Mapping, ...] = ()
    link: str | None = None
    """Where a click leads."""
    hidden: bool = False
    """Asked for its labels alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel; `width` is in 24ths of the page, `height` in Grafana's rows of 30 pixels."""

    title: str
    description: str
    unit: Unit
    targets: tuple[Target, ...]
    width: int
    height: int = 8
    kind: Literal["timeseries", "stat", "bargauge", "table"] = "timeseries"
    low: float | None = 0
    high: float | None = None
    stacked: bool = False
    bars: bool = False
    steps: bool = False
    decimals: int | None = None
    thresholds: Thresholds = ((None, GREEN),)
    mappings: tuple[Mapping, ...] = ()
    no_value: str | None = None
    """Text of a stat whose query answers nothing."""
    show_name: bool = False
    """A stat shows the name of the series, not its value."""
    colors: dict[str, str] = field(default_factory=dict)
    """Fixed colours by legend, or by a regular expression for legends, between slashes."""
    columns: tuple[Column, ...] = ()
    """Columns of a table, from left to right; those with an expression are the targets, in this order."""
    sort: str | None = None
    """Title of the column that a table is sorted by, the largest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One dashboard."""

    uid: str
    title: str
    description: str
    refresh: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]
    """(title, panels) from top to bottom."""
    collapsed: frozenset[str] = frozenset()
    """Titles of rows that are closed at first: most jobs have no data for them."""


def graph(title: str, unit: Unit, *targets: Target, about: str, width: int = 8, **rest: Any) -> Panel:
    """A panel of lines over time."""
    return Panel(title=title, description=about, unit=unit, targets=targets, width=width, **rest)


def stat(title: str, unit: Unit, target: Target, *, about: str, **rest: Any) -> Panel:
    """A panel of one number, as it is now."""
    defaults: dict[str, Any] = {"kind": "stat", "width": 4, "height": 4, "no_value": "No sidecar"}
    return graph(title, unit, target, about=about, **defaults | rest)


def table(title: str, *, about: str, columns: tuple[Column, ...], sort: str, **rest: Any) -> Panel:
    """A panel with a row for each combination of the columns that are labels, as it is now."""
    targets = [(column.expression, column.title) for column in columns if column.expression]
    shown: dict[str, Any] = {"kind": "table", "columns": columns, "sort": sort, "no_value": "-"}
    return graph(title, "short", *targets, about=about, **shown | rest)


def panel_builder(panel: Panel, *, panel_id: int) -> Any:
    """Grafana's builder of `panel`, ready to be put into a dashboard."""
    kinds = {"timeseries": _timeseries, "stat": _stat, "bargauge": lambda _: _bargauge(), "table": _table}
    made: Any = kinds[panel.kind](panel)
    made.id(panel_id).title(panel.title).description(panel.description).datasource(datasource())
    made.unit(panel.unit).span(panel.width).height(panel.height)
    steps = [model.Threshold(value=value, color=color) for value, color in panel.thresholds]
    made.thresholds(dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps))
    if panel.low is not None:
        made.min(panel.low)
    if panel.high is not None:
        made.max(panel.high)
    if panel.decimals is not None:
        made.decimals(panel.decimals)
    if panel.no_value is not None:
        made.no_value(panel.no_value)
    if panel.mappings:
        made.mappings([_range_map(index, mapping) for index, mapping in enumerate(panel.mappings)])
    for name, color in panel.colors.items():
        fixed = {"mode": "fixed", "fixedColor": color}
        override = made.override_by_regexp if name.startswith("/") else made.override_by_name
        override(name, [model.DynamicConfigValue(id_val="color", value=fixed)])
    for index, (expression, legend) in enumerate(panel.targets):
        query = prometheus.Dataquery().expr(expression).legend_format(legend).ref_id(chr(ord("A") + index))
        query.datasource(datasource())
        if panel.kind == "table":
            query.format(PromQueryFormat.TABLE)
        made.with_target(query.range() if panel.kind == "timeseries" else query.instant())
    return made


def _range_map(index: int, mapping: Mapping) -> model.RangeMap:
    result = model.ValueMappingResult(text=mapping.text, color=mapping.color, index=index)
    return model.RangeMap(
        model.DashboardRangeMapOptions(from_val=mapping.low, to=mapping.high, result=result)
    )


def _timeseries(panel: Panel) -> Any:
    legend = (
        common.VizLegendOptions().show_legend(show_legend=True).placement(common_model.LegendPlacement.BOTTOM)
    )
    legend.display_mode(common_model.LegendDisplayMode.LIST)
    tooltip = common.VizTooltipOptions().mode(common_model.TooltipDisplayMode.MULTI)
    made = timeseries.Panel().legend(legend).tooltip(tooltip.sort(common_model.SortOrder.DESCENDING))
    made.line_width(1).fill_opacity(10).show_points(common_model.VisibilityMode.NEVER)
    if panel.stacked:
        made.stacking(common.StackingConfig().mode(common_model.StackingMode.NORMAL).group("A"))
        made.fill_opacity(60).line_width(0)
    if panel.bars:
        made.draw_style(common_model.GraphDrawStyle.BARS).fill_opacity(80)
    if panel.steps:
        made.line_interpolation(common_model.LineInterpolation.STEP_AFTER)
    return made


def _last() -> common.ReduceDataOptions:
    return common.ReduceDataOptions().calcs(["lastNotNull"]).values(values=False)


def _stat(panel: Panel) -> Any:
    made = stat_builder.Panel().reduce_options(_last()).graph_mode(common_model.BigValueGraphMode.NONE)
    made.color_mode(
        common_model.BigValueColorMode.NONE if panel.show_name else common_model.BigValueColorMode.VALUE
    )
    if panel.show_name:
        made.text_mode(common_model.BigValueTextMode.NAME)
    return made


def _bargauge() -> Any:
    made = bargauge.Panel().reduce_options(_last()).orientation(common_model.VizOrientation.HORIZONTAL)
    return made.display_mode(common_model.BarGaugeDisplayMode.BASIC).show_unfilled(show_unfilled=True)


def _table(panel: Panel) -> Any:
    """The answers side by side, joined by their labels, under the columns' titles."""
    made = table_builder.Panel().filterable(filterable=True)
    made.sort_by([common.TableSortByFieldState().display_name(panel.sort or "").desc(desc=True)])
    names, excluded = {}, {"Time": True}
    values = iter("ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: len(panel.targets)])
    alone = len(panel.targets) == 1
    for column in panel.columns:
        name = column.label or ("Value" if alone else f"Value #{next(values)}")
        names[name] = column.title
        excluded[name] = column.hidden
        made.override_by_name(column.title, list(_properties(column)))
    made.with_transformation(model.DataTransformerConfig(id_val="merge", options={}))
    order = {name: index for index, name in enumerate(names)}
    organized = {"excludeByName": excluded, "indexByName": order, "renameByName": names}
    return made.with_transformation(model.DataTransformerConfig(id_val="organize", options=organized))


def _properties(column: Column) -> Iterator[model.DynamicConfigValue]:
    yield model.DynamicConfigValue(id_val="unit", value=column.unit)
    if column.decimals is not None:
        yield model.DynamicConfigValue(id_val="decimals", value=column.decimals)
    if column.mappings:
        mappings = [_range_map(index, mapping) for index, mapping in enumerate(column.mappings)]
        yield model.DynamicConfigValue(id_val="mappings", value=mappings)
    if column.thresholds:
        steps = [{"value": value, "color": color} for value, color in column.thresholds]
        yield model.DynamicConfigValue(id_val="thresholds", value={"mode": "absolute", "steps": steps})
        yield model.DynamicConfigValue(
            id_val="custom.cellOptions", value={"type": "color-background", "mode": "basic"}
        )
    if column.link:
        link = {"title": "Its overview", "url": column.link}
        yield model.DynamicConfigValue(id_val="links", value=[link])
