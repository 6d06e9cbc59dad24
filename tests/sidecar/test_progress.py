"""What a long plan logs while it is being made."""

from __future__ import annotations

import logging

import pytest

from sidecar.job import planning


@pytest.mark.parametrize(
    ("every", "due"),
    [(0.0, [("planning", "INFO", {"channel": "train", "entries": 7})]), (3600.0, [])],
)
def test_a_plan_that_takes_long_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, every: float, due: list[object]
) -> None:
    monkeypatch.setattr(planning, "PROGRESS_EVERY", every)
    progress = planning._Progress("train")
    with caplog.at_level(logging.INFO, "penstock"):
        progress(7)
    events = [(each.getMessage(), each.levelname, vars(each)["fields"]) for each in caplog.records]
    assert events == due
