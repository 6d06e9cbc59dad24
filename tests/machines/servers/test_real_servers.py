"""The machine of real S3 servers: one of its cases, and its table in the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.machines.__main__ import marks
from tests.machines.machine import home
from tests.machines.report import search
from tests.machines.servers.checks import CHECKS
from tests.machines.servers.habits import HABITS
from tests.machines.servers.machine import MACHINE, TRANSPORTS, cells_of
from tests.machines.servers.servers import KINDS

ROOT = Path(__file__).parents[3]
REFUSED = {"splice": "passed", "buffered": "refused", "aiobotocore": "failed"}


def test_the_table_is_of_what_was_tried_and_of_what_the_page_had() -> None:
    """What another machine has tried keeps its text."""
    first = MACHINE.table(
        {"rclone/habits": {"Version": "1.0", "Ranged GET": "200"}, "rclone/versions": REFUSED}, ""
    )
    whole = MACHINE.table({"moto/habits": {"Version": "2.0"}, "moto-tls/bodies": REFUSED}, first)
    cells = cells_of(whole)
    assert list(cells) == ["moto", "`rclone serve s3`"]
    assert cells["`rclone serve s3`"] == cells_of(first)["`rclone serve s3`"]
    assert cells["`rclone serve s3`"]["Checks, `splice`"].startswith(f"1 of {len(CHECKS)}; bodies, ")
    assert "; versions refused; bodies, " in cells["`rclone serve s3`"]["Checks, `buffered`"]
    assert "; versions failed; bodies, " in cells["`rclone serve s3`"]["Checks, `aiobotocore`"]
    assert cells["moto"]["Version"] == "2.0"
    assert "; bodies refused; " in cells["moto"]["Checks, `buffered` over TLS"]
    assert cells["moto"]["Checks, `splice`"].endswith(" not tried")


def test_the_documented_table_is_of_every_server() -> None:
    page = (ROOT / "docs" / "how-to" / "s3-compatible-servers.md").read_text()
    begin, end = marks("servers")
    written = page.partition(begin)[2].partition(end)[0].strip().splitlines()
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in written]
    assert rows[0][1:] == [kind.title for kind in KINDS.values()]
    assert {row[0] for row in rows[4:]} >= set(HABITS) | {f"Checks, `{name}`" for name in TRANSPORTS}
    checks = [cell for row in rows if row[0].startswith("Checks, ") for cell in row[1:]]
    assert all(re.fullmatch(r"\d+ of \d+(; [a-z_, ]+ (refused|not tried))*", cell) for cell in checks)
    explained = page.partition("| Row | What follows for a job |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| ([^|]+) \|", explained, re.MULTILINE) == list(HABITS)


@pytest.mark.e2e
@pytest.mark.timeout(180)
def test_a_check_passes_over_every_transport() -> None:
    (seed,) = (seed for seed, case in enumerate(MACHINE.cases()) if str(case) == "moto/doctor")
    report = search(home("servers"), [seed])
    assert not report.broken, report
    assert report.cells == {"moto/doctor": dict.fromkeys(TRANSPORTS, "passed")}
