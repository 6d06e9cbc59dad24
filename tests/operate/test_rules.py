"""Alerts and recording rules: fired and silent when they should be, by promtool; true to the metrics."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards.alerts import ALERTS
from dashboards.build import files
from dashboards.rules import RECORDED
from sidecar.observe.metrics import METRICS
from tests.operate import alarms
from tests.operate.alarms import CASES, Case
from tests.operate.promql import DASHBOARDS, ROOT, panels
from tests.test_docs import DOCS, names, table

RULES = ROOT / "dashboards/rules.yaml"
RULE_LIST = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
BY_NAME = {rule["alert"]: rule for rule in RULE_LIST if "alert" in rule}
FOREIGN = {
    "up", "process_resident_memory_bytes", "process_start_time_seconds",
}  # fmt: skip
"""Metrics of Prometheus itself and of prometheus_client."""
SCRAPERS = {"job", "instance", "container", "namespace", "cluster"}
"""Labels that a scraper puts on."""


def each_rule() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("rule", RULE_LIST, ids=lambda rule: rule.get("alert") or rule["record"])


def promtool(tmp_path: Path, tests: list[Any]) -> str | None:
    """`promtool test rules`: its output, or None where all is as expected."""
    document = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}
    file = tmp_path / "tests.yaml"
    file.write_text(yaml.safe_dump(document, allow_unicode=True), encoding="utf-8")
    ran = subprocess.run(
        ["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False
    )
    return None if ran.returncode == 0 else ran.stdout + ran.stderr


def reported(text: str, case: Case) -> str:
    """An annotation as Prometheus writes it, in that case."""
    text = re.sub(r"\{\{ range .*?\{\{ end \}\}", case.causes, text)
    labels = case.labels or {}
    text = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: labels[found[1]], text)
    text = re.sub(r"\{\{ \$value[^}]*\}\}", case.value, text)
    assert "{{" not in text
    return text


def test_promtool_takes_the_rules() -> None:
    ran = subprocess.run(
        ["promtool", "check", "rules", "--lint-fatal", str(RULES)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert f"{len(RULE_LIST)} rules found" in ran.stdout
    assert len(RULE_LIST) == len(ALERTS) + len(RECORDED)


def firing(case: Case) -> dict[Any, Any]:
    """The case as a test of its own, down to the texts."""
    rule = BY_NAME[case.alert]
    expected = []
    for each in (case, *(replace(case, labels=labels) for labels in case.others)):
        annotations = {key: reported(text, each) for key, text in rule["annotations"].items()}
        expected.append({"exp_labels": each.labels | rule["labels"], "exp_annotations": annotations})
    return {
        "interval": "1m",
        "input_series": case.series,
        "alert_rule_test": [{"eval_time": case.at, "alertname": case.alert, "exp_alerts": expected}],
    }


def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    assert promtool(tmp_path, [firing(case) for case in CASES if case.labels is not None]) is None


def beside(cases: list[Case]) -> list[dict[str, str]]:
    """The series of all cases, each as another sidecar; in one test they take a tenth of the time."""
    series = []
    for number, case in enumerate(cases):
        for each in case.series:
            renamed, times = re.subn(r'instance="([^"]*)"', rf'instance="\1-{number}"', each["series"])
            assert times == 1
            series.append(each | {"series": renamed})
    return series


def state(case: Case, number: int, wanted: str) -> str:
    """The selector of the alert of the case of this number, in this state."""
    return f'ALERTS{{alertname="{case.alert}", alertstate="{wanted}", instance=~".*-{number}"}}'


def test_alerts_are_silent_when_they_should_be(tmp_path: Path) -> None:
    cases = [case for case in CASES if case.labels is None]
    silent = [
        {"expr": state(case, number, "firing"), "eval_time": case.at, "exp_samples": []}
        for number, case in enumerate(cases)
    ]
    test = {"interval": "1m", "input_series": beside(cases), "promql_expr_test": silent}
    assert promtool(tmp_path, [test]) is None


def test_alerts_wait_as_long_as_they_say(tmp_path: Path) -> None:
    """Pending for its evaluations, a minute apart, and then it fires."""
    cases = [case for case in CASES if case.labels is not None]
    waited = [
        {
            "expr": f"sum(count_over_time({state(case, number, 'pending')}[2h])) or vector(0)",
            "eval_time": case.at,
            "exp_samples": [
                {
                    "labels": "{}",
                    "value": int(BY_NAME[case.alert]["for"].removesuffix("m")) * (1 + len(case.others)),
                }
            ],
        }
        for number, case in enumerate(cases)
    ]
    test = {"interval": "1m", "input_series": beside(cases), "promql_expr_test": waited}
    assert promtool(tmp_path, [test]) is None


def test_every_alert_is_seen_to_fire_and_seen_not_to() -> None:
    for name in BY_NAME:
        cases = [case for case in CASES if case.alert == name]
        assert any(case.labels is not None for case in cases), name
        assert any(case.labels is None for case in cases), name
    assert {case.alert for case in CASES} == set(BY_NAME)


def test_a_job_whose_trainer_is_the_slower_side_alerts_nobody(tmp_path: Path) -> None:
    """With every metric that an alert asks for: no alert is silent for want of it."""
    asked = set().union(*(metrics(rule["expr"]) for rule in RULE_LIST))
    there = {series["series"].partition("{")[0] for series in alarms.HEALTHY}
    assert asked - there - set(RECORDED) == {"penstock_first_byte_seconds_bucket"}
    quiet: list[dict[str, object]] = [
        {"expr": "ALERTS", "eval_time": time, "exp_samples": []}
        for time in ("1m", "10m", "30m", "60m", "89m")
    ]
    test = {"interval": "1m", "input_series": alarms.HEALTHY, "promql_expr_test": quiet}
    assert promtool(tmp_path, [test]) is None


def test_what_is_recorded(tmp_path: Path) -> None:
    """Every recording rule, over the same measurements, to the number."""
    assert alarms.RECORDED.keys() == RECORDED.keys()
    expected = [
        {
            # To a millionth: the division of floating-point sums.
            "expr": f"round({name}, 1e-6)",
            "eval_time": "50m",
            "exp_samples": [
                {"labels": alarms.selector(labels), "value": round(value, 6)} for labels, value in samples
            ],
        }
        for name, samples in alarms.RECORDED.items()
    ]
    test = {"interval": "1m", "input_series": alarms.MEASURED, "promql_expr_test": expected}
    assert promtool(tmp_path, [test]) is None


def test_a_wrong_expectation_is_noticed(tmp_path: Path) -> None:
    """promtool says so, of an alert that a case does not expect and of a text that is another."""
    (case, *_) = (case for case in CASES if case.labels is not None)
    wrongs: list[dict[str, object]] = [{"exp_alerts": []}, {"eval_time": "1m"}]
    for wrong in wrongs:
        test = firing(case)
        test["alert_rule_test"][0] |= wrong
        assert case.alert in (promtool(tmp_path, [test]) or "")


# True to the metrics


def metrics(expression: Any) -> set[Any]:
    """The names of metrics in a query: whatever is no word of PromQL, no label and no function."""
    bare = re.sub(r'"[^"]*"|\{[^}]*\}|\[[^\]]*\]', " ", expression)
    bare = re.sub(r"\b(?:by|without|on|ignoring|group_left|group_right) \([^)]*\)", " ", bare)
    return set(re.findall(r"(?<![\w.])[a-z_]+(?::[a-z_]+:[a-z0-9_]+)?\b(?! ?\()", bare)) - {
        "and", "or", "unless", "sum",
    }  # fmt: skip


def label_values() -> dict[Any, Any]:
    """The values that docs/reference/metrics.md has for each label."""
    return {
        names(label)[0]: names(values)
        for label, values in table(DOCS / "reference/metrics.md", "Label", "Values")
    }


def test_the_names_of_metrics_are_found() -> None:
    assert metrics('sum without (of) (rate(a_total{state!="x"}[5m])) / ignoring (kind) b:c_d:e5m > 1e9') == {
        "a_total", "b:c_d:e5m",
    }  # fmt: skip


@each_rule()
def test_every_metric_and_label_of_a_rule_exists(rule: dict[str, Any]) -> None:
    registry = {name: set(spec.labels) for name, spec in METRICS.items()}
    registry |= {
        f"{name}_bucket": set(spec.labels) for name, spec in METRICS.items() if spec.kind == "histogram"
    }
    described = {
        names(row[0])[0]
        for row in table(DOCS / "reference/metrics.md", "Metric", "Type", "Labels", "Meaning")
    }
    asked = metrics(rule["expr"])
    assert asked
    ours = asked - FOREIGN - set(RECORDED)
    assert ours <= set(registry)
    assert {name.removesuffix("_bucket") for name in ours} <= described
    known = set().union(SCRAPERS, *registry.values())
    values = label_values()
    for name, matchers in re.findall(r"([\w:]+)\{([^}]*)\}", rule["expr"]):
        for label, _, value in re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', matchers):
            if name == "up":
                assert label in SCRAPERS
                continue
            assert label in (registry[name] if name in registry else recorded_labels(name))
            assert value in values[label]
    for group in re.findall(r"\b(?:by|without|on|ignoring) \(([^)]*)\)", rule["expr"]):
        assert {label for label in group.split(", ") if label} <= known
    # Alerts must keep the labels that tell where: only a condition after `and on` lists labels to keep.
    assert not re.search(r"\bby \(", rule["expr"].split("and on (")[0])


def recorded_labels(name: str) -> set[Any]:
    """Those of the samples that the rule is seen to make."""
    return {label for labels, _ in alarms.RECORDED[name] for label in labels}


def test_the_texts_name_labels_that_the_alert_has() -> None:
    for case in CASES:
        if case.labels is None:
            continue
        texts = " ".join(BY_NAME[case.alert]["annotations"].values())
        assert set(re.findall(r"\$labels\.(\w+)", texts)) <= case.labels.keys(), case


@pytest.mark.parametrize("name", BY_NAME)
def test_alert_is_complete(name: str) -> None:
    rule = BY_NAME[name]
    assert name.startswith("Penstock")
    assert rule["labels"].keys() == {"severity"}
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
    assert "blocked" not in rule["expr"], "a trainer that is slower than storage is how it should be"
    assert re.search(
        r"\$labels\.instance", rule["annotations"]["summary"] + rule["annotations"]["description"]
    )


# The runbook


def entries() -> dict[Any, Any]:
    text = (DOCS / "how-to/runbook.md").read_text()
    return dict(re.findall(r"^## (Penstock\w+)\n(.*?)(?=^## )", text, re.MULTILINE | re.DOTALL))


def test_every_alert_has_its_entry_in_their_order() -> None:
    assert list(entries()) == list(BY_NAME)
    for name, rule in BY_NAME.items():
        assert rule["annotations"]["runbook_url"] == f"docs/how-to/runbook.md#{name.lower()}"


def test_the_runbook_may_be_read_elsewhere() -> None:
    """All but the chart, which has a value for it."""
    there = "https://docs.example/runbook.html"
    made = {
        path.relative_to(ROOT).as_posix(): text
        for path, text in files(there).items()
        if path.suffix == ".yaml"
    }
    assert {path: text.count(f"{there}#penstock") for path, text in made.items()} == {
        "dashboards/rules.yaml": len(BY_NAME),
        "deploy/kubernetes/components/prometheus-rule/prometheus-rule.yaml": len(BY_NAME),
        "deploy/helm/penstock/rules.yaml": 0,
    }


@pytest.mark.parametrize("name", BY_NAME)
def test_entry_says_what_it_means_what_to_look_at_and_what_to_do(name: str) -> None:
    rule, entry = BY_NAME[name], entries()[name].strip()
    paragraphs = re.split(r"\n\n+", entry)
    minutes = int(rule["for"].removesuffix("m"))
    if name == "PenstockNoProgress":
        minutes += 2  # of the rate
    when = "at once" if minutes == 0 else f"after {minutes} minutes"
    assert paragraphs[0].startswith(f"{rule['labels']['severity']}, {when}")
    assert len(paragraphs[0]) > 100
    assert paragraphs[1].startswith("Look at: ")
    assert paragraphs[2].startswith("Do")


def test_the_panels_that_the_runbook_names_exist() -> None:
    titles = {dashboard: {panel["title"] for panel in panels(dashboard)} for dashboard in DASHBOARDS}
    notes = {"Sidecar restarts"}
    found = 0
    for entry in entries().values():
        (looked,) = re.findall(r"^Look at: (.*?)\n\n", entry, re.MULTILINE | re.DOTALL)
        for title, where in re.findall(r"\*([^*]+)\*( \(fleet\))?", looked.replace("\n", " ")):
            found += 1
            assert title in (titles["penstock-fleet"] if where else titles["penstock-overview"] | notes), (
                title
            )
    assert found > 30


def test_the_runbook_explains_every_value_it_has_a_table_for() -> None:
    values = label_values()
    assert {names(value)[0] for value, _ in table(DOCS / "how-to/runbook.md", "`error`", "Do")} == set(
        values["error"]
    )
    assert {names(value)[0] for value, _ in table(DOCS / "how-to/runbook.md", "`kind`", "Do")} == set(
        values["kind"]
    ) - {"throttled"}
