"""The opt-in suite of real S3 servers: its last line, its exit status, and its table in the documentation."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.servers.checks import CHECKS
from tests.servers.habits import HABITS
from tests.servers.report import (
    BEGIN,
    END,
    TRANSPORTS,
    Result,
    Tried,
    exit_status,
    keep,
    load,
    summary,
    table,
)
from tests.servers.servers import KINDS

ROOT = Path(__file__).parent.parent


def results() -> list[Any]:
    return [
        Result("moto", "bodies", "splice", "passed"),
        Result("rclone", "versions", "buffered", "refused", "5: ignores versionId"),
        Result("rclone", "versions", "aiobotocore", "refused", "5: ignores versionId"),
        Result("rclone", "bodies", "aiobotocore", "failed", "other bytes"),
    ]


def test_the_last_line_names_what_ran_was_refused_and_failed() -> None:
    assert summary(results(), {"ceph": "not root"}) == (
        "ran 4 checks (moto 1, rclone 3): 1 passed; "
        "2 refused by name: rclone versions (buffered, aiobotocore); "
        "1 failed: rclone bodies (aiobotocore); not started: ceph"
    )


def test_the_exit_status_is_1_after_a_failure_and_for_a_server_that_did_not_start() -> None:
    passed, refused, _, failed = results()
    assert exit_status([passed, refused], {}) == 0
    assert exit_status([passed, failed], {}) == 1
    assert exit_status([passed], {"ceph": "not root"}) == 1


def test_results_of_several_runs_make_one_table(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.json"
    keep(path, "rclone", Tried("1.0", "2026-01-01", {}, results()[1:]))
    keep(path, "rclone", Tried("1.0", "2026-01-02", {"Ranged GET": "200"}, results()[3:]))
    keep(path, "moto", Tried("1.9", "2026-01-02", {}, [Result("moto", "bodies", "splice", "failed")]))
    keep(path, "moto", Tried("2.0", "2026-01-03", {"Ranged GET": "206"}, results()[:1]))
    lines = table(load(path), ["Ranged GET"]).splitlines()
    assert lines[0] == "|  | moto | `rclone serve s3` |"
    assert lines[2:5] == [
        "| Version | 2.0 | 1.0 |",
        "| Tried on | 2026-01-03 | 2026-01-02 |",
        "| Ranged GET | 206 | 200 |",
    ]
    [checks] = [line for line in lines if line.startswith("| Checks, `aiobotocore` |")]
    _, _, moto, rclone, _ = checks.split("|")
    assert moto.startswith(f" 0 of {len(CHECKS)}; bodies, ")
    assert rclone.startswith(f" 0 of {len(CHECKS)}; bodies failed; versions refused; odd_keys, ")
    assert rclone.endswith(" not tried ")


def test_a_cell_without_a_result_keeps_its_text() -> None:
    """The file of results is no part of the repository: another machine has none for the other servers."""
    old = {"rclone": Tried("1.0", "2026-01-01", {"Ranged GET": "200"}, results()[1:3])}
    page = f"# Servers\n\n{BEGIN}\n\n{table(old, ['Ranged GET'])}\n{END}\n"
    new = {"moto": Tried("2.0", "2026-01-03", {"Ranged GET": "206"}, results()[:1])}
    assert table(new, ["Ranged GET"], page) == table(old | new, ["Ranged GET"])
    assert table(old, ["Ranged GET"], page) == table(old, ["Ranged GET"])


def test_the_documented_table_is_of_every_server() -> None:
    page = (ROOT / "docs" / "how-to" / "s3-compatible-servers.md").read_text()
    written = page.partition(BEGIN)[2].partition(END)[0].strip().splitlines()
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in written]
    assert rows[0][1:] == [kind.title for kind in KINDS.values()]
    assert {row[0] for row in rows[4:]} >= set(HABITS) | {f"Checks, `{name}`" for name in TRANSPORTS}
    checks = [cell for row in rows if row[0].startswith("Checks, ") for cell in row[1:]]
    assert all(re.fullmatch(r"\d+ of \d+(; [a-z_, ]+ (refused|not tried))*", cell) for cell in checks)
    explained = page.partition("| Row | What follows for a job |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| ([^|]+) \|", explained, re.MULTILINE) == list(HABITS)


@pytest.mark.e2e
@pytest.mark.timeout(180)
def test_a_run_ends_with_its_summary(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.servers", "moto", "--check", "doctor", "--transport", "buffered"]
    command += ["--results", str(tmp_path / "results.json")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == (
        "ran 1 checks (moto 1): 1 passed; 0 refused by name: none; 0 failed: none"
    )
    assert [each.state for each in load(tmp_path / "results.json")["moto"].results] == ["passed"]
