"""A real Prometheus scrapes two real sidecars while they stream, and answers every panel of both dashboards.

weed mini (S3) -> penstock run -> FIFOs -> a reader process; Prometheus on the side, configured by the
committed dashboards/prometheus.yml with other targets and a shorter interval. Of the first sidecar's two
channels one is read, epoch after epoch, and one is not, as happens in training; the second one's channel is
dealt over two rank FIFOs, of which both are read.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import boto3
import pytest
import yaml

from dashboards.alerts import ALERTS
from dashboards.queries import PROGRESS_BY, SERIES
from dashboards.rules import RECORDED
from examples.demo.server import S3Server, free_ports, running_s3
from streamer import __version__
from tests.operate.promql import DASHBOARDS, ROOT, annotation_queries, document, panel_queries, panels
from tests.operate.scraping import Prometheus, eventually, reading, running, scraping

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

MIB = 1 << 20


def run_sidecar(stack: ExitStack[bool | None], work: Path, document: dict[str, Any], *, s3: S3Server) -> None:
    """Run `penstock run` with a reader until the stack unwinds; returns once it is ready."""
    work.mkdir()
    document["Penstock"]["BaseDirectory"] = str(work / "ml")
    port = document["Penstock"]["Admin"]["Port"]
    job = work / "job.yaml"
    job.write_text(yaml.safe_dump(document), encoding="utf-8")
    command = [sys.executable, "-m", "sidecar", "run", "-c", str(job)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    log = stack.enter_context((work / "sidecar.log").open("w+"))
    child = stack.enter_context(running(command, stderr=log, env=environment | s3.environment, cwd=ROOT))

    def ready() -> bool:
        """The sidecar says that it is ready."""
        if child.poll() is not None:
            log.seek(0)
            pytest.fail(f"the sidecar ended with {child.returncode}:\n{log.read()}")
        try:
            with urlopen(f"http://127.0.0.1:{port}/readyz", timeout=10):
                return True
        except (URLError, OSError):
            return False

    eventually(ready)


@dataclass(frozen=True)
class Scraped:
    server: Prometheus
    targets: tuple[str, ...]
    """The sidecars' addresses as `instance`: one with two channels, one with rank FIFOs."""


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    """A Prometheus that has scraped a streaming sidecar some times."""
    work = tmp_path_factory.mktemp("operate")
    with ExitStack() as stack:
        s3 = stack.enter_context(running_s3("demo"))
        client = boto3.client(
            "s3", endpoint_url=s3.url, region_name="us-east-1",
            aws_access_key_id=s3.access_key, aws_secret_access_key=s3.secret_key,
        )  # fmt: skip
        for key in ("train/a", "train/b", "train/c", "eval/a"):
            client.put_object(Bucket="demo", Key=key, Body=os.urandom(8 * MIB))
        client.close()
        ports = free_ports(2)
        first = _job(s3.url, ports[0], "train", "eval") | {
            "OutputDataConfig": {"S3OutputPath": "s3://demo/models/"},
            "CheckpointConfig": {"S3Uri": "s3://demo/checkpoints/"},
        }
        second = _job(s3.url, ports[1], "train")
        # Neither may take all the CPU time there is. With a limit delivery never waits for a part, so the
        # first has none: its reader pauses between epochs, which are larger than the memory budget.
        second["InputDataConfig"][0]["Penstock"] = {"Ranks": 2, "Bandwidth": "8MB"}
        for name, document, read in (("a", first, ["train"]), ("b", second, ["train-0", "train-1"])):
            run_sidecar(stack, work / name, document, s3=s3)
            pause = 1.0 if document is first else 0.0
            stack.enter_context(reading(work / name / "ml", *read, pause=pause))
        (work / "a" / "ml" / "checkpoints" / "weights").write_bytes(b"1")
        targets = tuple(f"127.0.0.1:{port}" for port in ports)
        server = stack.enter_context(scraping(work, *targets))

        def often() -> bool:
            """Prometheus has scraped both sidecars four times."""
            return len(server.ask('count_over_time(penstock_ready{job="penstock"}[1m]) >= 4')) == 2

        eventually(often)
        yield Scraped(server, targets)


def _job(url: str, port: int, *channels: str) -> dict[Any, Any]:
    def channel(name: str) -> dict[Any, Any]:
        source = {"S3DataType": "S3Prefix", "S3Uri": f"s3://demo/{name}/"}
        return {"ChannelName": name, "DataSource": {"S3DataSource": source}}

    return {
        "InputDataConfig": [channel(name) for name in channels],
        "Penstock": {
            "MemoryBudget": "16MiB",
            "PartSize": "1MiB",
            "DrainFor": 0,
            "Endpoint": {"Url": url, "Region": "us-east-1", "PathStyle": True},
            "Admin": {"Port": port},
        },
    }


