"""The committed dashboards as lists of queries, with Grafana's variables put in."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DASHBOARDS = ("penstock-overview", "penstock-fleet")
"""By uid, which is also the name of the file."""

SELECTOR = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\{([^}]*)\}")
"""A metric with its matchers; the lints demand matchers on every metric, so this finds them all."""


@dataclass(frozen=True)
class Query:
    panel: str
    ref: str
    expression: str

    def __str__(self) -> str:
        return f"{self.panel} {self.ref}"

    def metrics(self) -> set[str]:
        """Names of metrics as the registry knows them: a histogram without its suffix."""
        return {re.sub(r"_bucket$", "", name) for name, _ in SELECTOR.findall(self.expression)}

    def concrete(self, *, window: str = "30s") -> str:
        """PromQL as Grafana sends it with `All` chosen everywhere, for a minute."""
        text = self.expression.replace("$__rate_interval", window)
        text = text.replace("$__range", "1m").replace("$__interval", "1s")
        text = re.sub(r"\$(job|instance|channel)\b", ".+", text)
        assert "$" not in text, f"{self}: unknown variable in {text}"
        return text


def document(dashboard: str) -> dict[str, Any]:
    text = (ROOT / "dashboards" / f"{dashboard}.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def panels(dashboard: str) -> list[dict[str, Any]]:
    """The panels of all rows. Those of a closed row are in the row."""
    found: list[dict[str, Any]] = []
    for panel in document(dashboard)["panels"]:
        found += panel["panels"] if panel["type"] == "row" else [panel]
    return found


def panel_queries(dashboard: str) -> list[Query]:
    return [
        Query(panel["title"], target["refId"], target["expr"])
        for panel in panels(dashboard)
        for target in panel["targets"]
    ]


def annotation_queries(dashboard: str) -> list[Query]:
    return [
        Query(note["name"], "annotation", note["expr"]) for note in document(dashboard)["annotations"]["list"]
    ]
