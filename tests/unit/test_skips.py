"""A skip that is not listed fails."""

from __future__ import annotations

import pytest

from tests.kit.skips import refuse_unlisted


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        ("no cgroup with a limit of memory: /sys/fs/cgroup: Permission denied", "skipped"),
        ("without torch", "skipped"),
        ("neither kubectl nor kustomize is installed", "failed"),
        ("could not import 'yaml': No module named 'yaml'", "failed"),
        ("", "failed"),
    ],
)
def test_only_the_listed_reasons_skip(reason: str, outcome: str) -> None:
    report = pytest.TestReport(
        "t.py::t", ("t.py", 3, "t"), {}, "skipped", ("t.py", 4, f"Skipped: {reason}"), "setup"
    )
    refuse_unlisted(report)
    assert report.outcome == outcome
    assert outcome == "skipped" or f"t.py:4: this skip is not listed in tests/kit/skips.py: {reason}" in str(
        report.longrepr
    )


def test_an_expected_failure_is_no_skip() -> None:
    report = pytest.TestReport("t.py::t", ("t.py", 3, "t"), {}, "skipped", ("t.py", 4, "assert 0"), "call")
    report.wasxfail = "a known defect"
    refuse_unlisted(report)
    assert report.outcome == "skipped"
