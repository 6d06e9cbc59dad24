"""A pytest plugin: `--without=torch,pandas` leaves out the test files that need these modules.

A file is left out only if its import fails for want of one of them, and the summary names it. Any other error
of an import stays an error.
"""

from __future__ import annotations

import re
from collections.abc import Generator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--without", default="", help="modules, with commas, whose absence leaves out a file")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.outcome == "failed" and isinstance(collector, pytest.Module):
        absent = re.findall(
            r"^E +ModuleNotFoundError: No module named '(\w+)", str(report.longrepr), re.MULTILINE
        )
        if absent and absent[-1] in collector.config.getoption("without").split(","):
            report.outcome = "skipped"
            report.longrepr = (str(collector.path), 1, f"Skipped: without {absent[-1]}")
    return report
