"""The results of `python -m tests.servers`: the last line, the file, and the table in the documentation."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from tests.servers.checks import CHECKS, OVER_TLS
from tests.servers.servers import KINDS, TLS

BEGIN = "<!-- servers: begin; written by python -m tests.servers -->"
END = "<!-- servers: end -->"
TRANSPORTS = ("splice", "buffered", "aiobotocore")


@dataclass(frozen=True, slots=True)
class Result:
    """One check of one server over one transport."""

    server: str
    check: str
    transport: str
    state: Literal["passed", "refused", "failed"]
    """`refused`: Penstock refused by name what the server lacks."""
    text: str = ""


@dataclass(slots=True)
class Tried:
    """The latest results of one server."""

    version: str
    date: str
    habits: dict[str, str] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)


def _grouped(results: Iterable[Result]) -> str:
    """`ceph deleted (splice, buffered), ...`."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for result in results:
        found[f"{result.server} {result.check}"].append(result.transport)
    return ", ".join(f"{name} ({', '.join(transports)})" for name, transports in found.items()) or "none"


def summary(results: Sequence[Result], unavailable: dict[str, str]) -> str:
    """The last line: what ran, what was refused by name, what failed, which servers did not start."""
    ran = Counter(result.server for result in results)
    states = {
        state: [result for result in results if result.state == state]
        for state in ("passed", "refused", "failed")
    }
    counts = ", ".join(f"{name} {count}" for name, count in ran.items()) or "none"
    line = (
        f"ran {len(results)} checks ({counts}): "
        f"{len(states['passed'])} passed; "
        f"{len(states['refused'])} refused by name: {_grouped(states['refused'])}; "
        f"{len(states['failed'])} failed: {_grouped(states['failed'])}"
    )
    return line + (f"; not started: {', '.join(unavailable)}" if unavailable else "")


def exit_status(results: Sequence[Result], unavailable: dict[str, str]) -> int:
    """1 if a check failed or a server did not start."""
    return int(bool(unavailable) or any(result.state == "failed" for result in results))


def load(path: Path) -> dict[str, Tried]:
    """The results of earlier runs, by server; none if there is no file."""
    if not path.exists():
        return {}
    return {
        name: Tried(**entry | {"results": [Result(**each) for each in entry["results"]]})
        for name, entry in json.loads(path.read_text()).items()
    }


def keep(path: Path, name: str, found: Tried) -> None:
    """Add a run to the file of results, to earlier checks of the same version that it did not repeat."""
    tried = load(path)
    earlier = tried.get(name)
    if earlier is not None and earlier.version == found.version:
        repeated = {(each.check, each.transport) for each in found.results}
        found.results += [each for each in earlier.results if (each.check, each.transport) not in repeated]
    tried[name] = found
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({name: asdict(each) for name, each in tried.items()}, indent=1) + "\n")


def table(tried: dict[str, Tried], rows: Iterable[str], page: str = "") -> str:
    """The servers as columns, their habits (`rows`) and the passed checks of each transport as rows.

    A cell without a result keeps the text that it has on `page`, which has this table of an earlier run.
    """
    earlier = _cells(page)
    titles = {name: KINDS[name].title for name in KINDS if name in tried or KINDS[name].title in earlier}

    def row(label: str, values: Callable[[Tried], str], scheme: str = "", otherwise: str = "") -> list[str]:
        return [
            label,
            *(
                values(tried[name + scheme])
                if name + scheme in tried
                else earlier.get(title, {}).get(label, otherwise)
                for name, title in titles.items()
            ),
        ]

    cells = [["", *titles.values()], ["---"] * (len(titles) + 1)]
    cells += [row("Version", lambda each: each.version), row("Tried on", lambda each: each.date)]
    cells += [row(label, partial(_habit, label=label)) for label in rows]
    for scheme, words in (("", ""), (TLS, " over TLS")):
        checks = OVER_TLS if scheme else tuple(CHECKS)
        for transport in TRANSPORTS:
            if scheme and transport == "splice":
                continue
            passed = partial(_passed, transport=transport, checks=checks)
            cells.append(row(f"Checks, `{transport}`{words}", passed, scheme, passed(None)))
    return "\n".join(f"| {' | '.join(each)} |" for each in cells)


def _habit(tried: Tried, label: str) -> str:
    return tried.habits.get(label, "")


def _cells(page: str) -> dict[str, dict[str, str]]:
    """The table on a page: by server's title, by row's label."""
    lines = page.partition(BEGIN)[2].partition(END)[0].strip().splitlines()
    header, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines] or [[]]
    return {title: {row[0]: row[number] for row in rows} for number, title in enumerate(header) if number}


def _passed(tried: Tried | None, transport: str, checks: Sequence[str]) -> str:
    """`9 of 11; versions refused; many not tried`: the checks that passed, and the others by name."""
    results = [each for each in tried.results if each.transport == transport] if tried else []
    states = dict.fromkeys(checks, "not tried") | {each.check: each.state for each in results}
    cell = f"{sum(state == 'passed' for state in states.values())} of {len(states)}"
    for other in ("failed", "refused", "not tried"):
        names = [check for check, state in states.items() if state == other]
        cell += f"; {', '.join(names)} {other}" if names else ""
    return cell
