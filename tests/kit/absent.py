"""A pytest plugin: `--without=torch,pandas` leaves out the test files that need these modules and have none.

A file is left out only if its import fails for want of one of them, and the summary names it. Any other error
of an import stays an error. `--hide` does the same with modules that are installed: nothing can import them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Generator, Sequence
from importlib.abc import MetaPathFinder

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--without", default="", help="modules, with commas, whose absence leaves out a file")
    parser.addoption("--hide", default="", help="the same, of modules that are made absent")


class _Hidden(MetaPathFinder):
    """Refuses these modules before any other finder."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(self, fullname: str, *_: object) -> None:
        if fullname in self._names:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def pytest_configure(config: pytest.Config) -> None:
    sys.meta_path.insert(0, _Hidden(config.getoption("hide").split(",")))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.outcome == "failed" and isinstance(collector, pytest.Module):
        absent = re.findall(
            r"^E +ModuleNotFoundError: No module named '(\w+)", str(report.longrepr), re.MULTILINE
        )
        options = collector.config.getoption("without"), collector.config.getoption("hide")
        if absent and absent[-1] in ",".join(options).split(","):
            report.outcome = "skipped"
            report.longrepr = (str(collector.path), 1, f"Skipped: without {absent[-1]}")
    return report
