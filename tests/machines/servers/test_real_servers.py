"""The machine of real S3 servers: some of its cases, and its table in the documentation.

SeaweedFS checks signatures and credentials and lists bare and out-of-order things that S3 would not;
moto is faithful in listings (odd keys, pages, quoted ETags) and slow.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.machines.__main__ import marks
from tests.machines.machine import home
from tests.machines.report import search
from tests.machines.servers.checks import CHECKS, Refused, Site
from tests.machines.servers.habits import HABITS, s3
from tests.machines.servers.machine import MACHINE, TRANSPORTS, cells_of
from tests.machines.servers.servers import KINDS, Server, running

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
    named = re.findall(r"^\| ([^|]+) \|", explained, re.MULTILINE)
    assert named, "habits of which a job's user has something to do"
    assert named == [habit for habit in HABITS if habit in named]


@pytest.mark.e2e
@pytest.mark.timeout(180)
def test_a_case_is_a_check_over_every_transport() -> None:
    (seed,) = (seed for seed, case in enumerate(MACHINE.cases()) if str(case) == "moto/odd_keys")
    report = search(home("servers"), [seed])
    assert not report.broken, report
    assert report.cells == {"moto/odd_keys": dict.fromkeys(TRANSPORTS, "passed")}


@pytest.fixture(scope="module", params=["seaweedfs", "moto"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with running(request.param) as found:
        yield found


@pytest.fixture
def site(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_key)
    with contextlib.closing(s3(server)) as client:
        bucket = f"b{random.randrange(10**12)}"
        client.create_bucket(Bucket=bucket)
        yield Site(server, "splice", client, bucket, tmp_path)


@pytest.mark.e2e
@pytest.mark.timeout(180)
@pytest.mark.parametrize("check", ["bodies", "odd_keys", "multipart", "epochs", "replaced"])
def test_a_check_passes(site: Site, check: str) -> None:
    CHECKS[check](site)


@pytest.mark.e2e
@pytest.mark.timeout(180)
def test_what_is_missing_or_denied_has_its_exit_code(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.put({"train/x": b"x"})
    for bucket, prefix in ((site.bucket, "nothing/"), ("no-such-bucket-here", "train/")):
        with pytest.raises(Refused, match="^4: "):
            replace(site, bucket=bucket).cat(prefix)
    if site.server.secret_key == "secret":  # moto takes any credentials
        return
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "WRONG")
            with pytest.raises(Refused, match="^3: (?!.*WRONG)"):
                site.cat("train/")
