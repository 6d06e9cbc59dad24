"""Writes results as Markdown: `python -m benchmarks.report RESULTS.json [--into FILE]`.

`--into` writes the text between the file's two marker lines instead of printing it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.stats import Row, beside, rows

BEGIN = "<!-- results: begin; written by python -m benchmarks.report -->"
END = "<!-- results: end -->"
Document = dict[str, Any]


def markdown(results: Document) -> str:
    """Return the whole text: date, machine and scenarios, then a table for each figure."""
    return "\n".join(_lines(results)) + "\n"


def _lines(results: Document) -> Iterator[str]:
    machine = results["machine"]
    note = f" {results['note']}" if results["note"] else ""
    yield (
        f"Measured on {results['date']} with {results['rounds']} counted runs per row: median, and in "
        f"parentheses minimum and maximum.{note}"
    )
    yield ""
    yield (
        f"Machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:.0f} GiB, "
        f"Linux {machine['kernel']}, Python {machine['python']}; load when it began: "
        f"{machine['load']:.1f}. Origin: {machine['nginx']}."
    )
    yield ""
    yield f"Versions: {', '.join(f'{name} {version}' for name, version in results['versions'].items())}."
    yield ""
    yield from _summary(results)
    yield ""
    yield from _scenarios(results)
    for title, figure in FIGURES.items():
        yield ""
        yield f"### {title}"
        yield ""
        yield from _matrix(results, figure)


FIGURES: dict[str, Callable[[Row], str]] = {
    "Throughput, GB/s": lambda row: row.throughput.text() if row.throughput else "-",
    "CPU-seconds per GB": lambda row: row.cpu.text() if row.cpu else "-",
    "Peak RSS, MB": lambda row: f"{row.peak.median / 1e6:.0f}" if row.peak else "-",
}
"""By title of a table, the cell of a client in a scenario."""


def _scenarios(results: Document) -> Iterator[str]:
    """Yield what each scenario is, and the remarks without which its figures would mislead."""
    for name, scenario in results["scenarios"].items():
        if scenario.get("problem"):
            yield f"- `{name}`, {scenario['text']}: not measured, {scenario['problem']}."
            continue
        measured = f"{scenario['objects']}, {scenario['bytes'] / 1e9:.2f} GB"
        remarks = [remark for row in rows(scenario) if (remark := _remark(row))]
        yield f"- `{name}`, {scenario['text']}: {'; '.join([measured, *remarks])}."


def _remark(row: Row) -> str:
    if row.throughput is None:
        return f"{row.client} was not measured, {_shortened(row.problem or '')}"
    found = ", ".join(notes(row))
    return f"{row.client} ({row.setting}) {found}" if found else ""


def _matrix(results: Document, figure: Callable[[Row], str]) -> Iterator[str]:
    """Yield a table with a row for each scenario and a column for each client."""
    by_scenario = {
        name: {row.client: row for row in rows(scenario)}
        for name, scenario in results["scenarios"].items()
        if not scenario.get("problem")
    }
    clients = list(
        dict.fromkeys(client for name in by_scenario for client in results["scenarios"][name]["clients"])
    )
    yield f"| scenario | {' | '.join(clients)} |"
    yield f"|---|{'---|' * len(clients)}"
    for name, made in by_scenario.items():
        shown = (figure(made[client]) if client in made else "" for client in clients)
        yield f"| `{name}` | {' | '.join(shown)} |"


def _shortened(problem: str) -> str:
    """Return a problem as one line of at most 160 characters."""
    line = " ".join(problem.split())
    return line if len(line) <= 160 else line[:157] + "..."


def notes(row: Row) -> Iterator[str]:
    """Yield remarks without which the row's figures would mislead."""
    if row.transport:
        yield f"over {row.transport}"
    if row.cut:
        yield "cut off at the time limit"
    if row.ahead >= 0.01:
        where = "fetched more than that" if row.cut else "read ahead into the next epoch"
        yield f"{where}: {row.ahead:.0%}, its CPU included"
    if not row.verified:
        yield "NOT VERIFIED"


def _summary(results: Document) -> Iterator[str]:
    """Yield a line for every scenario, and one for those in which a peer is ahead."""
    found = {
        name: (beside(rows(scenario)), bool(scenario.get("reader_rate")))
        for name, scenario in results["scenarios"].items()
    }
    compared = {name: (ratios, slow) for name, (ratios, slow) in found.items() if ratios is not None}
    if not compared:
        return
    yield "Penstock divided by the best peer of each scenario (throughput above 1 and CPU below 1 are gains):"
    yield ""
    yield "| scenario | throughput | fastest peer | CPU per GB | cheapest peer |"
    yield "|---|---|---|---|---|"
    for name, (ratios, slow) in compared.items():
        quick = "- | the reader sets the pace" if slow else f"{ratios.throughput:.2f} | {ratios.fastest_peer}"
        yield f"| `{name}` | {quick} | {ratios.cpu:.2f} | {ratios.cheapest_peer} |"
    losses = {
        "throughput": [
            name for name, (ratios, slow) in compared.items() if ratios.throughput < 1 and not slow
        ],
        "CPU": [name for name, (ratios, _) in compared.items() if ratios.cpu > 1],
    }
    reported = "; ".join(
        f"{what} in {', '.join(f'`{name}`' for name in names)}" for what, names in losses.items() if names
    )
    yield ""
    yield f"Penstock loses on {reported}." if reported else "Penstock loses nowhere in this run."


def say(what: str) -> None:
    print(f"bench: {what}", flush=True)


def circumstances() -> Document:
    """Return the date, and what of this machine every results document tells."""
    return {
        "date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d"),
        "machine": {
            "cores": len(os.sched_getaffinity(0)),
            "kernel": ".".join(platform.release().split(".")[:2]),
            "python": platform.python_version(),
        },
    }


def insert(text: str, results: str, *, begin: str = BEGIN, end: str = END) -> str:
    """Return `text` with `results` between the two markers. Raises ValueError without the markers."""
    before, first, rest = text.partition(begin)
    _, last, after = rest.partition(end)
    if not first or not last:
        raise ValueError(f"the file has no lines {begin!r} and {end!r}")
    return f"{before}{begin}\n\n{results}\n{end}{after}"


def insert_into(path: str, results: str, *, begin: str = BEGIN, end: str = END) -> None:
    """Do `insert` in a file. Raises ValueError, OSError."""
    with open(path, encoding="utf-8") as file:
        whole = insert(file.read(), results, begin=begin, end=end)
    with open(path, "w", encoding="utf-8") as file:
        file.write(whole)


def keep(results: Document, path: str) -> None:
    """Write a results document; make its directory if it is missing."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(results, file, indent=1)
        file.write("\n")


def kept(path: str) -> Document:
    """Return the results document that an earlier run kept at `path`; an empty one if there is none."""
    with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8") as file:
        results: Document = json.load(file)
        return results
    return {}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.splitlines()[0])
    parser.add_argument("results", help="the JSON file that the benchmarks wrote")
    parser.add_argument("--into", metavar="FILE", help="replace the results in this Markdown file")
    arguments = parser.parse_args()
    with open(arguments.results, encoding="utf-8") as file:
        text = markdown(json.load(file))
    if arguments.into is None:
        sys.stdout.write(text)
        return 0
    insert_into(arguments.into, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
