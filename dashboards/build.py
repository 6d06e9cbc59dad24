"""Write what Grafana and Prometheus load: `python -m dashboards.build [--check] [--runbook ADDRESS]`.

    overview, fleet  ->  penstock-overview.json, penstock-fleet.json
    rules, alerts    ->  rules.yaml here, and in deploy/ the same for the Prometheus Operator

All of it is committed, since people provision files and do not run Python. `--check` writes nothing and
exits 1 when a file differs from what this program would write. `--runbook` is where the pages of docs/ are
read, for the alerts' `runbook_url`.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import count
from pathlib import Path
from typing import Any

import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards.alerts import RUNBOOK, alert_groups
from dashboards.fleet import FLEET
from dashboards.overview import OVERVIEW
from dashboards.panels import Page, dashboard, datasource, model, panel_builder
from dashboards.queries import ANNOTATIONS, VARIABLES
from dashboards.rules import recording_groups

ROOT = Path(__file__).parent.parent
PAGES = (OVERVIEW, FLEET)
_NOTE = "# Written by `python -m dashboards.build`; edit dashboards/rules.py and dashboards/alerts.py.\n"


def build(page: Page) -> Any:
    """Grafana's model of a page."""
    made = dashboard.Dashboard(page.title).uid(page.uid).tags(["penstock"]).readonly()
    made.description(page.description)
    made.timezone("utc").time("now-15m", "now").refresh(page.refresh)
    made.tooltip(model.DashboardCursorSync.CROSSHAIR)
    others = dashboard.DashboardLink("Penstock").type(model.DashboardLinkType.DASHBOARDS).tags(["penstock"])
    made.link(others.include_vars(include_vars=True).keep_time(keep_time=True).icon("external link"))
    made.with_variable(
        dashboard.DatasourceVariable("datasource")
        .label("Data source")
        .type("prometheus")
        .current(model.VariableOption(text="Prometheus", value="prometheus"))
    )
    everything = model.VariableOption(selected=True, text=["All"], value=["$__all"])
    for name, label, query in VARIABLES:
        variable = dashboard.QueryVariable(name).label(label).query(query).definition(query)
        variable.datasource(datasource()).multi(multi=True).include_all(include_all=True).all_value(".+")
        variable.refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(
            model.VariableSort.ALPHABETICAL_ASC
        )
        made.with_variable(variable.current(everything))
    for name, expression, color in ANNOTATIONS:
        note = dashboard.AnnotationQuery().name(name).datasource(datasource()).expr(expression)
        note.enable(enable=True).icon_color(color).title_format(name).text_format("{{instance}} {{channel}}")
        made.annotation(note)
    numbers = count(1)
    for title, panels in page.rows:
        row = dashboard.Row(title).id(next(numbers))
        builders = [panel_builder(panel, panel_id=next(numbers)) for panel in panels]
        if title in page.collapsed:  # Grafana keeps the panels of a closed row in the row
            for each in builders:
                row.with_panel(each)
            made.with_row(row)
        else:
            made.with_row(row)
            for each in builders:
                made.with_panel(each)
    finished = made.build()
    for link in finished.links or ():
        # On the page, not in a menu, which is the default of the SDK.
        link.placement = None  # type: ignore[assignment]
    return finished


def render(page: Page) -> str:
    """The text of a page's JSON file."""
    return json.dumps(build(page), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


class _Dumper(yaml.SafeDumper):
    """Queries of several lines as such."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def rules(runbook: str = RUNBOOK) -> dict[str, Any]:
    """What a rule file of Prometheus holds."""
    return {"groups": [*recording_groups(), *alert_groups(runbook)]}


def _yaml(document: Any) -> str:
    return _NOTE + yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=10**6, allow_unicode=True)


def files(runbook: str = RUNBOOK) -> dict[Path, str]:
    """Every file and its text."""
    found = {ROOT / f"dashboards/{page.uid}.json": render(page) for page in PAGES}
    groups = rules(runbook)
    found[ROOT / "dashboards/rules.yaml"] = _yaml(groups)
    # Helm reads no file from outside of a chart. Its template puts a value in the place of the address.
    found[ROOT / "deploy/helm/penstock/rules.yaml"] = _yaml(rules())
    found[ROOT / "deploy/kubernetes/components/prometheus-rule/prometheus-rule.yaml"] = _yaml(
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PrometheusRule",
            "metadata": {"name": "penstock"},
            "spec": groups,
        }
    )
    return found


def main() -> int:
    """Write the files, or with --check compare them. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m dashboards.build", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 on a difference")
    parser.add_argument(
        "--runbook", default=RUNBOOK, help="address of docs/how-to/runbook.md as your people read it"
    )
    options = parser.parse_args()
    due = files(options.runbook)
    if not options.check:
        for path, text in due.items():
            path.write_text(text, encoding="utf-8")
        return 0
    stale = [
        str(path.relative_to(ROOT))
        for path, text in due.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    if stale:
        print(f"out of date: {', '.join(stale)}; run python -m dashboards.build", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
