"""The skips that the suite allows: any other one fails, for a test that nobody runs shows nothing.

A tool that is not installed is no reason: `scripts/install-system-tools` and the group `dev` bring all.
On a bare Debian root skips nothing, which `scripts/fresh-machine` holds.
"""

from __future__ import annotations

import os
import re

import pytest

ALLOWED = {
    "an ordinary user may not do to the system what the test does": (
        r"only root .*|mounts need root" if os.geteuid() else "(?!)"
    ),
    "this container, kernel or C library has not what the test is about": (
        r"no cgroup with a limit of memory: .*"
        r"|nothing dumps core here: .*"
        r"|this container may not make a mount namespace"
        r"|no (tmpfs|private /etc/hosts) can be .* here: .*"
        r"|mallopt\(3\) is glibc's"
    ),
    "the interpreter is in a home directory, where another user cannot execute it": (
        r".* lies where other users may not go"
    ),
    "the server of the benchmarks has a processor of its own": r"the origin wants a core of its own",
    "a source distribution is not a repository": r"the repository is not here to compare with",
    "`make test-versions` leaves frameworks out, by `tests.kit.absent` too": (
        r"could not import '(tensorflow|torch|pandas)'.*|without \w+"
    ),
}
"""Expressions of the texts of `pytest.skip`, by why nothing else can be done."""


def refuse_unlisted(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Make a failure of the report of a skip that `ALLOWED` does not list."""
    if not report.skipped or hasattr(report, "wasxfail") or not isinstance(report.longrepr, tuple):
        return
    path, line, text = report.longrepr
    reason = text.removeprefix("Skipped: ")
    if not any(re.fullmatch(expression, reason, re.DOTALL) for expression in ALLOWED.values()):
        report.outcome = "failed"
        report.longrepr = f"{path}:{line}: this skip is not listed in tests/kit/skips.py: {reason}"
