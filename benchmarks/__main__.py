"""Compares Penstock with its peers: `python -m benchmarks` or `make bench`; docs/explanation/performance.md.

The objects of one scenario at a time are in memory (/dev/shm), at most 2.1 GB, and are always removed at the
end. Clients need up to 3 GB in addition. Results are written after every scenario.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

from benchmarks import lineup, origin, scenarios
from benchmarks.clients import Client
from benchmarks.dataset import directory_in_memory
from benchmarks.matrix import Matrix
from benchmarks.netns import NetworkUnavailable
from benchmarks.report import circumstances, keep
from benchmarks.scenarios import Scenario


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    made.add_argument(
        "--scenarios",
        type=_list(scenarios.choose),
        default="all",
        metavar="LIST",
        help=f"comma-separated: {', '.join((*scenarios.SCENARIOS, *scenarios.GROUPS))} (all)",
    )
    made.add_argument(
        "--peers",
        type=_list(lineup.choose),
        default="all",
        metavar="LIST",
        help=f"comma-separated: {', '.join(lineup.CLIENTS)} (all)",
    )
    made.add_argument(
        "--before",
        metavar="DIR",
        help="another checkout with a .venv: its Penstock is the peer `before`",
    )
    made.add_argument("--rounds", type=int, default=3, help="counted runs of each client (3)")
    made.add_argument("--defaults", action="store_true", help="each client's first setting; try no other")
    made.add_argument("--scale", type=float, default=1.0, help="times the bytes, for trying out (1)")
    made.add_argument("--out", default="build/benchmarks", metavar="DIR", help="results (build/benchmarks)")
    made.add_argument("--note", default="", help="a sentence about the circumstances, kept in the results")
    made.add_argument("--no-plot", action="store_true", help="do not draw the picture")
    return made


def _list(choose: Any) -> Any:
    def convert(text: str) -> Any:
        try:
            return choose(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 0 if all installed clients were measured, 1 if one failed, 2 for none."""
    made = parser()
    chosen = made.parse_args(arguments)
    if chosen.rounds < 1 or not 0 < chosen.scale <= 1:
        made.error("--rounds must be at least 1, --scale above 0 and at most 1")
    if reason := origin.missing():
        print(f"bench: {reason}", file=sys.stderr)
        return 2
    if chosen.before is not None:
        chosen.peers.append(lineup.before(chosen.before))
    signal.signal(signal.SIGTERM, _terminated)
    os.makedirs(chosen.out, exist_ok=True)
    results = _document(chosen.peers, chosen)
    started = time.monotonic()
    try:
        with directory_in_memory("penstock-bench-") as directory:
            matrix = Matrix(
                chosen.peers,
                directory=directory,
                rounds=chosen.rounds,
                defaults=chosen.defaults,
                say=_say,
            )
            for scenario in chosen.scenarios:
                _measure(
                    matrix, scenario.scaled(chosen.scale), results, os.path.join(chosen.out, "results.json")
                )
    except KeyboardInterrupt:
        print("bench: interrupted", file=sys.stderr)
        return 130
    _show(results)
    print(f"bench: {time.monotonic() - started:.0f} s; results in {chosen.out}/results.json")
    if not chosen.no_plot:
        _draw(results, os.path.join(chosen.out, "results.png"))
    return 1 if _failed(results) else 0


def _measure(matrix: Matrix, scenario: Scenario, results: dict[str, Any], path: str) -> None:
    _say(f"--- {scenario.name}: {scenario.text}")
    try:
        results["scenarios"][scenario.name] = matrix.measure(scenario)
    except NetworkUnavailable as error:
        _say(f"{scenario.name}: not measured: {error}")
        results["scenarios"][scenario.name] = {"text": scenario.text, "problem": str(error), "clients": {}}
    keep(results, path)


def _failed(results: dict[str, Any]) -> bool:
    """Return whether an installed client has failed in any scenario."""
    return any(
        entry["problem"] and "version" in entry
        for scenario in results["scenarios"].values()
        for entry in scenario["clients"].values()
    )


def _document(chosen: Sequence[Client], arguments: argparse.Namespace) -> dict[str, Any]:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        models = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    asked = subprocess.run([origin.nginx_path() or "nginx", "-v"], capture_output=True, text=True, check=True)
    reported = circumstances()
    return reported | {
        "note": arguments.note,
        "rounds": arguments.rounds,
        "scale": arguments.scale,
        "machine": reported["machine"]
        | {
            "cpu": models[0] if models else platform.machine(),
            "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
            "load": os.getloadavg()[0],
            "nginx": asked.stderr.strip().rpartition(": ")[2],
        },
        "versions": {client.name: client.version() for client in chosen if client.unavailable() is None},
        "scenarios": {},
    }


def _show(results: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from benchmarks.report import HEADINGS, cells, state
    from benchmarks.stats import rows

    console = Console(width=None if sys.stdout.isatty() else 160)
    for name, scenario in results["scenarios"].items():
        if scenario.get("problem"):
            console.print(f"\n{name}: not measured: {scenario['problem']}")
            continue
        table = Table(title=f"{name}: {scenario['text']} ({scenario['objects']})", title_justify="left")
        for number, heading in enumerate(HEADINGS):
            table.add_column(heading, justify="right" if 2 <= number <= 5 else "left")
        made = rows(scenario)
        for row in made:
            table.add_row(*cells(row), style="bold" if row.client.startswith("penstock") else None)
        console.print()
        console.print(table)
        if sentence := state(scenario):
            console.print(sentence)


def _draw(results: dict[str, Any], path: str) -> None:
    from benchmarks.plot import draw

    try:
        draw(results, path)
    except (ImportError, ValueError) as error:
        print(f"bench: no picture: {error}", file=sys.stderr)
    else:
        print(f"bench: picture in {path}")


def _terminated(number: int, _: FrameType | None) -> NoReturn:
    """End the benchmark on SIGTERM as on Ctrl-C, so that every `finally` runs."""
    raise SystemExit(128 + number)


def _say(what: str) -> None:
    print(f"bench: {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
