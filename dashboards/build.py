"""Write the dashboard's JSON from `dashboards.overview`: `python -m dashboards.build [--check]`.

The JSON is committed, since people provision files and do not run Python. `--check` writes nothing
and exits 1 when the file differs from what this program would write.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import count
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards.overview import ROWS, TITLE, UID
from dashboards.panels import dashboard, datasource, model, panel_builder
from dashboards.queries import ANNOTATIONS, VARIABLES

TARGET = Path(__file__).with_name(f"{UID}.json")


def build() -> Any:
    """Grafana's model of the overview."""
    made = dashboard.Dashboard(TITLE).uid(UID).tags(["penstock"]).readonly()
    made.description("Streaming of S3 objects into FIFOs: rates, who waits for whom, requests, epochs, cost.")
    made.timezone("utc").time("now-15m", "now").refresh("5s")
    made.tooltip(model.DashboardCursorSync.CROSSHAIR)
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
    for title, panels in ROWS:
        row = dashboard.Row(title).id(next(numbers))
        made.with_row(row)
        for panel in panels:
            made.with_panel(panel_builder(panel, panel_id=next(numbers)))
    return made.build()


def render() -> str:
    """The text of the JSON file."""
    return json.dumps(build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def main() -> int:
    """Write the file, or with --check compare it. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m dashboards.build", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 on a difference")
    if not parser.parse_args().check:
        TARGET.write_text(render(), encoding="utf-8")
        return 0
    if TARGET.is_file() and TARGET.read_text(encoding="utf-8") == render():
        return 0
    print(f"{TARGET.name} is out of date; run python -m dashboards.build", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
