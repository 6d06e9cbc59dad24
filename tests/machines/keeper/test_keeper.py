"""The first seeds of the search for an order of events that the keeper does not stand.

More of them: `python -m tests.machines keeper`.
"""

from __future__ import annotations

from typing import Any

import pytest

from streamer.helpers.keeper.connection import SidecarConnection
from tests.machines.keeper.world import ERRORS, Broken, run_seed
from tests.machines.machine import home
from tests.machines.report import search

SEEDS = range(60)


@pytest.mark.timeout(180)
def test_no_order_of_events_breaks_a_promise() -> None:
    report = search(home("keeper"), SEEDS, workers=1)
    assert not report.broken, report
    assert {f"{name} failed" for name in ERRORS} <= {*report.counts}
    what = "whole", "left", "released", "killed", "strangers", "doomed"
    assert min(report.counts[name] for name in what) > 0


def test_a_seed_is_a_run() -> None:
    assert run_seed(7) == run_seed(7)


def test_a_message_that_is_lost_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge is judged: what holds breaks as soon as the product does."""
    reply = SidecarConnection.reply

    def forgetful(connection: Any, kind: str, subject: None = None, **fields: Any) -> None:
        if kind != "settled":
            reply(connection, kind, subject, **fields)

    run_seed(0)
    monkeypatch.setattr(SidecarConnection, "reply", forgetful)
    with pytest.raises(Broken, match="hangs"):
        run_seed(0)
