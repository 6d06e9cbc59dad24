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
from dataclasses import replace
from types import FrameType
from typing import Any, NoReturn

from benchmarks import origin
from benchmarks.clients import Client
from benchmarks.dataset import directory_in_memory
from benchmarks.lineup import CLIENTS, before
from benchmarks.matrix import Matrix
from benchmarks.netns import NetworkUnavailable
from benchmarks.report import circumstances, keep, markdown, say
from benchmarks.scenarios import SCENARIOS, Scenario
from benchmarks.stats import list_of


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    for name, known in (("scenarios", SCENARIOS), ("peers", CLIENTS)):
        text = f"comma-separated: {', '.join(known)} (all)"
        made.add_argument(f"--{name}", type=list_of(known), default="all", metavar="LIST", help=text)
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
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 0 if all installed clients were measured, 1 if one failed, 2 for none."""
    made = parser()
    chosen = made.parse_args(arguments)
    if chosen.rounds < 1 or not 0 < chosen.scale <= 1:
        made.error("--rounds must be at least 1, --scale above 0 and at most 1")
    if reason := origin.missing():
        print(f"bench: {reason}", file=sys.stderr)
        return 2
    clients = [CLIENTS[name] for name in chosen.peers]
    if chosen.before is not None:
        clients.append(before(chosen.before))
    signal.signal(signal.SIGTERM, _terminated)
    os.makedirs(chosen.out, exist_ok=True)
    results = _document(clients, chosen)
    started = time.monotonic()
    try:
        with directory_in_memory("penstock-bench-") as directory:
            matrix = Matrix(
                clients,
                directory=directory,
                rounds=chosen.rounds,
                defaults=chosen.defaults,
            )
            for name in chosen.scenarios:
                scenario = SCENARIOS[name]
                scenario = replace(scenario, shape=scenario.shape.scaled(chosen.scale))
                _measure(matrix, scenario, results, os.path.join(chosen.out, "results.json"))
    except KeyboardInterrupt:
        print("bench: interrupted", file=sys.stderr)
        return 130
    print(markdown(results))
    print(f"bench: {time.monotonic() - started:.0f} s; results in {chosen.out}/results.json")
    return 1 if _failed(results) else 0


def _measure(matrix: Matrix, scenario: Scenario, results: dict[str, Any], path: str) -> None:
    say(f"--- {scenario.name}: {scenario.text}")
    try:
        results["scenarios"][scenario.name] = matrix.measure(scenario)
    except NetworkUnavailable as error:
        say(f"{scenario.name}: not measured: {error}")
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


def _terminated(number: int, _: FrameType | None) -> NoReturn:
    """End the benchmark on SIGTERM as on Ctrl-C, so that every `finally` runs."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
