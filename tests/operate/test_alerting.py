"""The alerts in a real Prometheus, beside a real sidecar whose storage and whose process fail.

S3 stub -> penstock run -> FIFO -> a reader; Prometheus scrapes with the committed rules, of which only the
durations are others: minutes become seconds. Its API is asked until it says what is due.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kit.harness import fill
from tests.kit.processes import job, sidecar, write_job
from tests.kit.stub import S3Stub, fails
from tests.operate.promql import ROOT
from tests.operate.scraping import Prometheus, eventually, reading, scraping

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


def hurried(rules: dict[str, Any]) -> dict[str, Any]:
    """The rules with every duration in seconds: windows of 4 or more, and 1 before an alert fires."""
    for group in rules["groups"]:
        for rule in group["rules"]:
            rule["expr"] = re.sub(r"\[(\d+)[mh]\]", lambda found: f"[{max(4, int(found[1]))}s]", rule["expr"])
            if rule.get("for", "0m") != "0m":
                rule["for"] = "1s"
    return rules


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    file = tmp_path / "rules.yaml"
    committed = yaml.safe_load((ROOT / "dashboards/rules.yaml").read_text(encoding="utf-8"))
    file.write_text(yaml.safe_dump(hurried(committed)), encoding="utf-8")
    return file


def alerts(server: Prometheus) -> dict[Any, Any]:
    """The state of each alert that is pending or fires, with its texts."""
    data = server.get("alerts")
    return {} if data is None else {one["labels"]["alertname"]: one for one in data["alerts"]}


def test_alerts_come_and_go_with_what_they_tell_of(stub: S3Stub, tmp_path: Path, rules: Path) -> None:
    fill(stub, [1 << 20] * 8, prefix="b/train/")
    document = job(stub.url, tmp_path / "ml", "b/train/", DrainFor=0, Bandwidth="8MB")
    with ExitStack() as stack:
        serving = stack.enter_context(sidecar(write_job(tmp_path / "job.yaml", document)))
        serving.wait_for("ready")
        target = serving.url.removeprefix("http://")
        stack.enter_context(reading(tmp_path / "ml", "train"))
        server = stack.enter_context(scraping(tmp_path, target, rule_files=[str(rules)]))
        here = {"job": "penstock", "instance": target}

        def healthy() -> list[tuple[dict[str, str], float]] | bool:
            """Bytes have flowed for as long as the windows are, and nobody is told of anything."""
            flowing = server.ask("min_over_time(channel:penstock_fifo_written_bytes:rate5m[2s]) > 0")
            return flowing and not alerts(server)

        def fired() -> set[Any]:
            """The names of the alerts that have fired so far."""
            return {
                labels["alertname"]
                for labels, _ in server.ask('max_over_time(ALERTS{alertstate="firing"}[5m])')
            }

        def reported(*names: str) -> Any:
            """These alerts fire."""
            found = alerts(server)
            return found if all(found.get(name, {}).get("state") == "firing" for name in names) else None

        eventually(healthy)

        stub.weather = lambda *_: fails(503, "SlowDown")
        found = eventually(lambda: reported("PenstockStarved", "PenstockNoProgress"))
        starved = found["PenstockStarved"]
        assert starved["labels"] == here | {
            "alertname": "PenstockStarved", "severity": "warning", "channel": "train", "state": "starved",
        }  # fmt: skip
        # The causes are asked for where the text is made; what a retry waits for is its turn after SlowDown.
        causes = starved["annotations"]["description"]
        assert re.search(r"waits for storage .* with a reader:.* throttled \d+", causes)
        assert starved["annotations"]["runbook_url"] == "docs/how-to/runbook.md#penstockstarved"
        # These fire while requests are made, which after SlowDown are few.
        eventually(lambda: {"PenstockThrottled", "PenstockStorageFailing"} <= fired())
        pending = server.ask('count_over_time(ALERTS{alertname="PenstockStarved", alertstate="pending"}[5m])')
        assert pending, "none fires before its time"

        stub.weather = None
        eventually(lambda: not alerts(server).keys() & {"PenstockStarved", "PenstockNoProgress"})

        serving.process.kill()
        down = eventually(lambda: reported("PenstockDown"))["PenstockDown"]
        assert down["labels"] == here | {"alertname": "PenstockDown", "severity": "critical"}
        assert target in down["annotations"]["summary"]


def test_an_alert_says_that_checkpoints_do_not_get_to_s3(stub: S3Stub, tmp_path: Path, rules: Path) -> None:
    """While the sidecar stays ready; it ends when S3 takes them again."""
    fill(stub, [1000], prefix="b/train/")
    document = job(stub.url, tmp_path / "ml", "b/train/") | {"CheckpointConfig": {"S3Uri": "s3://b/run"}}
    with ExitStack() as stack:
        serving = stack.enter_context(sidecar(write_job(tmp_path / "job.yaml", document)))
        serving.wait_for("ready")
        target = serving.url.removeprefix("http://")
        server = stack.enter_context(scraping(tmp_path, target, rule_files=[str(rules)]))
        stub.puts.refused.extend([(403, "AccessDenied")] * 1000)
        (tmp_path / "ml/checkpoints/weights").write_bytes(bytes(2048))

        def fires() -> Any:
            """The alert fires."""
            found = alerts(server).get("PenstockCheckpointOld", {})
            return found if found.get("state") == "firing" else None

        found = eventually(fires)
        assert found["labels"] == {
            "job": "penstock", "instance": target,
            "alertname": "PenstockCheckpointOld", "severity": "warning",
        }  # fmt: skip
        assert found["annotations"]["description"].startswith("2kiB wait")
        assert serving.get("/readyz") == (200, "ready\n")
        stub.puts.refused.clear()
        eventually(lambda: not alerts(server))
        assert stub.objects["b/run/weights"] == bytes(2048)
