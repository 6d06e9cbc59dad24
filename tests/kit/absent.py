"""A pytest plugin: `--without=torch,pandas` leaves out what needs these modules and has none.

A file or a test is left out only if an import fails for want of one of them, and the summary names it. Any
other error of an import stays an error. A file that imports names from one that is left out is left out too.
`--hide` does the same with modules that are installed: nothing can import them.
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


def _allowed(config: pytest.Config) -> list[str]:
    return ",".join((config.getoption("without"), config.getoption("hide"))).split(",")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.outcome == "failed" and isinstance(collector, pytest.Module):
        # pytest leaves the half-executed module there: a file that imports names from it would find some.
        path = collector.path.relative_to(collector.config.rootpath)
        sys.modules.pop(".".join(path.with_suffix("").parts), None)
        absent = re.findall(
            r"^E +ModuleNotFoundError: No module named '(\w+)", str(report.longrepr), re.MULTILINE
        )
        if absent and absent[-1] in _allowed(collector.config):
            report.outcome = "skipped"
            report.longrepr = (str(collector.path), 1, f"Skipped: without {absent[-1]}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    error = call.excinfo.value if call.excinfo else None
    if report.failed and isinstance(error, ModuleNotFoundError):
        name = (error.name or "").partition(".")[0]
        if name in _allowed(item.config):
            report.outcome = "skipped"
            report.longrepr = (str(item.path), (item.location[1] or 0) + 1, f"Skipped: without {name}")
    return report