def concrete(dashboard: str) -> dict[Any, Any]:
    """Every panel's queries, over a window of some scrapes."""
    return {str(query): query.concrete(window="10s") for query in panel_queries(dashboard)}


@pytest.mark.parametrize("dashboard", DASHBOARDS)
def test_every_panel_gets_an_answer(scraped: Scraped, dashboard: str) -> None:
    waiting = concrete(dashboard)
    assert len(waiting) == len(panel_queries(dashboard))

    def answered() -> bool:
        """Every panel's query has answered with a number at least once."""
        for name, expression in list(waiting.items()):
            if scraped.server.ask(expression):
                del waiting[name]
        return not waiting

    try:
        eventually(answered)
    except AssertionError:
        pytest.fail(f"without an answer: {waiting}")


@pytest.mark.parametrize("dashboard", DASHBOARDS)
def test_annotations_are_valid_queries(scraped: Scraped, dashboard: str) -> None:
    for query in annotation_queries(dashboard):
        assert scraped.server.get("query", query=query.concrete(window="10s")) is not None


@pytest.mark.parametrize("dashboard", DASHBOARDS)
def test_variables_find_the_sidecars_and_their_channels(scraped: Scraped, dashboard: str) -> None:
    found = {}
    for variable in document(dashboard)["templating"]["list"]:
        if variable["type"] == "query":
            match = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"])
            assert match is not None
            selector, label = match.groups()
            concrete = re.sub(r"\$\w+", ".+", selector)
            found[variable["name"]] = scraped.server.get(f"label/{label}/values", **{"match[]": concrete})
    assert found == {
        "job": ["penstock"],
        "instance": sorted(scraped.targets),
        "channel": ["eval", "train", "train-0", "train-1"],
    }


def test_what_the_overview_says_is_true(scraped: Scraped) -> None:
    """What is read moves, the other channel waits for a reader; nothing is said to have failed."""
    server, queries = scraped.server, concrete("penstock-overview")

    def delivering() -> bool:
        """Bytes flow on every channel that is read."""
        moving = server.ask(queries["Delivered by channel A"] + " > 0")
        return {labels["channel"] for labels, _ in moving} == {"train", "train-0", "train-1"}

    eventually(delivering)
    server.wait_for(queries["Ready A"], [({}, 1)])
    server.wait_for(queries["Failed channels A"], [({}, 0)])
    server.wait_for(queries["Request errors A"], [({}, 0)])
    server.wait_for(
        queries["Version and transport A"], [({"version": __version__, "transport": "splice"}, 2)]
    )
    shares = server.ask(queries["Where the time goes A"])
    assert {labels["state"] for labels, _ in shares} == {
        "idle", "blocked", "held_back", "starved", "limited", "moving", "refused",
    }  # fmt: skip
    states = server.ask(queries["Epochs ended by state A"])
    ended = {labels["trailer_state"]: value for labels, value in states}
    assert ended.keys() == {"complete", "abandoned", "failed", "stopped"}
    assert ended["complete"] > 0
    assert ended["abandoned"] == ended["failed"] == ended["stopped"] == 0


def test_what_the_overview_says_of_rank_fifos_is_true(scraped: Scraped) -> None:
    """Only the sidecar with rank FIFOs: added up, and an epoch apart at most, since one reads both."""
    server, queries = scraped.server, concrete("penstock-overview")
    ranks = {"whole": "train", "instance": scraped.targets[1]}
    # Both in one query: another evaluation would see another scrape.
    whole = f'sum(rate(penstock_fifo_written_bytes_total{{instance="{scraped.targets[1]}"}}[10s]))'
    together = queries["Delivered by channels with rank FIFOs A"]
    ((_, ratio),) = eventually(lambda: server.ask(f"sum({together}) / {whole}"))
    assert ratio == pytest.approx(1)
    ((labels, apart),) = eventually(lambda: server.ask(queries["Ranks apart A"]))
    assert labels == ranks
    assert 0 <= apart <= 1
    ((labels, idle),) = eventually(lambda: server.ask(queries["Idlest rank FIFO A"]))
    assert labels == ranks
    assert 0 <= idle <= 1.1


