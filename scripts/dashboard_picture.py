"""What a dashboard looks like with data, without a Grafana: `python -m scripts.dashboard_picture`.

Without --prometheus it makes the data itself: some minutes of real sidecars (`scripts.dashboard_session`).
Every panel's query goes to a real Prometheus as Grafana would send it; `scripts.dashboard_svg` draws the
answers into the dashboard's own grid, and Chromium takes the picture. So a picture shows what the panels ask
and what the sidecars answer, but not a pixel of Grafana, which is said in it.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
import tempfile
import time
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image

from scripts.dashboard_session import PHASES, Prometheus, session
from scripts.dashboard_svg import Series, draw
from tests.kit.browser import browser

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs/pictures"
WIDTH, UNIT, GAP = 1360, 28, 8
"""Pixels: of the page, of one row of the grid, and between panels."""
SAMPLES = 300
"""Points of a line."""
MADE_OF_ONE = {"penstock-overview": "digits-0"}
"""Dashboards that are drawn for one sidecar of the session; the others for all."""

STYLE = """
* { box-sizing: border-box; margin: 0 }
body { background: #111217; color: #ccccdc; font: 12px Inter, "DejaVu Sans", sans-serif; width: WIDTHpx }
header { padding: 14px 16px 6px; display: flex; gap: 10px; align-items: center }
header h1 { font-size: 17px; font-weight: 500; margin-right: auto }
header span { border: 1px solid #33343d; border-radius: 3px; padding: 4px 9px }
header em { font-style: normal; color: #8e8ea0 }
main { position: relative }
section { position: absolute; background: #181b1f; border: 1px solid #25272e; border-radius: 3px;
  padding: 0 7px; overflow: hidden }
h2 { position: absolute; font-size: 14px; font-weight: 500; padding: 6px 2px }
h3 { font-size: 13px; font-weight: 500; height: 30px; line-height: 30px; white-space: nowrap;
  overflow: hidden }
svg { display: block; overflow: visible }
svg line { stroke: #2a2c33; stroke-width: 1 }
svg text { fill: #9a9aab; font-size: 11px }
.legend { max-height: 51px; overflow: hidden; padding-top: 2px; line-height: 17px; font-size: 11px }
.legend span { margin-right: 12px; white-space: nowrap; display: inline-block }
.legend i { display: inline-block; width: 13px; height: 4px; border-radius: 2px; margin: 0 5px 3px 0 }
.stat { display: flex; flex-direction: column; align-items: center; justify-content: center;
  white-space: nowrap }
.stat b { font-weight: 500 } .stat small { color: #8e8ea0 }
.bar { display: grid; grid-template-columns: minmax(36px, auto) 1fr 48px; gap: 8px; align-items: center;
  margin-bottom: 8px }
.bar i { height: 16px; background: #25272e; display: block } .bar u { height: 16px; display: block }
.bar b { font-weight: 500; font-size: 14px; text-align: right }
table { border-collapse: collapse; width: 100% } th { color: #8ab8ff; font-weight: 500 }
td, th { border: 1px solid #25272e; padding: 5px 8px; text-align: left; white-space: nowrap }
footer { color: #8e8ea0; padding: 8px 16px 12px }
"""


class Board:
    """One dashboard's JSON, asked of one Prometheus for one span of time."""

    def __init__(self, path: Path, server: Prometheus, *, span: tuple[float, float], instance: str) -> None:
        self.document = json.loads(path.read_text(encoding="utf-8"))
        self._server = server
        self._span = span
        self._instance = instance
        self._step = max(2.0, (span[1] - span[0]) / SAMPLES)

    def html(self, *, rows: int | None = None) -> str:
        """The whole page; with `rows` only the first of its sections."""
        panels, top = self._panels(rows)
        shown = [
            ("Data source", "Prometheus"),
            ("Job", "All"),
            ("Sidecar", self._instance.replace(".+", "All")),
        ]
        if any(each["name"] == "channel" for each in self.document["templating"]["list"]):
            shown.append(("Channel", "All"))
        chosen = "".join(f"<span><em>{name}</em> {escape(value)}</span>" for name, value in shown)
        clock = " to ".join(time.strftime("%H:%M:%S", time.gmtime(at)) for at in self._span)
        return (
            f"<!doctype html><meta charset=utf-8><style>{STYLE.replace('WIDTH', str(WIDTH))}</style>"
            f"<header><h1>{escape(self.document['title'])}</h1>{chosen}<span>{clock} UTC</span></header>"
            f'<main style="height:{top * UNIT}px">{"".join(map(self._place, panels))}</main>'
            "<footer>Drawn by scripts/dashboard_picture.py from the answers of a Prometheus that scraped "
            "real sidecars. Not a picture of Grafana itself.</footer>"
        )

    def _panels(self, rows: int | None) -> tuple[list[dict[str, Any]], int]:
        found: list[dict[str, Any]] = []
        for panel in sorted(
            self.document["panels"], key=lambda each: (each["gridPos"]["y"], each["gridPos"]["x"])
        ):
            if panel["type"] == "row" and rows is not None:
                if rows == 0:
                    break
                rows -= 1
            found += [panel, *panel.get("panels", ())]
        return found, max(each["gridPos"]["y"] + each["gridPos"]["h"] for each in found)

    def _place(self, panel: dict[str, Any]) -> str:
        grid, column = panel["gridPos"], (WIDTH - 2 * GAP) / 24
        left, top = GAP + grid["x"] * column, grid["y"] * UNIT
        if panel["type"] == "row":
            return f'<h2 style="left:{left}px;top:{top - 2}px">{escape(panel["title"])}</h2>'
        size = grid["w"] * column - GAP, grid["h"] * UNIT - GAP
        inside = draw(panel, self._answers(panel), size=size, span=self._span)
        box = f"left:{left}px;top:{top}px;width:{size[0]}px;height:{size[1]}px"
        return f'<section style="{box}">{inside}</section>'

    def _answers(self, panel: dict[str, Any]) -> list[Series]:
        found = []
        for target in panel.get("targets", ()):
            expression = target["expr"].replace("$__rate_interval", "8s").replace("$__range", "5m")
            expression = expression.replace("$instance", self._instance)
            expression = re.sub(r"\$(job|channel)\b", ".+", expression)
            if target.get("instant"):
                data = self._server.get("query", query=expression, time=self._span[1])
            else:
                start, end = self._span
                data = self._server.get(
                    "query_range", query=expression, start=start, end=end, step=self._step
                )
            for one in data["result"]:
                points = [(float(at), float(value)) for at, value in one.get("values", [one.get("value")])]
                name = re.sub(
                    r"\{\{\s*(\w+)\s*\}\}", lambda m, o=one: o["metric"].get(m[1], ""), target["legendFormat"]
                )
                found.append(Series(name, one["metric"], points, target["refId"]))
        return found


def take(pages: dict[Path, str]) -> None:
    """Chromium's pictures of these pages, in few colours, since a dashboard has few."""
    with browser() as chromium:
        for path, html in pages.items():
            page = chromium.new_page(viewport={"width": WIDTH, "height": 400})
            page.set_content(html)
            taken = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
            taken.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
            page.close()
            print(f"{path}: {path.stat().st_size // 1000} kB, {taken.width} by {taken.height}")


def pictures(server: Prometheus, span: tuple[float, float], *, into: Path) -> None:
    """Every dashboard of dashboards/, whole, and the first sections of the overview for the README."""
    pages = {}
    for path in sorted((ROOT / "dashboards").glob("penstock-*.json")):
        board = Board(path, server, span=span, instance=MADE_OF_ONE.get(path.stem, ".+"))
        name = path.stem.removeprefix("penstock-")
        pages[into / f"dashboard-{name}.png"] = board.html()
        if path.stem in MADE_OF_ONE:
            pages[into / f"dashboard-{name}-top.png"] = board.html(rows=3)
    take(pages)


def main() -> int:
    """Make the pictures. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.dashboard_picture", description=__doc__)
    parser.add_argument("--into", type=Path, default=PICTURES, help="directory of the PNGs")
    parser.add_argument("--seconds", type=float, default=300, help="how long the session is")
    parser.add_argument("--prometheus", help="URL of one that has data already; needs --until")
    parser.add_argument("--until", type=float, help="Unix time of the right edge, with --prometheus")
    chosen = parser.parse_args()
    if chosen.prometheus:
        if not chosen.until:
            parser.error("--prometheus needs --until")
        span = chosen.until - chosen.seconds, chosen.until
        pictures(Prometheus(chosen.prometheus.rstrip("/")), span, into=chosen.into)
        return 0
    print(f"{len(PHASES)} sidecars, {chosen.seconds:.0f} s")
    with (
        tempfile.TemporaryDirectory(prefix="penstock-") as work,
        session(Path(work), seconds=chosen.seconds) as (server, begun, ended),
    ):
        pictures(server, (begun, ended), into=chosen.into)
    return 0


if __name__ == "__main__":
    sys.exit(main())
