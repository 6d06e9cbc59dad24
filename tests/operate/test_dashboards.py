"""The dashboards: generated, loadable, true to the metrics, and PromQL that Prometheus parses.

The lints are those of Grafana's dashboard-linter, restated; each test names its rule.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards.overview import NOT_GRAPHED
from dashboards.queries import SERIES
from sidecar.observe.metrics import HEDGES, METRICS, RETRIED, TRAILER_STATES, UPLOAD_PHASES
from streamer.relay.statistics import CAUSES, STATES
from tests.operate.promql import (
    DASHBOARDS,
    ROOT,
    SELECTOR,
    annotation_queries,
    document,
    panel_queries,
    panels,
)

PANELS = [panel for dashboard in DASHBOARDS for panel in panels(dashboard)]
EVERY_QUERY = [
    query for dashboard in DASHBOARDS for query in panel_queries(dashboard) + annotation_queries(dashboard)
]
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
# Those of Grafana's value formats that a streaming service has use for.
UNITS = {
    "binBps", "bool_yes_no", "bytes", "ops", "percentunit", "reqps", "s", "short",
}  # fmt: skip


def each_dashboard() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("dashboard", DASHBOARDS)


def each_panel() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])


def each_query() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("query", EVERY_QUERY, ids=str)


def test_committed_json_is_what_the_generator_writes() -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-m", "dashboards.build", "--check"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    ("dashboard", "title", "refresh"),
    [("penstock-overview", "Penstock / Overview", "5s"), ("penstock-fleet", "Penstock / Fleet", "30s")],
)
def test_identity_and_habits_of_the_page(dashboard: str, title: str, refresh: str) -> None:
    page = document(dashboard)
    assert (page["uid"], page["title"]) == (dashboard, title)
    assert page["editable"] is False  # template-uneditable-rule
    assert page["timezone"] == "utc"
    assert page["time"] == {"from": "now-15m", "to": "now"}
    assert page["refresh"] == refresh
    assert "penstock" in page["tags"]
    # Grafana fills these in itself; committed, they would tie the file to one database.
    assert page.keys().isdisjoint({"id", "version", "iteration"})


@each_dashboard()
def test_the_pages_lead_to_each_other(dashboard: str) -> None:
    """By a link to all pages with the tag, which keeps the choices and the time."""
    page = document(dashboard)
    (link,) = page["links"]
    assert (link["type"], link["tags"]) == ("dashboards", page["tags"])
    assert link["includeVars"] is True
    assert link["keepTime"] is True
    assert "placement" not in link, "in a menu nobody finds it"
    variables = {variable["name"] for variable in page["templating"]["list"]}
    titles = [column["title"] for panel in panels(dashboard) for column in columns(panel)]
    for panel in panels(dashboard):
        for override in panel["fieldConfig"]["overrides"]:
            for each in override["properties"]:
                if each["id"] == "links":
                    (inner,) = each["value"]
                    target, _, choices = inner["url"].removeprefix("/d/").partition("?")
                    assert target in DASHBOARDS
                    assert set(re.findall(r"var-(\w+)=", choices)) <= variables
                    assert set(re.findall(r"__data\.fields\.(\w+)", choices)) <= set(titles)


def columns(panel: dict[str, Any]) -> list[Any]:
    """The columns of a table, by what they are called and what they show."""
    if panel["type"] != "table":
        return []
    organized = next(each["options"] for each in panel["transformations"] if each["id"] == "organize")
    return [
        {"source": source, "title": title}
        for source, title in organized["renameByName"].items()
        if not organized["excludeByName"][source]
    ]


def test_tables_show_every_query_and_every_label() -> None:
    tables = [panel for panel in PANELS if panel["type"] == "table"]
    assert len(tables) == 2
    for panel in tables:
        assert [each["id"] for each in panel["transformations"]] == ["merge", "organize"]
        organized = panel["transformations"][1]["options"]
        shown = [each["source"] for each in columns(panel)]
        values = {source for source in organized["renameByName"] if source.startswith("Value")}
        alone = len(panel["targets"]) == 1
        assert values == {"Value" if alone else f"Value #{target['refId']}" for target in panel["targets"]}
        labels = {
            label
            for target in panel["targets"]
            for group in re.findall(r" by \(([^)]*)\)", target["expr"].partition(" / ")[0])
            for label in group.split(", ")
        }
        assert set(shown) - values == labels - {"le"}
        assert sorted(organized["indexByName"].values()) == list(range(len(organized["renameByName"])))
        titles = {each["title"] for each in columns(panel)}
        assert {each["displayName"] for each in panel["options"]["sortBy"]} <= titles
        named = {override["matcher"]["options"] for override in panel["fieldConfig"]["overrides"]}
        assert titles <= named
        assert all(target["format"] == "table" for target in panel["targets"])


@each_dashboard()
def test_variables(dashboard: str) -> None:
    """template-datasource-, -job-, -instance- and -on-time-change-reload-rule."""
    variables = {variable["name"]: variable for variable in document(dashboard)["templating"]["list"]}
    assert list(variables) == ["datasource", "job", "instance", "channel"]
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    known: set[str] = set()
    for name in ("job", "instance", "channel"):
        variable = variables[name]
        assert variable["type"] == "query"
        assert variable["datasource"] == DATASOURCE
        assert (variable["multi"], variable["includeAll"], variable["allValue"]) == (True, True, ".+")
        assert variable["refresh"] == 2
        # template-label-promql-rule: label_values(selector, the label so called), over earlier choices.
        found = re.fullmatch(r"label_values\((\w+)(\{[^}]*\})?, (\w+)\)", variable["query"])
        assert found, variable["query"]
        assert found[3] == name
        assert set(re.findall(r"\$(\w+)", found[2] or "")) == known
        known.add(name)


@each_panel()
def test_panel_is_complete(panel: Any) -> None:
    """panel-datasource-rule, panel-title-description-rule, panel-units-rule, panel-no-targets-rule."""
    assert panel["datasource"] == DATASOURCE
    assert panel["title"]
    assert len(panel["description"]) > 20
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    assert "min" in panel["fieldConfig"]["defaults"]
    assert panel["targets"]
    for target in panel["targets"]:
        assert target["datasource"] == DATASOURCE
        assert target["legendFormat"]
        assert target["instant"] != target["range"]
        assert target["instant"] == (panel["type"] != "timeseries"), "a stat shows now, a graph shows time"
    refs = [target["refId"] for target in panel["targets"]]
    assert len(set(refs)) == len(refs)
    if panel["type"] != "timeseries":
        assert panel["fieldConfig"]["defaults"]["noValue"]


@each_dashboard()
def test_panels_fill_the_page(dashboard: str) -> None:
    everything = []
    for panel in document(dashboard)["panels"]:
        everything += [panel, *panel.get("panels", ())]
    assert everything[0]["type"] == "row"
    numbers = [panel["id"] for panel in everything]
    assert len(set(numbers)) == len(numbers)
    titles = [panel["title"] for panel in everything]
    assert len(set(titles)) == len(titles)
    lines: dict[int, list[dict[str, Any]]] = {}
    for panel in everything:
        lines.setdefault(panel["gridPos"]["y"], []).append(panel["gridPos"])
    for line in lines.values():
        assert len({place["h"] for place in line}) == 1
        ends = list(accumulate(place["w"] for place in line))
        assert [place["x"] for place in line] == [0, *ends[:-1]]
        assert ends[-1] == 24


def test_colours_are_those_of_the_status_page() -> None:
    """Waits for the trainer are green, for storage purple, for another FIFO yellow; a limit is amber."""
    page = (ROOT / "sidecar/admin/page.html").read_text(encoding="utf-8")
    (table,) = re.findall(r"const STATES = (\[.*?\]);", page, re.DOTALL)
    shown = dict(re.findall(r'\["(\w+)", "[^"]+", "(\w+)"\]', table))
    names = {
        "trainer": "green",
        "storage": "purple",
        "limit": "orange",
        "even": "blue",
        "idle": "text",
        "peer": "yellow",
        "fault": "red",
    }
    by_title = {panel["title"]: panel for panel in PANELS}
    fixed = {
        override["matcher"]["options"]: override["properties"][0]["value"]["fixedColor"]
        for title in ("Where the time goes", "Blocked on the trainer, starved by storage")
        for override in by_title[title]["fieldConfig"]["overrides"]
    }
    assert fixed == {state: names[tone] for state, tone in shown.items()} | {
        "/ blocked$/": names[shown["blocked"]],
        "/ starved$/": names[shown["starved"]],
    }
    sides = {
        each["options"]["result"]["text"]: each["options"]["result"]["color"]
        for each in by_title["Slower side"]["fieldConfig"]["defaults"]["mappings"]
    }
    assert sides == {"Storage": names["storage"], "Balanced": names["even"], "Trainer": names["trainer"]}


def test_rows_without_data_in_most_jobs_are_closed() -> None:
    """And no others: an open row has no panels of its own, a closed one has all of them."""
    rows = [panel for panel in document("penstock-overview")["panels"] if panel["type"] == "row"]
    closed = {row["title"]: [panel["title"] for panel in row["panels"]] for row in rows if row["collapsed"]}
    assert closed == {
        "Checked objects": ["Objects checked"],
        "Ranks": ["Delivered by channels with rank FIFOs", "Ranks apart", "Idlest rank FIFO"],
        "Uploads": [
            "Uploaded",
            "Waiting for S3",
            "Age of the newest checkpoint",
            "Failed uploads by kind",
            "Time to upload a checkpoint",
            "Results by phase",
        ],
    }
    assert not any(row["panels"] for row in rows if not row["collapsed"])


@each_query()
def test_query_follows_the_rules(query: Any) -> None:
    """target-job-, -instance-, -counter-agg-, -rate-interval- and -histogram-rule."""
    selectors = SELECTOR.findall(query.expression)
    assert selectors
    for name, matchers in selectors:
        assert 'job=~"$job"' in matchers
        assert 'instance=~"$instance"' in matchers
        metric = METRICS.get(re.sub(r"_bucket$", "", name))
        if metric and "channel" in metric.labels:
            assert 'channel=~"$channel"' in matchers, name
    # No metric stands without matchers, where SELECTOR would not see it.
    assert not re.findall(r"\b(?:penstock|process|python)_\w+\b(?!\{)", query.expression)
    windows = set(re.findall(r"\[([^\]]*)\]", query.expression))
    assert windows <= {"$__rate_interval", "$__range:$__interval"}
    outside = re.sub(r"\b(rate|increase)\([a-z_]+\{[^}]*\}\[\$__rate_interval\]\)", "", query.expression)
    assert not re.findall(r"\w+_(?:total|bucket|count|sum)\{", outside), "a counter outside rate or increase"
    if "_bucket{" in query.expression:
        assert re.search(r"histogram_quantile\(0\.\d+, sum by \((\w+, )*le\) \(rate\(", query.expression)


VALUES = {
    "state": len(STATES), "cause": len(CAUSES), "kind": len(RETRIED), "fate": len(HEDGES),
    "trailer_state": len(TRAILER_STATES), "result": 3, "phase": len(UPLOAD_PHASES),
}  # fmt: skip
"""Values of labels that have few."""


def test_a_legend_has_at_most_eight_series() -> None:
    """However many sidecars and channels there are: by the query, or by its labels."""
    for panel in PANELS:
        series = 0
        for target in panel["targets"] if panel["type"] in ("timeseries", "bargauge") else ():
            chosen = re.search(r"\) and (?:top|bottom)k\((\d+), ", target["expr"])
            labels = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
            series += int(chosen[1]) if chosen else math.prod(VALUES[label] for label in labels)
        assert series <= SERIES, panel["title"]


def test_prometheus_parses_every_query(tmp_path: Path) -> None:
    """target-promql-rule, by Prometheus itself: each query as a recording rule."""
    rules = [
        {"record": f"penstock_test:query{number}", "expr": query.concrete()}
        for number, query in enumerate(EVERY_QUERY)
    ]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}), encoding="utf-8")
    ran = subprocess.run(
        ["promtool", "check", "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert f"{len(EVERY_QUERY)} rules found" in ran.stdout


def test_dashboards_and_sidecar_agree_on_the_metrics() -> None:
    """Nothing is asked for that is not exported; nothing is exported that is neither shown nor explained."""
    asked = set().union(*(query.metrics() for query in EVERY_QUERY))
    ours = {name for name in asked if name.startswith("penstock_")}
    assert ours <= set(METRICS)
    assert set(METRICS) - ours == set(NOT_GRAPHED)
    # The rest are prometheus_client's own, and Prometheus' of its alerts.
    assert asked - ours <= {
        "ALERTS",
        "process_cpu_seconds_total", "process_open_fds", "process_resident_memory_bytes",
        "process_start_time_seconds",
    }  # fmt: skip


def test_prometheus_configuration_is_valid_and_agrees_with_the_datasource() -> None:
    file = ROOT / "dashboards/prometheus.yml"
    ran = subprocess.run(
        ["promtool", "check", "config", str(file)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    scrape = yaml.safe_load(file.read_text(encoding="utf-8"))
    provisioned = ROOT / "dashboards/provisioning/datasources/prometheus.yaml"
    (source,) = yaml.safe_load(provisioned.read_text(encoding="utf-8"))["datasources"]
    assert source["jsonData"]["timeInterval"] == scrape["global"]["scrape_interval"]
    assert source["type"] == "prometheus"
    # The value that the dashboard's data source variable starts with.
    for dashboard in DASHBOARDS:
        (variable, *_) = document(dashboard)["templating"]["list"]
        assert variable["current"]["value"] == source["uid"]