def test_what_the_fleet_says_is_true(scraped: Scraped) -> None:
    """A row for each sidecar, with every column of the table; no sidecar is in trouble."""
    server, queries = scraped.server, concrete("penstock-fleet")
    (table,) = [panel for panel in panels("penstock-fleet") if panel["title"] == "Every sidecar"]
    for target in table["targets"]:

        def found(query: str = queries[f"Every sidecar {target['refId']}"]) -> bool:
            """The column has a row for each sidecar."""
            rows = sorted((labels["instance"], labels["job"]) for labels, _ in server.ask(query))
            return rows == [(instance, "penstock") for instance in sorted(scraped.targets)]

        eventually(found)
    target = next(each["refId"] for each in table["targets"] if each["expr"] == PROGRESS_BY)

    def progressing() -> bool:
        """The epochs of both sidecars move, though nobody reads one channel of the first."""
        rows = server.ask(queries[f"Every sidecar {target}"])
        return all(progress > 0 for _, progress in rows)

    eventually(progressing)
    server.wait_for(queries["Scraped A"], [({}, 2)])
    server.wait_for(queries["Not ready A"], [({}, 0)])
    server.wait_for(queries["Channels failed for good A"], [({}, 0)])
    server.wait_for(queries["Versions A"], [({"version": __version__, "transport": "splice"}, 2)])
    settings = {
        "memory_budget": "16 MiB", "part_size": "1 MiB", "requests_in_flight": "auto", "bandwidth": "none",
    }  # fmt: skip
    server.wait_for(queries["Settings A"], [(settings, 2)])


CHANNELS = 12


def test_a_graph_shows_the_eight_largest_of_its_time(tmp_path: Path) -> None:
    """Twelve channels are the fastest in turn. `topk` alone chooses others for every point."""
    begin = int(time.time()) - 600
    name = "penstock_fifo_written_bytes_total"
    lines = [f"# TYPE {name.removesuffix('_total')} counter"]
    for channel in range(CHANNELS):
        written = 0
        for at in range(0, 300, 5):
            fastest = at // 5 % CHANNELS == channel
            written += (1000 if fastest else 1) * (channel + 1)
            labels = f'job="penstock",instance="one",channel="c{channel}"'
            lines.append(f"{name}{{{labels}}} {written} {begin + at}")
    (tmp_path / "samples").write_text("\n".join([*lines, "# EOF", ""]), encoding="utf-8")
    command = ["promtool", "tsdb", "create-blocks-from", "openmetrics", "samples", "tsdb"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    query = next(each for each in panel_queries("penstock-overview") if each.panel == "Delivered by channel")
    text = query.expression.replace("$__rate_interval", "15s").replace("$__range", "240s")
    text = re.sub(r"\$(job|instance|channel)\b", ".+", text.replace("$__interval", "5s"))
    plain = text.partition(") and topk")[0].removeprefix("(")

    with scraping(tmp_path) as server:

        def ask(expression: str) -> set[str] | None:
            found = server.get("query_range", query=expression, start=begin + 30, end=begin + 270, step=5)
            return {one["metric"]["channel"] for one in found["result"]} if found else None

        everything = eventually(lambda: ask(plain))
        assert len(everything) == CHANNELS
        assert ask(f"topk(8, {plain})") == everything
        assert ask(text) == {f"c{channel}" for channel in range(CHANNELS - SERIES, CHANNELS)}


def test_the_rules_are_loaded_and_evaluated(scraped: Scraped) -> None:
    """Every rule without an error, and what is recorded is there."""

    def evaluated() -> list[Any] | None:
        """Every rule has been evaluated."""
        data = scraped.server.get("rules")
        rules = [rule for group in data["groups"] for rule in group["rules"]]
        return rules if all(rule["health"] != "unknown" for rule in rules) else None

    rules = eventually(evaluated)
    assert rules is not None
    assert [rule["lastError"] for rule in rules if rule["health"] != "ok"] == []
    assert {rule["name"] for rule in rules if rule["type"] == "alerting"} == {alert.name for alert in ALERTS}
    waiting = set(RECORDED)

    def recorded() -> bool:
        """Every recording rule has made a series."""
        waiting.difference_update(name for name in list(waiting) if scraped.server.ask(name))
        return not waiting

    try:
        eventually(recorded)
    except AssertionError:
        pytest.fail(f"not recorded: {waiting}")


def test_metrics_pass_prometheus_own_lint(scraped: Scraped) -> None:
    with urlopen(f"http://{scraped.targets[0]}/metrics") as answer:
        text = answer.read()
    ran = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
    complaints = ran.stdout.decode() + ran.stderr.decode()
    ours = [line for line in complaints.splitlines() if line.startswith("penstock_")]
    assert ours == []
    assert b"penstock_ready 1" in text
    # A scrape costs time on the loop that moves the bytes; labels are bounded, so this is too.
    assert text.count(b"\n") < 1000
